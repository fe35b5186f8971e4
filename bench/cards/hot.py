"""Which instructions a warp of an attention kernel executes for each block of keys, nearly always.

Kernels hold much that is rare: keys to hide, maxima that have risen. The way round the main loop that counts is the shortest
on which every product is computed once, Q·Kᵀ and P·V alike, each score's exponential is taken, the next block of keys is
fetched, and nothing is written.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cards.cubin import Code, Instruction

WARPGROUP = 4  # warps that compute a wgmma together
LANES = 32  # of a warp


class Product(NamedTuple):
    """A tensor instruction: its operands' kind, what it adds in, and multiply-adds for each warp."""

    kind: str  # "int8", "f16", "e4m3" or "e2m1"
    sums: str  # "int32", "f32" or "f16"
    multiply_adds: int


def product(instruction: Instruction) -> Product | None:
    """What a tensor instruction computes; None for others."""
    name = instruction.name
    if name.startswith("OMMA.SF.16864.F32.E2M1.E2M1."):
        return Product("e2m1", "f32", 16 * 8 * 64)
    if found := re.fullmatch(r"(IMMA|HMMA|QMMA)\.(\d+)(\..*)", name):
        m, n, k = {"16832": (16, 8, 32), "16816": (16, 8, 16), "1688": (16, 8, 8), "16864": (16, 8, 64)}[found[2]]
        size = m * n * k
    elif found := re.fullmatch(r"([IHQ]GMMA)\.(\d+)x(\d+)x(\d+)(\..*)", name):
        size = int(found[2]) * int(found[3]) * int(found[4]) // WARPGROUP
    else:
        return None
    kind = {"I": "int8", "H": "f16", "Q": "e4m3"}[found[1][0]]
    sums = "int32" if kind == "int8" else "f16" if ".F16" in found[found.lastindex or 0] else "f32"
    return Product(kind, sums, size)


class _Block(NamedTuple):
    """Instructions that are executed one after the other, and where to go from them."""

    instructions: list[Instruction]
    successors: list[int]
    scores: int  # multiply-adds of Q·Kᵀ; in FP4 none: by the instruction they are like those of P·V
    values: int  # … of P·V
    exponentials: int
    copies: int  # instructions that copy from global to shared memory
    stores: bool  # whether there are any to global memory: not in the main loop


def _targets(instruction: Instruction, labels: dict[str, int]) -> tuple[list[int], bool]:
    """Where a branch leads, and whether what stands behind it is reached too."""
    text, opcode = instruction.text, instruction.opcode
    predicated = text.startswith("@") or re.search(r"\s!?U?P\d+,", text) is not None
    if opcode in {"EXIT", "RET", "BRX", "BPT"}:
        return [], predicated
    label = re.search(r"`\((\.L_\S+?)\)", text)
    # A call of a label is a jump that the compiler found too far for a branch; one of a function comes back.
    if label and opcode in {"BRA", "CALL"} and ".DIV" not in instruction.name:  # where it is hot a warp's lanes go together
        return [labels[label[1]]], predicated
    return [], True


def _blocks(code: Code) -> dict[int, _Block]:
    """By the index of the first instruction."""
    starts = {0, *code.labels.values()}
    for i, instruction in enumerate(code.instructions):
        if instruction.opcode in {"BRA", "CALL", "EXIT", "RET", "BRX"}:
            starts.add(i + 1)
    ordered = sorted(start for start in starts if start < len(code.instructions))
    blocks = {}
    for start, end in zip(ordered, [*ordered[1:], len(code.instructions)], strict=True):
        instructions = code.instructions[start:end]
        targets, falls = _targets(instructions[-1], code.labels)
        products = [p for p in map(product, instructions) if p]
        blocks[start] = _Block(
            instructions,
            [t for t in (*targets, *([end] if falls else [])) if t < len(code.instructions)],
            sum(p.multiply_adds for p in products if p.kind == "int8"),
            sum(p.multiply_adds for p in products if p.kind != "int8"),
            sum(i.name.startswith("MUFU.EX2") for i in instructions),
            sum(i.opcode == "LDGSTS" for i in instructions),
            any(i.opcode == "STG" for i in instructions),
        )
    return blocks


