"""pixi.lock is proposed: a branch with pixi.lock alone, and one pull request for it, however often it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sage_factory import commands
from sage_factory.ship import propose

# A gh that notes what it was asked, and knows of the pull requests that it was asked for.
GH = """#!/bin/sh
echo "$*" >> "$GH_FOLDER/asked"
case "$1 $2" in
  "pr list") cat "$GH_FOLDER/open" 2>/dev/null || echo "[]" ;;
  "pr create")
    echo https://github.example/pull/1
    echo '[{"url": "https://github.example/pull/1", "isCrossRepository": false}]' > "$GH_FOLDER/open" ;;
esac
"""


def git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with a manifest and a change that is nobody's business, and a gh."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "nobody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "nobody@example.org")
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", tmp_path / "remote"], check=True)
    here = tmp_path / "here"
    subprocess.run(["git", "clone", "--quiet", tmp_path / "remote", here], check=True, capture_output=True)
    git(here, "switch", "--quiet", "--create", "main")
    (here / "pixi.toml").write_text("")
    git(here, "add", "pixi.toml")
    git(here, "commit", "--quiet", "-m", "first")
    git(here, "push", "--quiet", "origin", "main")
    (here / "pixi.toml").write_text("half a thought")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("GH_FOLDER", str(tmp_path))
    monkeypatch.setattr(propose, "ROOT", here)
    for module in ("git", "gh"):
        monkeypatch.setattr(f"sage_factory.{module}.ROOT", here)
    return here


def asked(checkout: Path) -> list[str]:
    return [line[:9] for line in (checkout.parent / "asked").read_text().splitlines()]


def test_the_lock_alone_is_proposed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "pixi.lock").write_text("version: 7\n")
    assert commands.main(["propose", "--base", "main"]) == 0
    assert capsys.readouterr().out == "https://github.example/pull/1\n"
    remote = checkout.parent / "remote"
    assert git(remote, "diff", "--name-only", "main", "pixi-lock") == "pixi.lock"
    assert git(remote, "show", "pixi-lock:pixi.lock") == "version: 7"
    assert git(checkout, "status", "--porcelain").split() == ["M", "pixi.toml", "??", "pixi.lock"]
    assert git(checkout, "branch", "--show-current") == "main"


def test_gh_says_who_pushes_and_the_users_configuration_stays_as_it_is(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "pixi.lock").write_text("version: 7\n")
    (tmp_path / "home" / ".gitconfig").parent.mkdir()
    (tmp_path / "home" / ".gitconfig").write_text("[credential]\nhelper = store\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    hook = checkout / ".git" / "hooks" / "pre-push"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\ngit config --get-all credential.helper > "$GH_FOLDER/helpers"\n')
    hook.chmod(0o755)
    assert commands.main(["propose"]) == 0
    # Those before an empty one are not asked.
    assert (tmp_path / "helpers").read_text().splitlines()[-2:] == ["", "!gh auth git-credential"]
    assert "auth setu" not in asked(checkout)
    assert (tmp_path / "home" / ".gitconfig").read_text() == "[credential]\nhelper = store\n"


def test_a_newer_lock_renews_the_open_request(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("7", "8"):
        (checkout / "pixi.lock").write_text(f"version: {version}\n")
        assert commands.main(["propose"]) == 0
    assert "the open pull request of pixi-lock has the new pixi.lock" in capsys.readouterr().out
    assert asked(checkout).count("pr create") == 1
    remote = checkout.parent / "remote"
    assert git(remote, "show", "pixi-lock:pixi.lock") == "version: 8"
    assert git(remote, "rev-list", "--count", "main..pixi-lock") == "1"


def test_a_strangers_request_is_not_ours(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its branch's name it could be."""
    (checkout.parent / "open").write_text('[{"url": "https://github.example/pull/7", "isCrossRepository": true}]')
    (checkout / "pixi.lock").write_text("version: 7\n")
    assert commands.main(["propose"]) == 0
    assert capsys.readouterr().out == "https://github.example/pull/1\n"


def test_what_is_there_already_is_not_proposed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "pixi.lock").write_text("version: 7\n")
    git(checkout, "add", "pixi.lock")
    git(checkout, "commit", "--quiet", "-m", "locked", "pixi.lock")
    assert commands.main(["propose"]) == 0
    assert "nothing to propose" in capsys.readouterr().out
    assert not (checkout.parent / "asked").exists()


def test_without_a_lock_it_says_how_to_make_one(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["propose"]) == 1
    assert "`pixi update --no-install` makes it" in capsys.readouterr().err


def test_without_gh_it_says_where_there_is_one(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "pixi.lock").write_text("version: 7\n")
    (checkout.parent / "bin" / "gh").unlink()
    (checkout.parent / "bin" / "git").symlink_to(subprocess.check_output(["which", "git"], text=True).strip())
    monkeypatch.setenv("PATH", str(checkout.parent / "bin"))
    assert commands.main(["propose"]) == 1
    assert (
        "`gh`, GitHub's command line, is not installed: pixi's environments `release` and `lock` have it; without pixi, install it"
        in capsys.readouterr().err
    )
