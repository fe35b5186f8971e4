"""pixi.lock, proposed: a commit with that file alone, and a pull request for it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from sage_factory import ROOT, FactoryError
from sage_factory.git import git

LOCK, BRANCH = "pixi.lock", "pixi-lock"
TITLE = "pixi.lock: what conda-forge has now"
BODY = """Made by `pixi update --no-install`. CI takes pixi.lock as it is, so what is merged here is what builds are made with from then on.

GitHub starts no workflow for a pull request that a workflow opens: close this one and open it again to have it tested.
"""


class ProposeError(FactoryError):
    """The file cannot be proposed; the message says why."""


def commit() -> str | None:
    """A commit on top of HEAD in which pixi.lock alone is as it is here; None if it is that already."""
    if not (ROOT / LOCK).is_file():
        raise ProposeError(f"there is no {LOCK} here: `pixi update --no-install` makes it")
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        git("read-tree", "HEAD", root=ROOT, more=index)
        git("update-index", "--add", LOCK, root=ROOT, more=index)
        tree = git("write-tree", root=ROOT, more=index)
    if tree == git("rev-parse", "HEAD^{tree}", root=ROOT):
        return None
    return git("commit-tree", tree, "-p", "HEAD", "-m", TITLE, root=ROOT)


def propose(base: str) -> str:
    """Push the branch, and open a pull request unless one is open for it; what was done."""
    made = commit()
    if made is None:
        return f"{LOCK} is what HEAD has: nothing to propose"
    _gh("auth", "setup-git")
    git("push", "--force", "origin", f"{made}:refs/heads/{BRANCH}", root=ROOT)
    if _gh("pr", "list", "--head", BRANCH, "--state", "open", "--json", "url", "--jq", ".[].url"):
        return f"the open pull request of {BRANCH} has the new {LOCK}"
    return _gh("pr", "create", "--head", BRANCH, "--base", base, "--title", TITLE, "--body", BODY)


def _gh(*command: str) -> str:
    try:
        done = subprocess.run(
            ["gh", *command], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
        )
    except FileNotFoundError as error:
        raise ProposeError("`gh`, GitHub's command line, is not installed: `pixi run propose` brings it") from error
    if done.returncode:
        raise ProposeError(f"`gh {' '.join(command[:2])}` failed: {done.stderr.strip()}")
    return done.stdout.strip()
