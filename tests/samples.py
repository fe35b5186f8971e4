"""Small artifacts, good in every respect, for tests to break: real archives with a real library and tiny cubins."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zstandard
from rattler_build import assemble_package

from sage_factory import alone
from sage_factory.files import sha256
from sage_factory.inspect import content
from sage_factory.make import archives, seal, wheels
from sage_factory.ship import collect
from sage_factory.what import matrix, variant
from sage_factory.what.build import Build

CUDA = "12.8"
TORCH = "2.8.0"
PACKAGE = "sageattention"  # whose artifacts these are where nothing else is said
KERNELS = tuple(content.instances(CUDA))
SECONDS = 1_600_000_000  # the time of conda packages
DIST_INFO = "sageattention-2.2.0.dist-info"


def build(python: str = "3.12", platform: str = "linux-64", package: str = PACKAGE) -> Build:
    """The build whose artifacts these are."""
    return matrix.builds(package=package, platform=platform, cuda=CUDA, torch=TORCH, python=python)[0]


def version(package: str) -> str:
    """As variants.yaml states it."""
    return matrix.load().packages[package].version


def cubin(sm: int, *, abi: int = 7, machine: int = 190) -> bytes:
    """The smallest ELF file that says what a cubin says: machine, ABI, SM number, one kernel."""
    names = b"\0.shstrtab\0.text.kernel\0"
    code = bytes(16)
    flags = (0x6000000 | sm << 8) if abi >= 8 else (sm << 16 | 5 << 8 | sm)
    offset = 64 + len(names) + len(code)
    ident = b"\x7fELF" + bytes([2, 1, 1, 65 if abi >= 8 else 51, abi]) + bytes(7)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, offset, flags, 64, 56, 0, 64, 3, 1)
    sections = [
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 64, len(names), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 11, 1, 6, 0, 64 + len(names), len(code), 0, 0, 16, 0),
    ]
    return header + names + code + b"".join(sections)


def ptx(target: str) -> bytes:
    """PTX with one kernel."""
    return f".version 8.7\n.target {target}\n.address_size 64\n.visible .entry kernel() {{ ret; }}\n".encode()


@functools.cache
def library(*flags: str, source: str = "int sage_one(void) { return 1; }") -> bytes:
    """A shared library as the system's compiler makes it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to make a library of: install gcc")
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "c.c").write_text(source, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", "-o", "c.so", "c.c", *flags]
        subprocess.run(command, cwd=scratch, check=True, capture_output=True)
        return Path(scratch, "c.so").read_bytes()


def dll(*imports: str, machine: int = 0x8664) -> bytes:
    """The smallest Windows library that says what one says: processor, sections, the libraries it needs."""
    base, tables = 0x1000, b""
    names = b"".join(name.encode() + b"\0" for name in imports)
    at = base + 20 * (len(imports) + 1)
    for name in imports:
        tables += struct.pack("<5I", at + len(names), 0, 0, at + names.index(name.encode() + b"\0"), at + len(names))
    functions = struct.pack("<QQ", 1 << 63 | 1, 0)  # number 1 of each
    content = (tables + bytes(20) + names + functions).ljust(512, b"\0")
    header = struct.pack("<HHIIIHH", machine, 1, 0, 0, 0, 240, 0x2022)
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, 512, 0, 0, base)
    optional += struct.pack("<QIIHHHHHHIIIIHHQQQQII", 0x180000000, 0x1000, 512, 6, 0, 0, 0, 6, 0, 0, 0x2000, 512, 0, 2, 0,
                            0, 0, 0, 0, 0, 16)  # fmt: skip
    directories = bytearray(128)
    struct.pack_into("<II", directories, 8, base, 20 * (len(imports) + 1))
    section = struct.pack("<8sIIIIIIHHI", b".rdata", 512, base, 512, 512, 0, 0, 0, 0, 0x40000040)
    start = b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0"
    return (start + header + optional + bytes(directories) + section).ljust(512, b"\0") + content


def cubin_set(kernels: Sequence[str] | None = None, package: str = PACKAGE) -> dict[str, bytes]:
    """A kernel set with its manifest, paths relative to cubins/."""
    only = content.instances(CUDA, package)
    kernels = tuple(only) if kernels is None else kernels
    files: dict[str, bytes] = {}
    for folder in content.folders_of(package, CUDA):
        number = int(re.sub(r"\D", "", folder))
        for kernel in (kernel for kernel in kernels if folder in (only[kernel] or [folder])):
            if folder.startswith("compute_"):
                files[f"{folder}/{kernel}.ptx"] = ptx(f"sm_{number}")
            else:  # 12.8's compiler writes the newer ABI for Blackwell already.
                files[f"{folder}/{kernel}.cubin"] = cubin(number, abi=8 if number >= 100 else 7)
    files["manifest.json"] = manifest(files, kernels, package)
    return files


