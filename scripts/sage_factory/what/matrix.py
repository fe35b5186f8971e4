"""The reader of variants.yaml: every build that there is, and those of a profile, a platform or a version."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml
from packaging.version import InvalidVersion, Version

from sage_factory import ROOT, FactoryError

TABLE = ROOT / "variants.yaml"
CUBINS = "-cubins"  # what the name of a package's kernels ends in

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
    def compiled_with(self) -> str:
        return self.release or self.version


@dataclass(frozen=True)
class Build:
    """One Python × PyTorch × CUDA × platform: one wheel; with its Python left out, one conda package.

    PyTorch `2.9+` is every one from 2.9 on, and `python` then the oldest.
    """

    package: str
    version: str
    platform: str
    cuda: str
    torch: str
    python: str
    architectures: tuple[str, ...]
    ptx: tuple[str, ...]
    wheel_platform: str
    local_version: bool = False
    number: int = 0  # how often what was released of it was repaired since
    index_platforms: tuple[str, ...] = ()

    @property
    def stable_abi(self) -> bool:
        """Whether the operators know no PyTorch in particular."""
        return self.torch.endswith("+")

    @property
    def torch_series(self) -> str:
        """The release series a binary is good for: 2.8.0 → 2.8; or the first: 2.9+ → 2.9."""
        return ".".join(self.torch.rstrip("+").split(".")[:2])

    @property
    def torch_tag(self) -> str:
        """PyTorch in the name of a conda package: 2.8.0 → 280, 2.9+ → 29on."""
        return self.torch.replace(".", "").replace("+", "on")

    @property
    def conda_torch(self) -> str:
        """What a conda package requires of PyTorch: 2.8.*, or of 2.9+ from the first on that conda-forge has for that major version of
        CUDA. An older one it has for another, and a solver would take its build without CUDA rather than other kernels.
        """
        return f">={self.conda_first.rpartition('.')[0]}" if self.stable_abi else f"{self.torch_series}.*"

    @property
    def conda_first(self) -> str:
        """The first PyTorch of the table that the conda package stands beside: 2.8.0; of 2.9+ with CUDA 13.0 2.10.0."""
        table, major = load().pytorch, self.cuda.split(".")[0]
        mine = table[self.torch].compiled_with
        later = [one for one in table.values() if not one.release and Version(one.version) >= Version(mine)]
        there = (one.version for one in sorted(later, key=lambda one: Version(one.version)) if major in one.conda_forge)
        return next(there, mine) if self.stable_abi else mine

    @property
    def conda_constrains(self) -> list[str]:
        """What a conda package is constrained by: where there is a driver, or a PyTorch with CUDA, it runs what the kernels are."""
        major = int(self.cuda.split(".")[0])
        return [f"__cuda >={major}", f"cuda-version >={self.cuda},<{major + 1}"]

    @property
    def requires_torch(self) -> str:
        """What a wheel requires."""
        return f"torch>={self.torch_series}" if self.stable_abi else f"torch=={self.torch_series}.*"

    @property
    def requires_python(self) -> str:
        """What a wheel requires: the same in all wheels of a PyTorch, since Poetry reads one of them for all. The tags say the rest."""
        return load().requires_python(self.torch_series, stable_abi=self.stable_abi)

    @property
    def wheel_version(self) -> str:
        """2.2.0, or with PyTorch and CUDA in it 1.0.0+cu128torch2.9.0; 1.0.0+cu128torch2.9.0.1 where that was repaired. 2.9+ is
        1.0.0+cu128torch2.9.abi, below the build for 2.9 alone.
        """
        torch = f"{self.torch_series}.abi" if self.stable_abi else self.torch
        local = f"+{cuda_tag(self.cuda)}torch{torch}{self._repaired}"
        return self.version + local if self.local_version else self.version

    @property
    def build_tag(self) -> str:
        """PyTorch 2.8.0 with CUDA 12.8 → 280.128, the wheel's build tag; 2.9+ → 29.128; 280.128.1 where that was repaired; empty
        where the version says all that.
        """
        tag = f"{self.torch.rstrip('+').replace('.', '')}.{self.cuda.replace('.', '')}{self._repaired}"
        return "" if self.local_version else tag

    @property
    def wheel_tag(self) -> str:
        """cp312-cp312-linux_x86_64; of operators for every PyTorch, which know no Python either, py3-none-linux_x86_64."""
        return f"{self._python_tag}-{self.wheel_platform}"

    @property
    def index_tags(self) -> tuple[str, ...]:
        """The same in pip's indexes: there on Linux also by the glibc that is promised."""
        return tuple(f"{self._python_tag}-{platform}" for platform in self.index_platforms)

    @property
    def _python_tag(self) -> str:
        python = "cp" + self.python.replace(".", "")
        return "py3-none" if self.stable_abi else f"{python}-{python}"

    @property
    def wheel_name(self) -> str:
        return "-".join(filter(None, [self.package, self.wheel_version, self.build_tag, self.wheel_tag])) + ".whl"

    @property
    def dist_info(self) -> str:
        """The folder of a wheel's metadata."""
        return f"{self.package}-{self.wheel_version}.dist-info"

    @property
    def cubins(self) -> str:
        """The kernels' conda package."""
        return f"{self.package}{CUBINS}"

    @property
    def index_version(self) -> str:
        """The version by which pip's indexes have this build, a local one (PEP 440): 2.2.0+torch2.8.cu128, which is below
        2.2.0+torch2.10.cu128; 2.9+ is 2.2.0+torch2.9.abi.cu128, below the builds for 2.9 alone. Build tags would not do: of equal
        versions pip keeps the one that is installed. A wheel whose own version is a local one is there as it is.
        """
        if self.local_version:
            return self.wheel_version
        abi = ".abi" if self.stable_abi else ""
        return f"{self.version}+torch{self.torch_series}{abi}.{cuda_tag(self.cuda)}{self._repaired}"

    @property
    def _repaired(self) -> str:
        return f".{self.number}" if self.number else ""

    @property
    def index_folder(self) -> str:
        """The index of its CUDA × PyTorch: cu128-torch28, cu128-torch29-or-later."""
        later = "-or-later" if self.stable_abi else ""
        return f"{cuda_tag(self.cuda)}-torch{self.torch_series.replace('.', '')}{later}"

    @property
    def index_major(self) -> str:
        """The index of its CUDA's major version, whose drivers run it: cu12."""
        return f"cu{self.cuda.split('.')[0]}"

    @property
    def index_name(self) -> str:
        """The wheel's file name there."""
        if self.local_version:
            return self.wheel_name
        return f"{self.package}-{self.index_version}-{self._python_tag}-{'.'.join(self.index_platforms)}.whl"

    @property
    def cubins_stem(self) -> str:
        """What the name of the kernels' conda package begins with, up to its digest."""
        return f"{self.cubins}-{self.version}-{cuda_tag(self.cuda)}_h"

    @property
    def operators_stem(self) -> str:
        """What the name of the operators' conda package begins with, up to its digest."""
        return f"{self.package}-{self.version}-torch{self.torch_tag}_{cuda_tag(self.cuda)}_h"

    def has(self, name: str) -> bool:
        """Whether a file of this name is its wheel, in either form, or its operators' conda package."""
        conda = name.startswith(self.operators_stem) and name.endswith(f"_{self.number}.conda")
        return conda or name in (self.wheel_name, self.index_name)


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
        """What a wheel for a PyTorch series, or for every one from it on, requires; empty where the table has none of it."""
        named = [p for p in self.pytorch.values() if p.version == f"{series}+" or p.version.startswith(f"{series}.")]
        return next((f">={p.python[0]}" for p in named if p.version.endswith("+") == stable_abi), "")

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
                              self.platforms[name].tags)
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


