"""Hopper's kernels, their own source compiled for the CPU: results against the reference and float64, and a judge of how threads wait for each other.

tests/kernels_on_cpu.py runs them. What stands in for mbarriers, the copy engine, clusters and wgmma, in tests/on_cpu/kernels/ptx/, lets everything
happen as late as it may, and refuses what the PTX ISA forbids. The stand-in has five multiprocessors: most calls here have more tiles.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from calls_on_cpu import (
    FORMS,
    Case,
    check_random_calls,
    check_unseen,
    check_wrong_starts,
    infinite_in_q,
    inputs,
    large_channels,
    large_in_q,
    packed,
    randn,
    stand_in,
    tokens_behind,
    unseen_keys,
)
from fuzz_inputs import Problem
from kernels_on_cpu import Kernels

from sageattention import dispatch

pytestmark = pytest.mark.slow

KERNEL = "sm90_qk_int8_pv_f16"
TYPES = {64: torch.float16, 128: torch.bfloat16, 256: torch.bfloat16}  # of the kernels that are compiled, by head_dim
LENGTHS = [5, 0, 250, 33], [70, 9, 0, 133]
FIRST, PROBLEMS = 3_000_000, 200  # of the fuzz


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("on_cpu"), "sm_90a")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The same, whose unordered accesses are errors."""
    return Kernels(tmp_path_factory.mktemp("races"), "sm_90a", races=True)


def case(
    batch: int, q_heads: int, kv_heads: int, qo_len: int, kv_len: int, head_dim: int, v_head_dim: int, **options: Any
) -> Case:
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


def hides(dtype: torch.dtype) -> float:
    """The largest number of a mask that does."""
    return -65504.0 if dtype == torch.float16 else float(torch.tensor(-5e5).to(dtype))


