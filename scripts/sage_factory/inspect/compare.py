"""Where two artifacts differ, entry by entry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_factory.make import archives


def differences(one: Path, other: Path) -> list[str]:
    """How two wheels or two conda packages differ, as sentences; none if not in a single byte."""
    if one.read_bytes() == other.read_bytes():
        return []
    mine, theirs = entries(one), entries(other)
    found = [f"{name} is not in {other}" for name in sorted(mine.keys() - theirs.keys())]
    found += [f"{name} is in {other} alone" for name in sorted(theirs.keys() - mine.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        found += [f"{name}: {said}" for said in _content(mine[name], theirs[name])]
    return found or [f"all {len(mine)} entries are the same, the archives are not: order, times, modes or compression differ"]


def entries(path: Path) -> dict[str, bytes]:
    """What an artifact holds, by path."""
    if path.suffix == ".whl":
        return archives.read_wheel(path).files
    conda = archives.read_conda(path)
    return {**conda.payload, **conda.info}


def _content(mine: bytes, theirs: bytes) -> Iterator[str]:
    if mine == theirs:
        return
    try:
        one, other = json.loads(mine), json.loads(theirs)
    except ValueError:
        pass
    else:
        if isinstance(one, dict) and isinstance(other, dict) and one != other:
            yield from _keys(one, other)
            return
    at = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), min(len(mine), len(theirs)))
    if b"\0" in mine[:4096]:
        yield f"{len(mine)} and {len(theirs)} bytes, the first that differs is {at}"
        return
    line = mine.count(b"\n", 0, at)
    shown = [(data.splitlines() + [b""] * (line + 1))[line].decode("utf-8", "replace")[:100] for data in (mine, theirs)]
    yield f"line {line + 1} is {shown[0]!r} and {shown[1]!r}"


def _keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"{key} is {json.dumps(one.get(key))[:100]} and {json.dumps(other.get(key))[:100]}"
