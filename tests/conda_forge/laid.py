"""Lay conda-forge's part that this repository uses on linux-64, of real programs: `python tests/conda_forge/laid.py FOLDER`.

For trying the front door where conda-forge cannot be reached: FOLDER/conda-forge is a channel of what pixi.toml and the recipe ask
for, FOLDER/simple an index with the one wheel that pixi.toml takes from PyPI. Python packages are the wheels that scripts/locks/
and recipe/pypi/ pin, one conda package each, with its own requirements; Python is the one that runs this, which has to be the one
that pixi.toml asks for; gcc and g++ are the system's; cuda-nvcc is that of with_what/channel.py. actionlint, gh and rattler-build
are taken from the path, and left empty where they are not there. They are links, so FOLDER serves this machine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler.index import index_fs
from rattler_build import assemble_package

from conda_forge import model
from sage_factory.what import matrix
from sage_factory.with_what import channel, cpu_torch, venvs

# What conda-forge calls otherwise than PyPI.
NAMES = {
    "matplotlib": "matplotlib-base",
    "msgpack": "msgpack-python",
    "nvidia-cuda-nvdisasm": "cuda-nvdisasm",
    "torch": "pytorch",
}
# What is not a package of its own there: CUDA comes with PyTorch's wheel where that is whole, zig from PyPI, the rest is laid below.
WITHIN = re.compile(r"nvidia-(?!cuda-nvdisasm).*|ziglang|cmake|ninja")
# What conda-forge's packages add to what is built with them (their recipes' run_exports).
RUN_EXPORTS = {
    "python": {"noarch": ["python"], "weak": [f"python_abi {channel.PYTHON}.* *_cp{channel.PYTHON.replace('.', '')}"]},
    "gcc_linux-64": {"strong": ["libgcc >=12"]},
    "gxx_linux-64": {"strong": ["libgcc >=12", "libstdcxx >=12"]},
    "sysroot_linux-64": {"strong": ["__glibc >=2.28,<3.0.a0"]},
    "cuda-nvcc_linux-64": {"strong": ["cuda-version >=12.8,<13"]},
}
HERE = "linux-64"
# conda keeps relative links and copies what absolute ones point to: this leads to the root from wherever a link lies.
UP = Path(*[".."] * 40)
NVCC = f"cuda-nvcc_{HERE}"
CUDA = ("12.8", "12.9")  # what is compiled for; compilers of the other releases are empty packages
TORCH = ("2.8.0", "2.9.0")  # the tests', and one to go on to


def distributions(locks: list[str]) -> Iterator[tuple[Path, importlib.metadata.Distribution]]:
    """What is installed of these locks, each version once, and where; of PyTorch what needs no driver."""
    seen: set[tuple[str, str]] = set()
    for lock in locks:
        if lock.startswith("torch-"):
            site = venvs.site_packages(cpu_torch.ensure(lock))
        else:
            site = venvs.site_packages(lock)
            if not site.is_dir():
                venvs.ensure(lock)
        for found in importlib.metadata.distributions(path=[str(site)]):
            name = canonicalize_name(found.metadata["Name"])
            if (name, found.version) not in seen and not WITHIN.fullmatch(name):
                seen.add((name, found.version))
                yield site, found


def of_wheel(site: Path, wheel: importlib.metadata.Distribution) -> channel.Thin:
    """A wheel as a conda package."""
    name = canonicalize_name(wheel.metadata["Name"])
    package = channel.Thin(NAMES.get(name, name), wheel.version, [f"python {channel.PYTHON}.*"])
    for line in wheel.requires or []:
        wanted = Requirement(line)
        other = canonicalize_name(wanted.name)
        if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and not WITHIN.fullmatch(other):
            pin = str(wanted.specifier) if str(wanted.specifier).startswith("==") else ""
            package.depends.append(f"{NAMES.get(other, other)} {pin}".strip())
    for file in wheel.files or []:
        path = Path(str(wheel.locate_file(file))).resolve()
        if path.parent.name == "bin":
            text = path.read_bytes()
            if text.startswith(b"#!"):  # a script for the Python of the environment that the wheel was installed into
                package.texts[f"bin/{path.name}"] = "#!/usr/bin/env python\n" + text.decode().split("\n", 1)[1]
            else:
                package.links[f"bin/{path.name}"] = path
        elif site in path.parents and "__pycache__" not in path.parts:
            top = path.relative_to(site).parts[0]
            package.links[f"{channel.SITE}/{top}"] = site / top
    return package


def compilers(found: channel.Compiler) -> Iterator[channel.Thin]:
    """gcc 12 as conda-forge names it: `gxx` for whoever works here, `gxx_linux-64` for the recipe."""
    programs = {"gcc": found.c, "cc": found.c, "g++": found.cxx, "c++": found.cxx}
    yield channel.Thin("gxx", found.version, links={f"bin/{name}": Path(path) for name, path in programs.items()})
    yield from channel.compilers(found, HERE)
    for name in ("libgcc", "libstdcxx"):
        yield channel.Thin(name, "15.2.0")


def toolkit(cuda: str, found: channel.Compiler) -> Iterator[channel.Thin]:
    """cuda-nvcc of a release; of those that are only to be solved for, empty."""
    nvcc = channel.nvcc(matrix.load().cuda[cuda], HERE, found, print) if cuda in CUDA else channel.Thin(NVCC, f"{cuda}.99")
    yield nvcc
    yield channel.Thin("cuda-nvcc", nvcc.version, [f"{nvcc.name} {nvcc.version}.*"])
    yield channel.Thin("cuda-version", cuda)


def packages() -> Iterator[channel.Thin]:
    """Everything there is for linux-64."""
    table, found = matrix.load(), channel.compiler()
    for site, wheel in distributions(
        ["tools", "build", "test", "lint", "bench", "lock", *(f"torch-{torch}" for torch in TORCH)]
    ):
        package = of_wheel(site, wheel)
        if package.name == "pytorch":
            # What the whole PyTorch requires, and pip looks for; that of conda-forge does not.
            package.links |= {f"{channel.SITE}/{path.name}": path for path in site.glob("nvidia*")}
        yield package
    yield channel.python()
    yield channel.Thin("python_abi", channel.PYTHON)
    yield from compilers(found)
    yield from (tool for tool in channel.tools(print) if tool.name in ("cmake", "ninja"))
    place = table.platforms[HERE]
    yield channel.sysroot(str(place.glibc), HERE, str(place.glibc_first))
    for cuda in table.cuda:
        yield from toolkit(cuda, found)
    for name, version in (("actionlint", "1.7.12"), ("gh", "2.80.0"), ("rattler-build", "0.72.2")):
        program = shutil.which(name)
        yield channel.Thin(name, version, links={f"bin/{name}": Path(program)} if program else {})


def write(package: channel.Thin, folder: Path) -> str:
    """Pack it; its file's name."""
    stage = folder / "stage" / package.name / package.digest()[:8]
    package.write(stage, lambda source: UP / source.relative_to("/"))
    suffix = {"python": "cpython", "python_abi": f"cp{channel.PYTHON.replace('.', '')}"}.get(package.name, "0")
    made = assemble_package(
        package.name, package.version, HERE, f"h{package.digest()[:8]}_{suffix}", folder / "conda-forge" / HERE,
        files_dir=stage, depends=package.depends, timestamp=channel.EPOCH, compression_level=1, detect_prefix=False,
    )  # fmt: skip
    return Path(made.path).name


