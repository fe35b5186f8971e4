"""A folder like dist/ that holds a whole profile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import github_stand_in
import pytest
import samples

from sage_factory.what import matrix


@pytest.fixture
def sample_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples' profile is one of the table's."""
    monkeypatch.setattr(matrix, "builds", samples.chosen)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("INDEX_URL", "CHANNEL_URL", "GITHUB_REPOSITORY", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def whole_dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.a_dist(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def dist(whole_dist: Path, tmp_path: Path, sample_profile: None) -> Path:
    """It, for a test to use up."""
    return Path(shutil.copytree(whole_dist, tmp_path / "dist"))


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> github_stand_in.GitHub:
    found = github_stand_in.GitHub(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return found
