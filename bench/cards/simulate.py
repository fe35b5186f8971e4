"""How long a scheduler's warps take round the main loop: each issues in order, as its instructions' scheduling bits say, to units
that are busy for a while with each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cards.cubin import Instruction
from cards.hot import product
from cards.units import Unit

ROUNDS = 10  # of each warp, on average, of which the first START do not count: all begin together
START = 2
# Instructions that wait in front of a unit whose results are awaited by counters, not by a number of clocks.
QUEUE = 4
# Clocks that the tensor cores lose where products of another kind follow: measured on the H200 (bench/notes-mma-sync.md), taken for all.
CHANGE = 20.0
OPERANDS = 8.0  # clocks until a queued instruction has read its operands


class _Warp:
    """How far a warp has come."""

    def __init__(self) -> None:
        self.at = 0
        self.ready = 0.0
        self.counters = [0.0] * 6  # when each will be 0
        self.groups: list[float] = []  # when groups of wgmma are done


def simulate(path: Sequence[Instruction], units: Sequence[Unit], warps: int) -> float:
    """Clocks for one way round of each of so many warps, in the long run; `units` are those of the path's instructions."""
    kinds = [(p.kind, p.sums) if (p := product(i)) else None for i in path]
    asynchronous = ["GMMA" in i.name for i in path]
    queued = [
        i.writes < 6 or i.reads < 6 or a or u.name in {"shared", "mufu"}
        for i, u, a in zip(path, units, asynchronous, strict=True)
    ]
    outstanding = [int(w[1]) if (w := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", i.text)) else None for i in path]
    free: dict[str, float] = {}
    kind: tuple[str, str] | None = None
    running = [_Warp() for _ in range(warps)]
    clock = 0.0

    def start(warp: _Warp) -> float:
        """When the unit of the warp's next instruction is free for it."""
        at = warp.at
        changes = kinds[at] is not None and kinds[at] != kind and not asynchronous[at]
        return free.get(units[at].name, 0.0) + (CHANGE if changes else 0.0)

    def issue(warp: _Warp) -> float:
        """When its next instruction can be issued."""
        at = warp.at
        when = max(clock, warp.ready)
        if path[at].waits:
            when = max(when, *(warp.counters[c] for c in range(6) if path[at].waits >> c & 1))
        if (may := outstanding[at]) is not None:
            when = max([when, *warp.groups[: len(warp.groups) - may]])
        return max(when, start(warp) - (QUEUE * units[at].busy if queued[at] else 0.0))

    issued, since = 0, 0.0
    while issued < ROUNDS * warps * len(path):
        # Whoever can issue first; of several the first.
        times = [issue(warp) for warp in running]
        when = min(times)
        warp = running[times.index(when)]
        instruction, unit = path[warp.at], units[warp.at]
        begins = max(when, start(warp))
        free[unit.name] = begins + unit.busy
        kind = kinds[warp.at] or kind
        done = begins + unit.busy + unit.latency
        if instruction.writes < 6:
            warp.counters[instruction.writes] = max(warp.counters[instruction.writes], done)
        if instruction.reads < 6:
            warp.counters[instruction.reads] = max(warp.counters[instruction.reads], begins + unit.busy + OPERANDS)
        if asynchronous[warp.at] and "gsb0" in instruction.text:
            warp.groups.append(done)
        warp.ready = when + max(instruction.stall, 1)
        warp.at = (warp.at + 1) % len(path)
        clock = when + 1  # one instruction a clock
        issued += 1
        if issued == START * warps * len(path):
            since = clock
    return (clock - since) / (ROUNDS - START)
