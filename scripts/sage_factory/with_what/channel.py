"""Lay a local conda channel from PyPI wheels, for machines that cannot reach conda-forge.

It holds what recipe/recipe.yaml asks for under conda-forge's names and versions, and no more. Its packages are thin:
links into one unpacked copy of each wheel set under .venvs, and wrappers around the compiler and the Python at
hand. So it serves this machine alone, is laid in seconds, and costs one download per CUDA and PyTorch version.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rattler.index import index_fs
from rattler_build import RattlerBuildError, assemble_package

from sage_factory import ROOT, FactoryError
from sage_factory.files import sha256
from sage_factory.what import matrix
from sage_factory.what.table import Cuda, known
from sage_factory.with_what import cpu_torch, venvs

WORK = ROOT / "build" / "pypi"
CONDA_FORGE = "conda-forge"  # the channel that there is without this one
SHIM = Path(__file__).resolve().parent / "nvrtc_nvcc.py"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"lib/python{PYTHON}/site-packages"
OLDEST_GCC = 9  # that compiles PyTorch's headers
# Packages carry a time; a constant one keeps equal channels equal.
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)

Report = Callable[[str], None]


class ChannelError(FactoryError):
    """The channel cannot be laid; the message says what is missing."""


@dataclass(frozen=True)
class Compiler:
    """The system's C++ compiler, which the channel forwards to."""

    c: str
    cxx: str
    version: str

    @property
    def major(self) -> str:
        return self.version.split(".")[0]

    @property
    def too_new(self) -> bool:
        """For operators that load beside the promised glibc."""
        return int(self.major) > int(matrix.load().gcc)


@dataclass
class Thin:
    """A package of links and small files."""

    name: str
    version: str
    depends: list[str] = field(default_factory=list)
    links: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path, target: Callable[[Path], Path] = lambda source: source) -> None:
        """Its files, as they are installed; a link leads to what `target` makes of its source."""
        folder.mkdir(parents=True, exist_ok=True)
        for place, text in self.texts.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.fsencode(text))  # it names paths
            path.chmod(0o755 if place.startswith("bin/") else 0o644)
        for place, source in self.links.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target(source))

    def digest(self) -> str:
        content = [
            self.name,
            self.version,
            *self.depends,
            *map(str, sorted(self.links.items())),
            *map(str, sorted(self.texts.items())),
        ]
        return sha256(os.fsencode("\n".join(content)))


def compiler() -> Compiler:
    """What CC and CXX name; else gcc and g++, or where these are too new for operators the newest on PATH that is not."""
    newest = int(matrix.load().gcc)
    found = _compiler("gcc", "g++")
    if (found is None or found.too_new) and not os.environ.keys() & {"CC", "CXX"}:
        found = next(filter(None, (_compiler(f"gcc-{n}", f"g++-{n}") for n in range(newest, OLDEST_GCC - 1, -1))), found)
    if found is None:
        raise ChannelError(
            f"no C++ compiler found (looked for g++ and gcc): install it, on Debian and Ubuntu `apt install g++-{newest}`, "
            "or name one in CXX and CC"
        )
    return found