def manifest(files: Mapping[str, bytes], kernels: Sequence[str] = KERNELS, package: str = PACKAGE) -> bytes:
    """The manifest of these files."""
    hashes = {name: sha256(data) for name, data in files.items() if name != "manifest.json"}
    folders = sorted({name.split("/")[0] for name in hashes})
    content = {"version": version(package), "cuda": CUDA, "architectures": folders, "kernels": list(kernels), "files": hashes}
    return json.dumps(content).encode()


def operators(package: str = PACKAGE) -> dict[str, bytes]:
    """The operators' package as it is installed."""
    head = f"Metadata-Version: 2.4\nName: {package}\nVersion: {version(package)}\n"
    made = {"version": version(package), "torch": TORCH, "cuda": CUDA, "commit": "c" * 40, "compiler": "GNU 13.3.0"}
    info = f"site-packages/{package}-{version(package)}.dist-info"
    return {
        f"site-packages/{package}/__init__.py": b"",
        f"site-packages/{package}/_build.json": json.dumps(made).encode(),
        f"site-packages/{package}/_C.so": library(),
        f"{info}/METADATA": f"{head}Summary: Attention × 8 bit\n\nRead me.\n".encode(),
        f"{info}/RECORD": b"of another installation",
        f"{info}/INSTALLER": b"conda",
        f"{info}/licenses/LICENSE": b"Apache",
    }


def index(name: str) -> dict[str, Any]:
    """info/index.json of one of the two conda packages of a package."""
    package = name.removesuffix("-cubins")
    if name != package:
        return {
            "name": name,
            "version": version(package),
            "build": "cu128_h1_0",
            "build_number": 0,
            "subdir": "noarch",
            "noarch": "generic",
            "license": "Apache-2.0",
            "depends": [],
        }
    kernels = f"{package}-cubins =={version(package)} cu128_h1_0"
    return {
        "name": name,
        "version": version(package),
        "build": "torch280_cu128_h2_0",
        "build_number": variant.number(build(), matrix.load()),
        "subdir": "linux-64",
        "noarch": "python",
        "license": "Apache-2.0",
        "depends": ["python >=3.9", "pytorch 2.8.*", "__glibc >=2.28", kernels],
        "constrains": ["__cuda >=12", "cuda-version >=12.8,<13"],
    }


def conda(
    folder: Path,
    payload: Mapping[str, bytes],
    index: Mapping[str, object],
    paths: Mapping[str, bytes] | None = None,
    document: object = None,
) -> Path:
    """Write a .conda file; `paths` is what paths.json is made of where that is not the payload, or `document` is all of it."""
    entries = [
        {"_path": name, "path_type": "hardlink", "sha256": sha256(data), "size_in_bytes": len(data)}
        for name, data in (payload if paths is None else paths).items()
    ]
    info = {
        "info/index.json": json.dumps(index).encode(),
        "info/about.json": b'{"license": "Apache-2.0", "summary": "Attention"}',
        "info/licenses/LICENSE": b"Apache",
        "info/paths.json": json.dumps({"paths": entries, "paths_version": 1} if document is None else document).encode(),
    }
    if not str(index["name"]).endswith("-cubins"):
        info["info/link.json"] = b'{"noarch": {"type": "python"}, "package_metadata_version": 1}'
    stem = f"{index['name']}-{index['version']}-{index['build']}"
    folder.mkdir(parents=True, exist_ok=True)
    members = {"metadata.json": b'{"conda_pkg_format_version": 2}', f"pkg-{stem}.tar.zst": _tar(payload)}
    return archive(folder / f"{stem}.conda", members | {f"info-{stem}.tar.zst": _tar(info)})


