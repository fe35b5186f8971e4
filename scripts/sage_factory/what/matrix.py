"""The reader of variants.yaml, and what is asked of it: the builds of a profile, a platform or a version, and how they share work."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from sage_factory import ROOT
from sage_factory.what import check
from sage_factory.what.build import Build, release_order
from sage_factory.what.table import Architecture, Cuda, Matrix, MatrixError, Package, Platform, PyTorch, known

TABLE = ROOT / "variants.yaml"


@cache
def load(path: Path = TABLE) -> Matrix:
    """The table, checked: whatever it names exists, and every CUDA can compile its architectures."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MatrixError(f"cannot read {path.name}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise MatrixError(f"{path.name} is not valid YAML: {error}") from error
    check.kinds(raw, path.name)
    try:
        matrix = Matrix(
            packages={
                n: Package(n, **{**p, "sources": tuple(p["sources"]), "architectures": tuple(p.get("architectures", ()))})
                for n, p in raw["packages"].items()
            },
            platforms={n: Platform(n, **p) for n, p in raw["platforms"].items()},
            architectures={n: Architecture(n, **a) for n, a in raw["architectures"].items()},
            cuda={
                n: Cuda(n, tuple(c["architectures"]), tuple(c["ptx"]), c["pytorch"], c["gcc_below"], c["pypi"])
                for n, c in raw["cuda"].items()
            },
            gcc=raw["gcc"],
            development_cuda=raw["development_cuda"],
            build_python=raw["build_python"],
            pytorch={
                n: PyTorch(n, **{**p, "python": tuple(p["python"]), "conda_forge": tuple(p.get("conda_forge", ()))})
                for n, p in raw["pytorch"].items()
            },
            tools=tuple(raw["tools"]),
            kernels=raw["kernels"],
            rows=tuple(raw["rows"]),
            profiles={n: tuple(rules) for n, rules in raw["profiles"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise MatrixError(f"{path.name} lacks or misnames an entry: {error}") from error
    check.consistent(matrix)
    return matrix


def host_platform() -> str:
    """The conda name of the machine at hand."""
    here = f"{host.system()} {host.machine()}".lower()
    names = {platform.host: platform.name for platform in load().platforms.values()}
    if here not in names:
        raise MatrixError(f"no packages are made on a machine of the kind {here!r}: variants.yaml has {', '.join(names)}")
    return names[here]


def tagged(name: str) -> Package:
    """The package that a release's tag is of, as it begins; MatrixError if it is of none."""
    packages = load().packages.values()
    found = next((package for package in packages if re.match(rf"{re.escape(package.tags)}\d", name)), None)
    if found is None:
        expected = " or ".join(f"{package.tags}{package.version}" for package in packages)
        raise MatrixError(f"tag {name} is of no package of variants.yaml: expected one such as {expected}")
    return found


def builds(
    profile: str | None = None,
    *,
    package: str | None = None,
    platform: str | None = None,
    cuda: str | None = None,
    torch: str | None = None,
    python: str | Sequence[str] | None = None,
    matrix: Matrix | None = None,
) -> tuple[Build, ...]:
    """The builds that all the given conditions leave; an error, with the reason, if there are none."""
    matrix = matrix or load()
    if platform:
        known("platform", platform, matrix.platforms)
    if package:
        known("package", package, matrix.packages)
    said = _said(profile, package, platform, cuda)
    chosen = matrix.in_profile(profile, platform) if profile else matrix.all_builds
    if package:
        chosen = tuple(b for b in chosen if b.package == package)
    if platform:
        chosen = tuple(b for b in chosen if b.platform == platform)
    if cuda:
        known("CUDA version", cuda, matrix.cuda)
        there = sorted({b.cuda for b in chosen}, key=Version)
        chosen = tuple(b for b in chosen if b.cuda == cuda)
        if there and not chosen:
            raise MatrixError(f"nothing to build with {said}: there CUDA is {', '.join(there)}")
    if not chosen:
        raise MatrixError(f"nothing to build with {said}: `matrix` lists every build")
    if torch:
        known("PyTorch", torch, matrix.pytorch)
        there = sorted({b.torch for b in chosen}, key=release_order)
        chosen = tuple(b for b in chosen if b.torch == torch)
        if not chosen:
            raise MatrixError(f"no build of PyTorch {torch} with {said}: "
                              f"there PyTorch is {', '.join(there)}; to add one, add a row to variants.yaml")  # fmt: skip
    if python:
        wanted = [python] if isinstance(python, str) else list(python)
        there = sorted({b.python for b in chosen}, key=Version)
        for one in wanted:
            if one not in there:
                of = f"PyTorch {torch}" if torch else "any PyTorch chosen"
                what = f"there Python is {', '.join(there)}"
                if there and all(b.stable_abi for b in chosen):
                    what = f"one wheel serves every Python from {there[0]} on, so leave --python out"
                raise MatrixError(f"no build for Python {one} of {of} with {said}: {what}")
        chosen = tuple(b for b in chosen if b.python in wanted)
    return chosen


def _said(profile: str | None, package: str | None, platform: str | None, cuda: str | None) -> str:
    conditions = (("profile", profile), ("package", package), ("platform", platform), ("CUDA", cuda))
    said = [f"{what} {value}" for what, value in conditions if value]
    return ", ".join(said) or "these conditions"


def groups(chosen: Iterable[Build], *, kernels: bool = False) -> list[tuple[Build, ...]]:
    """Builds that share all that is compiled, together: the Pythons of a package, platform, PyTorch and CUDA; kernels: of a CUDA."""
    found: dict[tuple[str, ...], list[Build]] = {}
    for build in chosen:
        found.setdefault((build.package, build.platform, build.cuda, *(() if kernels else (build.torch,))), []).append(build)
    return [tuple(group) for group in found.values()]


def targets(architectures: Iterable[str]) -> tuple[str, ...]:
    """Architectures as nvcc spells them: 8.0 → sm_80, 9.0a → sm_90a."""
    return tuple(f"sm_{name.replace('.', '')}" for name in architectures)


def kernel_sets(chosen: Iterable[Build], matrix: Matrix | None = None) -> list[dict[str, Any]]:
    """The kernels these builds need, one object a package and CUDA version, as the CI job that compiles them takes it."""
    matrix = matrix or load()
    # The same kernels serve every platform: the first one compiles them.
    place = next(iter(matrix.platforms.values()))
    first = {(build.package, build.cuda): build for build in reversed(tuple(chosen))}
    return [
        {
            "package": build.package,
            "version": build.version,
            "platform": place.name,
            "runner": place.runner,
            "cuda": build.cuda,
            "architectures": list(build.architectures),
            "ptx": list(build.ptx),
        }
        for build in sorted(first.values(), key=lambda build: (build.package, Version(build.cuda)))
    ]
