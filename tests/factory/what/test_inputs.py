"""What a package is made of: the same digest for the same content, wherever and whenever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sage_factory.git import GitError, git
from sage_factory.what import inputs


def test_digest_is_of_content_not_of_place_or_time(tmp_path: Path) -> None:
    digests: list[str] = []
    for name in ("a", "b"):
        root = tmp_path / name
        (root / "src").mkdir(parents=True)
        (root / "src" / "k.cu").write_text("kernel")
        os.utime(root / "src" / "k.cu", (len(digests), len(digests)))
        (root / "src" / "__pycache__").mkdir()
        (root / "src" / "__pycache__" / name).write_text(name)
        digests.append(inputs.digest(["src"], ["12.8"], root))
    assert digests[0] == digests[1]
    assert inputs.digest(["src"], ["12.9"], tmp_path / "a") != digests[0]
    (tmp_path / "a" / "src" / "k.cu").write_text("another kernel")
    assert inputs.digest(["src"], ["12.8"], tmp_path / "a") != digests[0]
    (tmp_path / "b" / "src" / "k.cu").rename(tmp_path / "b" / "src" / "l.cu")
    assert inputs.digest(["src"], ["12.8"], tmp_path / "b") != digests[0]


def test_inputs_are_sorted_alike_on_every_platform(tmp_path: Path) -> None:
    names = ["B", "a-b", "a/b", "c"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in inputs.files(["c", "a", "a-b", "B"], tmp_path)] == names


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="an input of the build is missing"):
        inputs.files(["csrc"], tmp_path)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, of one file."""
    for key, value in {"NAME": "n", "EMAIL": "n@example.invalid"}.items():
        monkeypatch.setenv(f"GIT_AUTHOR_{key}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{key}", value)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    git("init", "--quiet", root=root)
    (root / "src" / "k.cu").write_text("kernel")
    git("add", ".", root=root)
    git("commit", "--quiet", "-m", "one", root=root)
    return root


def test_what_the_user_has_git_do_otherwise_is_no_matter(checkout: Path) -> None:
    gpg = checkout.parent / "gpg"
    gpg.write_text("#!/bin/sh\ncat > /dev/null; echo '[GNUPG:] SIG_CREATED ' >&2; echo signature; echo Good signature >&2\n")
    gpg.chmod(0o755)
    git("config", "gpg.program", str(gpg), root=checkout)
    git("commit", "--quiet", "--amend", "--no-edit", "-S", root=checkout)
    commit, seconds = inputs.commit(["src"], checkout), inputs.seconds(["src"], checkout)
    assert len(commit) == 40
    git("config", "status.showUntrackedFiles", "no", root=checkout)
    git("config", "log.showSignature", "true", root=checkout)
    assert (inputs.commit(["src"], checkout), inputs.seconds(["src"], checkout)) == (commit, seconds)
    (checkout / "src" / "new.cu").write_text("another")
    assert inputs.commit(["src"], checkout) == f"{commit}+", "a file that no commit holds"


def built_of(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in inputs.files(["src"], root)]


@pytest.mark.parametrize("kind", ["clone", "worktree", "submodule"])
def test_what_git_ignores_is_no_input(kind: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor's or a tool's: of a commit that is stated everybody has the same files."""
    root = checkout
    if kind == "worktree":
        root = checkout.with_name(kind)
        git("worktree", "add", "--quiet", str(root), root=checkout)
    if kind == "submodule":
        outer = checkout.with_name("outer")
        git("init", "--quiet", str(outer), root=checkout)
        git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(checkout), "inner", root=outer)
        root = outer / "inner"
    mine = checkout.with_name("ignore")
    mine.write_text("*~\n")
    git("config", "core.excludesFile", str(mine), root=root)
    before = inputs.digest(["src"], [], root)
    (root / ".gitignore").write_text(".mypy_cache/\n*.log\n")
    (root / "src" / ".mypy_cache").mkdir()
    for name in ("k.cu~", "a.log", ".mypy_cache/x.json"):
        (root / "src" / name).write_text("of this machine")
    assert built_of(root) == ["src/k.cu"]
    assert (inputs.digest(["src"], [], root), inputs.commit(["src"], root)[40:]) == (before, "")
    inputs.copy(["src"], root / "copy", root)
    assert [path.name for path in (root / "copy").rglob("*") if path.is_file()] == ["k.cu"]
    (root / "src" / "ä b.cu").write_text("new")
    assert built_of(root) == ["src/k.cu", "src/ä b.cu"]
    assert inputs.commit(["src"], root)[40:] == "+"
    git("add", "--force", "src/a.log", root=root)
    (root / "src" / "k.cu").unlink()
    assert built_of(root) == ["src/a.log", "src/ä b.cu"], "what is held although it is ignored, and not what is gone"


@pytest.mark.parametrize("held", [False, True])
def test_sources_below_a_repository_that_ignores_them_are_built_whole(held: bool, checkout: Path) -> None:
    """As in a home that is one: it has no commit of them. With a commit of its own it is as any."""
    git("rm", "--quiet", "-r", "--cached", ".", root=checkout)
    (checkout / ".gitignore").write_text("*\n")
    git("add", "--force", ".gitignore", root=checkout)
    git("commit", "--quiet", "-m", "another's", root=checkout)
    root = checkout / "unpacked"
    (root / "src").mkdir(parents=True)
    for name in ("k.cu", "l.cu"):
        (root / "src" / name).write_text("kernel")
    if held:
        git("init", "--quiet", root=root)
        git("add", ".", root=root)
        git("commit", "--quiet", "-m", "one", root=root)
    assert built_of(root) == ["src/k.cu", "src/l.cu"]
    assert len(inputs.commit(["src"], root)) == 40 * held


def test_where_git_knows_nothing_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert (inputs.commit(["."], tmp_path), inputs.seconds(["."], tmp_path)) == ("", inputs.EPOCH)
    git("init", "--quiet", root=tmp_path)
    assert inputs.commit(["."], tmp_path) == ""
    monkeypatch.setenv("PATH", "")
    assert inputs.commit(["."], tmp_path) == ""


def test_a_checkout_that_git_refuses_is_an_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(GitError, match=r"dubious ownership[\s\S]*safe\.directory"):
        inputs.commit(["src"], checkout)


@pytest.mark.parametrize("told", ["0", "1", "abc", "-5", "1.5", "4354819200"])
def test_a_time_that_no_archive_can_state_is_refused(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", told)
    with pytest.raises(inputs.InputError, match=f"SOURCE_DATE_EPOCH is {told!r}"):
        inputs.seconds(["."])
