"""Read conda packages and wheels into memory: what `wheel.py` packs and `verify.py` checks."""

from __future__ import annotations

import hashlib
import io
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import zstandard

SITE_PACKAGES = "site-packages/"  # where a version-independent conda package keeps its Python files
CUBINS = "share/sageattention/cubins/"  # where the kernels' conda package keeps them
PACKAGE = "sageattention/"


class ArtifactError(Exception):
    """A file is not the archive it should be; the message says in what way."""


@dataclass(frozen=True)
class Conda:
    """The content of a .conda file: installed files and metadata, by path."""

    payload: dict[str, bytes]
    info: dict[str, bytes]
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wheel:
    """The content of a wheel, by path, and what is wrong with its zip directory."""

    files: dict[str, bytes]
    faults: list[str] = field(default_factory=list)


def read_conda(path: Path) -> Conda:
    """The content of a .conda file; ArtifactError if it cannot be read whole."""
    with _opened(path) as archive:
        stem = path.name.removesuffix(".conda")
        names = archive.namelist()
        for kind in ("pkg", "info"):
            # The name inside must be that of the file: conda clients look for it.
            if f"{kind}-{stem}.tar.zst" not in names:
                there = ", ".join(names)
                raise ArtifactError(f"{path.name} holds no {kind}-{stem}.tar.zst, only {there}: was the file renamed?")
        faults: list[str] = []
        payload = _untar(path, _member(path, archive, f"pkg-{stem}.tar.zst"), faults)
        info = _untar(path, _member(path, archive, f"info-{stem}.tar.zst"), faults)
    return Conda(payload, info, faults)


def read_wheel(path: Path) -> Wheel:
    """The content of a wheel; ArtifactError if it cannot be read whole."""
    files: dict[str, bytes] = {}
    faults: list[str] = []
    with _opened(path) as archive:
        for member in archive.infolist():
            if member.filename in files:
                faults.append(f"{member.filename} is in the archive twice: which of them is installed is chance")
            if unsafe(member.filename):
                faults.append(f"{member.filename!r} would be unpacked outside the package: paths must be relative and plain")
            if stat.S_ISLNK(member.external_attr >> 16):
                faults.append(f"{member.filename} is a symbolic link, which a wheel cannot carry")
            if not member.is_dir():
                files[member.filename] = _member(path, archive, member.filename)
    return Wheel(files, faults)


def unsafe(name: str) -> bool:
    """Whether a path of an archive leads elsewhere than below the place it is unpacked to."""
    return name.startswith("/") or "\\" in name or ":" in name or ".." in PurePosixPath(name).parts or not name


def sha256(data: bytes) -> str:
    """The hexadecimal digest that manifests state."""
    return hashlib.sha256(data).hexdigest()


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path.name} is not a whole zip archive ({error}): truncated or damaged") from error


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except Exception as error:
        raise ArtifactError(f"{name} in {path.name} cannot be read ({error}): truncated or damaged") from error


def _untar(path: Path, data: bytes, faults: list[str]) -> dict[str, bytes]:
    try:
        plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
        with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
            return dict(_files(archive, faults))
    except (zstandard.ZstdError, tarfile.TarError) as error:
        raise ArtifactError(f"{path.name} cannot be unpacked ({error}): truncated or damaged") from error


def _files(archive: tarfile.TarFile, faults: list[str]) -> Iterator[tuple[str, bytes]]:
    seen: set[str] = set()
    for member in archive:
        if member.name in seen:
            faults.append(f"{member.name} is in the archive twice: which of them is installed is chance")
        seen.add(member.name)
        if unsafe(member.name):
            faults.append(f"{member.name!r} would be unpacked outside the package: paths must be relative and plain")
        if not (member.isfile() or member.isdir()):
            faults.append(f"{member.name} is a link or a special file: a package of this project holds plain files only")
        if member.isfile():
            source = archive.extractfile(member)
            assert source is not None
            yield member.name, source.read()
