"""What variants.yaml is held to: whatever it names exists, and every CUDA can compile its architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from sage_factory.what.table import Matrix, MatrixError, known

# What is no text.
KINDS = {"local_version": bool, "on_request": bool, "old_abi_on_pypi": bool, "build": int}


def kinds(value: object, *place: str) -> None:
    """MatrixError where there is a number, or nothing, for a text: unquoted, 2.10 is the number 2.1."""
    kind = KINDS.get(place[-1], str)
    if isinstance(value, dict):
        for key, inner in value.items():
            kinds(key, *place, "a key")
            kinds(inner, *place, key)
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            kinds(inner, *place, f"entry {number}")
    elif type(value) is not kind:
        expected = {str: 'a text: quote it, as in "12.8"', bool: "true or false", int: "a number from 0"}[kind]
        raise MatrixError(f"{': '.join(place)} is " + ("empty" if value is None else f"{value!r}: expected {expected}"))


def consistent(matrix: Matrix) -> None:
    """MatrixError where one entry contradicts another."""
    pythons = {python: torch for torch in matrix.pytorch.values() for python in torch.python}
    majors = {cuda.split(".")[0]: cuda for cuda in matrix.cuda}
    for what, texts in (
        ("version of a package", [package.version for package in matrix.packages.values()]),
        ("CUDA version", [*matrix.cuda, *(architecture.cuda for architecture in matrix.architectures.values())]),
        ("PyTorch", [torch.removesuffix("+") for torch in matrix.pytorch]),
        ("Python", pythons),
    ):
        for text in texts:
            _check_version(what, text)
    known("CUDA version", matrix.development_cuda, matrix.cuda)
    for torch in matrix.pytorch.values():
        if torch.stable_abi and not torch.release:
            raise MatrixError(f"PyTorch {torch.version} has no `release`: name the one that it is compiled with")
        known(f"release of PyTorch {torch.version},", torch.compiled_with, matrix.pytorch)
        for major in torch.conda_forge:
            known(f"conda_forge of PyTorch {torch.version},", major, majors)
    for package in matrix.packages.values():
        known("profile", package.profile, matrix.profiles)
        for name in package.architectures:
            known("architecture", name, matrix.architectures)
    for cuda in matrix.cuda.values():
        known("PyTorch", cuda.pytorch, matrix.pytorch)
        for name in (*cuda.architectures, *cuda.ptx):
            architecture(matrix, cuda.version, name)
    keys = {"package", "cuda", "pytorch", "python", "platforms", "build"}
    for row in matrix.rows:
        if unknown := set(row) - keys:
            raise MatrixError(f"row {dict(row)} has unknown keys {sorted(unknown)}: known are {sorted(keys)}")
        cuda = known("CUDA version", row.get("cuda", "(none)"), matrix.cuda)
        package = matrix.package_of(row)
        if not matrix.compiled(package, cuda)[0]:
            raise MatrixError(f"CUDA {cuda.version} compiles {package.name} for none of {', '.join(package.architectures)}")
        released = known("PyTorch", row.get("pytorch", "(none)"), matrix.pytorch).python
        for python in row.get("python", ()):
            if python not in released:
                raise MatrixError(f"PyTorch {row['pytorch']} has no release for Python {python}: it has {', '.join(released)}")
        for name in row.get("platforms", ()):
            known("platform", name, matrix.platforms)
        if not 0 <= (number := row.get("build", 0)) < 100:
            raise MatrixError(f"row {dict(row)} has build {number!r}: expected a number from 0, as first released, to 99")
    names = [build.wheel_name for build in matrix.all_builds]
    if twice := {name for name in names if names.count(name) > 1}:
        raise MatrixError(f"two rows make {min(twice)}: remove one, or divide the Pythons and platforms between them")
    predicates: Mapping[str, Mapping[str, Any]] = {
        "in": matrix.profiles, "newest": {"python": None}, "on_request": {}, "package": matrix.packages,
        "pytorch": matrix.pytorch, "cuda": matrix.cuda, "python": pythons, "platform": matrix.platforms,
    }  # fmt: skip
    for name, rules in matrix.profiles.items():
        for rule in rules:
            if unknown := set(rule) - set(predicates):
                raise MatrixError(f"profile {name} has unknown predicates {sorted(unknown)}: known are {sorted(predicates)}")
            for key in sorted(set(rule) - {"on_request"}):
                several = isinstance(rule[key], list) and key not in ("in", "newest")
                for value in rule[key] if several else [rule[key]]:
                    known(f"{key} of profile {name},", str(value), predicates[key])
    for name in matrix.profiles:
        if not matrix.in_profile(name):
            raise MatrixError(f"profile {name} selects nothing: its predicates match no row")


def architecture(matrix: Matrix, cuda: str, name: str) -> None:
    """MatrixError where the compiler of a CUDA version does not know an architecture."""
    first = known("architecture", name, matrix.architectures).cuda
    if Version(cuda) < Version(first):
        raise MatrixError(f"CUDA {cuda} cannot compile architecture {name}: that takes CUDA {first} or newer")


def _check_version(what: str, text: str) -> None:
    try:
        Version(text)
    except InvalidVersion as error:
        raise MatrixError(f"{what} {text!r} is not a version") from error
