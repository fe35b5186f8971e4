"""Check artifacts before anybody installs them: `verify.py [FILE ...]`, by default all of dist/.

Name against metadata against content, hashes, GPU architectures, symbol versions, build-machine paths.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import artifact
import elf
import matrix
from packaging.metadata import Metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = (".so", ".dll", ".pyd")


@dataclass(frozen=True)
class Said:
    """What a file's name says was built."""

    version: str
    torch: str
    cuda: str
    platform: str
    python: str | None = None


def verify_wheel(path: Path) -> list[str]:
    """Every fault of a wheel, as sentences; none if it may be published."""
    try:
        wheel = artifact.read_wheel(path)
    except artifact.ArtifactError as error:
        return [str(error)]
    build, faults = _wheel_build(path)
    faults += wheel.faults
    if build is None:
        return faults
    info = f"{build.package}-{build.version}.dist-info"
    faults += _record_faults(wheel.files, f"{info}/RECORD")
    faults += _metadata_faults(wheel.files, info, build)
    faults += _wheel_file_faults(wheel.files, info, build)
    said = Said(build.version, build.torch, build.cuda, build.platform, build.python)
    faults += _operator_faults(_below(wheel.files, artifact.PACKAGE), said)
    faults += _cubin_faults(_below(wheel.files, f"{artifact.PACKAGE}cubins/"), said.version, said.cuda)
    return faults


def verify_conda(path: Path) -> list[str]:
    """Every fault of a conda package, as sentences; none if it may be published."""
    parts = path.name.removesuffix(".conda").rsplit("-", 2)
    if path.suffix != ".conda" or len(parts) != 3:
        return [f"{path.name} is not named NAME-VERSION-BUILD.conda"]
    try:
        conda = artifact.read_conda(path)
    except artifact.ArtifactError as error:
        return [str(error)]
    name, version, build = parts
    index, faults = _json(conda.info, "info/index.json")
    faults += conda.faults
    for key, expected in (("name", name), ("version", version), ("build", build)):
        if index.get(key) != expected:
            faults.append(f"info/index.json says {key} {index.get(key)!r}, expected {expected!r} as the file name does")
    faults += _paths_faults(conda)
    if name == "sageattention-cubins":
        return [*faults, *_cubin_package_faults(conda, index, version, build)]
    if name == "sageattention":
        return [*faults, *_operator_package_faults(conda, index, version, build)]
    return [*faults, f"{name} is no package of this project: expected sageattention or sageattention-cubins"]


# ── wheels ────────────────────────────────────────────────────────────────────────────────────────────────


