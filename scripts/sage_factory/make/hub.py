"""Lay out two conda packages as a build of a Hugging Face hub kernel: the same binaries, operators in a namespace of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_factory import alone
from sage_factory.make import wheels
from sage_factory.what import matrix
from sage_factory.what.build import Build, cuda_tag

PROCESSORS = {"amd64": "x86_64"}  # that Windows names otherwise


def lay(operators: Path, cubins: Path, folder: Path) -> Path:
    """Write `folder`/KERNEL/build/VARIANT, whole or not at all, in place of one that is there, and return its path."""
    build = wheels.find_build(operators)
    variant, files = content(operators, cubins, build)
    target = folder / matrix.load().packages[build.package].hub / "build" / variant
    with alone.alone(folder / ".lock", f"another process that lays kernels into {folder}"):
        _lay(files, target)
    return target


def _lay(files: Mapping[str, bytes], target: Path) -> None:
    partial, old = (target.with_name(f".{target.name}.{what}") for what in ("partial", "old"))
    if old.is_dir() and not target.exists():  # of one that was killed between its two renames
        old.rename(target)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    for name, data in files.items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def content(operators: Path, cubins: Path, build: Build) -> tuple[str, dict[str, bytes]]:
    """The variant's name and its files, by path."""
    packed = wheels.payload(operators, cubins)
    wheels.check(packed, operators, cubins, build)
    inside = f"{build.package}/"
    files = {name.removeprefix(inside): data for name, data in packed.items() if name.startswith(inside)}
    files["LICENSE"] = next(data for name, data in packed.items() if name.endswith("/licenses/LICENSE"))
    made: dict[str, Any] = json.loads(files["_build.json"])
    # torch280_cu128_h0123456789 of the package's file name: its digest is of all that went in.
    identity = f"{build.package}_{operators.stem.split('-')[-1].rpartition('_')[0]}"
    files["_build.json"] = _json({**made, "namespace": identity})
    files["metadata.json"] = _json(metadata(identity, build))
    return variant(build, cxx11_abi=made.get("cxx11_abi", True)), files


def variant(build: Build, *, cxx11_abi: bool) -> str:
    """The folder's name, by which `kernels` chooses: torch28-cxx11-cu128-x86_64-linux."""
    system, processor = matrix.load().platforms[build.platform].host.split()
    torch = ("torch-stable-abi" if build.stable_abi else "torch") + build.torch_series.replace(".", "")
    abi = [] if system == "windows" or build.stable_abi else ["cxx11" if cxx11_abi else "cxx98"]
    cuda = cuda_tag(build.cuda)
    return "-".join([torch, *abi, cuda, PROCESSORS.get(processor, processor), system])


def metadata(identity: str, build: Build) -> dict[str, Any]:
    """What `kernels` reads of a build: the name that its module gets, and which GPUs it runs on."""
    archs = [*build.architectures, *(f"{name}+PTX" for name in build.ptx)]
    return {
        "name": matrix.load().packages[build.package].hub,
        "id": identity,
        "version": int(build.version.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": archs},
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
