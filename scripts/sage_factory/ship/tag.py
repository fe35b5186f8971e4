"""Tag a release: `tag.py` puts v2.2.0 on the checked-out commit, or v2.2.0-build.N where that is taken. `git push` sends it.

A second build of a version is of the same sources, for combinations that the first had not. What the tag starts is in
docs/packaging.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, count

from sage_factory import ROOT
from sage_factory.what import matrix


class TagError(Exception):
    """This commit cannot be tagged; the message says why."""


def next_tag(version: str, taken: Iterable[str]) -> str:
    """The first tag of a version that is free."""
    names = set(taken)
    every = chain([f"v{version}"], (f"v{version}-build.{number}" for number in count(1)))
    return next(name for name in every if name not in names)


def git(*command: str) -> str:
    """What git says, or TagError."""
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TagError(f"git {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def tag(*, dry_run: bool) -> str:
    """Tag the commit at hand."""
    name = next_tag(matrix.load().packages["sageattention"], git("tag").split())
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise TagError(f"these changes are not committed, so the tag would not hold them:\n{changed}")
    if there := [one for one in git("tag", "--points-at", "HEAD").split() if one.startswith("v")]:
        raise TagError(f"this commit is released already, as {there[0]}")
    if not dry_run:
        git("tag", "-a", name, "-m", name)
    return name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="say which tag it would be")
    args = parser.parse_args(argv)
    try:
        name = tag(dry_run=args.dry_run)
    except (TagError, matrix.MatrixError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{name}: {'not made, this is a dry run' if args.dry_run else f'release it with `git push origin {name}`'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
