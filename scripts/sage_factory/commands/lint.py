"""Check style and types of the whole repository: ruff check, ruff format --check, mypy."""

from __future__ import annotations

import argparse
import shutil
import subprocess

from sage_factory import ROOT, FactoryError

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
)


def options(_parser: argparse.ArgumentParser) -> None:
    """None: all of it, always."""


def run(_args: argparse.Namespace) -> int:
    if missing := {check[0] for check in CHECKS if shutil.which(check[0]) is None}:
        raise FactoryError(f"no {' and no '.join(sorted(missing))} here: run `python3 scripts/run.py lint`")
    # All of them, whatever the first says: the reader wants every fault at once.
    failed = [" ".join(check) for check in CHECKS if subprocess.run(check, cwd=ROOT, check=False).returncode]
    if failed:
        raise FactoryError(f"faults were found by {' and by '.join(failed)}")
    return 0
