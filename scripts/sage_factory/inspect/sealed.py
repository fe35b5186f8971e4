"""Whether a conda package is as `seal` leaves it, and its metadata as recipe.yaml has rattler-build write them."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_factory.inspect import content
from sage_factory.make import archives, seal
from sage_factory.what import inputs

LICENSE = "Apache-2.0"
# More would tell a solver or an installer more than the recipe does: `track_features`, say, or commands to be made.
ABOUT = {"license", "summary"}
INDEX = {"arch", "build", "build_number", "constrains", "depends", "license", "name", "noarch", "platform", "subdir", "timestamp",
         "version"}  # fmt: skip
LINK = {"noarch": {"type": "python"}, "package_metadata_version": 1}
INFO = re.compile(r"info/((about|index|link|paths)\.json|licenses/LICENSE|tests/tests\.yaml)")


def faults(path: Path, info: Mapping[str, bytes], index: Mapping[str, Any], *, python: bool) -> Iterator[str]:
    """Of a package that can be read; `python` is whether it is one of operators."""
    about, wrong = content.read_json(info, "info/about.json")
    yield from wrong
    for name, said, known in (("index", index, INDEX), *([] if wrong else [("about", about, ABOUT)])):
        if said.get("license") != LICENSE:
            yield f"info/{name}.json says license {said.get('license')!r}, expected {LICENSE!r}"
        for key in sorted(said.keys() - known):
            yield f"info/{name}.json says {key} {str(said[key])[:60]}, expected no such key"
    if not info.get("info/licenses/LICENSE"):
        yield "info/licenses/LICENSE is missing or empty"
    if python:
        link, missing = content.read_json(info, "info/link.json")
        yield from missing
        if not missing and link != LINK:
            yield f"info/link.json says {link}, expected {LINK}"
    for name in sorted(info):
        if not INFO.fullmatch(name) or (name == "info/link.json" and not python):
            yield f"{name} is not of the metadata that a package of this project has"
    timestamp = index.get("timestamp")
    if type(timestamp) is not int or timestamp % 1000 or timestamp // 1000 not in inputs.TIMES:
        yield f"info/index.json says timestamp {timestamp!r}, expected that of a commit, in milliseconds since 1970"
    elif not wrong:
        yield from _archive_faults(path, timestamp // 1000)


def _archive_faults(path: Path, seconds: int) -> Iterator[str]:
    expected = seal.time(seconds)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.date_time != (*expected[:5], expected[5] // 2 * 2):  # a zip counts every other second
                yield f"{member.filename} is of another time than info/index.json says"
            if not member.filename.endswith(".tar.zst"):
                continue
            plain = archives.decompressed(archive.read(member))
            found = list(_member_faults(plain, seconds))
            yield from found
            if not found and seal.tarball(plain, seconds) != plain:
                yield f"{member.filename} is not as it was sealed: damaged, or packed by something else"


def _member_faults(plain: bytes, seconds: int) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        for member in archive:
            owner = member.uid, member.gid, member.uname, member.gname
            for said, good in (
                (f"of mode {member.mode:o}, expected 644 or 755", member.mode in (0o644, 0o755)),
                (f"of owner {':'.join(map(str, owner))}, expected 0:0 without names", owner == (0, 0, "", "")),
                (f"of {member.mtime} s since 1970, expected {seconds} as info/index.json says", member.mtime == seconds),
            ):
                if not good:
                    found.setdefault(said, []).append(member.name)
    for said, names in found.items():
        yield f"{names[0]} is {said}" + (f"; so are {len(names) - 1} more" if names[1:] else "")
