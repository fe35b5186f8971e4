"""The builds as kernels of the Hugging Face hub: loaded by `kernels` and by diffusers' hub backends, beside the installed packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sage_factory import ROOT, commands
from sage_factory.with_what import venvs

# What pip says where it reaches no index: then there is no `kernels` to ask.
UNREACHED = re.compile(r"No matching distribution|NewConnectionError|name resolution|Network is unreachable|timed out")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel repository of what is in dist/, beside that of FP4."""
    out = tmp_path_factory.mktemp("hub")
    assert commands.main(["hub", "--dist", str(ROOT / "dist"), "--out", str(out)]) == 0
    return out / "sage-attention"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kernels` from PyPI, alone: what it requires is here already."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--target", str(folder), "-r", str(venvs.lock_file("hub"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and UNREACHED.search(done.stderr):
        pytest.skip(f"no index to take `kernels` from: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def run(code: str, library: Path, hub: Path, folder: Path) -> None:
    """Run Python with `kernels`, without a network, and with a cache of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(library), str(ROOT / "tests")]), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder), "HUB": str(hub)}
    code = "import os\nfrom pathlib import Path\nimport torch\n" + code
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_loaded_from_a_folder_beside_the_installed_package(hub: Path, library: Path, tmp_path: Path) -> None:
    """Two copies of the same library in one process, each with operators in a namespace of its own."""
    run(
        """
from kernels import get_local_kernel
kernel = get_local_kernel(Path(os.environ["HUB"]))
import sageattention
assert Path(kernel.__file__).is_relative_to(os.environ["HUB"]), kernel.__file__
namespace = kernel._library.build.namespace
assert kernel.__name__ == namespace and namespace.startswith("sageattention_torch"), namespace
assert kernel._library.KERNEL_DIRECTORIES[0].is_dir() and kernel._library.kernels == sageattention._library.kernels
q, k, v = (torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))
for options in ({}, {"is_causal": True, "return_lse": True}):
    for one, other in zip(kernel.sageattn(q, k, v, **options), sageattention.sageattn(q, k, v, **options)):
        assert torch.equal(one, other)
compiled = torch.compile(kernel.sageattn, fullgraph=True, backend="eager")
assert torch.equal(compiled(q, k, v), sageattention.sageattn(q, k, v))
if torch.cuda.is_available():
    q, k, v = q.cuda(), k.cuda(), v.cuda()
    assert torch.equal(kernel.sageattn(q, k, v), sageattention.sageattn(q, k, v))
""",
        library, hub, tmp_path,
    )  # fmt: skip


def test_alone(hub: Path, library: Path, tmp_path: Path) -> None:
    """It needs no installed package."""
    run(
        """
import sys
sys.modules["sageattention"] = None
from kernels import get_local_kernel
q = torch.ones(1, 1, 3, 64).half()
assert torch.equal(get_local_kernel(Path(os.environ["HUB"])).sageattn(q, q, q), q)
""",
        library, hub, tmp_path,
    )  # fmt: skip


def test_diffusers_hub_backend(hub: Path, library: Path, tmp_path: Path) -> None:
    """`sage_hub` asks for a repository of the hub by name; LOCAL_KERNELS, a variable of `kernels`, says where that lies here."""
    run(
        """
from diffusers.models import attention_dispatch
config = attention_dispatch._HUB_KERNELS_REGISTRY[attention_dispatch.AttentionBackendName.SAGE_HUB]
os.environ["LOCAL_KERNELS"] = f"{config.repo_id}={os.environ['HUB']}"
import clients, sageattention
transformer = clients.Transformer("cuda" if torch.cuda.is_available() else "cpu")
error = transformer.error("sage_hub")
assert config.kernel_fn.__module__.startswith("sageattention_torch"), config.kernel_fn.__module__
assert 0 < error <= clients.TOLERANCE, error
assert torch.equal(transformer("sage_hub"), transformer("sage"))
""",
        library, hub, tmp_path,
    )  # fmt: skip


def test_diffusers_fp4_hub_backend(hub: Path, library: Path, tmp_path: Path) -> None:
    """`sage_blackwell_hub`, beside the installed package and alone with the other kernel. On a CPU: there is no Blackwell card here."""
    run(
        """
from diffusers.models import attention_dispatch
config = attention_dispatch._HUB_KERNELS_REGISTRY[attention_dispatch.AttentionBackendName.SAGE_BLACKWELL_HUB]
repository = Path(os.environ["HUB"])
os.environ["LOCAL_KERNELS"] = f"{config.repo_id}={repository.with_name('sage-blackwell')}"
import clients, sageattn3
from tensors import qkv
error = clients.Transformer("cpu").error("sage_blackwell_hub")
assert config.kernel_fn.__module__.startswith("sageattn3_torch"), config.kernel_fn.__module__
assert clients.TOLERANCE < error <= 0.05, error
q, k, v = qkv(1, 2, 200, 64)
assert torch.equal(config.kernel_fn(q, k, v, is_causal=True), sageattn3.sageattn3_blackwell(q, k, v, is_causal=True))
from kernels import get_local_kernel
eight_bits = get_local_kernel(repository)
assert eight_bits._library.build.namespace != config.kernel_fn.__module__.split(".")[0]
assert torch.isfinite(eight_bits.sageattn(q, k, v)).all()
""",
        library, hub, tmp_path,
    )  # fmt: skip


def test_a_kernel_for_another_pytorch_is_refused(hub: Path, library: Path, tmp_path: Path) -> None:
    """By `kernels`, which goes by the names of the folders."""
    fitting = next(hub.glob("build/torch[0-9]*-linux" if sys.platform == "linux" else "build/torch[0-9]*-windows"))
    repository = tmp_path / "repository"
    shutil.copytree(fitting, repository / "build" / re.sub(r"^torch\d+", "torch99", fitting.name))
    run(
        """
from kernels import get_local_kernel
try:
    get_local_kernel(Path(os.environ["HUB"]))
except FileNotFoundError as error:
    assert "does not match environment Torch version" in str(error), error
else:
    raise AssertionError("a kernel for PyTorch 9.9 was taken")
""",
        library, repository, tmp_path / "home",
    )  # fmt: skip
