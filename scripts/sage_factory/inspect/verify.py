"""What is wrong with a wheel or conda package: name against metadata against content, hashes, paths, what must be in it."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sage_factory.files import sha256
from sage_factory.inspect import content, sealed
from sage_factory.make import archives, sbom
from sage_factory.what import matrix, variant
from sage_factory.what.build import Build, cuda_tag, package_of_kernels
from sage_factory.what.table import Package


def verify_wheel(path: Path) -> list[str]:
    """Every fault of a wheel, as sentences; none if it may be published."""
    try:
        wheel = archives.read_wheel(path)
    except archives.ArtifactError as error:
        return [str(error)]
    build, faults = _wheel_build(path)
    faults += wheel.faults
    if build is None:
        return faults
    tagged = path.name == build.wheel_name
    version = build.wheel_version if tagged else build.index_version
    info, inside = f"{build.package}-{version}.dist-info", f"{build.package}/"
    faults += [
        f"{name} lies outside {inside} and {info}/: it would be installed beside other packages' files"
        for name in sorted(wheel.files)
        if not name.startswith((inside, f"{info}/")) and ".dist-info/" not in name
    ]
    faults += _record_faults(wheel.files, f"{info}/RECORD")
    faults += _metadata_faults(wheel.files, info, version, build)
    faults += _wheel_file_faults(wheel.files, info, build, tagged=tagged)
    faults += _bill_faults(wheel.files, info, version, build)
    kernels = f"{inside}cubins/"
    own = {name: data for name, data in wheel.files.items() if not name.startswith(kernels)}
    faults += content.operator_faults(content.below(own, inside), build)
    faults += content.description_faults(content.below(wheel.files, f"{info}/"))
    faults += content.cubin_faults(content.below(wheel.files, kernels), build.package, build.version, build.cuda)
    return faults


def verify_conda(path: Path) -> list[str]:
    """Every fault of a conda package, as sentences; none if it may be published."""
    parts = path.name.removesuffix(".conda").rsplit("-", 2)
    if path.suffix != ".conda" or len(parts) != 3:
        return [f"{path.name} is not named NAME-VERSION-BUILD.conda"]
    try:
        conda = archives.read_conda(path)
    except archives.ArtifactError as error:
        return [str(error)]
    name, version, build = parts
    index, faults = content.read_json(conda.info, "info/index.json")
    faults += conda.faults
    for key, expected in (("name", name), ("version", version), ("build", build)):
        if index.get(key) != expected:
            faults.append(f"info/index.json says {key} {index.get(key)!r}, expected {expected!r} as the file name does")
    faults += _paths_faults(conda)
    faults += sealed.faults(path, conda.info, index, python=not package_of_kernels(name))
    for package in matrix.load().packages.values():
        if name == package.cubins:
            return [*faults, *_cubin_package_faults(conda, index, package.name, version, build)]
        if name == package.name:
            return [*faults, *_operator_package_faults(conda, index, package, version, build)]
    expected = ", ".join(f"{package.name} or {package.cubins}" for package in matrix.load().packages.values())
    return [*faults, f"{name} is no package of this project: expected {expected}"]


# ── wheels ────────────────────────────────────────────────────────────────────────────────────────────────


def _wheel_build(path: Path) -> tuple[Build | None, list[str]]:
    try:
        name, version, tag, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        return None, [f"the file name is not a wheel's: {error}"]
    if build := matrix.load().named(path.name):
        return build, []
    told = "".join(map(str, tag)) or "none"
    return None, [
        f"variants.yaml has no build named {path.name}: version {version} of {name}, build tag {told}, "
        f"tags {', '.join(map(str, tags))}. `matrix` lists every name there is"
    ]


def _record_faults(files: Mapping[str, bytes], record: str) -> Iterator[str]:
    if record not in files:
        yield f"{record} is missing"
        return
    listed: dict[str, tuple[str, str]] = {}
    for row in csv.reader(files[record].decode("utf-8", "replace").splitlines()):
        if len(row) != 3:
            yield f"{record} has a line of {len(row)} fields, expected 3: {','.join(row)[:100]}"
            continue
        if row[0] in listed:
            yield f"{record} lists {row[0]} twice"
        listed[row[0]] = (row[1], row[2])
    for name in sorted(listed.keys() - files.keys()):
        yield f"{name} is listed in RECORD but missing"
    for name in sorted(files.keys() - listed.keys()):
        yield f"{name} is in the wheel but not listed in RECORD"
    for name in sorted(files.keys() & listed.keys() - {record}):
        digest, size = listed[name]
        found = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        if digest != found:
            yield f"{name} has hash {found}, RECORD says {digest or 'none'}"
        if size != str(len(files[name])):
            yield f"{name} has {len(files[name])} bytes, RECORD says {size or 'nothing'}"


def _metadata_faults(files: Mapping[str, bytes], info: str, version: str, build: Build) -> Iterator[str]:
    others = {name.split("/")[0] for name in files if ".dist-info/" in name} - {info}
    for other in sorted(others):
        yield f"{other} lies beside {info}: a wheel has one .dist-info, named as the wheel"
    if f"{info}/METADATA" not in files:
        yield f"{info}/METADATA is missing"
        return
    try:
        Metadata.from_email(files[f"{info}/METADATA"], validate=True)
    except ExceptionGroup as error:
        yield from (f"METADATA is not valid: {one}" for one in error.exceptions)
    metadata = _headers(files[f"{info}/METADATA"])
    if canonicalize_name(str(metadata["Name"])) != build.package:
        yield f"METADATA says Name {metadata['Name']}, expected {build.package} as the file name does"
    if metadata["Version"] != version:
        yield f"METADATA says Version {metadata['Version']}, expected {version} as the file name does"
    expected = build.requires_python
    if metadata["Requires-Python"] != expected:
        found = metadata["Requires-Python"]
        yield f"METADATA says Requires-Python {found}, expected {expected}, the oldest Python of PyTorch {build.torch_series}"
    wanted = build.requires_torch
    try:
        found = [str(Requirement(text)) for text in metadata.get_all("Requires-Dist", [])]
    except InvalidRequirement as error:
        yield f"METADATA holds a Requires-Dist that is no requirement: {error}"
        return
    said = f"build tag {build.build_tag}" if build.build_tag else f"version {build.wheel_version}"
    if found != [wanted]:
        yield f"METADATA requires {', '.join(found) or 'nothing'}, expected {wanted} alone as the {said} says"
    for name in metadata.get_all("License-File", []):
        if f"{info}/licenses/{name}" not in files:
            yield f"METADATA names the licence file {name}, which is not in {info}/licenses/"


def _headers(data: bytes) -> Message:
    # As text: of bytes that are not ASCII the parser makes objects that are no strings.
    return email.message_from_string(data.decode("utf-8", "replace"))


def _bill_faults(files: Mapping[str, bytes], info: str, version: str, build: Build) -> Iterator[str]:
    try:
        expected = sbom.of_wheel(files, build.package, version)
    except (ValueError, RecursionError, AttributeError):
        return  # of _build.json, and what is wrong with that is said
    bill = f"{info}/{sbom.name(build.package)}"
    if files.get(bill) != expected:
        yield f"{bill} is missing, or is not the bill of what this wheel holds"


def _wheel_file_faults(files: Mapping[str, bytes], info: str, build: Build, *, tagged: bool) -> Iterator[str]:
    if f"{info}/WHEEL" not in files:
        yield f"{info}/WHEEL is missing"
        return
    wheel = _headers(files[f"{info}/WHEEL"])
    tags = [build.wheel_tag] if tagged else list(build.index_tags)
    build_tag = [build.build_tag] if tagged and build.build_tag else []
    wanted = {"Wheel-Version": ["1.0"], "Tag": tags, "Build": build_tag, "Root-Is-Purelib": ["false"]}
    for key, values in wanted.items():
        if (found := wheel.get_all(key, [])) != values:
            yield f"WHEEL says {key} {', '.join(found) or 'nothing'}, expected {', '.join(values) or 'nothing'}"


# ── conda packages ────────────────────────────────────────────────────────────────────────────────────────


def _paths_faults(conda: archives.Conda) -> Iterator[str]:
    paths, faults = content.read_json(conda.info, "info/paths.json")
    yield from faults
    entries = paths.get("paths", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("_path"), str) for e in entries):
        yield "info/paths.json has no list of files"
        return
    listed = {entry["_path"]: entry for entry in entries}
    if len(listed) < len(entries):
        yield "info/paths.json lists a file twice"
    for name in sorted(listed.keys() - conda.payload.keys()):
        yield f"{name} is listed in info/paths.json but missing"
    for name in sorted(conda.payload.keys() - listed.keys()):
        yield f"{name} is in the package but not listed in info/paths.json"
    for name in sorted(conda.payload.keys() & listed.keys()):
        data, entry = conda.payload[name], listed[name]
        if entry.get("path_type") != "hardlink":
            yield f"{name} has path_type {entry.get('path_type')} in info/paths.json, expected hardlink"
        if entry.get("sha256") != sha256(data):
            yield f"{name} has sha256 {sha256(data)}, info/paths.json says {entry.get('sha256')}"
        if entry.get("size_in_bytes") != len(data):
            yield f"{name} has {len(data)} bytes, info/paths.json says {entry.get('size_in_bytes')}"
        if "prefix_placeholder" in entry:
            yield f"{name} holds the build machine's prefix ({str(entry['prefix_placeholder'])[:60]})"


def _cubin_package_faults(
    conda: archives.Conda, index: Mapping[str, Any], package: str, version: str, build: str
) -> Iterator[str]:
    folder = archives.cubins(package)
    if index.get("subdir") != "noarch" or index.get("noarch") != "generic":
        yield f"info/index.json says subdir {index.get('subdir')}, noarch {index.get('noarch')}: expected noarch, generic"
    if index.get("depends"):
        yield f"info/index.json says depends {index['depends']}, expected none: kernels need no library"
    cuda = _cuda_of(build)
    if cuda is None:
        yield f"the build string {build} does not begin with a CUDA version of variants.yaml, such as cu128"
        return
    stray = sorted(name for name in conda.payload if not name.startswith(folder))
    for name in stray[:5]:
        yield f"{name} lies outside {folder}, the only place for kernels"
    yield from content.cubin_faults(content.below(conda.payload, folder), package, version, cuda)


def _operator_package_faults(
    conda: archives.Conda, index: Mapping[str, Any], package: Package, version: str, build: str
) -> Iterator[str]:
    table = matrix.load()
    parts = re.match(r"torch([^_]+)_(cu\d+)_", build)
    cuda = _cuda_of(parts[2]) if parts else None
    same = [one for one in table.all_builds if one.package == package.name and parts and one.torch_tag == parts[1]]
    platform = str(index.get("subdir"))
    if not same or cuda is None:
        yield f"the build string {build} does not begin with a PyTorch and CUDA of variants.yaml, such as torch280_cu128"
        return
    if platform not in table.platforms:
        yield f"info/index.json says subdir {platform}, expected one of {', '.join(table.platforms)}"
        return
    if index.get("noarch") != "python":
        yield f"info/index.json says noarch {index.get('noarch')}, expected python: else one Python alone would find the package"
    made = next((one for one in same if (one.cuda, one.platform) == (cuda, platform)), None)
    if made is None:
        yield f"variants.yaml has no build of PyTorch {same[0].torch} with CUDA {cuda} for {platform}"
        return
    if not build.endswith(f"_{made.number}"):
        yield f"the build string {build} does not end in _{made.number}, the `build` of its row in variants.yaml"
    if index.get("build_number") != variant.number(made, table):
        yield f"info/index.json says build_number {index.get('build_number')}, expected {variant.number(made, table)}"
    listed = [str(one) for one in index["depends"]] if isinstance(index.get("depends"), list) else []
    depends = {one.split(" ")[0]: one for one in listed}
    yield from _requirement_faults(index, listed, made)
    if depends.get("pytorch") != f"pytorch {made.conda_torch}":
        yield f"info/index.json depends on {depends.get('pytorch')!r}, expected 'pytorch {made.conda_torch}' as the build string says"
    kernels = f"{package.cubins} =={version} {cuda_tag(cuda)}_"
    if not depends.get(package.cubins, "").startswith(kernels):
        yield f"info/index.json depends on {depends.get(package.cubins)!r}, expected '{kernels}…' exactly"
    own = f"{archives.SITE_PACKAGES}{package.name}/"
    described = f"{archives.SITE_PACKAGES}{package.name}-{version}.dist-info/"
    for name in sorted(conda.payload):
        if not name.startswith((own, described)):
            yield f"{name} lies outside {own} and {described}"
    metadata = _headers(conda.payload.get(f"{described}METADATA", b""))
    if (metadata["Name"], metadata["Version"]) != (package.name, version):
        yield f"{described}METADATA says {metadata['Name']} {metadata['Version']}, expected {package.name} {version}"
    yield from content.operator_faults(content.below(conda.payload, own), replace(made, version=version))
    yield from content.description_faults(content.below(conda.payload, described))


# What conda-forge's compilers have a package require beside what the recipe says: the runtime libraries of C and C++.
RUNTIME = {True: {"ucrt", "vc", "vc14_runtime"}, False: {"libgcc", "libstdcxx"}}  # of Windows, of others


def _requirement_faults(index: Mapping[str, Any], listed: Sequence[str], made: Build) -> Iterator[str]:
    """What decides where a solver has the package installed, as recipe.yaml says it."""
    platform = matrix.load().platforms[made.platform]
    # conda-forge's compiler bounds glibc above too, by an ABI that is not in sight.
    wanted = {"python": r"python( >=3\.\d+)?"}
    if platform.glibc:
        wanted["__glibc"] = rf"__glibc >={re.escape(platform.glibc)}(,<3\.0\.a0)?"
    for name, form in wanted.items():
        found = [one for one in listed if one.split(" ")[0] == name]
        if not found:
            yield f"info/index.json does not depend on {name}"
        for one in found:
            if not re.fullmatch(form, one):
                promised = f"glibc {platform.glibc}" if name == "__glibc" else "every Python from one on"
                yield f"info/index.json depends on {one!r}, and the package is for {promised}"
    known = {*wanted, "pytorch", made.cubins, *RUNTIME[platform.windows]}
    for one in (one for one in listed if one.split(" ")[0] not in known):
        yield f"info/index.json depends on {one!r}, which operators do without"
    if index.get("constrains") != made.conda_constrains:
        yield f"info/index.json constrains {index.get('constrains')}, expected {made.conda_constrains} as the build string says"


def _cuda_of(build: str) -> str | None:
    return next((c for c in matrix.load().cuda if re.match(rf"{cuda_tag(c)}(_|$)", build)), None)


# ── either ────────────────────────────────────────────────────────────────────────────────────────────────


def verify(path: Path) -> list[str]:
    """Every fault of a wheel or conda package."""
    if path.suffix == ".whl":
        return verify_wheel(path)
    if path.suffix == ".conda":
        return verify_conda(path)
    return [f"{path.name} is neither a wheel (.whl) nor a conda package (.conda)"]


def named(paths: Iterable[Path]) -> list[str]:
    """The faults of several, each a line with the file's name."""
    return [f"  {path.name}: {fault}" for path in paths for fault in verify(path)]
