"""Short attention on Hopper: time of our kernels, which quantise or not, and of PyTorch's by cuDNN, and which of ours `sageattn` takes.

    python bench/short.py [--output FILE.json]

What `sageattn` takes is predicted (csrc/torch/plan/faster_in_16_bits.cpp). The constants of that were fitted to such times, and
tests/test_faster_in_16_bits.py compares it with these. CUDA graphs of a call, replayed, of cuDNN's backend and of our kernels in turn, each
for so long that the card is at the clocks of a program that runs for long. Beside the JSON file a plot of the same name is drawn. Ctrl-C
ends the measuring, not the command.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from measure import each, environment, parser_of, replayed, under_load
from methods import ours
from plot import save, subplots
from torch.nn.attention import SDPBackend, sdpa_kernel

from sageattention import _library

QUANTISED, IN_16_BITS = "sm90_qk_int8_pv_f16", "sm90_qk_f16_pv_f16"
# That a call is repeated for, in each of three turns. In 0.02 the card draws more than its limit,
# which flatters cuDNN's by a tenth and ours by a fiftieth.
SECONDS = 0.05

MASKS = ("bool of keys", "bool", "numbers of each head")
HEADS = (8, 16, 24, 40, 64, 128)
TOKENS = (512, 768, 1024, 1280, 1536, 2048, 3072)


class Problem(NamedTuple):
    """One call, in bfloat16; the batch counts as heads."""

    heads: int
    kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int
    causal: bool = False
    mask: str = "none"  # one of _library.MASKS

    def taken(self, multiprocessors: int) -> str:
        """What `sageattn` takes: a field of `Times`."""
        sizes = (1, self.heads, self.kv_heads, self.qo_len, self.kv_len, self.head_dim, self.head_dim)
        faster = _library.library.faster_in_16_bits(QUANTISED, multiprocessors, sizes, self.causal, self.mask)
        return "in_16_bits" if faster else "quantised"

    def attn_mask(self) -> torch.Tensor | None:
        """Keys past nine tenths hidden; those after a query; or a number for each score."""
        if self.mask == "none":
            return None
        if self.mask == "bool of keys":
            return torch.arange(self.kv_len, device="cuda")[None, None, None] < self.kv_len - self.kv_len // 10
        if self.mask == "bool":
            return torch.ones(1, 1, self.qo_len, self.kv_len, device="cuda", dtype=torch.bool).tril()
        assert self.mask == "numbers of each head"
        return torch.randn(1, self.heads, self.qo_len, self.kv_len, device="cuda", dtype=torch.bfloat16)


class Times(NamedTuple):
    """Microseconds of a call."""

    quantised: float
    in_16_bits: float
    pytorch: float

    @property
    def least(self) -> float:
        """Of the faster one of ours."""
        return min(self.quantised, self.in_16_bits)

    def of(self, which: str) -> float:
        """Of one of the fields."""
        time: float = getattr(self, which)
        return time


def problems() -> Iterator[Problem]:
    """Self-attention of many sizes, then fewer of other head_dims, of two lengths, of grouped heads, and under masks.

    None of few queries, which are the 16-bit kernels'.
    """
    for head_dim, causal, tokens, heads in product((64, 128), (False, True), TOKENS, HEADS):
        yield Problem(heads, heads, tokens, tokens, head_dim, causal)
    for head_dim, causal, tokens, heads in product((40, 80, 160, 256), (False, True), TOKENS[:5:2], (16, 64)):
        yield Problem(heads, heads, tokens, tokens, head_dim, causal)
    for head_dim, qo_len, kv_len in product((64, 128), (64, 256, 1024, 4096, 16384), (77, 192, 384, 512, 1024, 8192)):
        if qo_len != kv_len:
            yield Problem(24, 24, qo_len, kv_len, head_dim)
    for head_dim, qo_len, kv_len in product((160, 256), (64, 1024, 16384), (77, 512)):
        yield Problem(24, 24, qo_len, kv_len, head_dim)
    for head_dim, tokens, heads in product((64, 72, 128), (197, 577, 729, 1370, 1500), (64, 192)):
        yield Problem(heads, heads, tokens, tokens, head_dim)
    grouped = (32, 8), (28, 4), (64, 8)
    for head_dim, tokens, (heads, kv_heads), causal in product((64, 128), (512, 1024, 2048), grouped, (False, True)):
        yield Problem(heads, kv_heads, tokens, tokens, head_dim, causal)
    for mask, head_dim, tokens, heads in product(MASKS, (64, 128), (128, 256, 512, 1024, 2048), (16, 64)):
        yield Problem(heads, heads, tokens, tokens, head_dim, mask=mask)
    for mask, head_dim in product(MASKS, (64, 128)):
        yield Problem(32, 32, 4096, 300, head_dim, mask=mask)
    for mask, tokens in product(MASKS, (256, 1024)):
        yield Problem(16, 16, tokens, tokens, 160, mask=mask)


def microseconds(call: Callable[[], object]) -> float:
    """Of a replayed graph. The median of three: a host that is interrupted for milliseconds leaves the GPU waiting."""
    replay = replayed(call)
    return statistics.median(under_load(replay, SECONDS) for _ in range(3)) * 1000


def measured(problem: Problem) -> tuple[Problem, Times]:
    """On the GPU."""
    q = torch.randn(1, problem.heads, problem.qo_len, problem.head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, problem.kv_heads, problem.kv_len, problem.head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    )

    mask = problem.attn_mask()

    def pytorchs() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=problem.causal, enable_gqa=problem.heads != problem.kv_heads
            )

    def by(kernel: str) -> float:
        return round(microseconds(partial(ours(kernel, mask), q, k, v, problem.causal)), 1)

    return problem, Times(by(QUANTISED), by(IN_16_BITS), round(microseconds(pytorchs), 1))


MARKS = {"quantised": "", "in_16_bits": "_"}


def draw(rows: list[tuple[Problem, Times]], multiprocessors: int, title: str, path: Path) -> None:
    """Of self-attention, PyTorch's time over that of what is taken; a line where that does not quantise."""
    ratios = {problem: times.pytorch / times.of(problem.taken(multiprocessors)) for problem, times in rows}
    figure, axes = subplots(2, 2, figsize=(11, 9), sharex=True, sharey=True)
    for axis, (head_dim, causal) in zip(axes.flat, product((64, 128), (False, True)), strict=True):
        table = [[Problem(heads, heads, tokens, tokens, head_dim, causal) for heads in HEADS] for tokens in TOKENS]
        numbers = [[ratios.get(problem, float("nan")) for problem in row] for row in table]
        image = axis.imshow(numbers, cmap="RdYlGn", vmin=0.6, vmax=1.4, origin="lower", aspect="auto")
        for (i, row), j in product(enumerate(table), range(len(HEADS))):
            if row[j] in ratios:
                axis.text(j, i, f"{ratios[row[j]]:.2f}", ha="center", va="center", fontsize=6)
                axis.plot(j, i + 0.33, MARKS[row[j].taken(multiprocessors)], color="black", markersize=3)
        axis.set_xticks(range(len(HEADS)), [str(heads) for heads in HEADS], fontsize=7)
        axis.set_yticks(range(len(TOKENS)), [str(tokens) for tokens in TOKENS], fontsize=7)
        axis.set_title(f"head_dim {head_dim}{', causal' if causal else ''}", fontsize=9)
    figure.supxlabel("batch × heads", fontsize=9)
    figure.supylabel("tokens", fontsize=9)
    figure.colorbar(
        image,
        ax=axes,
        label="time of cuDNN / time of what sageattn takes; line: our kernel in 16 bits",
        shrink=0.6,
    )
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def main() -> None:
    """Measure, write, draw and say what the choice costs."""
    arguments = parser_of("short", __doc__).parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("short: needs a GPU of compute capability 9.0, whose kernels these are")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    where = environment("python bench/short.py")
    found, missing = each({"calls": [partial(measured, problem) for problem in problems()]})
    rows = found["calls"]
    head = {
        "environment": where,
        "missing": missing,
        "multiprocessors": multiprocessors,
        "columns": [*Problem._fields, *Times._fields],
    }
    table = ",\n".join(json.dumps([*problem, *times]) for problem, times in rows)
    arguments.output.write_text(f'{json.dumps(head)[:-1]},\n"microseconds": [\n{table}\n]}}\n', encoding="utf-8")
    draw(rows, multiprocessors, f"{where['gpu']}, PyTorch {where['torch']}, bf16", arguments.output.with_suffix(".svg"))
    lost = sorted((times.of(problem.taken(multiprocessors)) / times.least, problem) for problem, times in rows)
    if lost:
        print(f"the choice costs {statistics.mean(loss for loss, _ in lost) - 1:.2%} beside the best one; most:")
    for loss, problem in lost[:-9:-1]:
        print(f"  {loss - 1:.0%}: {problem}")
    if missing:
        sys.exit("short: not all was measured: " + "; ".join(missing))


if __name__ == "__main__":
    main()