def tagged(name: str) -> Package:
    """The package that a release's tag is of, as it begins; MatrixError if it is of none."""
    packages = load().packages.values()
    found = next((package for package in packages if re.match(rf"{re.escape(package.tags)}\d", name)), None)
    if found is None:
        expected = " or ".join(f"{package.tags}{package.version}" for package in packages)
        raise MatrixError(f"tag {name} is of no package of variants.yaml: expected one such as {expected}")
    return found


def package_of_kernels(name: str) -> str:
    """The package whose kernels a conda package, or a file of one, by this name holds; empty where it holds none."""
    package, found, version = name.partition(CUBINS)
    return package if found and (not version or version.startswith("-")) else ""


def cuda_tag(cuda: str) -> str:
    """CUDA in the names of packages, versions and indexes: 12.8 → cu128."""
    return f"cu{cuda.replace('.', '')}"


def release_order(torch: str) -> Version:
    """What PyTorch's names are sorted by: 2.9+ comes after the last of 2.9."""
    return Version(torch.replace("+", ".999"))


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


def host_platform(matrix: Matrix | None = None) -> str:
    """The conda name of the machine at hand."""
    here = f"{host.system()} {host.machine()}".lower()
    names = {platform.host: platform.name for platform in (matrix or load()).platforms.values()}
    if here not in names:
        raise MatrixError(f"no packages are made on a machine of the kind {here!r}: variants.yaml has {', '.join(names)}")
    return names[here]


