"""Fixtures that several test modules share."""

from __future__ import annotations

import os

# Before PyTorch is imported. The tests' tensors are small: on a busy machine threads that wait for each other take ten times as
# long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nobody's settings: signed commits ask for a key, hooks do what they like.
os.environ.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")

import shutil
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A folder for what is compiled for the CPU, which the run's processes share: `compile_once` of kernels_on_cpu.py."""
    if not hasattr(config, "workerinput"):
        os.environ["SAGEATTENTION_COMPILED"] = tempfile.mkdtemp(prefix="sageattention-compiled-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("SAGEATTENTION_COMPILED"), ignore_errors=True)


@pytest.fixture
def wheel_path(tmp_path: Path) -> Path:
    """A good wheel, for a test to break."""
    import samples  # with the factory's tools, which the tests of the package alone do without

    return samples.a_wheel(tmp_path)
