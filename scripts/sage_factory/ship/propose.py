"""pixi.lock, proposed: a commit with that file alone, and a pull request for it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sage_factory import ROOT, FactoryError
from sage_factory.gh import gh
from sage_factory.git import git

LOCK, BRANCH = "pixi.lock", "pixi-lock"
# git asks gh who pushes, for this once: `gh auth setup-git` would write that into the user's own configuration.
ASKS_GH = {
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "credential.helper",
    "GIT_CONFIG_VALUE_0": "",  # no others, which would keep what gh says
    "GIT_CONFIG_KEY_1": "credential.helper",
    "GIT_CONFIG_VALUE_1": "!gh auth git-credential",
}
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
        git("read-tree", "HEAD", more=index)
        git("update-index", "--add", LOCK, more=index)
        tree = git("write-tree", more=index)
    if tree == git("rev-parse", "HEAD^{tree}"):
        return None
    return git("commit-tree", tree, "-p", "HEAD", "-m", TITLE)


def propose(base: str) -> str:
    """Push the branch, and open a pull request unless one is open for it; what was done."""
    made = commit()
    if made is None:
        return f"{LOCK} is what HEAD has: nothing to propose"
    git("push", "--force", "origin", f"{made}:refs/heads/{BRANCH}", more=ASKS_GH)
    # A fork may have a branch of that name, and anybody a fork.
    said = gh("pr", "list", "--head", BRANCH, "--state", "open", "--json", "url,isCrossRepository")
    if any(not one["isCrossRepository"] for one in json.loads(said)):
        return f"the open pull request of {BRANCH} has the new {LOCK}"
    return gh("pr", "create", "--head", BRANCH, "--base", base, "--title", TITLE, "--body", BODY)