@cache
def load(path: Path = TABLE) -> Matrix:
    """The table, checked: whatever it names exists, and every CUDA can compile its architectures."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MatrixError(f"cannot read {path.name}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise MatrixError(f"{path.name} is not valid YAML: {error}") from error
    _check_kinds(raw, path.name)
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
    _check(matrix)
    return matrix


# What is no text.
KINDS = {"local_version": bool, "on_request": bool, "old_abi_on_pypi": bool, "build": int}


def _check_kinds(value: object, *place: str) -> None:
    """MatrixError where there is a number, or nothing, for a text: unquoted, 2.10 is the number 2.1."""
    kind = KINDS.get(place[-1], str)
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_kinds(key, *place, "a key")
            _check_kinds(inner, *place, key)
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            _check_kinds(inner, *place, f"entry {number}")
    elif type(value) is not kind:
        expected = {str: 'a text: quote it, as in "12.8"', bool: "true or false", int: "a number from 0"}[kind]
        raise MatrixError(f"{': '.join(place)} is " + ("empty" if value is None else f"{value!r}: expected {expected}"))


def _check(matrix: Matrix) -> None:
    pythons = {python: torch for torch in matrix.pytorch.values() for python in torch.python}
    majors = {cuda.split(".")[0]: cuda for cuda in matrix.cuda}
    for what, texts in (
        ("version of a package", [package.version for package in matrix.packages.values()]),
        ("CUDA version", [*matrix.cuda, *(architecture.cuda for architecture in matrix.architectures.values())]),
        ("PyTorch", [torch.removesuffix("+") for torch in matrix.pytorch]),
        ("Python", pythons),
    ):
        for text in texts:
            _check_version(what, text)
    known("CUDA version", matrix.development_cuda, matrix.cuda)
    for torch in matrix.pytorch.values():
        known(f"release of PyTorch {torch.version},", torch.compiled_with, matrix.pytorch)
        for major in torch.conda_forge:
            known(f"conda_forge of PyTorch {torch.version},", major, majors)
    for package in matrix.packages.values():
        known("profile", package.profile, matrix.profiles)
        for name in package.architectures:
            known("architecture", name, matrix.architectures)
    for cuda in matrix.cuda.values():
        known("PyTorch", cuda.pytorch, matrix.pytorch)
        for name in (*cuda.architectures, *cuda.ptx):
            check_architecture(matrix, cuda.version, name)
    keys = {"package", "cuda", "pytorch", "python", "platforms", "build"}
    for row in matrix.rows:
        if unknown := set(row) - keys:
            raise MatrixError(f"row {dict(row)} has unknown keys {sorted(unknown)}: known are {sorted(keys)}")
        cuda = known("CUDA version", row.get("cuda", "(none)"), matrix.cuda)
        package = matrix.package_of(row)
        if not matrix.compiled(package, cuda)[0]:
            raise MatrixError(f"CUDA {cuda.version} compiles {package.name} for none of {', '.join(package.architectures)}")
        released = known("PyTorch", row.get("pytorch", "(none)"), matrix.pytorch).python
        for python in row.get("python", ()):
            if python not in released:
                raise MatrixError(f"PyTorch {row['pytorch']} has no release for Python {python}: it has {', '.join(released)}")
        for name in row.get("platforms", ()):
            known("platform", name, matrix.platforms)
        if not 0 <= (number := row.get("build", 0)) < 100:
            raise MatrixError(f"row {dict(row)} has build {number!r}: expected a number from 0, as first released, to 99")
    names = [build.wheel_name for build in matrix.all_builds]
    if twice := {name for name in names if names.count(name) > 1}:
        raise MatrixError(f"two rows make {min(twice)}: remove one, or divide the Pythons and platforms between them")
    predicates: Mapping[str, Mapping[str, Any]] = {
        "in": matrix.profiles, "newest": {"python": None}, "on_request": {}, "package": matrix.packages,
        "pytorch": matrix.pytorch, "cuda": matrix.cuda, "python": pythons, "platform": matrix.platforms,
    }  # fmt: skip
    for name, rules in matrix.profiles.items():
        for rule in rules:
            if unknown := set(rule) - set(predicates):
                raise MatrixError(f"profile {name} has unknown predicates {sorted(unknown)}: known are {sorted(predicates)}")
            for key in sorted(set(rule) - {"on_request"}):
                several = isinstance(rule[key], list) and key not in ("in", "newest")
                for value in rule[key] if several else [rule[key]]:
                    known(f"{key} of profile {name},", str(value), predicates[key])
    for name in matrix.profiles:
        if not matrix.in_profile(name):
            raise MatrixError(f"profile {name} selects nothing: its predicates match no row")


def check_architecture(matrix: Matrix, cuda: str, name: str) -> None:
    """MatrixError where the compiler of a CUDA version does not know an architecture."""
    first = known("architecture", name, matrix.architectures).cuda
    if Version(cuda) < Version(first):
        raise MatrixError(f"CUDA {cuda} cannot compile architecture {name}: that takes CUDA {first} or newer")


def _check_version(what: str, text: str) -> None:
    try:
        Version(text)
    except InvalidVersion as error:
        raise MatrixError(f"{what} {text!r} is not a version") from error


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
        chosen = tuple(b for b in chosen if b.cuda == cuda)
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
    if not chosen:
        raise MatrixError(f"nothing to build with {said}: `matrix` lists every build")
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


def targets(architectures: Iterable[str], matrix: Matrix | None = None) -> tuple[str, ...]:
    """Architectures as nvcc spells them: 8.0 → sm_80, 9.0a → sm_90a."""
    matrix = matrix or load()
    return tuple(f"sm_{known('architecture', a, matrix.architectures).name.replace('.', '')}" for a in architectures)


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
