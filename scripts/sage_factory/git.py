"""What git says of a checkout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_factory import ROOT, FactoryError


class GitError(FactoryError):
    """git did not do as it was asked; the message is git's own."""


def git(*command: str, root: Path | None = None, more: Mapping[str, str] | None = None) -> str:
    """What git says in `root`, by default this checkout, told `more` by its environment; GitError if it fails or is not there."""
    # Whoever signs may have git say so before each commit.
    words = ["git", "-C", str(root or ROOT), "-c", "log.showSignature=false", *command]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, "LC_ALL": "C", **(more or {})},  # some of its errors are recognised
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise GitError(f"git does not run: {error}") from error
    if done.returncode:
        raise GitError(f"git {' '.join(command[:2])}: {done.stderr.strip()}")
    return done.stdout.strip()


def resolved(name: str) -> str:
    """The commit of that name."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except GitError as error:
        raise GitError(
            f"there is no commit {name} here: `git fetch --tags` may bring it, in a shallow clone `git fetch --unshallow --tags`"
        ) from error


def holding(commit: str, refs: Sequence[str]) -> list[str]:
    """Which of these branches and tags (patterns of git's) hold a commit."""
    return git("for-each-ref", "--format=%(refname)", "--contains", commit, *refs).split()
