"""Hopper's kernels, their own source compiled for the CPU: results against the reference and float64, and a judge of how threads wait for each other.

tests/kernels_on_cpu.py runs them. What stands in for mbarriers, the copy engine, clusters and wgmma, in tests/on_cpu/kernels/ptx/, lets everything
happen as late as it may, and refuses what the PTX ISA forbids. The stand-in has five multiprocessors: most calls here have more tiles.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from fuzz_bounds import Exact
from fuzz_inputs import Problem
from kernels_on_cpu import CSRC, Case, Kernels, inputs, packed, randn

from sageattention import _ops, dispatch

pytestmark = pytest.mark.slow

KERNEL = "sm90_qk_int8_pv_f16"
TYPES = {64: torch.float16, 128: torch.bfloat16, 256: torch.bfloat16}  # of the kernels that are compiled, by head_dim
LENGTHS = [5, 0, 250, 33], [70, 9, 0, 133]
FIRST, PROBLEMS = 3_000_000, 60  # of the fuzz


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("on_cpu"), "sm_90a")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The same, whose unordered accesses are errors."""
    return Kernels(tmp_path_factory.mktemp("races"), "sm_90a", races=True)


def case(batch: int, q_heads: int, kv_heads: int, qo_len: int, kv_len: int, head_dim: int, v_head_dim: int, **options: Any) -> Case:
    """Inputs of the dtype that kernels of the head_dim are compiled for."""
    dtype = TYPES[64 if head_dim <= 64 else 128 if head_dim <= 128 else 256]
    tensors = inputs(batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim)
    return Case(*(x.to(dtype) for x in tensors), **options)


def seen(queries: int, keys: int, heads: int = 1) -> torch.Tensor:
    """Random; a row sees nothing, keys 64 to 127 are hidden, and those before them seen, as a whole."""
    mask = randn(1, heads, queries, keys, seed=1) > -0.3
    mask[..., :64], mask[..., 64:128] = True, False
    mask[..., 7, :] = False
    return mask


def padding(batch: int, keys: int, left: list[int]) -> torch.Tensor:
    """Keys from `left` on are hidden from all rows."""
    return (torch.arange(keys) < torch.tensor(left)[:, None])[:, None, None, :].expand(batch, 1, 1, keys)


def added(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """A number for each score, half of which hide; tile 1 hides nothing and adds nothing, tile 2 only hides. Rows do not start on 16 bytes."""
    mask = randn(1, 1, queries, keys + 1, seed=6).to(dtype)[..., 1:]
    mask[..., 64:192] = 0
    hidden = randn(1, 1, queries, keys, seed=7) > 0
    hidden[..., 64:128] = False
    return mask.masked_fill(hidden, -math.inf)


def strided(masked: bool) -> Case:
    """Tokens before heads; rows that start on no 16 bytes, which the copy engine cannot read."""
    q, k, v = (torch.randn(2, 90, 3, 71, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    mask = seen(90, 180)[..., ::2] if masked else None
    return Case(*(x[..., 3:59].transpose(1, 2) for x in (q, k, v)), attn_mask=mask)


def not_numbers() -> Case:
    """Of V none: within a tile it may spoil rows that do not see its key."""
    it = case(1, 2, 2, 70, 130, 64, 64, smooth_k=False)
    it.tensors[0][0, 0, 3, 5] = it.tensors[1][0, 1, 7, 9] = math.nan
    return it


def sequences(**options: Any) -> Case:
    return packed(*LENGTHS, 128, 96, torch.bfloat16, **options)


CASES = {
    # A block on its own, pairs, pairs of which a half has no rows, more tiles than blocks.
    "one block": case(1, 1, 1, 150, 200, 128, 128),
    "one key": case(1, 1, 1, 3, 1, 64, 64),
    "a pair": case(1, 1, 1, 380, 333, 128, 128),
    "many tiles": case(2, 4, 2, 70, 200, 128, 96),
    "many pairs": case(1, 4, 1, 384, 140, 128, 128),
    "64": case(1, 4, 2, 380, 333, 64, 64, smooth_k=False),
    "256": case(1, 4, 1, 250, 133, 256, 200),
    "causal": case(1, 2, 1, 500, 600, 128, 128, is_causal=True),
    "causal, 64": case(2, 1, 1, 400, 350, 64, 40, is_causal=True),
    "causal, 256": case(1, 7, 1, 150, 160, 256, 256, is_causal=True),
    "causal, pairs": case(1, 1, 1, 16 * 192 - 100, 70, 64, 64, is_causal=True),
    "uneven": case(1, 2, 1, 70, 90, 40, 32),
    "strided": strided(masked=False),
    "repeated": Case(*(x.bfloat16().expand(2, 3, -1, -1) for x in inputs(1, 1, 1, 70, 90, 128, 128))),
    "negative scale": case(1, 1, 1, 70, 130, 64, 64, sm_scale=-0.1),
    "packed": sequences(),
    "packed, causal": sequences(is_causal=True),
    "packed, 256": packed([70, 3], [9, 130], 256, 256, torch.bfloat16),
    "NaN": not_numbers(),
    "large V": Case(randn(1, 1, 40, 64).half(), randn(1, 1, 70, 64, seed=1).half(), torch.full((1, 1, 70, 64), 60000.0).half()),
    # Masks of each kind of row and of tile.
    "mask": case(1, 2, 1, 380, 333, 128, 128, attn_mask=seen(380, 333, 2)),
    "mask, causal": case(1, 2, 1, 380, 333, 128, 128, attn_mask=seen(380, 333), is_causal=True),
    "mask, 64": case(1, 3, 1, 150, 700, 64, 64, attn_mask=seen(150, 700)),
    "mask, 256": case(1, 2, 1, 250, 200, 256, 200, attn_mask=seen(250, 200)),
    "mask, many keys": case(1, 1, 1, 70, 64 * 33, 64, 64, attn_mask=padding(1, 64 * 33, [64 * 33]) & (torch.arange(64 * 33) % 640 < 70)),
    "padding": case(3, 2, 1, 200, 333, 128, 128, attn_mask=padding(3, 333, [333, 70, 0])),
    "all is hidden": case(1, 1, 1, 70, 130, 64, 64, attn_mask=torch.zeros(70, 130, dtype=torch.bool)),
    "strided mask": strided(masked=True),
    "added": case(1, 3, 1, 380, 333, 128, 128, attn_mask=added(380, 333, torch.bfloat16)),
    "added, causal": case(1, 1, 1, 380, 333, 128, 128, attn_mask=added(380, 333, torch.bfloat16), is_causal=True),
    "added, 64": case(1, 3, 1, 250, 270, 64, 64, attn_mask=added(250, 270, torch.float16)),
    "added, 256": case(1, 2, 1, 250, 200, 256, 200, attn_mask=added(250, 200, torch.bfloat16)),
    "added, one row": case(2, 1, 1, 200, 200, 64, 64, attn_mask=added(1, 200, torch.float16)),
}


# In order first, which has all that happens by itself happen as late as it may, then at random.
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str, hopper: Kernels) -> None:
    CASES[name].check(hopper, KERNEL)
    in_order = CASES[name].run(hopper, KERNEL)
    for seed in (1, 2):
        for one, other in zip(CASES[name].run(hopper, KERNEL, seed=seed), in_order, strict=True):
            assert torch.equal(fuzz.bits(one), fuzz.bits(other)), seed
