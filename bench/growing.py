"""Attention at lengths that have not been seen before, as a language model that writes meets them: one key more at each token.

    python bench/growing.py [--output FILE.json]

Microseconds of a call from where it is made to where its result is there, the GPU idle before, in the median of 32 lengths: at the
first call of a length, and at the second. cuDNN, which PyTorch takes by itself on Hopper, makes a plan for each length.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from measure import bf16, environment, parser_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sageattention import sageattn

LENGTHS = 32
BATCH, HEADS, KV_HEADS, HEAD_DIM = 8, 32, 8, 128  # Llama 3.1 8B's


class Kind(NamedTuple):
    """What has a new length at each call."""

    name: str
    queries: int  # 0: as many as keys
    masked: bool
    causal: bool

    def inputs(self, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """q, k, v and options of `scaled_dot_product_attention`, which `sageattn` takes too."""
        batch = BATCH if self.queries else 1
        q = bf16(batch, HEADS, self.queries or keys, HEAD_DIM)
        k, v = (bf16(batch, KV_HEADS, keys, HEAD_DIM) for _ in "kv")
        options: dict[str, Any] = {"is_causal": self.causal}
        if self.masked:  # sequences that began sooner and later
            first = torch.linspace(0, keys // 2, batch, device="cuda").int()
            options["attn_mask"] = torch.arange(keys, device="cuda")[None, None, None] >= first[:, None, None, None]
        return q, k, v, options


KINDS = (
    Kind("one query", 1, masked=False, causal=False),
    Kind("one query, padding mask", 1, masked=True, causal=False),
    Kind("prompt", 0, masked=False, causal=True),
)


def pytorchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """As PyTorch chooses."""
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """PyTorch's FlashAttention-2."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return pytorchs(q, k, v, **options)


METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "PyTorch's choice": pytorchs,
    "FlashAttention-2": flash,
    "sageattn": sageattn,
}


def microseconds(call: Callable[[], object]) -> float:
    """Until its result is there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def measured(kind: Kind) -> Iterator[tuple[str, float, float]]:
    """Of each method the medians of first calls and of second ones. Lengths are 600 or so, different for each: none was seen before."""
    for number, (name, method) in enumerate(METHODS.items()):
        if kind.masked and name == "FlashAttention-2":
            continue
        firsts, seconds = [], []
        for keys in range(521 + 2 * LENGTHS * number, 521 + 2 * LENGTHS * (number + 1), 2):  # odd: of no usual size
            q, k, v, options = kind.inputs(keys)
            firsts.append(microseconds(lambda: method(q, k, v, **options)))  # noqa: B023
            seconds.append(microseconds(lambda: method(q, k, v, **options)))  # noqa: B023
        yield name, round(statistics.median(firsts), 1), round(statistics.median(seconds), 1)


def main() -> None:
    """Measure, print, write."""
    parser = parser_of("growing", __doc__)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here, and what is measured runs on one")
    where, rows = environment("python bench/growing.py"), []
    for kind in KINDS:
        for name, first, again in measured(kind):
            rows.append({"call": kind.name, "method": name, "first": first, "again": again})
            print(f"{kind.name:<26}{name:<20}{first:>10.0f} µs at a new length{again:>8.0f} µs again", flush=True)
    arguments.output.write_text(json.dumps({"environment": where, "microseconds": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
