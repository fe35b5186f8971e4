"""Check style and types of the whole repository: ruff check, ruff format --check, mypy."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess

from sage_factory import ROOT, FactoryError, task

# sageattn3 as it is installed: its own modules beside those that CMake gives it. mypy and the tests' types look there (pyproject.toml).
ASSEMBLED = ROOT / "build" / "lint" / "sageattn3"
SHARED = re.compile(r"set\(shared ([^)]*)\)")  # in csrc/torch/CMakeLists.txt

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
)


def options(_parser: argparse.ArgumentParser) -> None:
    """None: all of it, always."""


def run(_args: argparse.Namespace) -> int:
    if missing := {check[0] for check in CHECKS if shutil.which(check[0]) is None}:
        raise FactoryError(f"no {' and no '.join(sorted(missing))} here: run {task('lint')}")
    shutil.rmtree(ASSEMBLED, ignore_errors=True)
    shutil.copytree(ROOT / "sageattention3_blackwell" / "sageattn3", ASSEMBLED)
    (shared,) = SHARED.findall((ROOT / "csrc" / "torch" / "CMakeLists.txt").read_text(encoding="utf-8"))
    for name in shared.split():
        shutil.copy(ROOT / "sageattention" / f"{name}.py", ASSEMBLED)
    # All of them, whatever the first says: the reader wants every fault at once.
    failed = [" ".join(check) for check in CHECKS if subprocess.run(check, cwd=ROOT, check=False).returncode]
    if failed:
        raise FactoryError(f"faults were found by {' and by '.join(failed)}")
    return 0
