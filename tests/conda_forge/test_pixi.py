"""Real pixi, where there is one, with the model of conda-forge in the place of conda-forge. Nothing is installed here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import loopback
import pytest

from conda_forge import emitted, faults, model, pixi
from conda_forge.manifest import Manifest, shown
from sage_factory import ROOT

TEXT = (ROOT / "pixi.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pixi.Pixi]:
    root = tmp_path_factory.mktemp("machine")
    served = pixi.offered(root / "served")
    model.lay(served / "ours", emitted.records(emitted.builds()))
    with loopback.offering(served) as server:
        yield pixi.installed(root / "home", server.url)


@pytest.fixture(scope="module")
def workspace(lonely: pixi.Pixi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest alone, locked."""
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copy(ROOT / "pixi.toml", folder)
    lonely("lock", cwd=folder)
    return folder


def test_locks_every_environment_as_the_solver_does(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pixi.locked(workspace)
    with capsys.disabled():
        print("\nlocked by pixi, environment × platform: packages known to the model, compiler, PyTorch")
        print("\n".join(shown(found, list(Manifest(TEXT).platforms))))
    assert found == Manifest(TEXT).solved(model.lay(tmp_path, model.records()).as_uri())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faults.platform_named_like_its_subdir, "special subdir platform"),
        (faults.compiler_for_13_where_the_driver_is_12, "__cuda"),
        (faults.floors_that_conda_forge_does_not_have, "py-rattler >=0.28"),
    ],
)
def test_refuses_a_manifest_with_a_fault(lonely: pixi.Pixi, fault: Callable[[str], str], said: str, tmp_path: Path) -> None:
    (tmp_path / "pixi.toml").write_text(fault(TEXT), encoding="utf-8")
    done = lonely("lock", cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


def test_lists_every_task_with_what_it_does(lonely: pixi.Pixi, workspace: Path) -> None:
    said = lonely("task", "list", cwd=workspace)
    text = said.stdout + said.stderr
    assert "WARN" not in text
    for name, task in Manifest(TEXT).table["tasks"].items():
        assert re.search(rf"{name}\W.*{re.escape(task['description'][:40])}", text), name


@pytest.mark.parametrize("command", [["info"], ["tree", "--environment", "test", "--platform", "linux-64"], ["list"]])
def test_describes_the_workspace_without_a_warning(lonely: pixi.Pixi, workspace: Path, command: list[str]) -> None:
    more = ["--no-install"] if command[0] in ("tree", "list") else []
    said = lonely(*command, *more, cwd=workspace)
    assert "WARN" not in said.stdout + said.stderr
    assert "python" in said.stdout or "cu128" in said.stdout


@pytest.mark.parametrize(
    ("driver", "torch", "kernels", "beside"),
    [
        ("", "2.10.*", "cu130", "cpu"),
        ("12.8", "2.10.*", "cu129", "cuda129"),
        ("13.0", "2.10.*", "cu130", "cuda130"),
        ("13.0", "2.9.*", "cu129", "cuda129"),
        ("13.0", "*", "cu130", "cuda130"),
    ],
)
def test_a_workspace_that_adds_the_channel_gets_the_right_build(
    lonely: pixi.Pixi, driver: str, torch: str, kernels: str, beside: str, tmp_path: Path
) -> None:
    lonely(
        "init", "--channel", f"{lonely.address}/ours", "--channel", "conda-forge", "--platform", "linux-64", ".", cwd=tmp_path
    )
    if driver:
        lonely("workspace", "platform", "edit", "linux-64", "--cuda", driver, cwd=tmp_path)
    lonely("add", "--no-install", f"pytorch={torch}", "sageattention", cwd=tmp_path)
    (found,) = pixi.locked(tmp_path)["default"].values()
    assert found["sageattention"].split()[1].split("_")[1] == kernels
    assert found["pytorch"].split()[1].split("_")[0] == beside


def test_a_workspace_whose_driver_is_too_old_is_refused(lonely: pixi.Pixi, tmp_path: Path) -> None:
    lonely(
        "init", "--channel", f"{lonely.address}/ours", "--channel", "conda-forge", "--platform", "linux-64", ".", cwd=tmp_path
    )
    lonely("workspace", "platform", "edit", "linux-64", "--cuda", "11.8", cwd=tmp_path)
    done = lonely("add", "--no-install", "sageattention", cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "__cuda" in done.stderr
