"""What executes an instruction, and for how many clocks: the units of a multiprocessor's quarter, which a scheduler feeds."""

from __future__ import annotations

import re
from typing import NamedTuple

from cards.cubin import Instruction
from cards.hot import product

# By unit, from memory of the pipelines that Nsight Compute names; an opcode that is not named goes to the ALU.
_FLOAT = {"FFMA", "FMUL", "FADD"}
_HEAVY = {"IMAD", "IDP"}
_HALF = {"HADD2", "HFMA2", "HMUL2"}
_MUFU = {"MUFU", "I2F", "F2I", "POPC", "FLO"}
_SHARED = {"LDS", "LDSM", "STS", "STSM", "LDGSTS", "SHFL", "ATOMS"}
# Those that take an issue slot and no unit that could be short.
_NONE = {
    "NOP", "BRA", "BSSY", "BSYNC", "CALL", "BAR", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "WARPGROUP", "SYNCS", "EXIT", "YIELD",
    "R2UR", "S2R", "CS2R", "LDG", "LDL", "STL", "LDC", "STG", "ELECT",
}  # fmt: skip

# Clocks from a unit's being done with an instruction until what waits for its result may start. Their sum with the unit's own time
# is from memory of what micro-benchmarks of these architectures find: some 30 for shared memory, some 24 for an exponential.
_LATENCY = {"shared": 24.0, "mufu": 16.0, "tensor": 24.0, "none": 30.0}
SHARED_BYTES = 128  # a clock and multiprocessor, on every architecture from 7.0 on

UNITS = ("tensor", "mufu", "fma", "alu", "shared")


class Rates(NamedTuple):
    """Of a multiprocessor, in results a clock. From memory of the CUDA programming guide's table of arithmetic throughput unless said."""

    float32: int
    half: int  # instructions, each of a pair
    narrow: int  # conversions to and from e4m3: as measured on the H200 (bench/notes.md), taken for all, and for e2m1
    integer: int = 64
    mufu: int = 16


class Unit(NamedTuple):
    """What executes an instruction of a warp, and for how long it is busy with it, in clocks."""

    name: str
    busy: float

    @property
    def latency(self) -> float:
        return _LATENCY.get(self.name, 4.0)


def unit_of(instruction: Instruction, rates: Rates, tensor: dict[tuple[str, str], float], share: float) -> Unit:
    """Of an architecture with these rates; `tensor` are multiply-adds a clock and multiprocessor, of which mma.sync has this share."""
    opcode, name = instruction.opcode, instruction.name
    if found := product(instruction):
        rate = tensor[found.kind, found.sums] * (1.0 if "GMMA" in name else share)
        return Unit("tensor", found.multiply_adds / (rate / 4))
    if opcode in _SHARED:
        return Unit("shared", shared_bytes(instruction) / (SHARED_BYTES / 4))
    if opcode in _NONE or opcode.startswith("U"):
        return Unit("none", 0.0)
    if opcode in _MUFU:
        unit, rate = "mufu", rates.mufu
    elif opcode in _FLOAT:
        unit, rate = "fma", rates.float32
    elif opcode in _HALF:
        unit, rate = "fma", rates.half
    elif opcode in _HEAVY:
        unit, rate = "fma", rates.integer
    else:
        unit, rate = "alu", rates.narrow if re.search("E4M3|E2M1", name) else rates.integer
    return Unit(unit, 32 / (rate / 4))


def shared_bytes(instruction: Instruction) -> int:
    """What passes between a warp and shared memory, at most, in whole rows of its banks."""
    name = instruction.name
    if instruction.text.startswith("@!PT"):
        return 0
    if name.startswith("LDSM"):
        return 128 * int(name[-1])
    bits = re.search(r"\.(64|128)\b", name)
    return 4 * int(bits[1]) if bits else 128
