"""What variants.yaml says: its entries, and the builds that its rows and profiles mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from packaging.version import Version

from sage_factory import FactoryError
from sage_factory.what.build import CUBINS, Build, release_order, series_of

T = TypeVar("T")


class MatrixError(FactoryError):
    """A request that the table has no answer to, or a table that contradicts itself."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    project: str
    sources: tuple[str, ...]
    tags: str
    profile: str
    hub: str
    architectures: tuple[str, ...] = ()
    local_version: bool = False

    @property
    def cubins(self) -> str:
        """The conda package of its kernels."""
        return f"{self.name}{CUBINS}"


@dataclass(frozen=True)
class Architecture:
    name: str
    cuda: str


@dataclass(frozen=True)
class Platform:
    name: str
    host: str
    wheel: str
    cxx: str
    c: str
    runner: str
    glibc: str | None = None
    glibc_first: str | None = None
    on_request: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """What pip's indexes call it: on Linux also by the glibc that is promised and verified (PEP 600)."""
        if self.glibc is None:
            return (self.wheel,)
        return (self.wheel.replace("linux", f"manylinux_{self.glibc.replace('.', '_')}", 1), self.wheel)

    @property
    def windows(self) -> bool:
        return self.name.startswith("win-")

    @property
    def library(self) -> str:
        """The operators' file in a package."""
        return "_C.dll" if self.windows else "_C.so"


@dataclass(frozen=True)
class Cuda:
    version: str
    architectures: tuple[str, ...]
    ptx: tuple[str, ...]
    pytorch: str
    gcc_below: str
    pypi: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True)
class PyTorch:
    version: str
    python: tuple[str, ...]
    old_abi_on_pypi: bool = False
    conda_forge: tuple[str, ...] = ()
    release: str = ""  # compiled with, if not `version`

    @property
    def stable_abi(self) -> bool:
        """Whether this is every one from a release on."""
        return self.version.endswith("+")

    @property
    def compiled_with(self) -> str:
        return self.release or self.version


@dataclass(frozen=True)
class Matrix:
    packages: Mapping[str, Package]
    platforms: Mapping[str, Platform]
    architectures: Mapping[str, Architecture]
    cuda: Mapping[str, Cuda]
    gcc: str
    development_cuda: str
    build_python: str
    pytorch: Mapping[str, PyTorch]
    tools: tuple[str, ...]
    kernels: str
    rows: tuple[Mapping[str, Any], ...]
    profiles: Mapping[str, tuple[Mapping[str, Any], ...]]

    def default_torch(self, cuda: str, package: str) -> str:
        """What a bare `--cuda X` means: the PyTorch that `cuda` says, or the newest by itself where a package has no row of that one."""
        usual = known("CUDA version", cuda, self.cuda).pytorch
        there = {
            build.torch for build in self.all_builds if (build.cuda, build.package, build.stable_abi) == (cuda, package, False)
        }
        return usual if usual in there or not there else max(there, key=release_order)

    def requires_python(self, series: str, *, stable_abi: bool) -> str:
        """What a wheel for a PyTorch series, or for every one from it on, requires; empty where the table has none of it. All wheels of
        a PyTorch require the same, since Poetry reads one of them for all. The tags say the rest.
        """
        there = (p for p in self.pytorch.values() if (series_of(p.version), p.stable_abi) == (series, stable_abi))
        return next((f">={p.python[0]}" for p in there), "")

    def conda_first(self, pytorch: PyTorch, cuda: Cuda) -> str:
        """The first PyTorch that a conda package stands beside: 2.8.0; of 2.9+ with CUDA 13.0 2.10.0, the first that conda-forge has
        for that major version of CUDA. An older one it has for another, and a solver would take its build without CUDA rather than
        other kernels.
        """
        mine, major = pytorch.compiled_with, cuda.version.split(".")[0]
        if not pytorch.stable_abi:
            return mine
        later = [one for one in self.pytorch.values() if not one.release and Version(one.version) >= Version(mine)]
        there = (one.version for one in sorted(later, key=lambda one: Version(one.version)) if major in one.conda_forge)
        return next(there, mine)

    @cached_property
    def all_builds(self) -> tuple[Build, ...]:
        found = []
        for row in self.rows:
            package = self.package_of(row)
            cuda, pytorch = self.cuda[row["cuda"]], self.pytorch[row["pytorch"]]
            architectures, ptx = self.compiled(package, cuda)
            for name in row.get("platforms", self.platforms):
                for python in row.get("python", pytorch.python):
                    found.append(
                        Build(package.name, package.version, name, cuda.version, pytorch.version, python,
                              architectures, ptx, self.platforms[name].wheel, package.local_version, row.get("build", 0),
                              self.platforms[name].tags, self.conda_first(pytorch, cuda),
                              self.requires_python(series_of(pytorch.version), stable_abi=pytorch.stable_abi))
                    )  # fmt: skip
        return tuple(found)

    def named(self, name: str) -> Build | None:
        """The build whose wheel, in either form, has this file name."""
        return self._by_wheel.get(name)

    @cached_property
    def _by_wheel(self) -> Mapping[str, Build]:
        # Of one index name, as of two patches of a PyTorch, the first.
        return {name: build for build in reversed(self.all_builds) for name in (build.wheel_name, build.index_name)}

    def package_of(self, row: Mapping[str, Any]) -> Package:
        """The package that a row is of."""
        return known("package", row["package"], self.packages) if "package" in row else next(iter(self.packages.values()))

    def compiled(self, package: Package, cuda: Cuda) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The architectures that a CUDA version compiles a package's kernels for, and those that it keeps PTX of."""
        if not package.architectures:
            return cuda.architectures, cuda.ptx
        able = Version(cuda.version)
        return tuple(a for a in package.architectures if Version(self.architectures[a].cuda) <= able), ()

    def in_profile(self, name: str, platform: str | None = None, above: tuple[str, ...] = ()) -> tuple[Build, ...]:
        """A profile's builds: for that platform, or else for all platforms that are not on request. `above` are those that it is in."""
        if name in above:
            raise MatrixError(f"profile {name} is in itself: {' → '.join([*above[above.index(name) :], name])}")
        chosen: set[Build] = set()
        for rule in known("profile", name, self.profiles):
            source = self.in_profile(rule["in"], platform, (*above, name)) if "in" in rule else self.all_builds
            everywhere = rule.get("on_request", False)
            places = [platform] if platform else [p.name for p in self.platforms.values() if everywhere or not p.on_request]
            matching = [b for b in source if b.platform in places and _holds(rule, b)]
            chosen.update(_newest_python(matching) if rule.get("newest") == "python" else matching)
        return tuple(b for b in self.all_builds if b in chosen)


def known(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of that name, or an error that lists the names there are."""
    if name not in table:
        raise MatrixError(f"unknown {what} {name!r}: variants.yaml has {', '.join(table)}")
    return table[name]


def _holds(rule: Mapping[str, Any], build: Build) -> bool:
    for key, value in (("package", build.package), ("pytorch", build.torch), ("cuda", build.cuda),
                       ("python", build.python), ("platform", build.platform)):  # fmt: skip
        wanted = rule.get(key, value)
        if value not in ([wanted] if isinstance(wanted, str) else wanted):
            return False
    return True


def _newest_python(builds: Iterable[Build]) -> list[Build]:
    newest: dict[tuple[str, ...], Build] = {}
    for build in builds:
        key = (build.package, build.platform, build.torch, build.cuda)
        if key not in newest or Version(newest[key].python) < Version(build.python):
            newest[key] = build
    return list(newest.values())
