"""Make a .conda a function of its content: fixed times throughout, nothing of the machine that built it.

rattler-build writes the time of the build into every archive member and into info/index.json, and the channels it
solved from into info/about.json; SOURCE_DATE_EPOCH does not reach there. Two builds of one commit would differ.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import zstandard


def seal(package: Path, seconds: int) -> None:
    """Rewrite `package` in place, whole or not at all, with `seconds` since 1970 as its only time."""
    partial = package.with_name(f".{package.name}.partial")
    stamp = datetime.fromtimestamp(seconds, UTC).timetuple()[:6]
    try:
        with zipfile.ZipFile(package) as old, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as new:
            for name in sorted(old.namelist(), reverse=True):  # pkg, metadata, info: readers want the last one last
                content = old.read(name)
                if name.endswith(".tar.zst"):
                    content = _tarball(content, seconds)
                member = zipfile.ZipInfo(name, stamp)
                member.create_system = 3  # the mode is Unix's, on Windows too
                member.external_attr = 0o644 << 16
                new.writestr(member, content)
        partial.replace(package)
    finally:
        partial.unlink(missing_ok=True)


def _tarball(content: bytes, seconds: int) -> bytes:
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)).read()
    answer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(plain)) as old,
        tarfile.open(fileobj=answer, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda m: m.name):
            source = old.extractfile(member) if member.isfile() else None
            data = source.read() if source else b""
            if member.name == "info/index.json":
                data = _json(data, timestamp=seconds * 1000)
            elif member.name == "info/about.json":
                data = _json(data, channels=None)
            member.size, member.mtime, member.pax_headers = len(data), seconds, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            new.addfile(member, io.BytesIO(data))
    return zstandard.ZstdCompressor(level=19).compress(answer.getvalue())


def _json(data: bytes, **changes: object) -> bytes:
    """The document with these keys set, or left out where the value is None."""
    document = {k: v for k, v in {**json.loads(data), **changes}.items() if v is not None}
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="+", help=".conda files to rewrite in place")
    parser.add_argument("--seconds", type=int, required=True, help="the time to write, in seconds since 1970")
    args = parser.parse_args()
    try:
        for package in args.package:
            seal(package, args.seconds)
    except (OSError, zipfile.BadZipFile, tarfile.TarError, zstandard.ZstdError, ValueError) as error:
        print(f"error: cannot seal {package}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
