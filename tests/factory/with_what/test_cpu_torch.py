"""PyTorch without CUDA's libraries: what is left out, and that what is left can be loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sage_factory.what import matrix
from sage_factory.with_what import cpu_torch, venvs

linux = pytest.mark.skipif(not shutil.which("gcc") or sys.platform != "linux", reason="needs gcc on Linux")


def compiled(folder: Path, library: str, text: str, *options: str) -> None:
    source = folder / "source.cpp"
    source.write_text(text, encoding="utf-8")
    command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / library), str(source), *options]
    subprocess.run(command, check=True, cwd=folder)


def loaded(library: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import ctypes; found = ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL); {code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@linux
def test_a_library_loads_without_those_that_it_was_linked_with(tmp_path: Path) -> None:
    """As PyTorch does: a C interface whose names have a version, types, and references that are written to early."""
    (tmp_path / "map").write_text("libcudart.so.12 { *; };", encoding="utf-8")
    runtime = (
        'extern "C" int cudaGetDeviceCount(int*) { return 0; } extern "C" const char* cudaGetErrorString(int) { return ""; }'
    )
    compiled(tmp_path, "libcudart.so.12", runtime, "-Wl,--version-script=map")
    part = "struct Part { virtual ~Part(); virtual void work(); }; int*& hook(); bool can_use(); "
    part += "namespace nccl { struct Options { Options(bool); virtual ~Options(); }; } "
    compiled(
        tmp_path,
        "libtorch_cuda.so",
        part + "Part::~Part() {} void Part::work() {} int*& hook() { static int* p; return p; } bool can_use() { return true; }"
        "nccl::Options::Options(bool) {} nccl::Options::~Options() {}",
    )
    user = f"#include <typeinfo>\n{part}" + (
        'extern "C" int cudaGetDeviceCount(int*);'
        "static int here; static bool set = (hook() = &here, true);"
        'extern "C" const char* name() { return typeid(Part).name(); }'
        'extern "C" int options() { nccl::Options* some = new nccl::Options(true); return typeid(*some) == typeid(Part); }'
        'extern "C" int devices() { int n; return cudaGetDeviceCount(&n); }'
        'extern "C" int can() { return can_use(); }'
        'extern "C" const char* cudaGetErrorString(int);'
        'extern "C" const char* error() { return cudaGetErrorString(100); }'
    )
    compiled(tmp_path, "libuser.so", user, "-L.", "-l:libcudart.so.12", "-l:libtorch_cuda.so", "-Wl,-rpath,$ORIGIN")
    for gone in ("libcudart.so.12", "libtorch_cuda.so"):
        (tmp_path / gone).unlink()
    assert "libcudart.so.12: cannot open shared object file" in loaded(tmp_path / "libuser.so").stderr
    cpu_torch.stand_ins(tmp_path, "gcc")
    done = loaded(
        tmp_path / "libuser.so",
        "found.name.restype = found.error.restype = ctypes.c_char_p; print(found.name().decode(), found.devices(), found.options(), found.can(), found.error())",
    )
    assert done.stdout.split(maxsplit=4) == ["4Part", "100", "0", "0", "b'no CUDA: a stand-in of its library'\n"], done.stderr
    assert "no version information" not in done.stderr
    assert {path.name for path in tmp_path.glob("lib*")} == {"libuser.so", "libcudart.so.12", "libtorch_cuda.so"}


@linux
def test_cudnn_has_the_version_that_was_locked(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("libcudnn.so.9 { *; };", encoding="utf-8")
    compiled(tmp_path, "libcudnn.so.9", 'extern "C" int cudnnGetProperty(int, int*) { return 0; }', "-Wl,--version-script=map")
    user = 'extern "C" int cudnnGetProperty(int, int*); extern "C" int part(int i) { int n = -1; cudnnGetProperty(i, &n); return n; }'
    compiled(tmp_path, "libuser.so", user, "-L.", "-l:libcudnn.so.9", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "libcudnn.so.9").unlink()
    cpu_torch.stand_ins(tmp_path, "gcc", ("9", "1", "7"))
    done = loaded(tmp_path / "libuser.so", "print(*map(found.part, range(3)))")
    assert done.stdout.split() == ["9", "1", "7"], done.stderr


@linux
def test_what_needs_nothing_gets_nothing(tmp_path: Path) -> None:
    compiled(tmp_path, "libalone.so", 'extern "C" int one() { return 1; }')
    cpu_torch.stand_ins(tmp_path, "gcc")
    assert [path.name for path in tmp_path.glob("lib*")] == ["libalone.so"]


@linux
def test_what_cannot_be_read_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "libtorch.so").write_bytes(b"not a library")
    with pytest.raises(cpu_torch.StandInError, match=r"^`\w+`, of the compiler's package, failed .*libtorch.so.*$"):
        cpu_torch.stand_ins(tmp_path, "gcc")


def test_a_wheel_is_unpacked_without_its_cuda_part(tmp_path: Path) -> None:
    kept = ["torch/__init__.py", "torch/lib/libtorch_cpu.so", "torch/lib/libc10_cuda.so", "torch/lib/libtorch.so",
            "torch/include/ATen/cuda/CUDAContext.h", "torch/bin/torch_shm_manager", "torch/_native/ops/__init__.py",
            "torch/_native/ops/polar/impl.py"]  # fmt: skip
    left_out = ["torch/lib/libtorch_cuda.so", "torch/lib/libtorch_cuda_linalg.so", "torch/lib/libcaffe2_nvrtc.so",
                "torch/lib/libtorch_nvshmem.so", "torch/bin/protoc"]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "torch.whl", "w") as archive:
        for name in kept + left_out:
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o755 if "/bin/" in name else 0o644) << 16
            archive.writestr(member, name)
    cpu_torch.unpack(tmp_path / "torch.whl", tmp_path / "site")
    assert {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.*")} | {
        "torch/bin/torch_shm_manager"
    } == set(kept)
    assert (tmp_path / "site" / "torch" / "bin" / "torch_shm_manager").stat().st_mode & 0o111
    assert (tmp_path / "site" / "torch" / "_native" / "ops" / "__init__.py").read_text(encoding="utf-8") == ""


@pytest.mark.parametrize("version", sorted({one.compiled_with for one in matrix.load().pytorch.values()}))
def test_no_wheel_of_cuda_is_asked_for(version: str) -> None:
    lock = venvs.lock_file(f"torch-{version}").read_text(encoding="utf-8")
    pins = dict(venvs.pins_of(lock))
    assert sum(map(len, pins.values())) == len(lock), "no line is lost"
    assert pins["torch"].startswith(f"torch=={version} ")
    assert any(name.startswith("nvidia-") for name in pins)
    left = {name for name in pins if not name.startswith(cpu_torch.GPU_WHEELS)}
    assert left <= {"torch", "filelock", "fsspec", "importlib-metadata", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools",
                    "sympy", "typing-extensions", "zipp"}  # fmt: skip


def test_pip_is_not_told_of_what_was_left_out(tmp_path: Path) -> None:
    """`pip install` of a package that requires PyTorch looks at what that requires."""
    requires = [
        "filelock",
        "nvidia-cublas-cu12==12.8.4.1; platform_system == 'Linux'",
        "triton==3.4.0",
        "cuda-toolkit[a]==13",
        "sympy>=1",
    ]
    text = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(tmp_path / "torch.whl", "w") as archive:
        archive.writestr("torch-2.8.0.dist-info/METADATA", f"Name: torch\n{text}\nRequires-Dist of nvidia- things\n")
    cpu_torch.unpack(tmp_path / "torch.whl", tmp_path)
    left = (tmp_path / "torch-2.8.0.dist-info" / "METADATA").read_text(encoding="utf-8")
    assert left == "Name: torch\nRequires-Dist: filelock\nRequires-Dist: sympy>=1\n\nRequires-Dist of nvidia- things\n"


def test_the_whole_pytorch_is_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venvs, "complete", lambda name: name == "torch-2.8.0")
    made: list[str] = []
    monkeypatch.setattr(venvs, "keep", lambda name, *_rest: made.append(name))
    assert cpu_torch.ensure("torch-2.8.0") == "torch-2.8.0"
    assert not made
    assert cpu_torch.ensure("torch-2.7.0") == "torch-2.7.0-cpu"
    assert made == ["torch-2.7.0-cpu"]


def test_by_another_way_of_making_it_it_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of the checkout, which may leave out other parts."""
    monkeypatch.setattr(venvs, "complete", lambda _name: False)
    made_of: list[str] = []
    monkeypatch.setattr(venvs, "keep", lambda _name, digest, _fill: made_of.append(digest))
    (tmp_path / "other.py").write_text("# another way", encoding="utf-8")
    for file in (cpu_torch.__file__, cpu_torch.__file__, str(tmp_path / "other.py")):
        monkeypatch.setattr(cpu_torch, "__file__", file)
        cpu_torch.ensure("torch-2.8.0")
    assert made_of[0] == made_of[1] != made_of[2]


@linux
def test_any_compiler_will_do_and_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(venvs.SetupError, match=r"no C compiler found .*install it, or name one in CC"):
        cpu_torch.c_compiler()
    (tmp_path / "gcc-12").touch(mode=0o755)
    assert cpu_torch.c_compiler() == str(tmp_path / "gcc-12")
    monkeypatch.setenv("CC", "/my/clang")
    assert cpu_torch.c_compiler() == "/my/clang"
