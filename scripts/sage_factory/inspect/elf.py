"""What a binary says of itself: the libraries, symbol versions and search paths of a host library, a cubin's GPU."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import cache

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import Policy, WheelPolicies
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from packaging.version import InvalidVersion, Version

from sage_factory.what import matrix

EM_CUDA = 190
# libpython would tie the library to one Python, the others to a PyTorch with CUDA or to one CUDA runtime.
FORBIDDEN = re.compile(r"lib(python|cudart|cuda\.|torch_cuda|c10_cuda|torch_python|nvrtc|cublas)")
# Where people and machines build. `/build` and `/host` are what the recipe maps its own folders to.
# Three patterns that each begin with what is looked for: one for all takes eighty times as long over a set of kernels.
BUILD_PATHS = (
    re.compile(rb"/(?:home|root|tmp|var/tmp|Users|work|mnt|workspace|__w|conda-bld|\.venvs)/[\x21-\x7e]{1,120}"),
    re.compile(rb":\\Users\\[\x21-\x7e]{1,120}"),
    re.compile(rb"_h_env_placehold[\x21-\x7e]{0,40}"),
)


def machine(platform: str) -> str:
    """The processor of a Linux platform as compilers name it, such as x86_64."""
    return matrix.load().platforms[platform].wheel.removeprefix("linux_")


def host_faults(name: str, data: bytes, platform: str, glibc: str) -> Iterator[str]:
    """What keeps a Linux library from working on every machine of `platform`."""
    try:
        elf = ELFFile(io.BytesIO(data))
        expected = f"EM_{machine(platform).upper()}"
        if not expected.startswith(str(elf["e_machine"])):  # EM_PPC64 is ppc64le's too
            yield f"{name} is code for {elf['e_machine']}, expected {expected} ({platform})"
        dynamic = [s for s in elf.iter_sections() if isinstance(s, DynamicSection)]
        if not dynamic:
            yield f"{name} has no dynamic section: not a shared library, or truncated"
        for section in dynamic:
            yield from _dynamic_faults(name, section)
        yield from _export_faults(name, elf)
        yield from _version_faults(name, elf, platform, glibc)
    except Exception as error:  # noqa: BLE001 - a damaged header may ask for anything
        yield f"{name} is not a whole ELF file ({error}): truncated or damaged"


def _dynamic_faults(name: str, section: DynamicSection) -> Iterator[str]:
    for tag in section.iter_tags():
        kind = tag.entry.d_tag.removeprefix("DT_")
        # pyelftools puts the text of such an entry into an attribute of the entry's name.
        text = getattr(tag, kind.lower(), "")
        if kind == "NEEDED" and FORBIDDEN.search(text):
            yield f"{name} needs {text}, which it must do without (DT_NEEDED)"
        elif kind in {"RPATH", "RUNPATH"}:
            yield f"{name} has {kind} {text!r}, expected none: link without rpath"


def _export_faults(name: str, elf: ELFFile) -> Iterator[str]:
    """Of two copies in one process the second would use what the first one exports."""
    symbols = elf.get_section_by_name(".dynsym")
    exported = sorted(s.name for s in symbols.iter_symbols() if s["st_shndx"] != "SHN_UNDEF") if symbols else []
    if others := [symbol for symbol in exported if not symbol.startswith("sage_")]:
        yield f"{name} exports {others[0]} and {len(others) - 1} more symbols: expected those alone that begin with sage_"


@cache
def policy(platform: str, glibc: str) -> Policy:
    """auditwheel's table of what a machine with this glibc has at least."""
    name = f"manylinux_{glibc.replace('.', '_')}_{machine(platform)}"
    return WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine(platform))).get_policy_by_name(name)


def _version_faults(name: str, elf: ELFFile, platform: str, glibc: str) -> Iterator[str]:
    promised = policy(platform, glibc).symbol_versions
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for library, versions in section.iter_versions():
            for version in versions:
                family, _, number = version.name.partition("_")
                if family in promised and number not in promised[family]:
                    newest = _newest(promised[family])
                    yield (
                        f"{name} needs {version.name} of {library.name}, newer than promised: "
                        f"variants.yaml says glibc {glibc}, which has {family} up to {newest}"
                    )


def _newest(numbers: frozenset[str]) -> str:
    versions = []
    for number in numbers:
        try:
            versions.append(Version(number))
        except InvalidVersion:
            continue  # names such as TM_1 have no order
    return str(max(versions))


def gpu_faults(name: str, data: bytes, architecture: str) -> Iterator[str]:
    """Whether `data` is a cubin with code for `architecture`, such as sm_90, or for an earlier minor version that it runs."""
    try:
        elf = ELFFile(io.BytesIO(data))
        if elf["e_machine"] not in {EM_CUDA, "EM_CUDA"}:
            yield f"{name} is an ELF file for {elf['e_machine']}, expected CUDA code (EM_CUDA)"
            return
        # ABI 8 (CUDA 13, and 12.8 for Blackwell) keeps the SM number in the second byte, earlier ones in the first.
        shift = 8 if elf["e_ident"]["EI_ABIVERSION"] >= 8 else 0
        found, expected = elf["e_flags"] >> shift & 0xFF, int(re.sub(r"\D", "", architecture))
        runs = architecture[-1].isdigit() and found // 10 == expected // 10 and found < expected
        if found != expected and not runs:
            yield f"{name} is code for sm_{found}, expected sm_{expected} as its folder says"
        if not any(s.name.startswith(".text.") and s["sh_size"] for s in elf.iter_sections()):
            yield f"{name} holds no kernel: it has no .text section"
    except Exception as error:  # noqa: BLE001
        yield f"{name} is not a whole CUDA ELF file ({error}): truncated or damaged"


def ptx_faults(name: str, data: bytes, architecture: str) -> Iterator[str]:
    """Whether `data` is PTX for `architecture`, such as compute_80."""
    target = re.search(rb"^\.target\s+(sm_\w+)", data, re.MULTILINE)
    expected = architecture.replace("compute_", "sm_")
    found = target[1].decode() if target else "no .target"
    if found != expected:
        yield f"{name} is PTX for {found}, expected {expected} as its folder says"
    if b".entry" not in data:
        yield f"{name} holds no kernel: it has no .entry"


def path_faults(name: str, data: bytes) -> Iterator[str]:
    """Paths of the machine that built it: they tell of it, and make its output differ from another's."""
    for found in sorted({match[0] for pattern in BUILD_PATHS for match in pattern.finditer(data)})[:3]:
        yield f"{name} names a path of the build machine: {found.decode(errors='replace')!r}"
