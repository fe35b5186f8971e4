"""Those who use what was built: real pixi and real conda, with our channel beside conda-forge, install it, run it and go on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conda_forge import conda, pixi
from conda_forge.conftest import run

pytestmark = pytest.mark.slow

ATTENTION = """
import torch
import sageattention

q, k, v = (torch.randn(1, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3))
out = sageattention.sageattn(q, k, v)
wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
error = (out.float() - wanted).abs().mean() / wanted.abs().mean()
assert error < 0.05, error
print("attention beside PyTorch", torch.__version__)
"""


@pytest.fixture(scope="session")
def ours(machine: pixi.Pixi, clone: Path) -> str:
    """A channel with a package for each of two PyTorches."""
    run(machine, clone, "build-cu128")
    run(machine, clone, "build", "--cuda", "12.8", "--torch", "2.9.0")
    return (clone / "dist" / "conda").as_uri()


def test_a_pixi_workspace(machine: pixi.Pixi, ours: str, tmp_path: Path) -> None:
    machine("init", "--channel", ours, "--channel", "conda-forge", "--platform", "linux-64", ".", cwd=tmp_path)
    machine("add", "python=3.12", "pytorch=2.8", "sageattention", cwd=tmp_path)
    assert "attention beside PyTorch 2.8.0" in machine("run", "python", "-c", ATTENTION, cwd=tmp_path).stdout
    machine("add", "pytorch=2.9", cwd=tmp_path)
    assert "attention beside PyTorch 2.9.0" in machine("run", "python", "-c", ATTENTION, cwd=tmp_path).stdout
    machine("remove", "sageattention", cwd=tmp_path)
    assert machine("run", "python", "-c", ATTENTION, cwd=tmp_path, check=False).returncode == 1


@pytest.mark.parametrize("solver", ["libmamba", "rattler"])
def test_a_conda_environment(machine: pixi.Pixi, ours: str, solver: str, tmp_path: Path) -> None:
    client = conda.installed(tmp_path / "home", solver)
    channels = ["--override-channels", "--channel", ours, "--channel", f"{machine.address}/conda-forge"]
    here = ["--yes", "--name", "new"]

    def attention() -> subprocess.CompletedProcess[str]:
        python = client.prefix("new") / "bin" / "python"
        return subprocess.run([python, "-c", ATTENTION], cwd=tmp_path, capture_output=True, text=True, check=False)

    client("create", *channels, *here, "python=3.12", "pytorch=2.8")
    added = conda.linked(client("install", *channels, *here, "sageattention")).keys()
    assert added == {"sageattention", "sageattention-cubins", "libgcc", "libstdcxx"}, "and the PyTorch that is there stays"
    assert "attention beside PyTorch 2.8.0" in attention().stdout, attention().stderr
    upgraded = conda.linked(client("install", *channels, *here, "pytorch=2.9"))
    assert upgraded["sageattention"].split()[1].startswith("torch290_cu128")
    assert "attention beside PyTorch 2.9.0" in attention().stdout, attention().stderr
    client("remove", *here, "sageattention")
    assert "No module named 'sageattention'" in attention().stderr
    left = client.prefix("new").rglob("*sageattention*")
    assert [path for path in left if path.parent.name not in ("conda-meta", "share")] == []
