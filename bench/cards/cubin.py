"""Read a cubin: what its kernel uses, from the ELF file, and its instructions, as nvdisasm writes them."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

# .nv.info attributes that compilers from 12.6 to 13.0 write alike (the register count in sh_info went away with ABI 8).
MAX_THREADS, REQUIRED_THREADS, FRAME_SIZE, MIN_STACK_SIZE, PARAMETER_BYTES, REGISTERS = 0x05, 0x10, 0x11, 0x12, 0x19, 0x2F

REGISTERS_PER_SM = 65536
# KiB of shared memory of a multiprocessor, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_KIB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
RESERVED_SHARED = 1024  # per block, by the system: from 9.0 on the compiler counts it as the kernel's own, where it has any


class CubinError(Exception):
    """The cubin cannot be read; the message says why and what to do."""


class Resources(NamedTuple):
    """What a cubin says its kernel uses."""

    registers: int
    stack: int
    local: int
    static_shared: int
    threads: int  # at most; 0: not said
    parameter_bytes: int


class Instruction(NamedTuple):
    """One instruction; `name` has its modifiers, without a predicate.

    The rest is what the compiler tells the scheduler, the same in every architecture from 7.0 on: clocks until the warp's next
    instruction, counters of outstanding work (0 to 5; 7: none) that go up until the result is written or the operands are read,
    and a bit for each counter that must be 0 first.
    """

    name: str
    text: str
    stall: int
    writes: int
    reads: int
    waits: int

    @property
    def opcode(self) -> str:
        return self.name.split(".", 1)[0]


class Code(NamedTuple):
    """A kernel's instructions, and at which of them its labels stand."""

    instructions: list[Instruction]
    labels: dict[str, int]


def resources(path: Path, kernel: str | None = None) -> Resources:
    """Of the one kernel in it, which has this name if one is given. A missing attribute is a KeyError."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        if elf["e_machine"] not in {190, "EM_CUDA"}:
            raise CubinError(f"{path}: no cubin, but of machine {elf['e_machine']}")
        table = elf.get_section_by_name(".symtab")
        assert isinstance(table, SymbolTableSection)
        symbols = [symbol.name for symbol in table.iter_symbols()]
        kernel = _kernel(path, elf, kernel)
        words: dict[int, list[tuple[int, int]]] = {}  # attribute → (symbol, value) of kernel and subroutines
        own: dict[int, int] = {}
        for section in elf.iter_sections():
            if section.name not in {".nv.info", f".nv.info.{kernel}"}:
                continue
            data, at = section.data(), 0
            while at < len(data):
                form, attribute, size = struct.unpack_from("<BBH", data, at)
                at += 4
                if form != 4:  # the value is in the place of the size
                    own[attribute] = size
                    continue
                if section.name == ".nv.info" and size == 8:
                    words.setdefault(attribute, []).append(struct.unpack_from("<II", data, at))
                elif attribute in {MAX_THREADS, REQUIRED_THREADS}:
                    x, y, z = struct.unpack_from("<III", data, at)
                    own[MAX_THREADS] = x * y * z
                at += size
        sizes = {section.name: section["sh_size"] for section in elf.iter_sections()}
        return Resources(
            registers=max(value for symbol, value in words[REGISTERS] if symbols[symbol] == kernel),
            stack=max(value for _, value in words[FRAME_SIZE] + words[MIN_STACK_SIZE]),
            local=sum(size for name, size in sizes.items() if name.startswith(".nv.local")),
            static_shared=sizes.get(f".nv.shared.{kernel}", 0),
            threads=own.get(MAX_THREADS, 0),
            parameter_bytes=own[PARAMETER_BYTES],
        )


def blocks_per_sm(used: Resources, threads: int, shared: int, capability: int) -> int:
    """How many blocks of so many threads and bytes of dynamic shared memory a multiprocessor holds."""
    # The hardware hands out registers to a warp in multiples of 256.
    registers = (used.registers + 7) // 8 * 8 * threads
    counted = capability >= 90 and used.static_shared > 0
    shared += used.static_shared + (0 if counted else RESERVED_SHARED)
    return min(REGISTERS_PER_SM // registers, SHARED_KIB[capability] * 1024 // shared)


def _kernel(path: Path, elf: ELFFile, expected: str | None) -> str:
    names = [str(section.name).removeprefix(".text.") for section in elf.iter_sections() if section.name.startswith(".text.")]
    if len(names) != 1 or names[0] != (expected or names[0]):
        raise CubinError(f"{path}: expected the kernel {expected or 'alone'}, got {names}")
    return names[0]


@cache
def disassembler() -> str:
    """nvdisasm of its wheel, of a CUDA toolkit, or on the path."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return str(file.locate())
    of_toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvdisasm"
    if of_toolkit.is_file():
        return str(of_toolkit)
    on_path = shutil.which("nvdisasm")
    if on_path is None:
        raise CubinError(
            "no nvdisasm: not of an installed nvidia-cuda-nvdisasm, not in CUDA_HOME or /usr/local/cuda, not on PATH; "
            "it comes with `pip install nvidia-cuda-nvdisasm`, conda-forge's cuda-nvdisasm and NVIDIA's toolkit"
        )
    return on_path


def listing(path: Path) -> str:
    """What nvdisasm writes of a cubin."""
    # What the last option leaves out says where branches lead that take it from a stack: there are none.
    done = subprocess.run([disassembler(), "-c", "-hex", "-ndf", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CubinError(f"{disassembler()} cannot read {path}: {done.stderr.strip()}")
    return done.stdout


def disassemble(path: Path) -> Code:
    """All instructions of a cubin in the order in which they lie."""
    text_of_all = listing(path)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    text = ""
    for line in text_of_all.splitlines():
        if label := re.match(r"(\.L_\S+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(.*?)\s*;", line):
            text = found[1]
        elif text and (word := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)):
            upper = int(word[1], 16)  # the upper half of 16 bytes
            name = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
            instructions.append(Instruction(name, text, upper >> 41 & 15, upper >> 46 & 7, upper >> 49 & 7, upper >> 52 & 63))
            text = ""
    if len(instructions) < 16:
        raise CubinError(f"{path}: cannot read the disassembly: {text_of_all[:500]}")
    return Code(instructions, labels)
