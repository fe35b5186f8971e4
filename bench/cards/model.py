"""From a kernel's cubin and a card's rates to clocks for a tile of scores, and from those to the time of a call."""

from __future__ import annotations

import heapq
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cards.cubin import Instruction, blocks_per_sm, disassemble, resources
from cards.gpus import Card
from cards.hot import hot_path
from cards.shape import Shape
from cards.simulate import simulate
from cards.units import UNITS, unit_of

TILE = 128 * 128  # scores
L2_BYTES = 64  # a clock and multiprocessor, from L2
SCHEDULERS = 4

# What the simulation leaves out (instruction fetch, banks of registers, barriers): the share of its speed that the H200's kernels
# reach, and the clocks that a block of threads takes before and after its loop.
REACHED = 0.87
AROUND = 6000
LAUNCH = 3e-6  # seconds until a kernel's first instruction where it cannot be launched ahead of the last one's end


class Kernel(NamedTuple):
    """An attention kernel's main loop."""

    name: str
    architecture: str
    head_dim: int
    path: tuple[Instruction, ...]
    scores: int  # that a warp computes once round
    warps: int  # a scheduler's, at a time
    rows: int  # of a block of threads
    blocks: int  # of threads on a multiprocessor
    copied: float  # bytes of K and V that a tile takes from L2

    @property
    def asynchronous(self) -> bool:
        """Whether it multiplies with wgmma."""
        return any("GMMA" in i.name for i in self.path)