class _State(NamedTuple):
    """How far a way has come: where it goes on, and what it has done."""

    at: int
    scores: int
    values: int
    exponentials: int
    fetched: frozenset[int]  # blocks with copies that it came through


def _reached(start: int, edges: Mapping[int, Iterable[int]]) -> set[int]:
    """Whatever can be reached from a block, itself too."""
    found, todo = {start}, [start]
    while todo:
        new = set(edges[todo.pop()]) - found
        found |= new
        todo += new
    return found


def _loop(blocks: dict[int, _Block], head: int) -> set[int]:
    """The blocks that can be gone through on a way from one back to it on which nothing is stored."""
    forward = {start: [] if block.stores else block.successors for start, block in blocks.items()}
    backward: dict[int, list[int]] = {start: [] for start in blocks}
    for start, successors in forward.items():
        for successor in successors:
            backward[successor].append(start)
    return _reached(head, forward) & _reached(head, backward)


def _around(blocks: dict[int, _Block], head: int, of_scores: int, of_values: int, exponentials: int) -> list[int] | None:
    """The shortest way from a block back to it with so many multiply-adds of each kind and exponentials, and most copies.

    Of P·V there may be some more: kernels add up the rows of P so, too; and some rescale with an exponential.
    """
    loop = _loop(blocks, head)
    start = _State(head, 0, 0, 0, frozenset())
    distance, before = {start: 0}, {start: start}
    heap = [(0, 0, start)]
    number = 0  # of a state: lengths may be equal
    best: dict[int, list[int]] = {}
    while heap:
        length, _, state = heapq.heappop(heap)
        if length > distance[state]:
            continue
        block = blocks[state.at]
        scores, values = state.scores + block.scores, state.values + block.values
        taken = min(state.exponentials + block.exponentials, exponentials)
        if scores > of_scores or values > of_values * 5 // 4 or state.at in state.fetched:
            continue
        fetched = state.fetched | {state.at} if block.copies else state.fetched
        for successor in loop.intersection(block.successors):
            following = _State(successor, scores, values, taken, fetched)
            if successor == head and scores == of_scores and values >= of_values and taken == exponentials:
                way = [state]
                while way[-1] != start:
                    way.append(before[way[-1]])
                best.setdefault(sum(blocks[at].copies for at in fetched), [s.at for s in reversed(way)])
            elif length + len(block.instructions) < distance.get(following, 1 << 60):
                distance[following], before[following] = length + len(block.instructions), state
                heapq.heappush(heap, (distance[following], number := number + 1, following))
    return best[max(best)] if best else None


def _heads(blocks: dict[int, _Block]) -> list[int]:
    """Where loops start that have all products in them, and the copies if there are any: inner ones alone do not fetch."""
    ends: dict[int, int] = defaultdict(int)
    for start, block in blocks.items():
        for successor in block.successors:
            if successor <= start:
                ends[successor] = max(ends[successor], start)
    loops = {head: [blocks[start] for start in blocks if head <= start <= end] for head, end in ends.items()}
    in_fp4 = not any(block.scores for block in blocks.values())
    whole = {head for head, loop in loops.items() if (in_fp4 or any(b.scores for b in loop)) and any(b.values for b in loop)}
    fetching = {head for head in whole if any(b.copies for b in loops[head])}
    return sorted(fetching or whole)


def hot_path(code: Code, head_dim: int, rows: int) -> tuple[list[Instruction], int]:
    """The instructions of a warp with so many rows, once round the main loop, and how many keys that is.

    Raises ValueError where there is no such way.
    """
    blocks = _blocks(code)
    heads = _heads(blocks)
    for keys in (64, 128, 256):
        products = rows * keys * head_dim
        of_scores, of_values = (products, products) if any(block.scores for block in blocks.values()) else (0, 2 * products)
        exponentials = rows * keys // LANES
        ways = [way for head in heads if (way := _around(blocks, head, of_scores, of_values, exponentials))]
        if ways:
            cost = {
                tuple(way): (-sum(blocks[at].copies for at in way), sum(len(blocks[at].instructions) for at in way))
                for way in ways
            }
            return [i for at in min(cost, key=cost.__getitem__) for i in blocks[at].instructions], keys
    raise ValueError(f"no way round a loop with the products of {rows} rows and 64, 128 or 256 keys of head_dim {head_dim}")
