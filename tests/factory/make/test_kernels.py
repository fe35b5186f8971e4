"""The kernels alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sage_factory import ROOT, alone, files
from sage_factory.make import kernels
from sage_factory.what.table import MatrixError
from sage_factory.with_what import channel, venvs


def test_kernels_are_not_compiled_by_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("SAGEATTENTION_CHANNEL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert kernels.compiler("12.8")[0] == str(nvcc)
    with pytest.raises(kernels.KernelsError, match=r"is CUDA 12\.8, not 13\.0: run `pixi run -e cu130 kernels --cuda 13\.0`"):
        kernels.compiler("13.0")


@pytest.mark.parametrize(
    ("package", "cuda", "architecture", "said"),
    [
        ("sageattention", "12.6", "12.0", r"CUDA 12\.6 cannot compile architecture 12\.0: that takes CUDA 12\.8 or newer"),
        ("sageattn3", "12.8", "12.1", r"CUDA 12\.8 cannot compile architecture 12\.1: that takes CUDA 12\.9 or newer"),
        ("sageattention", "12.6", "7.5", r"unknown architecture '7\.5'"),
    ],
)
def test_what_a_compiler_does_not_know_is_refused_before_there_is_one(
    package: str, cuda: str, architecture: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "compiler", None)
    with pytest.raises(MatrixError, match=said):
        kernels.compile_kernels(package, cuda, [architecture])


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a compiler of CUDA 12.8 that looks as if it was installed from PyPI."""
    monkeypatch.setenv("SAGEATTENTION_CHANNEL", "pypi")
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    monkeypatch.setattr(venvs, "ensure", lambda name: tmp_path / name)
    monkeypatch.setattr(channel, "compiler", lambda: channel.Compiler("/usr/bin/gcc", "/usr/bin/g++", "12.2.0"))
    lock = tmp_path / "cuda-12.8.txt"
    lock.write_text("nvcc==12.8.93\n")
    monkeypatch.setattr(venvs, "lock_file", lambda _: lock)
    return lock


def test_the_compilers_wrapper_changes_with_the_toolkit_and_then_alone(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = [Path(kernels.compiler("12.8")[0]).with_name(name) for name in ("nvcc", "ptxas")]
    assert all(path.read_text().startswith("#!/bin/sh\n# ") for path in wrappers)
    before = [(path.read_text(), path.stat().st_mtime_ns) for path in wrappers]
    for path in wrappers:
        path.chmod(0o644)  # as one who was killed before chmod leaves it
    kernels.compiler("12.8")
    assert [(path.read_text(), path.stat().st_mtime_ns) for path in wrappers] == before
    assert all(os.access(path, os.X_OK) for path in wrappers)
    locked.write_text("nvcc==12.8.99\n")

    def held(path: Path, content: bytes) -> None:
        assert alone.held, "two who write it at once"
        files.put(path, content)

    monkeypatch.setattr("sage_factory.make.kernels.put", held)
    kernels.compiler("12.8")
    assert not {path.read_text() for path in wrappers} & {text for text, _ in before}


COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "release {0}" && exit
while [ "$1" != -o ]; do shift; done
echo "{0}" > "$2"
"""


def test_another_compiler_at_the_same_path_compiles_again_however_old_it_is(tmp_path: Path) -> None:
    """As pixi puts one there, with the time that it was packed at."""
    cmake, ninja = (venvs.bin_dir("tools") / name for name in ("cmake", "ninja"))
    if not cmake.is_file() or os.name == "nt":
        pytest.skip("no CMake from PyPI here: `python3 scripts/run.py build-cu128` brings it")
    values = {"CMAKE_MAKE_PROGRAM": ninja, "SAGE_NVCC": tmp_path / "nvcc", "SAGE_PACKAGE": "sageattn3", "SAGE_VERSION": "1",
              "SAGE_CUDA_VERSION": "12.8", "SAGE_ARCHITECTURES": "12.0a"}  # fmt: skip
    options = [f"-D{key}={value}" for key, value in values.items()]
    configure: list[str | Path] = [cmake, "-S", ROOT / "csrc" / "kernels", "-B", tmp_path / "build", "-G", "Ninja", *options]

    def compiled(release: str) -> tuple[str, set[str]]:
        for name in ("nvcc", "ptxas"):
            (tmp_path / name).write_text(COMPILER.format(release))
            (tmp_path / name).chmod(0o755)
            os.utime(tmp_path / name, (1, 1))
        subprocess.run(configure, check=True, capture_output=True)
        said = subprocess.run([cmake, "--build", tmp_path / "build"], check=True, capture_output=True, text=True).stdout
        files = [*(tmp_path / "build").rglob("*.ptx"), *(tmp_path / "build").rglob("*.cubin")]
        return said.splitlines()[-1], {path.read_text().strip() for path in files}

    assert compiled("12.8.1")[1] == {"12.8.1"}
    assert compiled("12.8.1") == ("ninja: no work to do.", {"12.8.1"})
    assert compiled("12.8.2")[1] == {"12.8.2"}


@pytest.mark.skipif(os.name != "posix", reason="open files are handed on as POSIX does")
def test_the_lock_is_ninjas_too(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []

    def run(command: list[str], *, pass_fds: list[int], **_options: object) -> subprocess.CompletedProcess[str]:
        given.append(list(pass_fds))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    kernels.compile_kernels("sageattention", "12.8", ["8.0"])
    assert len(given) == 2
    assert all(len(locks) == 1 for locks in given)