def added(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """A number for each score, half of which hide; tile 1 hides nothing and adds nothing, tile 2 only hides. Rows do not start on 16 bytes."""
    mask = randn(1, 1, queries, keys + 1, seed=6).to(dtype)[..., 1:]
    mask[..., 64:192] = 0
    hidden = randn(1, 1, queries, keys, seed=7) > 0
    hidden[..., 64:128] = False
    return mask.masked_fill(hidden, hides(dtype))


def strided(masked: bool) -> Case:
    """Tokens before heads, in the output too; rows that start on no 16 bytes, which the copy engine cannot read."""
    q, k, v = (torch.randn(2, 90, 3, 71, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    mask = seen(90, 180)[..., ::2] if masked else None
    return Case(*(x[..., 3:59].transpose(1, 2) for x in (q, k, v)), attn_mask=mask, out_turned=True)


def not_numbers() -> Case:
    """Of V none: within a tile it may spoil rows that do not see its key."""
    it = case(1, 2, 2, 70, 130, 64, 64, smooth_k=False)
    it.tensors[0][0, 0, 3, 5] = it.tensors[1][0, 1, 7, 9] = math.nan
    return it


def growing(head_dim: int, blocks: list[float], **options: Any) -> Case:
    """Scores of some rows rise to so many powers of two in each block of 64 keys; others' fall."""
    it = case(1, 1, 1, 70, 64 * len(blocks), head_dim, head_dim, smooth_k=False, **options)
    q, k, _ = it.tensors
    q[..., 0] = torch.linspace(-2, 4, q.shape[2])
    k[..., 0] = torch.tensor(blocks).repeat_interleave(64) * math.log(2.0) * math.sqrt(head_dim) / 4
    return it


def aligned(head_dim: int, blocks: list[float]) -> Case:
    """The same of all rows, and of nothing but one channel: scores are as large as their bound."""
    it = growing(head_dim, blocks)
    q, k, _ = it.tensors
    q[..., 1:], k[..., 1:] = 0, 0
    q[..., 0] = 4
    return it


def sequences(**options: Any) -> Case:
    return packed(*LENGTHS, 128, 96, torch.bfloat16, **options)


CASES = {
    # A block on its own, pairs, more tiles than blocks.
    "one block": case(1, 1, 1, 150, 200, 128, 128),
    "one key": case(1, 1, 1, 3, 1, 64, 64),
    "two blocks": case(1, 1, 1, 380, 333, 128, 128),
    "many tiles": case(2, 4, 2, 70, 200, 128, 96),
    "many pairs": case(1, 4, 1, 384, 140, 128, 128),
    "last rows": case(1, 2, 1, 600, 140, 128, 128),
    "pairs, 64": case(1, 4, 2, 380, 333, 64, 64, smooth_k=False),
    # The ring of K's scales more than once.
    "pairs, many keys": case(1, 4, 2, 384, 2100, 64, 64),
    "many keys, 256": case(1, 2, 1, 100, 1700, 256, 200),
    "256": case(1, 4, 1, 250, 133, 256, 200),
    "causal": case(1, 2, 1, 500, 600, 128, 128, is_causal=True),
    "causal, 64": case(2, 1, 1, 400, 350, 64, 40, is_causal=True),
    "causal, 256": case(1, 7, 1, 150, 160, 256, 256, is_causal=True),
    "causal, pairs": case(1, 1, 1, 2500, 300, 256, 256, is_causal=True),
    "causal, a few tiles": case(1, 1, 1, 20 * 192 - 100, 70, 64, 64, is_causal=True),
    # So many keys that heads are computed two after the other, and the last five together; most see nobody.
    "sections of heads": case(1, 7, 7, 300, 32768, 64, 64, is_causal=True),
    "uneven": case(1, 2, 1, 70, 90, 40, 32),
    "strided": strided(masked=False),
    "repeated": Case(*(x.bfloat16().expand(2, 3, -1, -1) for x in inputs(1, 1, 1, 70, 90, 128, 128))),
    "negative scale": case(1, 1, 1, 70, 130, 64, 64, sm_scale=-0.1),
    "infinite scale": case(1, 1, 1, 70, 130, 64, 64, sm_scale=math.inf),
    "packed": sequences(),
    "packed, causal": sequences(is_causal=True),
    "packed, causal, keys that nobody sees": unseen_keys(sequences(is_causal=True)),
    "packed, no queries at the end": packed([5, 0], [70, 9], 64, 48, torch.float16),
    "packed, tokens behind": tokens_behind(sequences()),
    "packed, 256": packed([70, 3], [9, 130], 256, 256, torch.bfloat16),
    # Long ones, whose last rows each block of a pair has of a head of its own, or both share; keys of one or the other block of a stage.
    "packed, pairs": packed([1161, 385, 760, 0, 1600], [70, 133, 300, 64, 0], 128, 96, torch.bfloat16),
    "packed, pairs, 64": packed([1000, 577], [333, 128], 64, 64, torch.float16, kv_heads=2),
    "packed, pairs, 256": packed([900, 770], [9, 130], 256, 256, torch.bfloat16),
    "packed, pairs, few keys": packed([800, 1160, 760], [5, 20, 64], 128, 128, torch.bfloat16, kv_heads=2),
    "packed, pairs, large channels": large_channels(packed([1161, 650], [70, 133], 128, 128, torch.bfloat16)),
    # The last of an odd number of heads has none to share a pair with.
    "packed, three heads": packed([1161, 650], [70, 133], 64, 64, torch.float16, sharers=3),
    # Tiles of the last round whose keys several clusters share, beside tiles that one has alone; rows of a pair's second block beyond the last.
    "parts": case(1, 1, 1, 150, 1700, 128, 128),
    "parts, 64": case(1, 1, 1, 190, 1700, 64, 64),  # in float16, which shows in what order they are added up
    "parts, whole tiles": case(1, 6, 3, 70, 1100, 64, 64),
    "parts, a pair": case(1, 1, 1, 330, 3000, 64, 40, smooth_k=False),
    "parts, rows of one of three": case(1, 3, 1, 200, 1100, 64, 64),
    # A head's tile of few rows comes after its others; its keys are shared.
    "short tiles last": case(1, 3, 3, 194, 203, 64, 64),
    "short tiles last, parts": case(1, 3, 3, 195, 1650, 64, 64),
    "parts, two of three": case(1, 11, 1, 199, 1384, 64, 64),
    "parts, 256": case(1, 2, 1, 100, 2700, 256, 200),
    # Q is quantised a second time; without log-sum-exp only once, where that it is to be rotated is known soon enough.
    "large channels, once": large_channels(case(2, 4, 2, 70, 333, 128, 96, return_lse=False)),
    "large channels, pairs, once": large_channels(case(1, 4, 1, 384, 140, 128, 128, return_lse=False)),
    "large channels, packed, once": large_channels(sequences(return_lse=False)),
    "large channels, mask, once": large_channels(
        case(1, 4, 2, 380, 333, 128, 128, attn_mask=seen(380, 333, 4), return_lse=False)
    ),
    "large channels": large_channels(case(2, 4, 2, 70, 333, 128, 96)),
    "large channels, pairs, 64": large_channels(case(1, 4, 2, 380, 333, 64, 64)),
    "large channels, 256": large_channels(case(1, 4, 1, 250, 200, 256, 200)),
    "large channels, causal": large_channels(case(1, 2, 1, 500, 600, 128, 128, is_causal=True)),
    "large channels, packed": large_channels(sequences()),
    "large channels, mask": large_channels(case(1, 4, 2, 380, 333, 128, 128, attn_mask=seen(380, 333, 4))),
    "large in Q": large_in_q(case(2, 4, 2, 70, 333, 128, 96)),
    "large in Q, 64": large_in_q(case(1, 4, 2, 380, 333, 64, 64)),
    "large in Q, 256": large_in_q(case(1, 4, 1, 250, 200, 256, 200)),
    "large channels, mask, 256": large_channels(case(1, 2, 1, 250, 200, 256, 200, attn_mask=seen(250, 200))),
    "NaN": not_numbers(),
    "infinite": infinite_in_q(case(1, 2, 2, 70, 130, 64, 64, smooth_k=False)),
    "large V": Case(randn(1, 1, 40, 64).half(), randn(1, 1, 70, 64, seed=1).half(), torch.full((1, 1, 70, 64), 60000.0).half()),
    # Blocks that float16 does not hold relative to those before, of bounds that float32 holds and of others.
    "growing": growing(64, [0, 9, 26, 90, 60, 300]),
    "growing, causal": growing(64, [0, 20, 60], is_causal=True),
    "growing, bfloat16": growing(128, [0, 0, 0, 60, 60, 60, 79, 79, 79, 81, 81, 81]),
    "growing as far as a bound tells": aligned(128, [60, 279]),
    # Masks of each kind of row and of tile.
    "mask": case(1, 4, 2, 380, 333, 128, 128, attn_mask=seen(380, 333, 4)),
    "mask, last rows": case(1, 1, 1, 600, 140, 64, 64, attn_mask=seen(600, 140)),
    "mask, a pair's last rows": case(1, 1, 1, 984, 140, 64, 64, attn_mask=padding(1, 140, [133])),
    "mask, causal, pairs": case(1, 1, 1, 20 * 192 - 70, 333, 64, 64, attn_mask=padding(1, 333, [200]), is_causal=True),
    "mask, causal": case(1, 2, 1, 380, 333, 128, 128, attn_mask=seen(380, 333), is_causal=True),
    "mask, 64": case(1, 3, 1, 150, 700, 64, 64, attn_mask=seen(150, 700)),
    "mask, 256": case(1, 2, 1, 250, 200, 256, 200, attn_mask=seen(250, 200)),
    "mask, many keys": case(
        1, 1, 1, 70, 64 * 33, 64, 64, attn_mask=padding(1, 64 * 33, [64 * 33]) & (torch.arange(64 * 33) % 512 < 70)
    ),
    "padding": case(3, 2, 1, 200, 333, 128, 128, attn_mask=padding(3, 333, [333, 70, 0])),
    "all is hidden": case(1, 1, 1, 70, 130, 64, 64, attn_mask=torch.zeros(70, 130, dtype=torch.bool)),
    "strided mask": strided(masked=True),
    "added": case(1, 3, 1, 380, 333, 128, 128, attn_mask=added(380, 333, torch.bfloat16)),
    "added, causal": case(1, 1, 1, 380, 333, 128, 128, attn_mask=added(380, 333, torch.bfloat16), is_causal=True),
    "growing, mask": growing(64, [0, 20, 60, 20], attn_mask=seen(70, 256)),
    "growing, added": growing(64, [0, 20, 60, 20], attn_mask=added(70, 256, torch.float16)),
    "added, 64": case(1, 3, 1, 250, 270, 64, 64, attn_mask=added(250, 270, torch.float16)),
    "added, 256": case(1, 2, 1, 250, 200, 256, 200, attn_mask=added(250, 200, torch.bfloat16)),
    "added, expanded": case(2, 2, 1, 80, 203, 64, 64, attn_mask=added(80, 203, torch.float16)[..., :203].expand(2, 2, -1, -1)),
    "added, heads": case(2, 4, 2, 80, 208, 64, 64, attn_mask=randn(2, 4, 80, 208, seed=6).half()),
    "added, one key": case(1, 1, 1, 80, 70, 64, 64, attn_mask=randn(1, 1, 80, 1, seed=6).half()),
    "added, one row": case(2, 1, 1, 200, 200, 64, 64, attn_mask=added(1, 200, torch.float16)),
}


# In order first, which has all that happens by itself happen as late as it may, then at random.
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str, hopper: Kernels) -> None:
    CASES[name].check(hopper, KERNEL)
    *_, (*_, cluster) = hopper.launches()
    assert cluster == 2 or "pair" not in name
    CASES[name].check_orders(hopper, KERNEL, 1, 2)


@pytest.mark.parametrize(
    "name",
    [
        "one block",
        "uneven",
        "256",
        "packed",
        "packed, no queries at the end",
        "packed, 256",
        "mask",
        "padding",
        "added, 64",
        "added, one row",
    ],
)
def test_nothing_behind_the_callers_tensors_is_read(name: str, hopper: Kernels) -> None:
    CASES[name].at_the_end_of_memory().check(hopper, KERNEL)


def test_an_expanded_mask_is_looked_at_once(hopper: Kernels) -> None:
    CASES["added, expanded"].run(hopper, KERNEL)
    assert ("mask_tiles", 1) in [(kernel, blocks) for kernel, blocks, *_ in hopper.launches()]


@pytest.mark.parametrize("name", ["strided", "strided mask", "added", "packed", "parts"])
def test_the_stable_abi_says_the_same(name: str, hopper: Kernels) -> None:
    """What is copied, made even or seen as another shape is so by LibTorch's stable ABI too."""
    by_stable_abi = Kernels(hopper.folder, hopper.architecture, stable_abi=True)
    for one, other in zip(CASES[name].run(by_stable_abi, KERNEL), CASES[name].run(hopper, KERNEL), strict=True):
        assert torch.equal(fuzz.bits(one), fuzz.bits(other))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_whose_scores_are_beyond_measure(head_dim: int, hopper: Kernels) -> None:
    """Each part makes the unit of such a row's scores another; one key outweighs all others in any."""
    dtype = TYPES[head_dim]
    q, k, v = inputs(1, 1, 1, 70, 1000, head_dim, head_dim)
    it = Case((250 * q).to(dtype), (250 * k).to(dtype), v.to(dtype), sm_scale=100.0)
    rounding = 2**-10 if dtype == torch.float16 else 0  # whose sums are of probabilities that are not rounded yet
    out, lse = it.run(hopper, KERNEL)
    expected, expected_lse = it.expected(KERNEL)
    torch.testing.assert_close(out, expected, rtol=rounding, atol=0)
    # Where the kernel divides, Q may be rounded otherwise.
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=float(expected_lse.abs().max()) / 128)


class Mask(ctypes.Structure):
    """csrc/kernels/attention/params.h's AttentionMask."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "tiles", "bits")),
        *((name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "row_stride", "key_stride")),
        *((f"tiles_{name}_stride", ctypes.c_int64) for name in ("batch", "head", "row")),
        *((name, ctypes.c_int32) for name in ("tile_rows", "type")),
    )


class MaskTiles(ctypes.Structure):
    """csrc/kernels/mask/mask_tiles.h's Params."""

    _fields_ = (
        ("mask", Mask),
        *((name, ctypes.c_void_p) for name in ("tiles", "bits", "seen")),
        *((name, ctypes.c_int32) for name in ("heads", "rows", "keys", "causal", "alone", "vectors", "count")),
    )


MASK_TYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)
HIDDEN, MIXED, VISIBLE, ADDED = range(4)


