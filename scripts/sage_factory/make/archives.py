"""Conda packages and wheels as archives: how they are written, and read again with an eye for whatever is not as it was written."""

from __future__ import annotations

import io
import json
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import zstandard

from sage_factory import FactoryError

SITE_PACKAGES = "site-packages/"  # where a version-independent conda package keeps its Python files

Time = tuple[int, int, int, int, int, int]  # year to second, as a zip states it


class ArtifactError(FactoryError):
    """A file is not the archive it should be; the message says in what way."""


def cubins(package: str) -> str:
    """Where the conda package of a package's kernels keeps them."""
    return f"share/{package}/cubins/"


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


def zipped(entries: Iterable[tuple[str, int, bytes]], time: Time, level: int | None = None) -> bytes:
    """A zip of entries (name, mode, content) with one time, deflated to `level` or stored: of equal entries equal bytes."""
    answer = io.BytesIO()
    with zipfile.ZipFile(answer, "w", zipfile.ZIP_STORED if level is None else zipfile.ZIP_DEFLATED) as archive:
        for name, mode, content in entries:
            member = zipfile.ZipInfo(name, time)
            member.create_system = 3  # the modes are Unix's, on Windows too
            member.external_attr = mode << 16
            archive.writestr(member, content, archive.compression, level)
    return answer.getvalue()


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
        faults = list(_zip_faults(path, archive))
        if sorted(names) != sorted((f"pkg-{stem}.tar.zst", "metadata.json", f"info-{stem}.tar.zst")):
            faults.append(f"the archive holds {', '.join(names)}: expected pkg-…, info-… and metadata.json, each once")
        elif _json(_member(path, archive, "metadata.json")) != {"conda_pkg_format_version": 2}:
            faults.append("metadata.json does not say conda_pkg_format_version 2: clients would not know how to read the rest")
        payload = _untar(path, _member(path, archive, f"pkg-{stem}.tar.zst"), faults)
        info = _untar(path, _member(path, archive, f"info-{stem}.tar.zst"), faults)
    return Conda(payload, info, faults)


def read_wheel(path: Path) -> Wheel:
    """The content of a wheel; ArtifactError if it cannot be read whole."""
    files: dict[str, bytes] = {}
    seen: set[str] = set()
    with _opened(path) as archive:
        faults = list(_zip_faults(path, archive))
        for member in archive.infolist():
            faults += _twice(member.filename, seen)
            if unsafe(member.filename):
                faults.append(f"{member.filename!r} would be unpacked outside the package: paths must be relative and plain")
            if stat.S_ISLNK(member.external_attr >> 16):
                faults.append(f"{member.filename} is a symbolic link, which a wheel cannot carry")
            if not member.is_dir():
                files[member.filename] = _member(path, archive, member.filename)
    return Wheel(files, faults)


def holds(path: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a whole wheel of this content is there. Its bytes may be others: those of the zlib of the Python that packed it."""
    try:
        found = read_wheel(path)
    except ArtifactError:
        return False
    return found.files == files and not found.faults


def unsafe(name: str) -> bool:
    """Whether a path of an archive leads elsewhere than below the place it is unpacked to."""
    return name.startswith("/") or "\\" in name or ":" in name or ".." in PurePosixPath(name).parts or not name


def _zip_faults(path: Path, archive: zipfile.ZipFile) -> Iterator[str]:
    """Whether the archive is just what zipfile writes, entry after entry, the directory behind them, and nothing else.

    Some installers go by the header before each entry and others by the directory: both must see what is checked here.
    """
    data, end, directory = path.read_bytes(), 0, b""
    for member in archive.infolist():
        header = member.FileHeader()
        # Format 2.0 and no flags; what follows is of this entry, and equal in both places.
        if end != member.header_offset or data[end : end + len(header)] != header or header[4:8] != b"\x14\0\0\0":
            yield f"the entry {member.filename} in {path.name} is not as it was written: damaged, or packed by something else"
            return
        mode = member.external_attr >> 16
        if mode not in {0o644, 0o755, stat.S_IFREG | 0o644, stat.S_IFREG | 0o755}:
            yield f"{member.filename} has the mode {mode:o}, expected 100644 or 100755"
        directory += b"PK\1\2\x14\3" + header[4:30] + struct.pack("<3H2L", 0, 0, 0, mode << 16, end) + header[30:]
        end += len(header) + member.compress_size
    count = len(archive.infolist())
    if data[end:] != directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), end, 0):
        yield f"{path.name} does not end as it was written: damaged, or something was added to it"


def _twice(name: str, seen: set[str]) -> Iterator[str]:
    # Windows and macOS do not tell A from a.
    if name.casefold() in seen:
        yield f"{name} is in the archive twice: which of them is installed is chance"
    seen.add(name.casefold())


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist") from error
    except Exception as error:
        raise ArtifactError(f"{path.name} is not a whole zip archive ({error}): truncated or damaged") from error


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except Exception as error:
        raise ArtifactError(f"{name} in {path.name} cannot be read ({error}): truncated or damaged") from error


def decompressed(data: bytes) -> bytes:
    """The tar archive in a .tar.zst."""
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()


def _untar(path: Path, data: bytes, faults: list[str]) -> dict[str, bytes]:
    try:
        with tarfile.open(fileobj=io.BytesIO(decompressed(data))) as archive:
            return dict(_files(archive, faults))
    except Exception as error:
        raise ArtifactError(f"{path.name} cannot be unpacked ({error}): truncated or damaged") from error


def _files(archive: tarfile.TarFile, faults: list[str]) -> Iterator[tuple[str, bytes]]:
    seen: set[str] = set()
    for member in archive:
        faults += _twice(member.name, seen)
        if unsafe(member.name):
            faults.append(f"{member.name!r} would be unpacked outside the package: paths must be relative and plain")
        if not (member.isfile() or member.isdir()):
            faults.append(f"{member.name} is a link or a special file: a package of this project holds plain files only")
        if member.isfile():
            source = archive.extractfile(member)
            assert source is not None
            yield member.name, source.read()
