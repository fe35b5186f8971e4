"""What a run made, as Markdown: versions, sizes, hashes, and the times of each build, which builds report here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sage_factory import FactoryError
from sage_factory.files import put, sha256
from sage_factory.inspect import cost
from sage_factory.what import matrix
from sage_factory.what.build import package_of_kernels
from sage_factory.what.offers import table


def report(dist: Path, name: str, steps: Mapping[str, tuple[float, float]]) -> None:
    """What each step of a build took: seconds that passed, and of processors."""
    put(dist / "reports" / f"{name}.json", json.dumps({"steps": steps}, indent=1).encode())


def described(path: Path) -> list[str]:
    """Version, PyTorch, CUDA, Python and platform of a file, as its name says."""
    if build := matrix.load().named(path.name):
        return [build.version, build.torch, build.cuda, build.python, build.platform]
    for build in matrix.load().all_builds:
        if path.name.startswith(build.operators_stem) and path.parent.name == build.platform:
            return [build.version, build.torch, build.cuda, "any", build.platform]
        if path.name.startswith(build.cubins_stem):
            return [build.version, "any", build.cuda, "any", "any"]
    return ["not of variants.yaml", *[""] * 4]


def summary(dist: Path) -> list[str]:
    """The lines of the summary."""
    files = sorted([*dist.glob("conda/*/*.conda"), *dist.glob("wheels/*.whl")], key=lambda p: (p.suffix, p.name))
    if not files:
        raise FactoryError(f"{dist} holds no conda package and no wheel: `build` makes them")
    titles = ["file", "version", "PyTorch", "CUDA", "Python", "platform", "MB", "sha256"]
    rows = [
        [path.name, *described(path), f"{path.stat().st_size / 1e6:.2f}", f"`{sha256(path.read_bytes())}`"] for path in files
    ]
    lines = [f"### {len(rows)} files", "", *table(titles, rows)]
    for path in (path for path in files if package_of_kernels(path.name)):
        lines += ["", f"### {path.name}: kB of machine code (instances)", "", *costs(cost.of_package(path))]
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(dist.glob("reports/*.json"))}
    steps = list(dict.fromkeys(step for report in reports.values() for step in report["steps"]))
    if reports:
        times = [
            [
                name,
                *(f"{report['steps'][s][0]:.1f} ({report['steps'][s][1]:.1f})" if s in report["steps"] else "" for s in steps),
            ]
            for name, report in reports.items()
        ]
        lines += ["", "### Seconds that passed (and of processors)", "", *table(["build", *steps], times)]
    return lines


def costs(found: Mapping[str, Mapping[str, cost.Cost]]) -> list[str]:
    """What the kernels of a set cost, as a table."""
    folders = sorted({folder for by_folder in found.values() for folder in by_folder}, key=lambda name: (len(name), name))
    rows = [
        [kernel, *(shown(by_folder[f]) if f in by_folder else "" for f in folders), shown(cost.total(by_folder))]
        for kernel, by_folder in sorted(found.items())
    ]
    sums = [cost.total({k: v[folder] for k, v in found.items() if folder in v}) for folder in folders]
    return table(["kernel", *folders, "all"], [*rows, ["all", *map(shown, [*sums, cost.total(*found.values())])]])


def shown(one: cost.Cost) -> str:
    """kB, and of how many instances."""
    return f"{one.code / 1e3:.0f} ({one.instances})"
