"""What the tests use where it is there, and say that they lack where it is not."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from sage_factory import ROOT


def shared(path: str) -> Path | None:
    """A file of the folder `shared` that may lie beside the checkout, or above it."""
    return next((found for parent in ROOT.parents if (found := parent / "shared" / path).exists()), None)


def beside(name: str) -> str | None:
    """A program of the environment that the tests run in, which the wheel's own environment lies beside."""
    folders = [
        sysconfig.get_path("scripts"),
        *(str(Path(p).parents[2] / "bin") for p in sys.path if p.endswith("site-packages")),
    ]
    return shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def program(name: str) -> str:
    """A program that is no requirement of the tests: on the path, or shared/tools/NAME beside the checkout."""
    found = shutil.which(name) or shared(f"tools/{name}")
    if found is None:
        pytest.skip(
            f"there is no {name} here, neither on the path nor at ../shared/tools/{name}: what it alone can tell is not asked"
        )
    return str(found)
