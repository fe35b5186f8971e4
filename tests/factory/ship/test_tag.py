"""Tags: one for each commit, the next that is free."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sage_factory.git import git
from sage_factory.ship import tag
from sage_factory.what import matrix


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ([], "v2.2.0"),
        (["v2.1.0", "v2.2.0rc1"], "v2.2.0"),
        (["v2.2.0"], "v2.2.0-build.1"),
        (["v2.2.0", "v2.2.0-build.1", "v2.2.0-build.2"], "v2.2.0-build.3"),
    ],
)
def test_the_next_tag(taken: list[str], name: str) -> None:
    assert tag.next_tag("v2.2.0", taken) == name


def test_a_commit_is_tagged_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_factory.git.ROOT", tmp_path)
    for name, value in (("NAME", "x"), ("EMAIL", "x@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    version = matrix.load().packages["sageattention"].version
    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    assert tag.tag("sageattention", dry_run=True) == f"v{version}"
    assert git("tag") == ""
    assert tag.tag("sageattention", dry_run=False) == f"v{version}"
    with pytest.raises(tag.TagError, match=f"released already, as v{re.escape(version)}"):
        tag.tag("sageattention", dry_run=False)
    assert tag.tag("sageattn3", dry_run=False) == "sageattn3-v1.0.0", "the other package, of the same commit"
    (tmp_path / "file").write_text("two")
    with pytest.raises(tag.TagError, match=r"not committed.*\n.*file"):
        tag.tag("sageattention", dry_run=False)
    git("commit", "--quiet", "-am", "two")
    assert tag.tag("sageattention", dry_run=False) == f"v{version}-build.1"