def _wheel_build(path: Path) -> tuple[matrix.Build | None, list[str]]:
    try:
        name, version, tag, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        return None, [f"the file name is not a wheel's: {error}"]
    for build in matrix.load().all_builds():
        if build.wheel_name == path.name:
            return build, []
    told = "".join(map(str, tag)) or "none"
    return None, [
        f"variants.yaml has no build named {path.name}: version {version} of {name}, build tag {told}, "
        f"tags {', '.join(map(str, tags))}. `matrix.py` lists every name there is"
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


def _metadata_faults(files: Mapping[str, bytes], info: str, build: matrix.Build) -> Iterator[str]:
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
    metadata = email.message_from_bytes(files[f"{info}/METADATA"])
    if canonicalize_name(str(metadata["Name"])) != build.package:
        yield f"METADATA says Name {metadata['Name']}, expected {build.package} as the file name does"
    if metadata["Version"] != build.version:
        yield f"METADATA says Version {metadata['Version']}, expected {build.version} as the file name does"
    expected = f"=={build.python}.*"
    if metadata["Requires-Python"] != expected:
        found = metadata["Requires-Python"]
        yield f"METADATA says Requires-Python {found}, expected {expected} as the tag {build.python_tag} does"
    wanted = SpecifierSet(f"=={build.torch_series}.*")
    pins = []
    for text in metadata.get_all("Requires-Dist", []):
        try:
            pins.append(Requirement(text))
        except InvalidRequirement as error:
            yield f"METADATA says Requires-Dist {text!r}, which is no requirement: {error}"
    torch = [pin for pin in pins if pin.name == "torch"]
    if [pin.specifier for pin in torch] != [wanted]:
        found = ", ".join(map(str, torch)) or "nothing"
        yield f"METADATA requires {found}, expected torch{wanted} as the build tag {build.build_tag} says"


def _wheel_file_faults(files: Mapping[str, bytes], info: str, build: matrix.Build) -> Iterator[str]:
    if f"{info}/WHEEL" not in files:
        yield f"{info}/WHEEL is missing"
        return
    wheel = email.message_from_bytes(files[f"{info}/WHEEL"])
    expected = f"{build.python_tag}-{build.python_tag}-{build.wheel_platform}"
    for key, value in (("Tag", expected), ("Build", build.build_tag), ("Root-Is-Purelib", "false")):
        if wheel.get_all(key) != [value]:
            found = ", ".join(wheel.get_all(key) or ["nothing"])
            yield f"WHEEL says {key} {found}, expected {value}"


# ── conda packages ────────────────────────────────────────────────────────────────────────────────────────


def _paths_faults(conda: artifact.Conda) -> Iterator[str]:
    paths, faults = _json(conda.info, "info/paths.json")
    yield from faults
    listed = {entry["_path"]: entry for entry in paths.get("paths", [])}
    for name in sorted(listed.keys() - conda.payload.keys()):
        if listed[name].get("path_type") == "hardlink":
            yield f"{name} is listed in info/paths.json but missing"
    for name in sorted(conda.payload.keys() - listed.keys()):
        yield f"{name} is in the package but not listed in info/paths.json"
    for name in sorted(conda.payload.keys() & listed.keys()):
        data, entry = conda.payload[name], listed[name]
        if entry.get("sha256") != artifact.sha256(data):
            yield f"{name} has sha256 {artifact.sha256(data)}, info/paths.json says {entry.get('sha256')}"
        if entry.get("size_in_bytes") != len(data):
            yield f"{name} has {len(data)} bytes, info/paths.json says {entry.get('size_in_bytes')}"
        if "prefix_placeholder" in entry:
            yield f"{name} holds the build machine's prefix ({entry['prefix_placeholder'][:60]})"


def _cubin_package_faults(conda: artifact.Conda, index: Mapping[str, Any], version: str, build: str) -> Iterator[str]:
    if index.get("subdir") != "noarch" or index.get("noarch") != "generic":
        yield f"info/index.json says subdir {index.get('subdir')}, noarch {index.get('noarch')}: expected noarch, generic"
    if index.get("depends"):
        yield f"info/index.json says depends {index['depends']}, expected none: kernels need no library"
    cuda = _cuda_of(build)
    if cuda is None:
        yield f"the build string {build} does not begin with a CUDA version of variants.yaml, such as cu128"
        return
    stray = sorted(name for name in conda.payload if not name.startswith(artifact.CUBINS))
    for name in stray[:5]:
        yield f"{name} lies outside {artifact.CUBINS}, the only place for kernels"
    yield from _cubin_faults(_below(conda.payload, artifact.CUBINS), version, cuda)


def _operator_package_faults(conda: artifact.Conda, index: Mapping[str, Any], version: str, build: str) -> Iterator[str]:
    table = matrix.load()
    parts = re.match(r"torch(\d+)_(cu\d+)_", build)
    torch = next((name for name in table.pytorch if parts and name.replace(".", "") == parts[1]), None)
    cuda = _cuda_of(parts[2]) if parts else None
    platform = str(index.get("subdir"))
    if torch is None or cuda is None:
        yield f"the build string {build} does not begin with a PyTorch and CUDA of variants.yaml, such as torch280_cu128"
        return
    if platform not in table.platforms:
        yield f"info/index.json says subdir {platform}, expected one of {', '.join(table.platforms)}"
        return
    depends = {dependency.split(" ")[0]: dependency for dependency in index.get("depends", [])}
    series = ".".join(torch.split(".")[:2])
    if depends.get("pytorch") != f"pytorch {series}.*":
        yield f"info/index.json depends on {depends.get('pytorch')!r}, expected 'pytorch {series}.*' as the build string says"
    kernels = f"sageattention-cubins =={version} cu{cuda.replace('.', '')}_"
    if not depends.get("sageattention-cubins", "").startswith(kernels):
        yield f"info/index.json depends on {depends.get('sageattention-cubins')!r}, expected '{kernels}…' exactly"
    if "python" not in depends:
        yield "info/index.json does not depend on python"
    for name in sorted(name for name in conda.payload if not name.startswith(artifact.SITE_PACKAGES))[:5]:
        yield f"{name} lies outside {artifact.SITE_PACKAGES}: the package would serve one Python only"
    inside = _below(conda.payload, artifact.SITE_PACKAGES + artifact.PACKAGE)
    yield from _operator_faults(inside, Said(version, torch, cuda, platform))


def _cuda_of(build: str) -> str | None:
    return next((c for c in matrix.load().cuda if re.match(rf"cu{c.replace('.', '')}(_|$)", build)), None)


# ── content, the same in both ─────────────────────────────────────────────────────────────────────────────


def _operator_faults(files: Mapping[str, bytes], said: Said) -> Iterator[str]:
    """The Python package and `_C`, paths relative to the package."""
    platform = matrix.load().platforms[said.platform]
    made, faults = _json(files, "_build.json")
    yield from faults
    for key, expected in (("version", said.version), ("torch", said.torch), ("cuda", said.cuda)):
        if not faults and made.get(key) != expected:
            yield f"_build.json says {key} {made.get(key)!r}, expected {expected!r} as the file name does"
    for name in ("__init__.py", platform.extension):
        if name not in files:
            yield f"{artifact.PACKAGE}{name} is missing"
    for name, data in sorted(files.items()):
        if name.endswith(LIBRARIES):
            yield from elf.path_faults(name, data)
            if platform.glibc:
                yield from elf.host_faults(name, data, said.platform, platform.glibc)


def _cubin_faults(files: Mapping[str, bytes], version: str, cuda: str) -> Iterator[str]:
    """A kernel set, paths relative to its folder."""
    manifest, faults = _json(files, "manifest.json")
    yield from faults
    if faults:
        return
    for key, expected in (("version", version), ("cuda", cuda)):
        if manifest.get(key) != expected:
            yield f"cubins/manifest.json says {key} {manifest.get(key)!r}, expected {expected!r} as the file name does"
    hashes, kernels = manifest.get("files"), manifest.get("kernels")
    if not isinstance(hashes, dict) or not isinstance(kernels, list) or not all(isinstance(k, str) for k in kernels):
        yield "cubins/manifest.json has no list of kernels or no table of files"
        return
    there = {name for name in files if name != "manifest.json"}
    for name in sorted(hashes.keys() - there):
        yield f"cubins/{name} is listed in cubins/manifest.json but missing"
    for name in sorted(there - hashes.keys()):
        yield f"cubins/{name} is not listed in cubins/manifest.json"
    yield from _promise_faults(set(hashes), kernels, cuda)
    for name in sorted(there):
        data, shown = files[name], f"cubins/{name}"
        if name in hashes and hashes[name] != artifact.sha256(data):
            yield f"{shown} has sha256 {artifact.sha256(data)}, cubins/manifest.json says {hashes[name]}"
        folder = name.split("/")[0]
        if name.endswith(".cubin"):
            yield from elf.gpu_faults(shown, data, folder)
        elif name.endswith(".ptx"):
            yield from elf.ptx_faults(shown, data, folder)
        else:
            yield f"{shown} is neither a cubin nor PTX"
        yield from elf.path_faults(shown, data)


def _promise_faults(names: set[str], kernels: list[str], cuda: str) -> Iterator[str]:
    """Every kernel that csrc/kernels/kernels.json lists, for every architecture that variants.yaml promises."""
    promised = matrix.load().cuda[cuda]
    folders = [*matrix.targets(promised.architectures), *(f"compute_{a.replace('.', '')}" for a in promised.ptx)]
    for kernel, only in _instances().items():
        if kernel not in kernels:
            yield f"cubins/manifest.json does not name the kernel {kernel}, which csrc/kernels/kernels.json lists"
            continue
        for folder in folders:
            ending = "ptx" if folder.startswith("compute_") else "cubin"
            if (only is None or folder in only) and f"{folder}/{kernel}.{ending}" not in names:
                yield f"cubins/{folder}/{kernel}.{ending} is missing: variants.yaml promises {folder} for CUDA {cuda}"


def _instances() -> dict[str, set[str] | None]:
    """The kernel instances of csrc/kernels/kernels.json, and the architectures of those that are made for some only."""
    entries = json.loads((ROOT / "csrc" / "kernels" / "kernels.json").read_text(encoding="utf-8"))
    return {
        f"{Path(entry['source']).stem}-d{head_dim}-{dtype}": set(entry["architectures"]) if "architectures" in entry else None
        for entry in entries
        for head_dim in entry["head_dim"]
        for dtype in entry["dtype"]
    }


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}


