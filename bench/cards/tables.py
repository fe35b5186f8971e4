"""The model's predictions as the Markdown tables of docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cards.gpus import CARDS, Card
from cards.model import MEASURED, OURS, Kernel, attention_seconds, call_seconds, load, read_kernel
from cards.original import original_cards, original_kernel, original_seconds
from cards.shape import Shape

# As docs/kernels.md calls them.
SHORT = {
    "sm80_qk_int8_pv_f16": "`f16`",
    "sm80_qk_int8_pv_f16_accum_f16": "`f16_accum_f16`",
    "sm89_qk_int8_pv_f8": "`f8`",
    "sm89_qk_int8_pv_f8_accum_f16": "`f8_accum_f16`",
    "sm90_qk_int8_pv_f16": "wgmma",
}
BATCH, HEADS, TOKENS = 2, 32, 4096


def kernels_of(cubins: Sequence[Path], card: Card, head_dim: int) -> Iterator[Kernel]:
    """Ours for a card's architecture, those that are in one of the folders."""
    for name in OURS:
        paths = (folder / card.architecture / f"{name}-d{head_dim}-fp16.cubin" for folder in cubins)
        if path := next((path for path in paths if path.is_file()), None):
            yield read_kernel(path, head_dim)


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def cards_table() -> str:
    """What the model takes each card to be."""
    head = (
        "GPU",
        "multiprocessors",
        "GHz",
        "INT8",
        "FP16, float32 sums",
        "FP16 sums",
        "e4m3, float32 sums",
        "FP16 sums",
        "memory GB/s",
        "from",
    )
    rows = (
        (
            f"{c.name} ({c.architecture})", c.multiprocessors, f"{c.ghz:.2f}",
            *(rate or "–" for rate in (c.int8, c.f16_f32, c.f16_f16, c.e4m3_f32, c.e4m3_f16)), c.gb_s, c.source,
        )
        for c in CARDS
    )  # fmt: skip
    return _table(head, rows)


def tflops(kernel: Kernel, card: Card, *, causal: bool) -> float:
    """Of a whole call."""
    shape = Shape(BATCH, HEADS, TOKENS, kernel.head_dim, causal)
    return shape.operations / call_seconds(kernel, card, shape) / 1e12


def kernels_table(cubins: Sequence[Path]) -> str:
    """Clocks of each unit for a tile at head_dim 128, and what a call then reaches."""
    head = ("GPU", "kernel", "tensor", "exponentials", "FMA", "ALU", "shared memory", "issue", "L2", "simulated",
            "TFLOPS, D=128", "causal", "D=64", "causal")  # fmt: skip
    rows = []
    for card in CARDS:
        narrow = {kernel.name.split("-")[0]: kernel for kernel in kernels_of(cubins, card, 64)}
        for kernel in kernels_of(cubins, card, 128):
            name = kernel.name.split("-")[0]
            speeds = [f"{tflops(k, card, causal=causal):.0f}" for k in (kernel, narrow[name]) for causal in (False, True)]
            rows.append((card.name, SHORT[name], *_clocks(kernel, card), *speeds))
    return _table(head, rows)


def checked_table(cubins: Sequence[Path]) -> str:
    """What was measured, beside the prediction."""
    card = next(c for c in CARDS if c.name == "H200")
    shape = Shape(2, 32, 4096, 128)
    rows = []
    for kernel in kernels_of(cubins, card, 128):
        name = kernel.name.split("-")[0]
        if (measured := MEASURED.get(name)) is None:
            continue
        predicted = 1e6 * attention_seconds(kernel, card, shape)
        rows.append((SHORT[name], f"{measured:.0f}", f"{predicted:.0f}", f"{predicted / measured:.2f}"))
    return _table(("kernel", "measured, µs", "predicted, µs", "ratio"), rows)


def generated(cubins: Sequence[Path]) -> str:
    """All that stands between the markers of docs/kernels.md."""
    return f"""\
Multiply-adds a clock and multiprocessor of the tensor cores, dense, at the boost clock:

{cards_table()}
A tile in clocks, and TFLOPS of a whole call at batch {BATCH}, {HEADS} heads, N={TOKENS}, quantisation included:

{kernels_table(cubins)}
The H200, attention kernel alone, batch 2, 32 heads, N=4096, D=128, float16:

{checked_table(cubins)}"""


def fp4_table(cubins: Path, original: Path | None = None) -> str:
    """The FP4 kernel on cards that have such tensor cores: clocks of each unit for a tile, and what a call then reaches.

    `original`: a folder with SageAttention3's own kernels, which then stand beside ours.
    """
    head = (
        "GPU",
        "D",
        "kernel",
        "tensor",
        "exponentials",
        "FMA",
        "ALU",
        "shared memory",
        "issue",
        "L2",
        "simulated",
        "TFLOPS",
        "causal",
    )
    rows = []
    for card in CARDS:
        for head_dim in (64, 128):
            architecture = f"{card.architecture}a"
            path = cubins / architecture / f"sm120_qk_fp4_pv_fp4-d{head_dim}-fp16.cubin"
            if not card.e2m1 or not path.is_file():
                continue
            ours = read_kernel(path, head_dim)
            speeds = [tflops(ours, card, causal=causal) for causal in (False, True)]
            rows.append((card.name, head_dim, "ours", *_clocks(ours, card), *(f"{s:.0f}" for s in speeds)))
            if original:
                shapes = [Shape(BATCH, HEADS, TOKENS, head_dim, causal) for causal in (False, True)]
                speeds = [s.operations / sum(original_seconds(original, card, s, architecture)) / 1e12 for s in shapes]
                theirs = original_kernel(original, architecture, head_dim, causal=False)
                rows.append((card.name, head_dim, "original", *_clocks(theirs, card), *(f"{s:.0f}" for s in speeds)))
    return _table(head, rows)


def _clocks(kernel: Kernel, card: Card) -> list[str]:
    """Of each unit for a tile, the one that takes longest in bold, and simulated."""
    found = load(kernel, card)
    clocks = [f"**{round(c)}**" if unit == found.bound else f"{round(c)}" for unit, c in found.units.items()]
    return [*clocks, f"{round(found.simulated)}"]


def original_table(cubins: Sequence[Path], original: Path) -> str:
    """Ours beside SageAttention's own `sageattn`, in microseconds: attention and quantisation of each."""
    head = (
        "GPU",
        "D",
        "causal",
        "N",
        "original: attention",
        "quantisation",
        "kernel of ours",
        "attention",
        "quantisation",
        "original / ours",
    )
    rows = []
    for card in original_cards():
        for head_dim in (64, 128):
            for causal in (False, True):
                for tokens in (1024, 4096, 16384):
                    shape = Shape(BATCH, HEADS, tokens, head_dim, causal)
                    theirs = original_seconds(original, card, shape)
                    for kernel in kernels_of(cubins, card, head_dim):
                        alone, whole = attention_seconds(kernel, card, shape), call_seconds(kernel, card, shape)
                        rows.append((
                            card.name, head_dim, "yes" if causal else "", tokens, *(f"{1e6 * t:.0f}" for t in theirs),
                            SHORT[kernel.name.split("-")[0]], f"{1e6 * alone:.0f}", f"{1e6 * (whole - alone):.0f}",
                            f"{sum(theirs) / whole:.2f}",
                        ))  # fmt: skip
    return _table(head, rows)
