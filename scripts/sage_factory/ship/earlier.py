"""What earlier releases of a version hold: taken as it is, so that another build of the version makes only what they lack."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_factory import FactoryError, task
from sage_factory.files import put, sha256
from sage_factory.gh import gh
from sage_factory.make import archives
from sage_factory.ship import indexes
from sage_factory.what.build import Build, package_of_kernels
from sage_factory.what.table import Package

# In a folder like dist/: which of its files an earlier release has, byte for byte, as `sha256sum --check` takes it.
LIST = "earlier.sha256"


class EarlierError(FactoryError):
    """An earlier release cannot be built upon; the message says why."""


@dataclass(frozen=True)
class File:
    """A wheel or conda package of a release."""

    tag: str
    name: str
    sha256: str


def published(releases: Iterable[Mapping[str, Any]], package: Package, tag: str) -> dict[str, File]:
    """The files by name that public releases of the package's version have, but for the one of `tag`, which is being made.

    Of a withdrawn one these are the kernels alone: their name ends in the digest of what went in, so that the same sources would make
    another file of that name, and what is mended another name.
    """
    found: dict[str, File] = {}
    for release in releases:
        named = re.fullmatch(rf"{re.escape(package.tags + package.version)}(-build\.\d+)?", release["tag_name"])
        mine = named and release["tag_name"] != tag
        if not mine or release["draft"]:
            continue
        begin = f"{package.cubins}-" if indexes.withdrawn(release) is not None else ""
        for asset in release["assets"]:
            if asset["name"].startswith(begin) and asset["name"].endswith((".whl", ".conda")):
                digest = str(asset.get("digest") or "").removeprefix("sha256:")
                found.setdefault(asset["name"], File(release["tag_name"], asset["name"], digest))
    return found


def left(builds: Iterable[Build], there: Mapping[str, File]) -> tuple[Build, ...]:
    """The builds whose wheels no earlier release has; EarlierError if there is none."""
    new = tuple(build for build in builds if build.wheel_name not in there)
    if not new:
        raise EarlierError(
            "earlier releases of this version have every wheel of the profile: add a row to variants.yaml, or `build: 1` to the "
            "rows that shall be built again (2 where it is 1)"
        )
    return new


def refuse_withdrawn(releases: Iterable[Mapping[str, Any]], builds: Iterable[Build], tag: str) -> None:
    """EarlierError if a withdrawn release has a wheel or the operators of these builds: they are not taken, and names are kept."""
    gone = [one for one in releases if one["tag_name"] != tag and not one["draft"] and indexes.withdrawn(one) is not None]
    held = {asset["name"]: release["tag_name"] for release in gone for asset in release["assets"]}
    taken = {name: of for build in builds for name, of in held.items() if build.has(name)}
    if taken:
        name, of = next(iter(taken.items()))
        raise EarlierError(
            f"{name}{f' and {len(taken) - 1} more' if len(taken) > 1 else ''} cannot be released again: the withdrawn {of} has "
            "that name. Give its row in variants.yaml a higher `build`, raise the version, or offer that release again: "
            + task(f"withdraw --tag {of}")
        )


def wanted(there: Mapping[str, File], builds: Sequence[Build]) -> list[File]:
    """Of these files those that belong to these builds: wheels in both forms, operators, and kernels of their CUDA versions."""
    kernels = tuple({build.cubins_stem for build in builds})
    return [file for name, file in there.items() if name.startswith(kernels) or any(one.has(name) for one in builds)]


def differs(name: str, tag: str) -> str:
    """What is wrong where a file is not the released one of its name, and what to do."""
    if package_of_kernels(name):
        todo = "`earlier --packages` fetches that one, which `build` then takes; if it is what is wrong, raise the version"
    else:
        todo = "give its row in variants.yaml a higher `build`, or raise the version"
    return f"{name} was released as {tag} with other content, and what was published is never replaced: {todo}"


def fetch(files: Iterable[File], folder: Path, repository: str) -> list[Path]:
    """Put the conda packages into a channel, each in the folder of its platform, where a build finds what it need not make."""
    placed = []
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            if file.name.endswith(".conda"):
                path = _downloaded(file, Path(scratch), repository)
                target = folder / _subdir(path) / file.name
                put(target, path.read_bytes())
                placed.append(target)
    return placed


def complete(files: Iterable[File], dist: Path, repository: str) -> list[Path]:
    """Put what dist/ lacks of these files there, and write down which of its files are those of an earlier release."""
    here = {path.name: path for path in (*dist.rglob("*.whl"), *dist.rglob("*.conda"))}
    placed, lines = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            path = here.get(file.name)
            if path is None:
                new = _downloaded(file, Path(scratch), repository)
                path = dist / _folder(new) / file.name
                put(path, new.read_bytes())
                placed.append(path)
            elif sha256(path.read_bytes()) != file.sha256:
                raise EarlierError(differs(file.name, file.tag))
            lines.append(f"{file.sha256}  {path.relative_to(dist).as_posix()}\n")
    put(dist / LIST, "".join(sorted(lines)).encode())
    return placed


def listed(dist: Path) -> frozenset[str]:
    """The names of files in dist/ that an earlier release has, byte for byte."""
    path = dist / LIST
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [line.split("  ", 1) for line in lines]
    if changed := [name for digest, name in found if sha256((dist / name).read_bytes()) != digest]:
        raise EarlierError(
            f"{dist} holds files that are not the released ones: {', '.join(changed)}. Remove them and fetch them again"
        )
    return frozenset(Path(name).name for _, name in found)


def _folder(path: Path) -> Path:
    if path.suffix == ".conda":
        return Path("conda", _subdir(path))
    return Path("wheels" if path.name == indexes.build_of(path).wheel_name else "release/index")


def _subdir(package: Path) -> str:
    return str(json.loads(archives.read_conda(package).info["info/index.json"])["subdir"])


def _downloaded(file: File, scratch: Path, repository: str) -> Path:
    where = ["--repo", repository] if repository else []
    gh("release", "download", file.tag, "--pattern", file.name, "--dir", str(scratch), "--clobber", *where)
    path = scratch / file.name
    if sha256(path.read_bytes()) != file.sha256:
        raise EarlierError(f"{file.name} of release {file.tag} is not the file whose SHA-256 GitHub states, {file.sha256}")
    return path