def shared_bytes(name: str, head_dim: int) -> int:
    """Dynamic shared memory of a block of threads of ours: csrc/kernels/attention/mma_sync/layout.h; 0 for wgmma's, which is alone."""
    if name.startswith("sm90"):
        return 0
    if "fp4" in name:
        return 2 * -(-block_bytes(name, head_dim) // 1024) * 1024 + 128 + 64 + 4 * 128
    threads = 128 if head_dim <= 128 else 256
    return 2 * block_bytes(name, head_dim) + 128 + 4 * 128 + (16 * 128 + 16 * threads if "pv_f8" in name else 0)


def block_bytes(name: str, head_dim: int) -> int:
    """Of 64 keys: K, V and their scales; in FP4 (csrc/kernels/attention/sm120_qk_fp4_pv_fp4.h) the scores of Q's mean too."""
    if "fp4" in name:
        return 36 * head_dim + 16 + 36 * head_dim + 4 * (head_dim + 4) + 4 * 64
    in_8_bits = "pv_f8" in name
    scales = 4 * head_dim + 16 if in_8_bits else head_dim + 16 if "accum" in name else 0
    return 64 * head_dim * (2 if in_8_bits else 3) + scales + 16


@cache
def read_kernel(path: Path, head_dim: int, *, shared: int | None = None, threads: int = 0) -> Kernel:
    """A kernel of which a block of threads computes 128 rows, or with wgmma 64 for each warpgroup that computes.

    `shared` bytes and `threads` of a block, where it is not one of ours, and the cubin does not say. Raises ValueError where the
    loop is not found.
    """
    name, capability = path.stem.split("-")[0], int(re.sub(r"\D", "", path.parent.name))
    used, code = resources(path), disassemble(path)
    threads = used.threads or threads
    asynchronous = any("GMMA" in i.name for i in code.instructions)
    loads = any(i.opcode == "UTMALDG" for i in code.instructions)  # the first warpgroup, by tensor maps, for the others
    computing = threads // 32 - (4 if loads else 0)
    rows = computing * 16 if asynchronous else 128
    found, keys = hot_path(code, head_dim, rows // computing)
    shared = shared_bytes(name, head_dim) if shared is None else shared
    blocks = 1 if asynchronous else blocks_per_sm(used, threads, shared, capability)
    # In FP4 some copies are of few threads alone; the copy engine's are of a block of keys.
    whole = "fp4" in name or any(i.opcode == "UBLKCP" for i in found)
    copies = (
        2 * block_bytes(name, head_dim) / TILE
        if whole
        else 512 * sum(i.opcode == "LDGSTS" for i in found) * computing / (rows * keys)
    )
    # Copied by another warp: K in 8 bits and V in 16, for the two blocks of a cluster at once.
    multicast = head_dim * 3 / rows / 2
    return Kernel(
        path.stem, path.parent.name, head_dim, tuple(found), rows // computing * keys, blocks * computing // SCHEDULERS, rows, blocks,
        TILE * (multicast if asynchronous else copies),
    )  # fmt: skip


class Load(NamedTuple):
    """Clocks of a multiprocessor for a tile."""

    units: dict[str, float]  # by unit
    with_blocks: tuple[float, ...]  # simulated, with 1, 2, … blocks of threads on it

    @property
    def simulated(self) -> float:
        """With as many as fit."""
        return self.with_blocks[-1]

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self.units, key=self.units.__getitem__)


@cache
def load(kernel: Kernel, card: Card) -> Load:
    """What a tile takes on a card."""
    units = [unit_of(i, card.rates, card.tensor, card.mma_sync_share) for i in kernel.path]
    rounds = TILE / (SCHEDULERS * kernel.scores)  # of a scheduler's warps, in all
    clocks = {name: rounds * sum(u.busy for u in units if u.name == name) for name in UNITS}
    clocks["issue"] = rounds * len(kernel.path)
    clocks["L2"] = kernel.copied / L2_BYTES
    warps = [kernel.warps * blocks // kernel.blocks for blocks in range(1, kernel.blocks + 1)]
    return Load(clocks, tuple(rounds / n * simulate(kernel.path, units, n) for n in warps))


def _makespan(blocks: list[float], multiprocessors: int, clocks: tuple[float, ...]) -> float:
    """Clocks until all blocks of threads are done that start, in this order, as others end.

    A multiprocessor with k of them does a unit of their work in clocks[k - 1], and they share it alike.
    """
    todo = iter(blocks)
    running: list[list[float]] = [[] for _ in range(multiprocessors)]  # what each has left
    for _ in clocks:
        for left, work in zip(running, todo, strict=False):
            left.append(work)
    ends = [(min(left) * len(left) * clocks[len(left) - 1], number) for number, left in enumerate(running) if left]
    heapq.heapify(ends)
    clock = 0.0
    while ends:
        clock, number = heapq.heappop(ends)
        done = min(running[number])
        left = [work - done for work in running[number]]
        left.remove(0.0)
        left += islice(todo, 1)
        running[number] = left
        if left:
            heapq.heappush(ends, (clock + min(left) * len(left) * clocks[len(left) - 1], number))
    return clock


def attention_seconds(kernel: Kernel, card: Card, shape: Shape, *, rows_descend: bool = True) -> float:
    """Of the attention kernel alone. Blocks of threads start as others end, the last rows' first or, if not, each head's in order."""
    clocks = tuple(c / REACHED for c in load(kernel, card).with_blocks)
    blocks = []  # in tiles
    for first in range(0, shape.tokens, kernel.rows):
        keys = min(shape.tokens, first + kernel.rows) if shape.causal else shape.tokens
        blocks.append(-(-keys // 64) * 64 * kernel.rows / TILE + AROUND / clocks[-1] / kernel.blocks)
    heads = shape.batch * shape.heads
    queue = [b for b in reversed(blocks) for _ in range(heads)] if rows_descend else blocks * heads
    ghz = card.wgmma_ghz if kernel.asynchronous and card.wgmma_ghz else card.ghz
    return max(_makespan(queue, card.multiprocessors, clocks) / (ghz * 1e9), 4.0 * shape.elements / (card.gb_s * 1e9))


class Quantiser(NamedTuple):
    """A kernel that passes over K, V or Q before attention."""

    name: str
    bytes: float  # read and written for an element
    # Clocks of a multiprocessor for an element: measured on the H200, where they and not memory are the limit; 0: not known.
    clocks: float = 0.0
    of_means: float = 0.0  # bytes for each key and 128 queries
    only_seen: bool = False  # of those that a causal mask lets see each other


# Microseconds on the H200, for 2 x 32 heads x 4096 tokens of head_dim 128, float16, the kernel alone (bench/notes-mma-sync.md).
MEASURED = {
    "sm80_qk_int8_pv_f16": 1190,
    "sm80_qk_int8_pv_f16_accum_f16": 1375,
    "sm89_qk_int8_pv_f8": 1709,  # 1478 alone, and the 158 and 73 that whole calls take longer since
    "sm90_qk_int8_pv_f16": 663,
    "quant_k_int8": 31.2,
    "quant_v_f16": 51.5,
    "quant_v_f8": 69.5,
}


def _quantiser(name: str, size: float) -> Quantiser:
    return Quantiser(name, size, MEASURED[name] * 1e-6 * 132 * 1.98e9 / (2 * 32 * 4096 * 128))


_K, _V_F16, _V_F8 = _quantiser("quant_k_int8", 3), _quantiser("quant_v_f16", 4), _quantiser("quant_v_f8", 3)
# Not measured. Bytes: what is read of 16 bits, and written in four with scales. Clocks: instructions executed for an element (40 and
# 90), a lane each. V's and K's blocks of threads are one launch, the ones before the others.
_FP4 = (
    Quantiser("means", 2),
    Quantiser("quant_kv_fp4, V", 2.7, 90 / 128),
    Quantiser("quant_kv_fp4, K", 2.6, 40 / 128, of_means=4, only_seen=True),
)
# What goes before each attention kernel.
OURS = {
    "sm80_qk_int8_pv_f16": (_K,),
    "sm80_qk_int8_pv_f16_accum_f16": (_K, _V_F16),
    "sm89_qk_int8_pv_f8": (_K, _V_F8),
    "sm89_qk_int8_pv_f8_accum_f16": (_K, _V_F8),
    "sm90_qk_int8_pv_f16": (_K,),
    "sm120_qk_fp4_pv_fp4": _FP4,
}


def quantisation_seconds(quantisers: tuple[Quantiser, ...], card: Card, shape: Shape, *, overlapped: bool) -> float:
    """Of kernels one after the other; `overlapped`: each is launched ahead of the last one's end."""
    seconds = 0.0 if overlapped else LAUNCH * len(quantisers)
    for quantiser in quantisers:
        pairs = shape.batch * shape.heads * shape.tokens**2 / 128 / (2 if shape.causal and quantiser.only_seen else 1)
        moved = quantiser.bytes * shape.elements + quantiser.of_means * pairs
        memory = moved / (card.gb_s * 1e9)
        units = quantiser.clocks * shape.elements / (card.multiprocessors * card.ghz * 1e9)
        seconds += max(memory, units)
    return seconds


def call_seconds(kernel: Kernel, card: Card, shape: Shape) -> float:
    """Of a call of ours, as the GPU sees it: quantisation, attention, and a launch that nothing hides."""
    name = kernel.name.split("-", 1)[0]
    # Only from 9.0 on can kernels be launched ahead.
    overlapped = kernel.architecture in {"sm_90a", "sm_100", "sm_103", "sm_120", "sm_120a", "sm_121"}
    quantisation = quantisation_seconds(OURS[name], card, shape, overlapped=overlapped)
    return quantisation + attention_seconds(kernel, card, shape) + LAUNCH
