"""The packages that a build of variants.yaml emits, as their channel's index has them: rendered from the recipe, not built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from conda_forge import model
from sage_factory.make import engine
from sage_factory.what import matrix, variant
from sage_factory.what.build import Build

DIGESTS = {"kernels_digest": ["0"], "operators_digest": ["1"], "sage_commit": ["c"]}


# What gcc 12 and glibc 2.28 of conda-forge add to what a package requires (their run_exports).
OF_COMPILERS = ["libgcc >=12", "libstdcxx >=12", "__glibc >=2.28,<3.0.a0"]


def of(build: Build) -> dict[str, dict[str, Any]]:
    """The recipe's two outputs for one PyTorch × CUDA × platform."""
    python = matrix.load().build_python
    rendered = engine.render(variant.of(build, python_pin=f"{python}.* *_cpython") | DIGESTS)
    return {name: one.recipe.to_dict() for name, one in rendered.items()}


def builds(package: str | None = None, profile: str | None = None) -> list[Build]:
    """One of each package and PyTorch × CUDA × platform: conda packages know no Python."""
    every = matrix.builds(profile, package=package)
    return list({(build.package, build.platform, build.torch, build.cuda): build for build in every}.values())


def released() -> list[Build]:
    """What the released channel has: of each package the profile that its releases are made of."""
    return [build for package in matrix.load().packages.values() for build in builds(package.name, package.profile)]


def records(wanted: Iterable[Build]) -> Iterator[model.Record]:
    """Every package of these builds."""
    kernels: dict[tuple[str, str], model.Record] = {}
    for build in wanted:
        outputs = of(build)
        cubins = _record(outputs[build.cubins], "noarch")
        kernels[build.package, build.cuda] = cubins | {"noarch": "generic"}
        exact = f"{build.cubins} =={cubins['version']} {cubins['build']}"
        needs = [exact] if matrix.load().platforms[build.platform].windows else [exact, *OF_COMPILERS]
        operators = _record(outputs[build.package], build.platform)
        yield operators | {"depends": [*operators["depends"], *needs], "noarch": "python"}
    yield from kernels.values()


def _record(recipe: dict[str, Any], subdir: str) -> model.Record:
    requirements = recipe["requirements"]
    return {
        **recipe["package"],
        "subdir": subdir,
        "build": recipe["build"]["string"],
        "build_number": recipe["build"]["number"],
        "depends": [spec for spec in requirements.get("run", []) if isinstance(spec, str)],
        "constrains": requirements.get("run_constraints", []),
    }
