"""The files of a release: of a folder laid out as dist/, those that a profile promises. All of them, each without fault."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sage_factory import FactoryError
from sage_factory.inspect import verify
from sage_factory.make import archives, wheels
from sage_factory.ship import earlier
from sage_factory.what import matrix
from sage_factory.what.build import Build, package_of_kernels


class CollectError(FactoryError):
    """The folder does not hold what was asked for; the message names every fault."""


@dataclass(frozen=True)
class Group:
    """One PyTorch × CUDA × platform: two conda packages and the wheels that are packed of them."""

    builds: tuple[Build, ...]
    kernels: Path
    operators: Path
    wheels: tuple[Path, ...]

    @cached_property
    def made(self) -> Mapping[str, Any]:
        """_build.json: version, torch, cuda, and the commit and compiler of the operators."""
        return inside(self.operators, f"{archives.SITE_PACKAGES}{self.builds[0].package}/_build.json")


@dataclass(frozen=True)
class Collection:
    """What is released together."""

    groups: tuple[Group, ...]
    others: tuple[Path, ...]  # files of the folder that the profile does not name
    earlier: frozenset[str] = frozenset()  # names of those that an earlier release has, byte for byte

    @property
    def builds(self) -> tuple[Build, ...]:
        return tuple(build for group in self.groups for build in group.builds)

    @property
    def packages(self) -> tuple[Path, ...]:
        """Conda packages, in an order in which none comes before what it depends on."""
        kernels = dict.fromkeys(group.kernels for group in self.groups)
        return (*kernels, *(group.operators for group in self.groups))

    @property
    def wheels(self) -> tuple[Path, ...]:
        return tuple(path for group in self.groups for path in group.wheels)

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.packages, *self.wheels)


def collect(folder: Path, profile: str, platform: str | None = None) -> Collection:
    """The profile's files in `folder`; CollectError if one is missing, faulty or does not fit the others."""
    wanted = matrix.groups(matrix.builds(profile, platform=platform))
    there = sorted([*folder.glob("wheels/*.whl"), *folder.glob("conda/*/*.conda")])
    if not there:
        raise CollectError(f"{folder} holds neither wheels nor conda packages: there is nothing to publish")
    groups, faults = [], []
    for builds in wanted:
        try:
            groups.append(_group(folder, builds))
        except CollectError as error:
            faults.append(str(error))
    if faults:
        count = sum(map(len, wanted))
        where = f" for {platform}" if platform else ""
        said = "\n".join(faults)
        raise CollectError(f"{folder} is not the whole of profile {profile}{where}, which has {count} builds:\n{said}")
    found = Collection(tuple(groups), (), earlier.listed(folder))
    found = replace(found, others=tuple(path for path in there if path not in found.files))
    faults = [*_verified(found), *kernels_once(found)]
    if faults:
        raise CollectError("faults were found, so nothing of this may be published:\n" + "\n".join(faults))
    return found


def _group(folder: Path, builds: tuple[Build, ...]) -> Group:
    first = builds[0]
    operators = sorted((folder / "conda" / first.platform).glob(f"{first.operators_stem}*_{first.number}.conda"))
    missing = [] if operators else [f"conda/{first.platform}/{first.operators_stem}…_{first.number}.conda"]
    missing += [f"wheels/{b.wheel_name}" for b in builds if not (folder / "wheels" / b.wheel_name).is_file()]
    if missing:
        raise CollectError("\n".join(f"  {name} is missing" for name in missing))
    if len(operators) > 1:
        names = ", ".join(path.name for path in operators)
        raise CollectError(
            f"  there are {len(operators)} builds of the same package: {names}. Remove all but one; if one was released already, give "
            "its row in variants.yaml a higher `build`"
        )
    return Group(builds, kernels_of(operators[0]), operators[0], tuple(folder / "wheels" / b.wheel_name for b in builds))


def kernels_of(operators: Path) -> Path:
    """The kernels' package that an operators' package of the same channel depends on."""
    needed = [need.split() for need in inside(operators, "info/index.json").get("depends", [])]
    names = ["-".join(need).replace("==", "") for need in needed if package_of_kernels(need[0]) and len(need) == 3]
    kernels = operators.parent.parent / "noarch" / f"{''.join(names)}.conda"
    if not kernels.is_file():
        raise CollectError(f"  conda/noarch/{kernels.name} is missing, which {operators.name} depends on")
    return kernels


def _verified(found: Collection) -> Iterator[str]:
    # What was released is as it is, whatever rules have come since.
    yield from verify.named(path for path in found.files if path.name not in found.earlier)
    with tempfile.TemporaryDirectory() as scratch:
        for group in found.groups:
            for build, path in zip(group.builds, group.wheels, strict=True):
                if path.name in found.earlier:
                    continue
                yield from _repacked(group, build, path, Path(scratch))


def _repacked(group: Group, build: Build, path: Path, scratch: Path) -> Iterator[str]:
    """Pip users get what conda users get: a wheel holds what packing it again from its conda packages gives."""
    try:
        again = wheels.emit(group.operators, group.kernels, build=build, out_dir=scratch)
        mine, theirs = archives.read_wheel(path).files, archives.read_wheel(again).files
    except (archives.ArtifactError, wheels.WheelError):
        return  # verify has said why
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield f"  {path.name} was not packed from {group.operators.name} and {group.kernels.name}: {name} differs"
            return


def kernels_once(found: Collection) -> Iterator[str]:
    """One kernel set a package and CUDA version, whichever platform it is for, in all that is new."""
    sets: dict[tuple[str, str], set[str]] = {}
    for group in (group for group in found.groups if group.operators.name not in found.earlier):
        sets.setdefault((group.builds[0].package, group.builds[0].cuda), set()).add(group.kernels.name)
    for (_, cuda), names in sets.items():
        if len(names) > 1:
            yield f"  the packages for CUDA {cuda} need {len(names)} kernel sets, expected one: {', '.join(sorted(names))}"


def inside(package: Path, name: str) -> Mapping[str, Any]:
    """A JSON file of a conda package."""
    try:
        conda = archives.read_conda(package)
        return dict(json.loads({**conda.payload, **conda.info}[name]))
    except (archives.ArtifactError, KeyError, ValueError) as error:
        raise CollectError(f"  {package.name} has no readable {name}: {error}") from error
