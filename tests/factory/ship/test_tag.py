"""Tags: one for each commit, the next that is free."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sage_factory import FactoryError
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
    git("init", "--quiet", "--initial-branch=main")
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


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """main with one commit."""
    monkeypatch.setattr("sage_factory.git.ROOT", tmp_path)
    for kind in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{kind}_NAME", "x")
        monkeypatch.setenv(f"GIT_{kind}_EMAIL", "x@example.org")
    git("init", "--quiet", "--initial-branch=main")
    git("commit", "--quiet", "--allow-empty", "-m", "one")
    return tmp_path


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("there", "name", "said"),
    [
        ([], "v2.2.0", None),
        (["v2.1.0", "v2.1.0-build.7", "v10", "release-3"], "v2.2.0", "older than v10"),
        (["v2.1.0", "v2.1.0-build.7", "release-3"], "v2.2.0", None),
        (["v2.2.0"], "v2.2.0-build.1", None),
        (
            ["v2.2.0", "v2.2.0-build.2"],
            "v2.2.0-build.1",
            r"older than v2\.2\.0-build\.2.* if v2\.2\.0-build\.2 was never released, delete",
        ),
        (["v2.2.0", "v2.2.0-build.9"], "v2.2.0-build.10", None),
        (["v2.2.0"], "sageattn3-v1.0.0", None),
        (["sageattn3-v1.0.0", "sageattn3-v10"], "v2.2.0", None),
        (["v10", "sageattn3-v1.1"], "sageattn3-v1.0.0", r"older than sageattn3-v1\.1"),
        ([], "v2.3.0", r"is not one of sageattention 2\.2\.0, which variants\.yaml states"),
        ([], "v2.2.0rc1", "is not one of sageattention"),
        ([], "sageattn3-v2.2.0", r"is not one of sageattn3 1\.0\.0"),
        ([], "release-3", r"of no package of variants\.yaml: expected one such as v2\.2\.0 or sageattn3-v1\.0\.0"),
    ],
)
def test_a_tag_that_is_to_be_released_is_the_newest_of_its_version(there: list[str], name: str, said: str | None) -> None:
    for one in (*there, name):
        git("tag", one)
    if said is None:
        tag.check(name)
    else:
        with pytest.raises(FactoryError, match=said):
            tag.check(name)


def test_a_tag_that_is_not_on_main_is_refused(repository: Path) -> None:
    git("checkout", "--quiet", "-b", "other")
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    git("tag", "-a", "v2.2.0", "-m", "x")
    with pytest.raises(tag.TagError, match=r"v2\.2\.0 is not on main"):
        tag.check("v2.2.0")
    git("checkout", "--quiet", "--detach", "main")
    git("merge", "--quiet", "--ff-only", "other")
    git("branch", "--quiet", "--force", "main")
    tag.check("v2.2.0")
    git("checkout", "--quiet", "-b", "another")
    git("commit", "--quiet", "--allow-empty", "-m", "three")
    with pytest.raises(tag.TagError, match=r"v2\.2\.0-build\.1 is not on main"):
        tag.tag("sageattention", dry_run=True)
    git("checkout", "--quiet", "--detach", "main")
    git("branch", "--quiet", "-D", "another")
    # As a workflow has it: the tag checked out, and main as the remote's.
    git("branch", "--quiet", "-D", "main", "other")
    with pytest.raises(tag.TagError, match="not on main"):
        tag.check("v2.2.0")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    tag.check("v2.2.0")