def _json(files: Mapping[str, bytes], name: str) -> tuple[dict[str, Any], list[str]]:
    if name not in files:
        return {}, [f"{name} is missing"]
    try:
        value = json.loads(files[name])
    except ValueError as error:
        return {}, [f"{name} is not valid JSON: {error}"]
    return (value, []) if isinstance(value, dict) else ({}, [f"{name} holds {type(value).__name__}, expected an object"])


# ── command line ──────────────────────────────────────────────────────────────────────────────────────────


def verify(path: Path) -> list[str]:
    """Every fault of a wheel or conda package."""
    if path.suffix == ".whl":
        return verify_wheel(path)
    if path.suffix == ".conda":
        return verify_conda(path)
    return [f"{path.name} is neither a wheel (.whl) nor a conda package (.conda)"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="*", help="wheels and conda packages (default: all of dist/)")
    args = parser.parse_args()
    files = args.file or sorted([*(ROOT / "dist").glob("wheels/*.whl"), *(ROOT / "dist").glob("conda/*/*.conda")])
    if not files:
        print(
            "error: dist/ holds nothing to verify: `python3 scripts/run.py build-cu128` makes something",
            file=sys.stderr,
        )
        return 2
    try:
        found = {path: verify(path) for path in files}
    except matrix.MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(Column("file", overflow="fold"), Column("verdict", overflow="fold"))
    for path, faults in found.items():
        table.add_row(escape(path.name), "[red]" + escape("\n".join(faults)) if faults else "[green]good")
    Console().print(table)
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
