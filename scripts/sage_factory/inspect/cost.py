"""What kernels cost: machine code, by kernel and architecture. It grows as the seconds do that compiling takes, and is the same on
every machine, however busy.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from sage_factory.make import archives
from sage_factory.what.build import package_of_kernels


class Cost(NamedTuple):
    """Of a kernel for an architecture, or of several."""

    instances: int
    code: int  # bytes of instructions


def of_set(files: Mapping[str, bytes]) -> dict[str, dict[str, Cost]]:
    """By kernel (all its head_dims and dtypes) and by architecture, of a set's files: `sm_80/<kernel>-d<head_dim>-<dtype>.cubin`.

    What an architecture has of another one is compiled once and counts there.
    """
    found: dict[str, dict[str, Cost]] = {}
    compiled: set[tuple[str, bytes]] = set()
    for name in sorted(files):
        path = PurePosixPath(name)
        if path.suffix == ".cubin" and (path.name, files[name]) not in compiled:
            compiled.add((path.name, files[name]))
            by_architecture = found.setdefault(path.stem.partition("-d")[0], {})
            before = by_architecture.get(path.parent.name, Cost(0, 0))
            by_architecture[path.parent.name] = Cost(before.instances + 1, before.code + _code(files[name]))
    return found


def of_package(path: Path) -> dict[str, dict[str, Cost]]:
    """Of the kernels' conda package of a package."""
    payload, folder = archives.read_conda(path).payload, archives.cubins(package_of_kernels(path.name))
    return of_set({name.removeprefix(folder): data for name, data in payload.items()})


def total(*found: Mapping[str, Cost]) -> Cost:
    """Of kernels for an architecture, of architectures of a kernel, or of several such, together."""
    every = [cost for costs in found for cost in costs.values()]
    return Cost(sum(cost.instances for cost in every), sum(cost.code for cost in every))


def _code(cubin: bytes) -> int:
    try:
        sections = list(ELFFile(io.BytesIO(cubin)).iter_sections())
    except ELFError:  # `verify` says what is wrong with it
        return 0
    return sum(int(section["sh_size"]) for section in sections if section.name.startswith(".text."))
