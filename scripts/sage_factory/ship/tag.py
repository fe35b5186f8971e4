"""The tag of a release: that of its version, or of another build of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, count

from packaging.version import Version

from sage_factory import FactoryError, task
from sage_factory.git import git, holding
from sage_factory.what import matrix
from sage_factory.what.table import Package, known


class TagError(FactoryError):
    """This commit cannot be tagged; the message says why."""


def next_tag(version: str, taken: Iterable[str]) -> str:
    """The first tag of a version, such as v2.2.0, that is free."""
    names = set(taken)
    every = chain([version], (f"{version}-build.{number}" for number in count(1)))
    return next(name for name in every if name not in names)


def number(name: str, package: Package) -> int:
    """Which build of the package's version a tag is, 0 for the first; TagError if it is a tag of something else."""
    version = package.tags + package.version
    mine = re.fullmatch(rf"{re.escape(version)}(?:-build\.([1-9]\d*))?", name)
    if mine is None:
        raise TagError(
            f"tag {name} is not one of {package.name} {package.version}, which variants.yaml states: "
            f"expected {version} or {version}-build.N. {task('tag')} makes the next"
        )
    return int(mine[1] or 0)


def check(name: str, commit: str = "") -> None:
    """TagError unless this tag, or this commit by that name, may be released: of its package's version in variants.yaml, newer than all
    others of the package, and on main.
    """
    package = matrix.tagged(name)
    mine = Version(package.version), number(name, package)
    form = re.compile(rf"{re.escape(package.tags)}(\d+(?:\.\d+)*)(?:-build\.(\d+))?")
    others = {(Version(m[1]), int(m[2] or 0)): m[0] for tag in git("tag").split() if tag != name and (m := form.fullmatch(tag))}
    if newer := max((other for other in others if other > mine), default=None):
        raise TagError(
            f"tag {name} is older than {others[newer]}: indexes and channels would go back. Raise the version; or, if "
            f"{others[newer]} was never released, delete that tag"
        )
    if not holding(commit or f"refs/tags/{name}", ["refs/heads/main", "refs/remotes/origin/main"]):
        raise TagError(f"tag {name} is not on main: merge what it names there first, and tag that")


def tag(package: str, *, dry_run: bool) -> str:
    """Tag the commit at hand as a release of a package."""
    released = known("package", package, matrix.load().packages)
    name = next_tag(released.tags + released.version, git("tag").split())
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise TagError(f"these changes are not committed, so the tag would not hold them:\n{changed}")
    if there := [one for one in git("tag", "--points-at", "HEAD").split() if one.startswith(released.tags)]:
        raise TagError(f"this commit is released already, as {there[0]}")
    check(name, "HEAD")
    if not dry_run:
        git("tag", "-a", name, "-m", name)
    return name