def lay(folder: Path) -> None:
    """The channel and the index, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    forge = folder / "conda-forge"
    exports = {write(package, folder): RUN_EXPORTS.get(package.name, {}) for package in packages()}
    shutil.rmtree(folder / "stage")
    asyncio.run(index_fs(forge, write_zst=False, write_shards=False, force=True))
    index = (forge / HERE / "repodata.json").read_text(encoding="utf-8")
    # The other platforms are solved for and never installed: the model does.
    others = [subdir for subdir in model.SUBDIRS if subdir not in (HERE, "noarch")]
    known = list(model.records())
    model.lay(forge, [r | {"subdir": other} for other in others for r in known if r["subdir"] in (other, "noarch")])
    (forge / HERE / "repodata.json").write_text(index, encoding="utf-8")
    content = {"info": {"subdir": HERE}, "packages": {}, "packages.conda": {f: {"run_exports": e} for f, e in exports.items()}}
    (forge / HERE / "run_exports.json").write_text(json.dumps(content), encoding="utf-8")
    wheels = folder / "simple" / "ziglang"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
    for processor in ("x86_64", "aarch64"):
        subprocess.run([*pip, "--dest", wheels, "--platform", f"manylinux2014_{processor}", "ziglang"], check=True)
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in wheels.iterdir())
    (wheels / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    lay(parser.parse_args().folder.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
