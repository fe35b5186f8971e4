"""What is packed, in wheels and conda packages alike: the Python package with its library, and the kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_factory import ROOT
from sage_factory.files import sha256
from sage_factory.inspect import elf, pe
from sage_factory.what import matrix
from sage_factory.what.build import Build

LIBRARIES = (".so", ".dll", ".pyd")
# What a Python package of this project holds besides its library, and what lies beside it: all that pip and `wheels` write there.
OWN = re.compile(r"[A-Za-z_]\w*\.py|py\.typed|_build\.json", re.ASCII)
DESCRIBED = re.compile(r"METADATA|WHEEL|RECORD|INSTALLER|REQUESTED|licenses/LICENSE|sboms/\w+\.cdx\.json", re.ASCII)


def operator_faults(files: Mapping[str, bytes], build: Build) -> Iterator[str]:
    """The Python package and `_C` of the build that the file's name says, paths relative to the package."""
    platform = matrix.load().platforms[build.platform]
    made, faults = read_json(files, "_build.json")
    yield from faults
    for key, expected in (("version", build.version), ("torch", build.torch), ("cuda", build.cuda)):
        if not faults and made.get(key) != expected:
            yield f"_build.json says {key} {made.get(key)!r}, expected {expected!r} as the file name does"
    for name in ("__init__.py", platform.library):
        if name not in files:
            yield f"{build.package}/{name} is missing"
    for name, data in sorted(files.items()):
        if name == platform.library:
            yield from elf.path_faults(name, data)
            if platform.glibc:
                yield from elf.host_faults(name, data, build.platform, platform.glibc)
            else:
                yield from pe.library_faults(name, data, platform.wheel)
        elif name.endswith(LIBRARIES):
            yield f"{name} is a second library: expected {platform.library} alone"
        elif not OWN.fullmatch(name):
            yield f"{build.package}/{name} is neither a module nor anything else that belongs there: was it left among the sources?"


def description_faults(files: Mapping[str, bytes]) -> Iterator[str]:
    """What lies in .dist-info, paths relative to it."""
    for name in sorted(files):
        if not DESCRIBED.fullmatch(name):
            yield f"{name} does not belong in .dist-info: no tool of this project writes it"


def cubin_faults(files: Mapping[str, bytes], package: str, version: str, cuda: str) -> Iterator[str]:
    """A kernel set, paths relative to its folder."""
    manifest, faults = read_json(files, "manifest.json")
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
    yield from _promise_faults(set(hashes), kernels, package, cuda)
    for name in sorted(there):
        data, shown = files[name], f"cubins/{name}"
        if name in hashes and hashes[name] != sha256(data):
            yield f"{shown} has sha256 {sha256(data)}, cubins/manifest.json says {hashes[name]}"
        folder = name.split("/")[0]
        if name.endswith(".cubin"):
            yield from elf.gpu_faults(shown, data, folder)
        elif name.endswith(".ptx"):
            yield from elf.ptx_faults(shown, data, folder)
        else:
            yield f"{shown} is neither a cubin nor PTX"
        yield from elf.path_faults(shown, data)


def _promise_faults(names: set[str], kernels: list[str], package: str, cuda: str) -> Iterator[str]:
    """Every kernel that csrc/kernels/kernels.json lists, for every architecture that variants.yaml promises."""
    folders = folders_of(package, cuda)
    for kernel, only in instances(cuda, package).items():
        if kernel not in kernels:
            yield f"cubins/manifest.json does not name the kernel {kernel}, which csrc/kernels/kernels.json lists"
            continue
        for folder in folders:
            ending = "ptx" if folder.startswith("compute_") else "cubin"
            if (only is None or folder in only) and f"{folder}/{kernel}.{ending}" not in names:
                yield f"cubins/{folder}/{kernel}.{ending} is missing: variants.yaml promises {folder} for CUDA {cuda}"


def folders_of(package: str, cuda: str) -> list[str]:
    """The folders of a package's kernel set, as variants.yaml promises them for a CUDA version."""
    table = matrix.load()
    architectures, ptx = table.compiled(table.packages[package], table.cuda[cuda])
    return [*matrix.targets(architectures), *(f"compute_{a.replace('.', '')}" for a in ptx)]


def instances(cuda: str, package: str = "sageattention") -> dict[str, set[str] | None]:
    """The kernel instances of csrc/kernels/kernels.json that a CUDA version compiles for a package, and the architectures of those that are
    made for some only: <stem>-d<head_dim>-<dtype>, or <stem> where a kernel depends on neither.
    """
    entries = json.loads((ROOT / "csrc" / "kernels" / "kernels.json").read_text(encoding="utf-8"))
    return {
        Path(entry["source"]).stem + suffix: set(entry["architectures"]) if "architectures" in entry else None
        for entry in entries
        if package in entry.get("packages", ["sageattention"])
        and [int(n) for n in cuda.split(".")] >= [int(n) for n in entry.get("cuda", "0").split(".")]
        for suffix in [f"-d{d}-{t}" for d in entry.get("head_dim", ()) for t in entry["dtype"]] or [""]
    }


def below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}


def read_json(files: Mapping[str, bytes], name: str) -> tuple[dict[str, Any], list[str]]:
    if name not in files:
        return {}, [f"{name} is missing"]
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        return {}, [f"{name} is not valid JSON: {error}"]
    return (value, []) if isinstance(value, dict) else ({}, [f"{name} holds {type(value).__name__}, expected an object"])
