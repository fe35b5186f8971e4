"""Propose pixi.lock as it lies here: one commit with that file on a branch of its own, and a pull request for it.

`pixi update --no-install` makes the file, where conda-forge is reached; .github/workflows/lock.yml does both. The checkout stays
as it is. `gh` has to be logged in (GH_TOKEN).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matrix

LOCK, BRANCH = "pixi.lock", "pixi-lock"
TITLE = "pixi.lock: what conda-forge has now"
BODY = """Made by `pixi update --no-install`. CI takes pixi.lock as it is, so what is merged here is what builds are made with from then on.

GitHub starts no workflow for a pull request that a workflow opens: close this one and open it again to have it tested.
"""


class ProposeError(Exception):
    """The file cannot be proposed; the message says why."""


def run(*command: str, more: Mapping[str, str] | None = None) -> str:
    """What a command says, or ProposeError."""
    try:
        done = subprocess.run(
            command, cwd=matrix.ROOT, env=os.environ | (more or {}), capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ProposeError(f"{command[0]} is not on the path: run `pixi run propose`") from error
    if done.returncode:
        raise ProposeError(f"{' '.join(command[:3])}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit() -> str | None:
    """A commit on top of HEAD in which pixi.lock alone is as it is here; None if it is that already."""
    if not (matrix.ROOT / LOCK).is_file():
        raise ProposeError(f"there is no {LOCK} here: `pixi update --no-install` makes it")
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        run("git", "read-tree", "HEAD", more=index)
        run("git", "update-index", "--add", LOCK, more=index)
        tree = run("git", "write-tree", more=index)
    if tree == run("git", "rev-parse", "HEAD^{tree}"):
        return None
    return run("git", "commit-tree", tree, "-p", "HEAD", "-m", TITLE)


def propose(base: str) -> str:
    """Push the branch, and open a pull request unless one is open for it; what was done."""
    made = commit()
    if made is None:
        return f"{LOCK} is what HEAD has: nothing to propose"
    run("gh", "auth", "setup-git")
    run("git", "push", "--force", "origin", f"{made}:refs/heads/{BRANCH}")
    if run("gh", "pr", "list", "--head", BRANCH, "--state", "open", "--json", "url", "--jq", ".[].url"):
        return f"the open pull request of {BRANCH} has the new {LOCK}"
    return run("gh", "pr", "create", "--head", BRANCH, "--base", base, "--title", TITLE, "--body", BODY)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="the branch to merge it into (default: main)")
    args = parser.parse_args(argv)
    try:
        print(propose(args.base))
    except (ProposeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
