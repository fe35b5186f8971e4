"""Digests of what goes into a package: the same digest means the same package, so that it need not be built again."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from sage_factory import ROOT, FactoryError
from sage_factory.files import sha256
from sage_factory.git import GitError, git
from sage_factory.what import matrix

KERNELS = ("csrc/kernels", "LICENSE", "recipe/recipe.yaml", "recipe/build_cubins.sh")
OPERATORS = ("csrc", "LICENSE", "recipe/recipe.yaml", "recipe/build_operators.sh", "recipe/build_operators.bat",
             "recipe/test_cpu.py")  # fmt: skip
# The time of packages made outside a git checkout that name none in SOURCE_DATE_EPOCH.
EPOCH = 1_577_836_800
# What a zip archive can state.
TIMES = range(315_532_800, 4_354_819_200)
# What git says where there is nothing to be asked: anything else that it says is an error.
NO_HISTORY = ("not a git repository", "does not have any commits yet", "git does not run")


class InputError(FactoryError):
    """What goes into a package cannot be told; the message says why."""


def operators(package: str) -> tuple[str, ...]:
    """What goes into a package of operators."""
    return (*OPERATORS, *matrix.load().packages[package].sources)


def files(names: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The files under these paths, but for what running and compiling leave behind and, where there is a commit of them, what git
    ignores: it says nothing of that.
    """
    names = tuple(names)
    found: set[Path] = set()
    for name in names:
        path = root / name
        if not path.exists():
            raise FileNotFoundError(2, "an input of the build is missing", str(path))
        found.update([path] if path.is_file() else path.rglob("*"))
    if _commit(names, root):
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *names)
        found &= {root / name for name in listed.split("\0")}
    found = {p for p in found if p.is_file() and "__pycache__" not in p.parts and p.suffix not in {".pyc", ".so"}}
    # By name as text: Windows would sort paths without regard to case, and make another digest.
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def copy(names: Iterable[str], folder: Path, root: Path = ROOT) -> None:
    """Have these paths' files in `folder`, and nothing else."""
    if folder.exists():
        shutil.rmtree(folder)
    for path in files(names, root):
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def digest(names: Iterable[str], facts: Iterable[str], root: Path = ROOT) -> str:
    """Ten digits for the content of these paths and for facts that are in no file."""
    state = hashlib.sha256("\0".join(facts).encode())
    for path in files(names, root):
        state.update(f"\0{path.relative_to(root).as_posix()}\0{sha256(path.read_bytes())}".encode())
    return state.hexdigest()[:10]


def seconds(names: Iterable[str], root: Path = ROOT) -> int:
    """When these paths were last changed by a commit: a package's own time, whenever it is built."""
    if told := os.environ.get("SOURCE_DATE_EPOCH"):
        if not (told.isascii() and told.isdigit() and int(told) in TIMES):
            raise InputError(
                f"SOURCE_DATE_EPOCH is {told!r}: expected whole seconds since 1970, {TIMES.start} to {TIMES.stop - 1}, which are the "
                "years 1980 to 2107 that an archive can state"
            )
        return int(told)
    said = _git(root, "log", "-1", "--format=%ct", "--", *names)
    return int(said) if said else EPOCH


def commit(names: Iterable[str], root: Path = ROOT) -> str:
    """The commit that last changed these paths, which says what a package was made of; with a `+` if they differ from it now.

    Not the checkout's own: that would make other bytes of the same sources.
    """
    names = tuple(names)
    said = _commit(names, root)
    return said + "+" if said and _git(root, "status", "--porcelain", "--untracked-files=normal", "--", *names) else said


def _commit(names: Iterable[str], root: Path) -> str:
    return _git(root, "log", "-1", "--format=%H", "--", *names)


def _git(root: Path, *command: str) -> str:
    """What git says; nothing where this is no checkout, or git is not there."""
    try:
        return git(*command, root=root)
    except GitError as error:
        if any(said in str(error) for said in NO_HISTORY):
            return ""
        raise
