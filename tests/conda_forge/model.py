"""The model of conda-forge (model.yaml) as a channel, and what conda's solver makes of it for any machine.

Where conda-forge itself is reached, the tests take it in the model's place: `CONDA_FORGE=https://… python -m pytest
tests/conda_forge`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import rattler
import yaml
from rattler import Gateway, GenericVirtualPackage, PackageName, Version, solve

MODEL = Path(__file__).with_name("model.yaml")
REAL = os.environ.get("CONDA_FORGE")
SUBDIRS = ("noarch", "linux-64", "linux-aarch64", "win-64")
Record = dict[str, Any]


def records(path: Path = MODEL) -> Iterator[Record]:
    """Every package of the model, as repodata has it."""
    for group in yaml.safe_load(path.read_text(encoding="utf-8")):
        for values in _products(group.get("for", {})):
            for record in group["records"]:
                yield _filled(record, values)


def _products(wanted: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, str]]:
    for choice in itertools.product(*wanted.values()):
        values: dict[str, str] = {}
        for key, value in zip(wanted, choice, strict=True):
            values |= value if isinstance(value, dict) else {key: value}
        yield {name: str(value) for name, value in values.items()} | {
            f"{n}_": str(v).replace(".", "") for n, v in values.items()
        }


def _filled(record: Mapping[str, Any], values: Mapping[str, str]) -> Record:
    def fill(value: Any) -> Any:
        return [fill(one) for one in value] if isinstance(value, list) else str(value).format_map(values)

    filled: Record = {"subdir": values.get("subdir"), "build": "0", "number": "0", "depends": [], "constrains": []}
    filled |= {key: fill(value) for key, value in record.items()}
    return filled | {"build_number": int(filled.pop("number"))}


def lay(folder: Path, wanted: Iterator[Record] | Sequence[Record]) -> Path:
    """A channel of these records. It has no packages to them: enough for whoever solves and downloads nothing."""
    subdirs: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in wanted:
        file = f"{record['name']}-{record['version']}-{record['build']}.conda"
        assert file not in subdirs[record["subdir"]], f"{record['subdir']} has {file} twice"
        digest = hashlib.sha256(file.encode()).hexdigest()
        subdirs[record["subdir"]][file] = {"sha256": digest, "md5": digest[:32], "size": 1, "timestamp": 1, **record}
    for subdir in SUBDIRS:
        content = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": subdirs[subdir], "repodata_version": 1}
        (folder / subdir).mkdir(parents=True, exist_ok=True)
        (folder / subdir / "repodata.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def machine(platform: str, cuda: str | None = None) -> dict[str, str]:
    """The virtual packages that pixi takes for granted on a platform (crates/pixi_default_versions), and a driver."""
    common = {"__win": "10.0"} if platform.startswith("win-") else {"__unix": "0", "__linux": "4.18", "__glibc": "2.28"}
    return common | ({"__cuda": cuda} if cuda else {})


def virtual(packages: Mapping[str, str]) -> list[GenericVirtualPackage]:
    """As the solver takes them. Before py-rattler 0.28 a build string was a string."""
    build: Any = getattr(rattler, "BuildString", str)("0")
    return [GenericVirtualPackage(PackageName(name), Version(version), build) for name, version in packages.items()]


@cache
def _gateway() -> Gateway:
    return Gateway()


def solved(channels: Sequence[str], specs: Sequence[str], platform: str, machine: Mapping[str, str]) -> dict[str, str]:
    """What a client would install on such a machine: version and build, by name. Raises rattler's SolverError."""
    platforms: list[Any] = [platform, "noarch"]
    found = asyncio.run(solve(channels, list(specs), _gateway(), platforms=platforms, virtual_packages=virtual(machine)))
    return {record.name.normalized: f"{record.version} {record.build}" for record in found}
