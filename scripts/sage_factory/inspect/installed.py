"""A wheel installed: alone in a clean environment beside PyTorch, by pip, and tried."""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from sage_factory import FactoryError, child, task
from sage_factory.what import matrix
from sage_factory.with_what import venvs


class InstallError(FactoryError):
    """The wheel cannot be installed; the message says why."""


def torch_version() -> str:
    """The PyTorch of this environment, read without the seconds that importing it takes."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        raise InstallError(f"this environment has no PyTorch: run the tests with {task('test')}") from None


def choose(directory: Path, torch: str, cuda: str) -> list[Path]:
    """The wheels in `directory` for this Python and PyTorch: sageattention, which has to be there, and what else there is.

    PyTorch is a release such as 2.8.1, whose wheel is the one of its series, or 2.9+.
    """
    python, here = f"{sys.version_info[0]}.{sys.version_info[1]}", matrix.host_platform()
    series = ".".join(torch.split(".")[:2])  # 2.9+ stays as it is
    fitting = [
        build
        for build in matrix.load().all_builds
        if (build.cuda, build.platform) == (cuda, here) and series == (build.torch if build.stable_abi else build.torch_series)
    ]
    names = dict.fromkeys(build.wheel_name for build in fitting if build.stable_abi or build.python == python)
    found = [directory / name for name in names if (directory / name).is_file()]
    if found and found[0].name.startswith("sageattention-"):
        return found
    there = ", ".join(path.name for path in sorted(directory.glob("*.whl"))) or "nothing"
    row = next((build.torch for build in fitting if build.package == "sageattention"), None)
    todo = f"{task(f'build --cuda {cuda} --torch {row}')} makes one" if row else "variants.yaml has no such row"
    raise InstallError(
        f"{directory} has no wheel for PyTorch {series}, CUDA {cuda} and Python {python}: it holds {there}. {todo}"
    )


def own_folder(parent: Path) -> Path:
    """A folder for this process, so that two runs in one checkout do not replace each other's wheel."""
    for old in parent.glob("*"):
        if not _runs(old.name):
            shutil.rmtree(old, ignore_errors=True)
    return parent / str(os.getpid())


def _runs(process: str) -> bool:
    if os.name == "nt":  # asking there ends the process; Windows keeps what is open from being removed anyway
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def install(wheels: Sequence[Path], target: Path) -> Path:
    """A fresh environment that holds these wheels alone and sees this environment's packages; returns its interpreter."""
    shutil.rmtree(target, ignore_errors=True)
    base = venvs.base_python()
    _run(f"{base} cannot make an environment", [base, "-m", "venv", "--without-pip", str(target)])
    python = venvs.python_in(target)
    seen = [path for path in sys.path if path.endswith("site-packages") and Path(path).is_dir()]
    seen = seen or site.getsitepackages() or [sysconfig.get_paths()["purelib"]]
    # Beside another of its name pip would take a package for installed already.
    seen = [path for path in seen if not any(Path(path, package).exists() for package in matrix.load().packages)]
    (venvs.packages_of(target) / "beside.pth").write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")
    # No index: a requirement that is not there already means that the wheel's metadata is wrong.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", *map(str, wheels)]
    _run(f"pip cannot install {' and '.join(wheel.name for wheel in wheels)}", command)
    return python


def _run(failure: str, command: list[str]) -> None:
    done = child.said(command)
    if done.returncode:
        raise InstallError(f"{failure}: {done.stderr.strip() or done.stdout.strip()}")


def import_faults(python: Path) -> list[str]:
    """What keeps `import sageattention` and one call on the CPU from working in an environment."""
    code = """
import torch, sageattention
q = torch.ones(1, 1, 3, 64, dtype=torch.float16)
out = sageattention.sageattn(q, q, q)
assert out.shape == q.shape and bool((out == 1).all()), f"attention over equal values gave {out}"
"""
    done = child.said([str(python), "-P", "-c", code])
    if done.returncode == 0:
        return []
    lines = done.stderr.strip().splitlines() or [f"Python ended with status {done.returncode}"]
    return [f"the installed wheel does not import and run on the CPU: {lines[-1]}"]
