"""The tag of a release: that of its version, or of another build of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count

from sage_factory import FactoryError
from sage_factory.git import git
from sage_factory.what import matrix


class TagError(FactoryError):
    """This commit cannot be tagged; the message says why."""


def next_tag(version: str, taken: Iterable[str]) -> str:
    """The first tag of a version, such as v2.2.0, that is free."""
    names = set(taken)
    every = chain([version], (f"{version}-build.{number}" for number in count(1)))
    return next(name for name in every if name not in names)


def tag(package: str, *, dry_run: bool) -> str:
    """Tag the commit at hand as a release of a package."""
    released = matrix.known("package", package, matrix.load().packages)
    name = next_tag(released.tags + released.version, git("tag").split())
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise TagError(f"these changes are not committed, so the tag would not hold them:\n{changed}")
    if there := [one for one in git("tag", "--points-at", "HEAD").split() if one.startswith(released.tags)]:
        raise TagError(f"this commit is released already, as {there[0]}")
    if not dry_run:
        git("tag", "-a", name, "-m", name)
    return name
