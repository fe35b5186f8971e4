"""A package that is broken, or beside another PyTorch, or without kernels: what is said of it, and what works all the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensors import qkv

from sageattention import (
    _library,
    _ops,
    sageattn,
    sageattn_qk_int8_pv_fp16_cuda,
)

BUILD = _library.Build("2.2.0", "2.8.0", "12.8")


def test_the_right_pytorch_is_taken() -> None:
    for installed in ("2.8.0", "2.8.1+cu128", "2.8.0a0+git123"):
        _library.check_torch(BUILD, installed)


def test_the_stable_abi_is_for_every_later_pytorch() -> None:
    build = BUILD._replace(torch="2.9+")
    for installed in ("2.9.0", "2.9.1+cu130", "2.10.1+cu130", "2.15.0a0+git1", "3.0.0"):
        _library.check_torch(build, installed)
    for installed in ("2.9.0a0+git1", "2.9.0rc1"):  # pip's torch>=2.9 refuses them too
        with pytest.raises(ImportError, match=r"for PyTorch 2\.9 and later"):
            _library.check_torch(build, installed)
    with pytest.raises(ImportError, match=r"for PyTorch 2\.9 and later \(CUDA 12\.8\), but PyTorch 2\.8\.0 .*'torch>=2\.9'"):
        _library.check_torch(build, "2.8.0")


@pytest.mark.parametrize("installed", ["2.9.1+cu130", "2.7.0", "2.80.0", "3.8.0"])
def test_another_pytorch_is_refused(installed: str) -> None:
    with pytest.raises(ImportError) as caught:
        _library.check_torch(BUILD, installed)
    message, series = str(caught.value), ".".join(installed.split(".")[:2])
    assert "built for PyTorch 2.8 (CUDA 12.8)" in message
    assert f"PyTorch {installed} is installed" in message
    assert f"Install the build for PyTorch {series}: " in message
    assert "PAGES" not in message
    assert "pip install 'torch==2.8.*'" in message


INDEX = "Index, https://example.org/pages/"
CONDA = "`conda install sageattention pytorch=2.9`"


@pytest.mark.parametrize(
    ("cuda", "installer", "stated", "said"),
    [
        ("12.8", "pip", [INDEX], "`pip install --upgrade sageattention --index-url https://example.org/pages/cu12/`"),
        ("13.0", "uv", ["Homepage, https://example.org", INDEX], "`pip install --upgrade sageattention --index-url https://example.org/pages/cu13/`"),
        ("12.8", "conda", [], CONDA),
        ("12.8", "pip", [], "from the index that this one was installed from, if it was, or in a checkout, where "
                            "`python3 scripts/run.py matrix --package sageattention --torch 2.9.0` lists what can be built for it"),
    ],
)  # fmt: skip
def test_another_build_is_where_this_one_came_from(
    monkeypatch: pytest.MonkeyPatch, cuda: str, installer: str, stated: list[str], said: str
) -> None:
    described = Message()
    for url in stated:
        described["Project-URL"] = url
    this = SimpleNamespace(metadata=described, read_text={"INSTALLER": f"{installer}\n"}.get)
    monkeypatch.setattr(_library, "distribution", lambda _: this)
    assert _library.source_of(BUILD, "2.9", cuda) == said


def test_a_pytorch_of_another_abi_is_refused() -> None:
    _library.check_abi(BUILD, "2.8.0", cxx11_abi=True)
    with pytest.raises(
        ImportError, match=r"built for a PyTorch 2\.8\.0 with libstdc\+\+'s new C\+\+ ABI, but .* the old one.*own index"
    ):
        _library.check_abi(BUILD, "2.8.0", cxx11_abi=False)
    old = BUILD._replace(torch="2.6.0", cxx11_abi=False)
    _library.check_abi(old, "2.6.0+cu124", cxx11_abi=False)
    with pytest.raises(
        ImportError, match=r"old C\+\+ ABI, but PyTorch 2\.6\.0\+cu126 here has the new .*pip install torch==2\.6\.0"
    ):
        _library.check_abi(old, "2.6.0+cu126", cxx11_abi=True)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"version": "2.2.0"}', '{"version": "1", "torch": "2", "cuda": "3", "x": "4"}']
)
def test_a_damaged_build_record(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "_build.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(
        ImportError,
        match=r"_build\.json is missing or damaged .*start it in another folder.*"
        r"run\.py build --package sageattention --cuda 12\.8.* or reinstall",
    ):
        _library.read_build(path)


def test_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"_C\.\w+ cannot be loaded .*; reinstall the package"):
        _library.Library(tmp_path)


def test_a_damaged_library(tmp_path: Path) -> None:
    for name in ("_C.so", "_C.dll"):
        (tmp_path / name).write_bytes(b"\x7fELF and no more")
    with pytest.raises(ImportError, match=r"_C\.\w+ cannot be loaded .*; reinstall the package"):
        _library.Library(tmp_path)


@pytest.fixture
def _kernels_restored() -> Iterator[None]:
    yield
    _library.name_kernels(_library.KERNEL_DIRECTORIES)


@pytest.mark.usefixtures("_kernels_restored")
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"architectures": 5}', '{"architectures": ["sm_80"], "files": ["x"]}']
)
def test_a_damaged_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(ImportError, match=r"the kernel manifest .*manifest\.json is damaged .*; reinstall"):
        _library.name_kernels((tmp_path / "none here", tmp_path))


@pytest.mark.usefixtures("_kernels_restored")
def test_without_kernels_the_cpu_works(tmp_path: Path) -> None:
    _library.name_kernels((tmp_path / "a", tmp_path / "b"))
    out: Any = sageattn(*qkv(1, 2, 8, 64))
    assert out.isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver() -> None:
    """The package is imported, as this file shows; only asking for a GPU fails, in words."""
    with pytest.raises(RuntimeError, match=r"libcuda|nvcuda"):
        _library.library.kernel_architecture(0)


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture
def kernel_copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of the kernel set to spoil, named to the runtime, which forgets what it has loaded."""
    source = _library.kernel_set(_library.KERNEL_DIRECTORIES)
    _library.name_kernels((shutil.copytree(source, tmp_path / "cubins"),))
    yield tmp_path / "cubins"
    _library.name_kernels(_library.KERNEL_DIRECTORIES)