def archive(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write a zip as sealing does."""
    path.write_bytes(archives.zipped(((name, 0o644, data) for name, data in members.items()), seal.time(SECONDS)))
    return path


def _tar(files: Mapping[str, bytes]) -> bytes:
    answer = io.BytesIO()
    with tarfile.open(fileobj=answer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    # Sealed, but for the level: a test has no time for 2% less.
    return zstandard.ZstdCompressor().compress(seal.tarball(answer.getvalue(), SECONDS))


def cubins_conda(folder: Path, files: Mapping[str, bytes] | None = None, package: str = PACKAGE) -> Path:
    """The kernels' conda package."""
    files = cubin_set(package=package) if files is None else files
    return conda(folder, {archives.cubins(package) + name: data for name, data in files.items()}, index(f"{package}-cubins"))


def operators_conda(folder: Path, files: Mapping[str, bytes] | None = None, package: str = PACKAGE) -> Path:
    """The operators' conda package."""
    return conda(folder, operators(package) if files is None else files, index(package))


def a_wheel(folder: Path, python: str = "3.12", package: str = PACKAGE) -> Path:
    """A wheel of the two."""
    packages = operators_conda(folder, package=package), cubins_conda(folder, package=package)
    return wheels.emit(*packages, build=build(python, package=package), out_dir=folder)


def a_stable_wheel(folder: Path) -> Path:
    """The wheel of operators by LibTorch's stable ABI."""
    files = operators()
    name = "site-packages/sageattention/_build.json"
    files[name] = json.dumps({**json.loads(files[name]), "torch": "2.9+"}).encode()
    (build,) = matrix.builds("stable-abi", platform="linux-64", cuda=CUDA)
    return wheels.emit(operators_conda(folder, files), cubins_conda(folder), build=build, out_dir=folder)


def tiny_wheel(folder: Path, one: Build) -> Path:
    """A wheel of any build that installers can choose, with next to nothing in it."""
    info = f"{one.package}-{one.version}.dist-info"
    files = {"sageattention/__init__.py": b"", f"{info}/METADATA": wheels._metadata(None, one, [])}
    files[f"{info}/WHEEL"] = wheels._wheel(one)
    return _packed(folder / one.wheel_name, files, info)


def other_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel of another project, for any Python."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: samples\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return _packed(folder / f"{name}-{version}-py3-none-any.whl", files, info)


def _packed(path: Path, files: dict[str, bytes], info: str) -> Path:
    files[f"{info}/RECORD"] = wheels._record(files, f"{info}/RECORD")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wheels._zipped(files, last=f"{info}/"))
    return path


def contents(path: Path) -> dict[str, bytes]:
    """A wheel's files."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, files: Mapping[str, bytes], *, record: bool = True) -> Path:
    """Write a wheel anew with other files, by default with a RECORD that fits them."""
    files = dict(files)
    own = f"{DIST_INFO}/RECORD"
    if record:
        files.pop(own, None)
        files[own] = wheels._record(files, own)
    path.write_bytes(wheels._zipped(files, last=f"{DIST_INFO}/"))
    return path


def locked(folder: Path) -> bool:
    """Whether somebody is at work in a folder."""
    with (folder / ".lock").open("a+", encoding="utf-8") as handle:
        return not alone._locked(handle)


def assembled(folder: Path, name: str, string: str, *, depends: list[str] | None = None, year: int = 2020) -> Path:
    """A conda package of one small file, for this machine or any, as rattler-build assembles it."""
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    (files / "content").write_text("same")
    subdir, when = "noarch" if "cubins" in name else matrix.host_platform(), datetime(year, 1, 1, tzinfo=UTC)
    out = assemble_package(
        name, "2.2.0", subdir, string, folder / subdir, files_dir=files, depends=depends or [], timestamp=when
    )
    return Path(out.path)


# A profile that these artifacts fill.

PROFILE = "sample"
BUILDS = tuple(build(python) for python in ("3.11", "3.12"))
ALL_BUILDS = matrix.builds


def chosen(profile: str | None = None, *, platform: str | None = None, **conditions: Any) -> tuple[Build, ...]:
    """In place of matrix.builds, which then knows the profile."""
    return BUILDS if profile == PROFILE else ALL_BUILDS(profile, platform=platform, **conditions)


def promise(builds: Iterable[Build], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has these builds, whatever its rows say."""
    load, table = matrix.load, dataclasses.replace(matrix.load())
    vars(table)["all_builds"] = tuple(builds)
    monkeypatch.setattr(matrix, "load", lambda path=matrix.TABLE: table if path == matrix.TABLE else load(path))


def a_dist(folder: Path, **made: str) -> Path:
    """A folder like dist/ that holds the whole profile; `made` changes _build.json."""
    files = operators()
    name = "site-packages/sageattention/_build.json"
    files[name] = json.dumps({**json.loads(files[name]), **made}).encode()
    packages = operators_conda(folder / "conda" / "linux-64", files), cubins_conda(folder / "conda" / "noarch")
    for one in BUILDS:
        wheels.emit(*packages, build=one, out_dir=folder / "wheels")
    return folder


def a_group(
    platform: str, *, kernels: str = "cu128_h1_0", operators: str = "torch280_cu128_h2_0", commit: str = "c" * 40
) -> collect.Group:
    """A group of a collection by its names alone, without the files."""
    found = collect.Group(
        (build(platform=platform),),
        Path("noarch", f"sageattention-cubins-2.2.0-{kernels}.conda"),
        Path(platform, f"sageattention-2.2.0-{operators}.conda"),
        (Path(build(platform=platform).wheel_name),),
    )
    found.__dict__["made"] = {"commit": commit}
    return found
