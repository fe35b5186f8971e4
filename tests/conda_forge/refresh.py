"""Write model.yaml anew, of conda-forge itself: `python tests/conda_forge/refresh.py`, in an environment of pixi.toml's `test`.

Of what pixi.toml and the recipe name, and of what the model knows, it takes: where a series of versions or any is asked for
(`pytorch 2.8.*`, `pip *`) and of what is not asked for itself the newest version of each minor series, of the rest the newest version;
of each the last build of every kind; of what a package depends on, these names.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import yaml
from rattler import Gateway, MatchSpec, RepoDataRecord

from conda_forge import emitted, model
from conda_forge.manifest import Manifest
from sage_factory import ROOT
from sage_factory.what import matrix


def asked() -> set[str]:
    """Every requirement of pixi.toml's environments and of the recipe's packages, on any platform."""
    manifest = Manifest((ROOT / "pixi.toml").read_text(encoding="utf-8"))
    environments = [(name, platform) for name in manifest.environments for platform in manifest.platforms_of(name)]
    specs = {spec for name, platform in environments for spec in manifest.specs(name, platform)}
    for build in emitted.builds():
        for output in emitted.of(build).values():
            sections = (output["requirements"].get(name, []) for name in ("build", "host", "run"))
            specs |= {spec for section in sections for spec in section if isinstance(spec, str)}
    specs |= {f"python {python}.*" for torch in matrix.load().pytorch.values() for python in torch.python}
    return {spec for spec in specs if not spec.startswith("__")}


def name_of(spec: str) -> str:
    return re.split(r"[ <>=!~]", spec, maxsplit=1)[0]


def chosen(found: Iterable[RepoDataRecord], specs: set[str]) -> Iterable[RepoDataRecord]:
    """The records that the model takes."""
    wanted: dict[str, list[str]] = defaultdict(list)
    for spec in specs:
        wanted[name_of(spec)].append(spec)

    def fits(record: RepoDataRecord) -> bool:
        asked = wanted[record.name.normalized]
        return not asked or any(MatchSpec(spec).matches(record) for spec in asked)

    def series(record: RepoDataRecord) -> tuple[str, ...]:
        asked = wanted[record.name.normalized]
        every = not asked or any("*" in spec for spec in asked)
        return str(record.subdir), record.name.normalized, *(str(record.version).split(".")[:2] if every else ())

    def kind(record: RepoDataRecord) -> tuple[str, ...]:
        """What makes a build another one, and not a later one: `cuda129_mkl_py312_h0abcdef_302` → cuda129_mkl_py312."""
        return *series(record), *(part for part in str(record.build).split("_") if not re.fullmatch(r"h[0-9a-f]+|\d+", part))

    fitting = [record for record in found if fits(record)]
    newest: dict[tuple[str, ...], Any] = {}
    for record in fitting:
        newest[series(record)] = max(newest.get(series(record), record.version), record.version)
    last: dict[tuple[str, ...], RepoDataRecord] = {}
    for record in sorted(fitting, key=lambda record: record.build_number):
        if record.version == newest[series(record)]:
            last[kind(record)] = record
    return last.values()


def as_text(found: Iterable[RepoDataRecord], names: set[str], channel: str) -> str:
    """The model as a file, a record a line."""

    def known(specs: Iterable[str]) -> list[str]:
        return [spec for spec in specs if name_of(spec) in names or spec.startswith("__")]

    lines = [
        f"# Written by tests/conda_forge/refresh.py, which says what it takes, of {channel} on {datetime.now(UTC):%Y-%m-%d}."
    ]
    lines += [f"- from: {channel}", "  records:"]
    for record in sorted(found, key=lambda r: (r.name.normalized, str(r.subdir), r.version, str(r.build))):
        entry: dict[str, Any] = {"name": record.name.normalized, "version": str(record.version), "subdir": str(record.subdir)}
        entry |= {"build": str(record.build), "number": record.build_number}
        entry |= {"depends": known(record.depends), "constrains": known(record.constrains)}
        if not record.noarch.none:
            entry["noarch"] = "python" if record.noarch.python else "generic"
        if record.track_features:
            entry["track_features"] = " ".join(record.track_features)
        entry = {key: value for key, value in entry.items() if value not in ([], 0)}
        lines.append(f"    - {yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10**6).strip()}")
    return "\n".join(lines) + "\n"


async def refreshed(channel: str) -> str:
    """The new model's text."""
    specs = asked()
    names = {record["name"] for record in model.records()} | {name_of(spec) for spec in specs}
    platforms: list[Any] = list(model.SUBDIRS)
    answer = await Gateway().query([channel], platforms, sorted(names), recursive=False)
    return as_text(chosen([record for part in answer for record in part], specs), names, channel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel", default="conda-forge", help="another name or address of it")
    parser.add_argument("--output", type=Path, default=model.MODEL, help="default: model.yaml")
    args = parser.parse_args()
    text = asyncio.run(refreshed(args.channel))
    args.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