class TestKernelFilesOnAGpu:
    """What the driver makes of the set, and what is said where a file of it is spoilt."""

    pytestmark = needs_gpu

    @pytest.mark.parametrize("spoil", ["missing", "cut short", "empty", "no ELF"])
    def test_a_spoilt_kernel(self, kernel_copy: Path, spoil: str) -> None:
        q, k, v = (x.cuda() for x in qkv(1, 2, 20, 64))
        for path in kernel_copy.rglob("quant_k_int8-d64-fp16.*"):
            content = path.read_bytes()
            if spoil == "missing":
                path.unlink()
            else:
                path.write_bytes({"cut short": content[: len(content) // 2], "empty": b"", "no ELF": b"x" * 5000}[spoil])
        state = "missing" if spoil == "missing" else "damaged"
        with pytest.raises(RuntimeError, match=rf"kernel file .*quant_k_int8-d64-fp16\.\w+ is {state}; reinstall"):
            sageattn_qk_int8_pv_fp16_cuda(q, k, v)
        # Another instance is none the worse.
        assert torch.isfinite(sageattn_qk_int8_pv_fp16_cuda(q.bfloat16(), k.bfloat16(), v.bfloat16())).all()

    def test_no_kernel_for_this_gpu(self, kernel_copy: Path) -> None:
        _library.library.set_kernel_directory(str(kernel_copy), ["sm_999"])
        with pytest.raises(RuntimeError, match=r"no kernel for compute capability \d+\.\d .*this build has sm_999 in"):
            sageattn_qk_int8_pv_fp16_cuda(*(x.cuda() for x in qkv(1, 2, 20, 64)))

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_ptx_runs_where_there_is_no_cubin(self, kernel_copy: Path, head_dim: int, dtype: torch.dtype) -> None:
        q, k, v = (x.cuda() for x in qkv(1, 2, 300, head_dim, dtype=dtype))
        expected = sageattn_qk_int8_pv_fp16_cuda(q, k, v, is_causal=True)
        _library.library.set_kernel_directory(str(kernel_copy), ["compute_80"])
        assert _library.library.kernel_architecture(0) == "compute_80"
        # The folder of PTX has this kernel and not Hopper's: what is installed is asked of the manifest, not of this folder.
        scale = head_dim**-0.5
        out, _ = _ops.attention(q, k, v, None, "HND", True, scale, True, False, False, "sm80_qk_int8_pv_f16")
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_an_import_waits_for_no_compiler_and_no_device() -> None:
    """torch._dynamo takes as long to import as PyTorch, and cannot be within a device that holds nothing."""
    code = "import sys, torch\nwith torch.device('meta'): import sageattention\nassert 'torch._dynamo' not in sys.modules"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_kernels_of_the_environment_that_a_virtual_one_sees() -> None:
    done = run_python(
        "import sys; sys.base_prefix = '/base'; from sageattention import _library as l; print(*l.KERNEL_DIRECTORIES, sep=chr(10))"
    )
    assert done.returncode == 0, done.stderr
    share = Path("share") / "sageattention" / "cubins"
    assert done.stdout.splitlines()[1:] == [str(Path(prefix) / share) for prefix in dict.fromkeys((sys.prefix, "/base"))]


def test_import_beside_another_pytorch(tmp_path: Path) -> None:
    """The whole import, of a package that says it was built for a PyTorch that is not here."""
    package = tmp_path / "sageattention"
    shutil.copytree(_library.PACKAGE, package, ignore=shutil.ignore_patterns("cubins", "__pycache__"))
    record = json.loads((package / "_build.json").read_text(encoding="utf-8"))
    (package / "_build.json").write_text(json.dumps({**record, "torch": "99.0.1"}), encoding="utf-8")
    done = run_python("import sageattention", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: sageattention {record['version']} here was built for PyTorch 99.0 ")
    assert f"but PyTorch {torch.__version__} is installed" in last


# The context of a device is its number; current are the primary one of GPU 0 (1), a green one of it (10), one of GPU 1 (2) and none.
CONTEXTS = """
#include <cstdio>
#include "runtime/context.h"
using namespace sage::runtime;
static std::intptr_t now;
void Driver::fail(CUresult, const char* what, const char*) const { std::puts(what); }
int main() {
  Driver driver{};
  driver.cuCtxGetCurrent = [](CUcontext* c) { *c = reinterpret_cast<CUcontext>(now); return 0; };
  driver.cuCtxGetDevice = [](CUdevice* d) { *d = now == 2 ? 1 : 0; return now == 0 ? 201 : 0; };
  driver.cuCtxPushCurrent = [](CUcontext c) { std::printf(" push %d", int(reinterpret_cast<std::intptr_t>(c))); return 0; };
  driver.cuCtxPopCurrent = [](CUcontext*) { std::printf(" pop"); return 0; };
  for (now = 0; now <= 10; now = now == 2 ? 10 : now + 1) {
    CurrentContext current(driver, 0, reinterpret_cast<CUcontext>(std::intptr_t{1}));
    std::printf("|%d", int(now));
  }
}
"""


def test_a_context_of_the_tensors_gpu_stays_current(tmp_path: Path) -> None:
    """As a green one, in whose order PyTorch's own kernels run."""
    (tmp_path / "main.cpp").write_text(CONTEXTS, encoding="utf-8")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", f"-I{Path(__file__).parents[1] / 'csrc'}", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    assert said == " push 1|0 pop|1 push 1|2 pop|10"


# A driver that says what it is asked for, and in which mode of capture; device 90 has compute capability 9.0.
LAUNCHES = """
#include <cstdio>
#include <utility>
#include "runtime/kernel_store.cpp"
using namespace sage::runtime;
static Driver driver{};
static int mode = 0;
const Driver& Driver::get() { return driver; }
void Driver::fail(CUresult, const char* what, const char*) const { throw std::runtime_error(what); }
int main(int, char** arguments) {
  driver.cuDeviceGetAttribute = [](int* value, int which, CUdevice d) {
    *value = which == 75 ? d / 10 : which == 76 ? d % 10 : 5;
    return 0;
  };
  driver.cuDevicePrimaryCtxRetain = [](CUcontext*, CUdevice) { return 0; };
  driver.cuCtxGetCurrent = [](CUcontext*) { return 0; };
  driver.cuThreadExchangeStreamCaptureMode = [](int* other) { std::swap(*other, mode); return 0; };
  driver.cuLibraryLoadData = [](CUlibrary* library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
    *library = reinterpret_cast<CUlibrary>(std::intptr_t{1});
    std::printf("load in %d|", mode);
    return 0;
  };
  driver.cuLibraryGetKernel = [](CUkernel*, CUlibrary, const char* name) { return std::printf("find %s|", name) < 0 ? 1 : 0; };
  driver.cuKernelSetAttribute = [](int which, int value, CUkernel, CUdevice) {
    return std::printf("set %d to %d in %d|", which, value, mode) < 0 ? 1 : 0;
  };
  driver.cuLaunchKernelEx = [](const CUlaunchConfig* config, CUkernel, void**, void**) {
    std::printf("%u x %u, %u in %d", config->grid_x, config->block_x, config->shared_bytes, mode);
    for (uint32_t i = 0; i < config->attribute_count; ++i) {
      std::printf(", %d: %u", config->attributes[i].id, config->attributes[i].value.cluster_dimension[0]);
    }
    std::puts("");
    return 0;
  };
  KernelStore& store = KernelStore::get();
  store.set_directory(arguments[1], {"sm_80", "sm_90a"});
  const auto launch = [&](int device, uint32_t shared_bytes, uint32_t cluster) {
    store.launch({"one-d64", "one", device, nullptr, 6, 128, shared_bytes, cluster}, nullptr);
  };
  launch(90, 0, 1);
  launch(90, 90000, 2);
  launch(90, 80000, 1);
  launch(90, 100000, 1);
  launch(86, 50000, 1);
}
"""


def test_what_a_launch_asks_the_driver_for(tmp_path: Path) -> None:
    """A kernel is loaded once, which is none of a captured graph's work; shared memory is asked for where more is wanted than before."""
    for folder in ("sm_80", "sm_90a"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one-d64.cubin").write_bytes(b"\x7fELF".ljust(64, b"\0"))
    (tmp_path / "main.cpp").write_text(LAUNCHES, encoding="utf-8")
    include, package = f"-I{Path(__file__).parents[1] / 'csrc'}", '-DSAGE_PACKAGE="sageattention"'
    command = [os.environ.get("CXX", "c++"), "-std=c++17", include, package, "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "main", tmp_path], capture_output=True, text=True, check=True).stdout
    # Of clusters attribute 4 says how large; 6 that it may start before the one before has ended.
    assert said.splitlines() == [
        "load in 2|find one|6 x 128, 0 in 0, 6: 1",
        "set 8 to 90000 in 2|6 x 128, 90000 in 0, 4: 2, 6: 1",
        "6 x 128, 80000 in 0, 6: 1",
        "set 8 to 100000 in 2|6 x 128, 100000 in 0, 6: 1",
        "load in 2|find one|set 8 to 50000 in 2|6 x 128, 50000 in 0",
    ]


# A driver of as many GPUs as one likes: device 86 has compute capability 8.6.
DRIVER = """
#define OK 0
typedef void* P;
int cuInit(unsigned f) { return OK; }
int cuGetErrorString(int e, const char** t) { *t = "no such thing"; return OK; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? d / 10 : d % 10; return d == 999 ? 101 : OK; }
int cuDevicePrimaryCtxRetain(P* c, int d) { *c = (P)1; return OK; }
int cuCtxGetCurrent(P* c) { return OK; }
int cuCtxGetDevice(int* d) { return OK; }
int cuCtxPushCurrent_v2(P c) { return OK; }
int cuCtxPopCurrent_v2(P* c) { return OK; }
int cuThreadExchangeStreamCaptureMode(int* m) { return OK; }
int cuLibraryLoadData(P* l) { return OK; }
int cuLibraryGetKernel(P* k) { return OK; }
int cuKernelSetAttribute(int a) { return OK; }
int cuLaunchKernelEx(P c) { return OK; }
int cuTensorMapEncodeTiled(P map) { return OK; }
"""


@pytest.fixture(scope="module")
def architectures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str], list[int]], dict[int, str]]:
    """For a kernel set with these folders: which of them each device runs, or the error."""
    if sys.platform != "linux":
        pytest.skip("the driver's stand-in is made for Linux")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER, encoding="utf-8")
    compiler = os.environ.get("CC", "cc")
    done = subprocess.run(
        [compiler, "-w", "-shared", "-fPIC", str(folder / "driver.c"), "-o", str(folder / "libcuda.so.1")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def ask(architectures: list[str], devices: list[int]) -> dict[int, str]:
        done = run_python(
            "import json, torch, sageattention\n"
            "library = sageattention._library.library\n"
            f"library.set_kernel_directory('/set', {architectures!r})\n"
            "def ask(device):\n"
            "    try:\n"
            "        return library.kernel_architecture(device)\n"
            "    except RuntimeError as error:\n"
            "        return str(error).splitlines()[0]\n"
            f"print(json.dumps([ask(device) for device in {devices!r}]))",
            LD_LIBRARY_PATH=f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        )
        assert done.returncode == 0, done.stderr
        return dict(zip(devices, json.loads(done.stdout), strict=True))

    return ask


def test_which_kernels_a_gpu_runs(architectures_of: Callable[[list[str], list[int]], dict[int, str]]) -> None:
    folders = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120", "compute_80"]
    assert architectures_of(folders, [80, 86, 87, 89, 90, 100, 103, 120, 121, 130]) == {
        80: "sm_80",
        86: "sm_86",
        87: "compute_80",  # Orin, a Tegra, for which nothing here was compiled
        89: "sm_89",
        90: "sm_90a",
        100: "compute_80",  # newer than every cubin of its major version: the driver compiles the PTX
        103: "compute_80",
        120: "sm_120",
        121: "sm_120",
        130: "compute_80",
    }
    assert architectures_of(["sm_86", "sm_87", "sm_100", "compute_80"], [87, 89, 101, 103]) == {
        87: "sm_87",
        89: "sm_86",
        101: "compute_80",  # Thor
        103: "sm_100",
    }
    # A suffix means that architecture alone, and is preferred on it; nothing older than the code runs it.
    found = architectures_of(["sm_90", "sm_90a", "sm_100a", "compute_90"], [75, 86, 90, 100, 103, 999])
    assert (found[90], found[100], found[103]) == ("sm_90a", "sm_100a", "compute_90")
    for device, capability in ((75, "7.5"), (86, "8.6")):
        assert f"no kernel for compute capability {capability} (device {device})" in found[device]
        assert "this build has sm_90, sm_90a, sm_100a, compute_90 in /set" in found[device]
    assert "reading the compute capability: no such thing (CUDA driver error 101)" in found[999]
    assert "this build has none in /set" in architectures_of([], [80])[80]
