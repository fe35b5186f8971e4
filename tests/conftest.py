"""Fixtures that several test modules share."""

from __future__ import annotations

import os

# Before PyTorch is imported. The tests' tensors are small: on a busy machine threads that wait for each other take ten times as
# long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nobody's settings: signed commits ask for a key, hooks do what they like.
os.environ.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
os.environ.pop("PIXI_ENVIRONMENT_NAME", None)  # whoever runs the tests, messages name tasks as run.py runs them

import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A folder that the run's processes share, for what takes long to make: `compile_once` of kernels_on_cpu.py, and `listed_once` below."""
    if not hasattr(config, "workerinput"):
        os.environ["SAGEATTENTION_SHARED"] = tempfile.mkdtemp(prefix="sageattention-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("SAGEATTENTION_SHARED"), ignore_errors=True)


@pytest.fixture(scope="session")
def listed_once() -> Iterator[None]:
    """nvdisasm is asked once a run for each cubin: its start alone takes a quarter of a second."""
    from cards import cubin
    from kernels_on_cpu import whole

    from sage_factory import files  # the package's own tests do without the factory's tools

    ask, folder = cubin.listing, Path(os.environ["SAGEATTENTION_SHARED"])

    def listing(path: Path) -> str:
        listed = folder / f"{files.sha256(path.read_bytes())}.sass"
        if listed.is_file():
            return zlib.decompress(listed.read_bytes()).decode()
        text = ask(path)
        with whole(listed) as unfinished:
            unfinished.write_bytes(zlib.compress(text.encode(), 1))
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cubin, "listing", listing)
        yield


@pytest.fixture
def wheel_path(tmp_path: Path) -> Path:
    """A good wheel, for a test to break."""
    import samples  # with the factory's tools, which the tests of the package alone do without

    return samples.a_wheel(tmp_path)