def _compiler(c: str, cxx: str) -> Compiler | None:
    """Of those names on PATH, or of those in CC and CXX; None where there is none."""
    c, cxx = os.environ.get("CC") or shutil.which(c) or "", os.environ.get("CXX") or shutil.which(cxx) or ""
    if not c or not cxx:
        return None
    try:
        version = subprocess.run([cxx, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ChannelError(f"the C++ compiler {cxx} does not run ({error}): install g++ or name another in CXX") from error
    return Compiler(shutil.which(c) or c, shutil.which(cxx) or cxx, version)


def check_operators(found: Compiler) -> None:
    """ChannelError if `verify` would refuse, once all is compiled, what this compiler makes."""
    if found.too_new:
        newest = int(matrix.load().gcc)
        raise ChannelError(
            f"{found.cxx} is GCC {found.version}, too new for operators: its libstdc++ has symbols that machines with the promised "
            f"glibc lack (GLIBCXX_3.4.32 of GCC 13, CXXABI_1.3.15 of GCC 14). GCC {newest} is the newest that will do: on Debian "
            f"and Ubuntu `apt install g++-{newest}`, which is then found by itself, or name one in CC and CXX"
        )


def installed(lock: str, report: Report) -> Path:
    """The wheels of recipe/pypi/<lock>.txt side by side: the same environment that `run.py` would make of that file."""
    report(f"{lock} from PyPI")
    venvs.ensure(lock)
    return venvs.site_packages(lock)


def _release(lock: str, name: str) -> str:
    """The version that was installed: a lock file may pin one per Python."""
    found = next(venvs.site_packages(lock).glob(f"{name.replace('-', '_')}-*.dist-info"), None)
    if found is None:
        raise ChannelError(f"{lock} was installed without {name}: remove .venvs/{lock} and run again")
    return found.name.removesuffix(".dist-info").rpartition("-")[2]


def _stamp(lock: str) -> dict[str, str]:
    """Other wheels behind the same links make another package."""
    return {f"share/pypi-channel/{lock}.txt": sha256(venvs.lock_file(lock).read_bytes()) + "\n"}


def _site_links(target: Path, names: Sequence[str] | None = None) -> dict[str, Path]:
    """Links from site-packages to what pip put side by side (all of it, or the named ones with their metadata)."""
    links = {}
    for entry in sorted(target.iterdir()):
        plain = re.split(r"-\d", entry.name)[0].removesuffix(".py")
        if entry.name not in ("__pycache__", "share", "beside.pth") and (names is None or plain in names):
            links[f"{SITE}/{entry.name}"] = entry
    return links


def python() -> Thin:
    """The interpreter at hand, with an empty site-packages: the layout that venv makes."""
    base = Path(venvs.base_python()).resolve()
    version = sys.version.split()[0]
    config = f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {version}\nexecutable = {base}\n"
    names = ("python", "python3", f"python{PYTHON}")
    return Thin("python", version, links={f"bin/{n}": base for n in names}, texts={"pyvenv.cfg": config})


def compilers(found: Compiler, suffix: str) -> list[Thin]:
    c, cxx = f"export CC={shlex.quote(found.c)}\n", f"export CXX={shlex.quote(found.cxx)}\n"
    return [
        Thin(f"gcc_{suffix}", found.version, texts={"etc/conda/activate.d/gcc.sh": c}),
        Thin(f"gxx_{suffix}", found.version, depends=[f"gcc_{suffix} {found.version}.*"],
             texts={"etc/conda/activate.d/gxx.sh": cxx}),
    ]  # fmt: skip


# Functions that glibc 2.34 moved from libdl and libpthread into libc, or gave a new version: linked on a newer system,
# a binary would ask for that one. Each keeps its first version forever.
MOVED = ("dlopen", "dlsym", "dlclose", "dlerror", "dladdr", "pthread_create", "pthread_join", "pthread_once",
         "pthread_key_create", "pthread_getspecific", "pthread_setspecific", "pthread_mutex_trylock")  # fmt: skip


def sysroot(glibc: str, suffix: str, first: str) -> Thin:
    """The glibc promise kept with the system's own headers."""
    lines = [f'__asm__(".symver {name}, {name}@GLIBC_{first}");' for name in MOVED]
    header = "#pragma once\n#if defined(__linux__) && !defined(__ASSEMBLER__)\n" + "\n".join(lines) + "\n#endif\n"
    place = f"share/glibc-{glibc}/symbols.h"
    flags = f"""apostrophe="'" escaped="'\\\\''" # a path may have one
export CXXFLAGS="${{CXXFLAGS:-}} -include '${{CONDA_PREFIX//$apostrophe/$escaped}}/{place}'"
"""
    return Thin(f"sysroot_{suffix}", glibc, texts={place: header, "etc/conda/activate.d/sysroot.sh": flags})


def nvcc(cuda: Cuda, suffix: str, found: Compiler, report: Report) -> Thin:
    target = installed(f"cuda-{cuda.version}", report)
    stamp = _stamp(f"cuda-{cuda.version}")
    if "nvidia-cuda-nvcc" in cuda.pypi:
        release = cuda.pypi["nvidia-cuda-nvcc"]
        if int(found.major) >= int(cuda.gcc_below):
            raise ChannelError(
                f"nvcc of CUDA {cuda.version} takes gcc below {cuda.gcc_below}, but {found.cxx} is {found.version}: "
                "name an older one in CXX and CC"
            )
        folder = f"{target}/nvidia/cu{cuda.version.split('.')[0]}/bin"
        texts = {"bin/nvcc": _forward(f"{folder}/nvcc", "-ccbin", found.cxx), "bin/ptxas": _forward(f"{folder}/ptxas")}
        return Thin(f"cuda-nvcc_{suffix}", release, texts=texts | stamp)
    release = cuda.pypi["nvidia-cuda-nvrtc-cu12"]
    place = "libexec/nvrtc_nvcc.py"
    python, toolkit = shlex.quote(sys.executable), shlex.join([str(target), release])
    text = f'#!/bin/sh\nexec {python} -IS "$(dirname "$0")/../{place}" {toolkit} "$@"\n'
    texts = {
        "bin/nvcc": text,
        "bin/ptxas": _forward(f"{target}/nvidia/cuda_nvcc/bin/ptxas"),
        place: SHIM.read_text(encoding="utf-8"),
    }
    return Thin(f"cuda-nvcc_{suffix}", release, texts=texts | stamp)


def _forward(*command: str) -> str:
    """A command that is another with these first arguments."""
    return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'


def tools(report: Report) -> list[Thin]:
    target = installed("tools", report)
    cmake = _forward(f"{target}/cmake/data/bin/cmake")
    pin = [f"python {PYTHON}.*"]
    backend = ("scikit_build_core", "packaging", "pathspec", "tomli", "exceptiongroup")
    return [
        Thin("cmake", _release("tools", "cmake"), texts={"bin/cmake": cmake}),
        Thin("ninja", _release("tools", "ninja"), links={"bin/ninja": venvs.bin_dir("tools") / "ninja"}),
        Thin("pip", _release("tools", "pip"), pin, _site_links(target, ["pip"])),
        Thin("scikit-build-core", _release("tools", "scikit-build-core"), pin, _site_links(target, backend)),
    ]


def torch_environment(version: str, report: Report = print) -> str:
    """The environment that has PyTorch, and all it needs to be imported on a CPU, for the Python at hand."""
    pythons = known("PyTorch", version, matrix.load().pytorch).python
    if PYTHON not in pythons:
        raise ChannelError(
            f"PyTorch {version} has no release for the Python at hand, {PYTHON}: start this with one of {', '.join(pythons)}"
        )
    report(f"PyTorch {version} from PyPI")
    return cpu_torch.ensure(f"torch-{version}")


def pytorch(version: str, report: Report) -> list[Thin]:
    """PyTorch, and apart from it the one package that build tools want too."""
    name, pin, shared = torch_environment(version, report), [f"python {PYTHON}.*"], "typing_extensions"
    target = venvs.site_packages(name)
    # pip is the environment's own, packaging is the build tools'.
    links = {k: v for k, v in _site_links(target).items() if not re.match(rf"{SITE}/(pip|packaging|{shared})\b", k)}
    release = _release(name, shared)
    return [
        Thin("pytorch", version, [*pin, shared], links, _stamp(f"torch-{version}")),
        Thin(shared, release, pin, _site_links(target, [shared])),
    ]


def lay(
    platform: str, *, cuda: str | None = None, torch: str | None = None, beside: str | None = None, report: Report = print
) -> Path:
    """The channel for kernels (`cuda`) or operators (`torch`): a folder named by what is in it, whole or not there.

    `beside` is the PyTorch that operators are tested beside, where it is not the one that they are compiled with.
    """
    here = matrix.host_platform()
    if platform != here or here.startswith("win-"):
        raise ChannelError(
            f"a channel from PyPI serves the Linux machine that lays it ({here}), not {platform}: use --channel conda-forge"
        )
    table, found = matrix.load(), compiler()
    if torch:
        check_operators(found)
    place = table.platforms[here]
    packages = [python(), *compilers(found, here), *tools(report)]
    if place.glibc and place.glibc_first:
        packages.append(sysroot(place.glibc, here, place.glibc_first))
    if cuda:
        packages.append(nvcc(known("CUDA version", cuda, table.cuda), here, found, report))
    for one in dict.fromkeys(filter(None, (torch, beside))):
        packages += pytorch(one, report)
    digest = sha256("".join(p.digest() for p in packages).encode())[:12]
    target = WORK / "channels" / digest
    if not target.is_dir():
        report("laying the channel")
        _write(packages, target, here)
    return target


def _write(packages: Sequence[Thin], target: Path, platform: str) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for package in packages:
            stage = partial / "stage" / package.name / package.digest()[:8]
            package.write(stage)
            assemble_package(
                package.name,
                package.version,
                platform,
                f"pypi_h{package.digest()[:8]}_0",
                partial / "channel" / platform,
                files_dir=stage,
                depends=package.depends,
                timestamp=EPOCH,
                compression_level=1,
                detect_prefix=False,
            )
        (partial / "channel" / "noarch").mkdir(parents=True, exist_ok=True)
        asyncio.run(index_fs(partial / "channel", write_zst=False, write_shards=False))
        (partial / "channel").replace(target)
    except RattlerBuildError as error:
        raise ChannelError(f"the channel cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
