"""What the tests in this folder share: conda-forge's model, or conda-forge; and a machine that has just got pixi."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import loopback
import pytest

from conda_forge import emitted, model, pixi
from sage_factory import ROOT


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """conda-forge's address."""
    return model.REAL or model.lay(tmp_path_factory.mktemp("conda-forge"), model.records()).as_uri()


@pytest.fixture(scope="session")
def channels(forge: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a user of the package has: a channel with all that variants.yaml builds, and conda-forge."""
    return [model.lay(tmp_path_factory.mktemp("ours"), emitted.records(emitted.builds())).as_uri(), forge]


@pytest.fixture(scope="session")
def released(forge: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same of a channel with what is released alone."""
    return [model.lay(tmp_path_factory.mktemp("released"), emitted.records(emitted.released())).as_uri(), forge]


LAID = ROOT / "build" / "laid"


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pixi.Pixi]:
    """Nothing but pixi, git, what Debian has, and the channel that laid.py laid."""
    if not LAID.is_dir():
        pytest.skip("no channel was laid here: `python tests/conda_forge/laid.py build/laid`, by a Python 3.12")
    with loopback.offering(LAID) as server:
        yield pixi.installed(tmp_path_factory.mktemp("machine") / "home", server.url)


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone, of what is committed here."""
    folder = tmp_path_factory.mktemp("clone") / "sageattention"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


def run(machine: pixi.Pixi, clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`pixi run WORDS`. rattler-build does not read pixi's mirrors: it is told of the channel as of any mirror."""
    return machine("run", *words, cwd=clone, more={"SAGEATTENTION_CHANNEL": f"{machine.address}/conda-forge"})
