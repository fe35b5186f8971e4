"""The channel of the tests in this folder: conda-forge's model, or conda-forge."""

from __future__ import annotations

import pytest

import conda_forge.emitted as emitted
import conda_forge.model as model


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """conda-forge's address."""
    return model.REAL or model.lay(tmp_path_factory.mktemp("conda-forge"), model.records()).as_uri()


@pytest.fixture(scope="session")
def channels(forge: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a user of the package has: a channel with all that variants.yaml builds, and conda-forge."""
    return [model.lay(tmp_path_factory.mktemp("ours"), emitted.records()).as_uri(), forge]