def look_at(
    kernels: Kernels, mask: torch.Tensor, rows: int, tile_rows: int, *, bits: bool, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What mask_tiles says of [heads, rows or 1, keys].

    Returns [heads, tiles of rows, tiles of keys], for each tile the words, and which of its keys some row sees.
    """
    keys, size = mask.shape[2], mask.element_size()
    row_tiles, key_tiles = -(-rows // tile_rows), -(-keys // 64)
    tiles = torch.full((mask.shape[0], row_tiles, key_tiles), 255, dtype=torch.uint8)
    words = torch.full((*tiles.shape, 128), -1, dtype=torch.int32)
    row_stride = 0 if mask.shape[1] == 1 else mask.stride(1) * size
    told = Mask(mask.data_ptr(), 0, 0, 0, mask.stride(0) * size, row_stride, mask.stride(2) * size)
    told.tile_rows, told.type = tile_rows, MASK_TYPES.index(mask.dtype)
    vectors = mask.data_ptr() % 16 == 0 and mask.stride(0) * size % 16 == 0 and row_stride % 16 == 0 and mask.stride(2) == 1
    seen = torch.full((*tiles.shape, 4), -1, dtype=torch.int32)
    params = MaskTiles(
        told,
        tiles.data_ptr(),
        words.data_ptr() if bits else 0,
        seen.data_ptr(),
        mask.shape[0],
        rows,
        keys,
        causal,
        0,  # of masks that put keys far away
        vectors,
        tiles.numel(),
    )
    launch = ctypes.CDLL(str(kernels.folder / kernels.architecture / "mask_tiles.so")).launch
    launch.restype = ctypes.c_char_p
    assert launch(ctypes.byref(params), -(-tiles.numel() // 8), 1, 256, 0, 1, None, 0) is None
    key = torch.arange(64)
    return tiles, words, (seen[..., key % 8 // 2] >> key // 8 * 4 + key % 2 & 1).bool()


def expected_tiles(
    mask: torch.Tensor, rows: int, tile_rows: int, *, bits: bool, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, plainly. Words are those of tiles that are looked at again."""
    heads, _, keys = mask.shape
    number = torch.zeros(mask.shape) if mask.dtype == torch.bool else mask.float()
    sees = (mask if mask.dtype == torch.bool else ~(number <= hides(mask.dtype))).expand(heads, rows, keys)
    adds = sees & (number != 0)
    if causal:
        sees = sees & (torch.arange(keys) <= torch.arange(rows)[:, None])
    tiles = torch.zeros(heads, -(-rows // tile_rows), -(-keys // 64), dtype=torch.uint8)
    words = torch.zeros(*tiles.shape, 128, dtype=torch.int32)
    thread, bit = torch.arange(128)[:, None], torch.arange(32)
    row = thread // 32 * 16 + thread % 32 // 4 + bit // 2 % 2 * 8
    key = bit // 4 * 8 + thread % 4 * 2 + bit % 2
    for head, i, j in itertools.product(*(range(size) for size in tiles.shape)):
        place = head, slice(i * tile_rows, (i + 1) * tile_rows), slice(j * 64, (j + 1) * 64)
        seen, whole = sees[place], not bits or (j + 1) * 64 <= keys
        added = bool(adds[place].any())
        tiles[head, i, j] = (
            HIDDEN if not seen.any() else ADDED if added and bits else VISIBLE if seen.all() and whole and not added else MIXED
        )
        if bits and tiles[head, i, j] in (MIXED, ADDED):
            padded = torch.zeros(64, 64, dtype=torch.bool)
            padded[: 64 if rows == 1 else len(seen), : seen.shape[1]] = seen  # a row may stand for all
            words[head, i, j] = (padded[row, key].long() << bit).sum(1).to(torch.int32)
    return tiles, words


def seen_by_tiles(sees: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """Which keys a row of each tile sees: [heads, rows, keys] → [heads, tiles of rows, tiles of keys, 64]."""
    padded = torch.nn.functional.pad(sees, (0, -sees.shape[2] % 64, 0, -sees.shape[1] % tile_rows))
    return padded.unflatten(2, (-1, 64)).unflatten(1, (-1, tile_rows)).any(dim=2)


@pytest.mark.parametrize("dtype", MASK_TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 70, 200])
def test_mask_tiles(dtype: torch.dtype, rows: int, hopper: Kernels) -> None:
    hopper.compile(KERNEL, 64, torch.float16, masked=True)
    for mask_rows, offset, causal in itertools.product({rows, 1}, (0, 3), (False, True)):
        numbers = randn(2, mask_rows, 352, seed=offset)[..., offset : offset + 333]
        hidden = randn(2, mask_rows, 333, seed=5) > 0
        hidden[..., :64], hidden[1, :, 64:140], hidden[0, :, 256:] = False, True, False
        numbers[0, :, :70] = 0
        mask = torch.zeros(2, mask_rows, 352, dtype=dtype)[..., offset : offset + 333]
        mask.copy_(~hidden if dtype == torch.bool else numbers.masked_fill(hidden, hides(dtype)))
        for tile_rows, bits in ((64, True), (128, False)):
            if (bits and dtype == torch.float32) or (causal and (rows == 1 or not bits)):
                continue  # not asked for
            asked = rows if causal else mask_rows
            tiles, words, seen = look_at(hopper, mask, asked, tile_rows, bits=bits, causal=causal)
            expected, expected_words = expected_tiles(mask, asked, tile_rows, bits=bits, causal=causal)
            assert torch.equal(tiles, expected)
            assert torch.equal(seen, seen_by_tiles(~hidden.expand(-1, asked, -1), tile_rows))
            read = (expected == MIXED) | (expected == ADDED)
            assert not bits or torch.equal(words[read], expected_words[read])


def test_mask_tiles_of_other_bytes_than_one(hopper: Kernels) -> None:
    """What is not zero is true."""
    hopper.compile(KERNEL, 64, torch.float16, masked=True)
    seen = randn(1, 150, 333) > 0.5
    expected, expected_words = expected_tiles(seen, 150, 64, bits=True, causal=False)
    bytes_of = torch.arange(1, 256, dtype=torch.uint8).repeat(196)[: seen.numel()].view(seen.shape) * seen
    for width in (333, 336):
        mask = torch.zeros(1, 150, width, dtype=torch.uint8)[..., :333].copy_(bytes_of).view(torch.bool)
        tiles, words, keys = look_at(hopper, mask, 150, 64, bits=True, causal=False)
        assert torch.equal(tiles, expected)
        assert torch.equal(keys, seen_by_tiles(seen, 64))
        assert torch.equal(words[expected == MIXED], expected_words[expected == MIXED])


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_nobody_sees_changes_no_bit(form: str, hopper: Kernels) -> None:
    check_unseen(hopper, KERNEL, FORMS[form], v_hidden=1e4)


ORDERED = [
    "many tiles",
    "many pairs",
    "large channels, once",
    "large channels, pairs, once",
    "causal, 256",
    "packed",
    "packed, pairs, 256",
    "mask",
    "added",
]


@pytest.mark.parametrize("name", ORDERED)
def test_accesses_are_ordered(name: str, judged: Kernels) -> None:
    CASES[name].check(judged, KERNEL)


# In the kernels' sources: a text, what it becomes, the call, and words of the error that follows (empty: or another result).
FAULTS = {
    "start": ("attend.cuh", "    ptx::mbarrier_init_fence();\n", "", "many pairs", "need not be seen"),
    "end": ("attend.cuh", "  ptx::cluster_sync();", "", "many pairs", "of a block that has ended"),
    "count": (
        "attend.cuh",
        "Config::kConsumerWarps * ptx::cluster_size()",
        "Config::kConsumerWarps",
        "many pairs",
        "arrival",
    ),
    "stage": (
        "attend.cuh",
        "    ptx::mbarrier_wait_unless(ready, shared.address + Shared::kFull + ring.place * 8, ring.parity);\n",
        "",
        "many pairs",
        "",
    ),
    "product": (
        "attend.cuh",
        "ptx::wgmma_wait<1>();",
        "ptx::wgmma_wait<2>();",
        "many pairs",
        "registers that a product will write",
    ),
    "warpgroup": (
        "attend.cuh",
        "ptx::wgmma_s8_s8(scores, q[step], k_step, step > 0);",
        "ptx::wgmma_s8_s8(scores, q[step], k_step, step > 0 && warp % 4 < 2);",
        "many pairs",
        "than other warps of the warpgroup have executed",
    ),
    "wait": (
        "attend.cuh",
        "if constexpr (Masked) predicate = ptx::named_barrier_any(1 + group, 128, predicate);",
        "",
        "growing, mask",
        "than other warps of the warpgroup have executed",
    ),
    "rescaling": ("attend.cuh", "      rescaling.apply(out);\n", "", "growing", ""),
    "scales": (
        "load.cuh",
        "      if (scale_stage % kHalf == kHalf - 1) ptx::mbarrier_wait(",
        "      if (false) ptx::mbarrier_wait(",
        "pairs, many keys",
        "arrival",
    ),
    "scales, two phases late": (  # which a parity does not tell from none
        "load.cuh",
        "scale_stage % kHalf == kHalf - 1) ptx::mbarrier_wait(shared.address + Shared::kScalesEmpty, (scale_stage / kHalf + 1) % 2)",
        "scale_stage % kHalf == 0 && scale_stage > 0) ptx::mbarrier_wait(shared.address + Shared::kScalesEmpty, scale_stage / kHalf % 2)",
        "pairs, many keys",
        "",
    ),
    "of a head each": (
        "load.cuh",
        "count == 0 || (Packed && ptx::cluster_size() > 1 && work.alone)",
        "count == 0",
        "packed, pairs",
        "arrival",
    ),
    "sum": (
        "attend.cuh",
        "if constexpr (Config::kHalfRange) lower_probabilities(q_reach, scores, sums, rows, any_too_large, rescale);",
        "",
        "growing",
        "",
    ),
    "overlap": ("attend.cuh", "if (p.lse != nullptr) ptx::grid_dependency_wait();", "", "many pairs", ""),
}
# The same, that only `judged` sees.
UNORDERED = {
    "warps": ("attend.cuh", "      __syncwarp();\n      if (releases)", "      if (releases)", "many pairs"),
    "lanes": (
        "attend.cuh",
        "      ptx::mbarrier_arrive(empty + ring.place * 8);",
        "      for (int i = 0; lane == 0 && i < 32; ++i) ptx::mbarrier_arrive(empty + ring.place * 8);",
        "mask",
    ),
    "lanes that read what a row has": ("quantise_q.cuh", "  __syncwarp();  // before what", "  // before what", "added"),
    "proxies": ("attend.cuh", "      ptx::proxy_async_fence();\n", "", "causal, 256"),
    "output": ("store_out.cuh", "      __syncwarp();\n      uint4", "      uint4", "many tiles"),
    "output, its next channels": ("store_out.cuh", "++panel) {\n      __syncwarp();\n", "++panel) {\n", "many tiles"),
}


def with_fault(kernels: Kernels, folder: Path, file: str, text: str, other: str) -> Kernels:
    """The same but for a text."""
    faulty = kernels.copy(folder, KERNEL)
    faulty.change(f"attention/wgmma/{file}", text, other)
    return faulty


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, hopper: Kernels, tmp_path: Path) -> None:
    file, text, other, call, words = FAULTS[name]
    right = [fuzz.bits(x) for x in CASES[call].run(hopper, KERNEL)]
    faulty = with_fault(hopper, tmp_path, file, text, other)
    message, found = "", []
    try:
        found = [CASES[call].run(faulty, KERNEL, seed=seed) for seed in range(4)]
    except RuntimeError as error:
        message = str(error)
    assert words in message
    assert message or not all(torch.equal(fuzz.bits(x), y) for some in found for x, y in zip(some, right, strict=True))


@pytest.mark.parametrize("name", UNORDERED)
def test_unordered_accesses_are_seen(name: str, judged: Kernels, tmp_path: Path) -> None:
    file, text, other, call = UNORDERED[name]
    assert call in ORDERED
    with pytest.raises(RuntimeError, match="unordered accesses to byte"):
        CASES[call].run(with_fault(judged, tmp_path, file, text, other), KERNEL)


def able(problem: Problem) -> bool:
    """Whether the kernels take a problem, and are among those that these tests compile."""
    sizes = problem.q.shape[-1], problem.v.shape[-1]
    dtype = torch.bfloat16 if problem.q.dtype == torch.float32 else problem.q.dtype
    taken = all(size % 8 == 0 for size in sizes) and not dispatch.is_other_mask(problem.mask, problem.q)
    return taken and max(sizes) <= 128 and TYPES[64 if max(sizes) <= 64 else 128] == dtype


def test_sequences_that_start_nowhere(hopper: Kernels) -> None:
    check_wrong_starts(hopper, KERNEL, TYPES[64])
    check_wrong_starts(hopper, KERNEL, TYPES[64], tokens=1600)  # by pairs


def test_random_calls(hopper: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(hopper, monkeypatch)
    monkeypatch.setattr(fuzz, "kernels", lambda device, problem: [KERNEL] * 9 if able(problem) else [])
    calls = check_random_calls(FIRST, PROBLEMS, lambda call, _: call.kernel == KERNEL)
    assert calls >= PROBLEMS / 6
