"""Make a .conda a function of its content: fixed times throughout, nothing of the machine that built it.

rattler-build writes the time of the build into every archive member and into info/index.json, and the channels it
solved from into info/about.json; SOURCE_DATE_EPOCH does not reach there. Two builds of one commit would differ.
All that the recipe was told is in info/hash_input.json, the Python of the build among it, which no binary depends on
and no name tells of. Nothing that installs reads that file.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import zstandard

from sage_factory.files import put
from sage_factory.make import archives


def seal(package: Path, seconds: int) -> None:
    """Rewrite `package` in place, whole or not at all, with `seconds` since 1970 as its only time."""
    with zipfile.ZipFile(package) as old:
        # pkg, metadata, info: readers want the last one last.
        members = [(name, old.read(name)) for name in sorted(old.namelist(), reverse=True)]
    sealed = ((name, 0o644, _packed(data, seconds) if name.endswith(".tar.zst") else data) for name, data in members)
    put(package, archives.zipped(sealed, time(seconds)))


def time(seconds: int) -> archives.Time:
    """Seconds since 1970 as a zip states them."""
    return datetime.fromtimestamp(seconds, UTC).timetuple()[:6]


def _packed(content: bytes, seconds: int) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(tarball(archives.decompressed(content), seconds))


def tarball(plain: bytes, seconds: int) -> bytes:
    """A tar archive as it is sealed; one that was sealed with these seconds stays as it is."""
    answer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(plain)) as old,
        tarfile.open(fileobj=answer, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda m: m.name):
            if member.name == "info/hash_input.json":
                continue
            source = old.extractfile(member) if member.isfile() else None
            data = source.read() if source else b""
            if member.name == "info/index.json":
                data = _json(data, timestamp=seconds * 1000)
            elif member.name == "info/about.json":
                data = _json(data, channels=None)
            member.size, member.mtime, member.pax_headers = len(data), seconds, {}
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            new.addfile(member, io.BytesIO(data))
    return answer.getvalue()


def _json(data: bytes, **changes: object) -> bytes:
    """The document with these keys set, or left out where the value is None."""
    document = {k: v for k, v in {**json.loads(data), **changes}.items() if v is not None}
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
