"""A wheel as a user installs it: in a clean environment of its Python, beside the PyTorch that pip brings, and run there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from sage_factory import ROOT, FactoryError, child
from sage_factory.what import matrix
from sage_factory.what.build import Build, cuda_tag, release_order
from sage_factory.with_what import venvs

CPU_TEST = ROOT / "recipe" / "test_cpu.py"


class CleanError(FactoryError):
    """A wheel does not install or run; the message says which, and what was said."""


@contextlib.contextmanager
def environment(python: str) -> Iterator[Path]:
    """The interpreter of a fresh environment of that Python with nothing but pip in it."""
    uv = shutil.which("uv")
    if uv is None:
        raise CleanError("`uv`, which finds or fetches each Python, is not installed: the environment `release` has it")
    with tempfile.TemporaryDirectory(prefix="sageattention-", ignore_cleanup_errors=True) as folder:
        place = Path(folder, "environment")
        _run(f"there is no environment of Python {python}", [uv, "venv", "--quiet", "--python", python, str(place)])
        interpreter = venvs.python_in(place)
        _run("the environment gets no pip", [str(interpreter), "-m", "ensurepip"])
        yield interpreter


def pytorches(build: Build) -> list[tuple[str, str]]:
    """With which Python and beside which PyTorch a wheel is tried: its own, and the newest of its series; one for every PyTorch from
    one on also beside the newest, with the newest Python of that: it may have none for the oldest.
    """
    tried = [(build.python, f"torch=={build.torch_series}.*")]
    if build.stable_abi:
        newest = max(matrix.load().pytorch.values(), key=lambda one: release_order(one.version))
        tried.append((max(newest.python, key=Version), build.requires_torch))
    return tried


def pytorch(interpreter: Path, build: Build, wanted: str, *, cxx11_abi: bool = True) -> None:
    """Install this PyTorch: pip's own, but for one that is not of the build's C++ ABI."""
    table, said = matrix.load(), f"{wanted} cannot be installed"
    if cxx11_abi and table.pytorch[build.torch].old_abi_on_pypi and not table.platforms[build.platform].windows:
        backend = cuda_tag(build.cuda)
        _run(said, ["uv", "pip", "install", "--python", str(interpreter), "--torch-backend", backend, wanted])
    else:
        _pip(said, interpreter, "install", wanted)


def tried(interpreter: Path, files: Sequence[Path], package: str, test: Path = CPU_TEST) -> None:
    """Install each of these forms of a wheel of a package over the one before, as its user would, and run it on the CPU."""
    for path in files:
        _pip(f"pip does not install {path.name}", interpreter, "install", str(path))
        _pip(f"{path.name} does not fit what is installed", interpreter, "check")
        # -I: of what lies here and of the user's own packages nothing is on the import path.
        _run(f"{path.name} does not run", [str(interpreter), "-I", str(test)], package, show=True)
        _run(f"{path.name} is not sound", [str(interpreter), "-I", "-m", package], show=True)


def _pip(failure: str, interpreter: Path, *command: str) -> None:
    _run(failure, [str(interpreter), "-m", "pip", "--disable-pip-version-check", *command])


def _run(failure: str, command: list[str], package: str = "", *, show: bool = False) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        # Which one the test tries.
        done = child.said(command, directory=Path(elsewhere), more={"SAGE_PACKAGE": package})
    if done.returncode:
        raise CleanError(f"{failure}: {done.stderr.strip() or done.stdout.strip()}")
    if show:
        print(done.stdout, end="", flush=True)
