"""The 16-bit kernel of few tokens: its own source, compiled for the CPU, against float64 (tests/kernels_on_cpu.py)."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import calls_on_cpu
import fuzz
import pytest
import torch
from accuracy import error_by_size, exact, relative_l1
from calls_on_cpu import at_the_end_of_memory, inputs, randn
from kernels_on_cpu import WAIT, WAIT_AT_END, Kernels

from sageattention import _ops, validation

pytestmark = pytest.mark.slow

INSTEAD_OF, HOPPERS = "sm80_qk_int8_pv_f16", "sm90_qk_int8_pv_f16"
SPLIT_KV, KEYS = "attention/mma_sync_in_16_bits/split_kv.cuh", "attention/mma_sync_in_16_bits/keys.cuh"
TYPES = {64: torch.float16, 128: torch.bfloat16, 256: torch.bfloat16}  # that are compiled, by head_dim
LIMITS = {torch.float16: 0.0006, torch.bfloat16: 0.004}  # P and the output are rounded once each


attention = partial(calls_on_cpu.attend, kernel=INSTEAD_OF, or_16_bit=True)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("on_cpu"), "sm_80")


def check(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kernel: str = INSTEAD_OF,
    seed: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, held to float64."""
    out, lse = attention(kernels, q, k, v, **options, kernel=kernel, seed=seed)
    assert out.isfinite().all()
    assert error_by_size(out, q, k, v, **options) <= LIMITS[q.dtype] * max(1.0, k.shape[2] / 96) ** 0.5
    expected = exact(q, k, v, **options)[1]
    seen = expected.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert ((lse - expected).abs() <= 1e-4 + 1e-6 * expected.abs())[seen].all()
    assert not out[~seen].any()
    return out, lse


def of_type(head_dim: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.to(TYPES[head_dim]) for x in tensors]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (64, (2, 4, 2, 1, 1, 8, 8)),
        (64, (3, 2, 2, 16, 16, 40, 40)),
        (64, (1, 3, 1, 33, 17, 64, 56)),
        (64, (1, 2, 1, 100, 96, 64, 64)),
        (64, (1, 1, 1, 5, 70, 16, 64)),
        (128, (2, 2, 1, 20, 64, 80, 128)),
        (128, (1, 1, 1, 60, 31, 128, 40)),
        (256, (1, 2, 2, 16, 16, 160, 160)),
        (256, (1, 1, 1, 3, 32, 256, 200)),
        # Many keys. Queries times heads that share them are a strip of 16 rows, or two; the emulated GPU has room for 80 warps
        # (head_dim 64) or 40.
        (64, (1, 4, 1, 1, 700, 64, 64)),
        (64, (2, 8, 2, 3, 97, 40, 64)),
        (64, (12, 1, 1, 1, 260, 64, 48)),
        (64, (1, 6, 2, 9, 400, 64, 64)),
        (64, (1, 1, 1, 32, 2000, 8, 16)),
        (64, (14, 3, 1, 20, 20, 8, 8)),  # strips of two heads, whose last rows see fewer keys than others
        (64, (12, 1, 1, 1, 4500, 8, 8)),  # more than 32 blocks a warp
        (128, (1, 8, 1, 4, 1300, 128, 128)),
        (128, (2, 2, 2, 17, 65, 80, 128)),
        (256, (1, 3, 1, 2, 300, 160, 256)),
        (256, (1, 1, 1, 20, 33, 256, 200)),
    ],
)
def test_it_is_exact_but_for_rounding(kernels: Kernels, kernel: int, sizes: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = of_type(kernel, inputs(*sizes))
    check(kernels, q, k, v, is_causal=is_causal)
    once, again = (attention(kernels, q, k, v, is_causal=is_causal, seed=seed) for seed in (0, 1))
    assert all(torch.equal(fuzz.bits(x), fuzz.bits(y)) for x, y in zip(once, again, strict=True))


@pytest.mark.parametrize(
    ("sizes", "parts", "warps", "staged", "whole"),
    [
        ((4, 4, 1, 3, 700, 64, 64), 1, 8, False, 0),
        ((1, 4, 1, 3, 700, 64, 64), 6, 4, False, 0),
        ((12, 2, 1, 1, 260, 64, 48), 1, 4, False, 0),
        ((20, 6, 2, 1, 300, 64, 64), 1, 2, False, 0),
        ((80, 2, 1, 2, 50, 64, 40), 1, 1, False, 0),
        ((2, 2, 1, 3, 2000, 64, 64), 8, 4, False, 0),
        ((40, 2, 1, 1, 70, 128, 128), 1, 1, False, 0),
        ((1, 4, 1, 3, 1300, 128, 128), 16, 2, False, 0),
        ((10, 2, 1, 9, 150, 256, 256), 1, 2, True, 0),
        ((40, 1, 1, 2, 40, 256, 200), 1, 1, False, 0),
        ((5, 2, 1, 9, 500, 200, 256), 4, 1, True, 0),
        ((1, 3, 1, 2, 300, 256, 256), 12, 1, False, 0),
        # A strip each for the warps of the first blocks, and then those that are left.
        ((90, 2, 1, 2, 500, 64, 64), 1, 8, True, 10),
        ((48, 6, 1, 3, 200, 64, 64), 1, 4, True, 20),
        ((30, 4, 2, 1, 300, 128, 128), 1, 2, True, 20),
        ((43, 2, 2, 7, 150, 96, 128), 1, 4, True, 20),
        ((15, 3, 3, 1, 200, 256, 200), 1, 4, True, 10),
    ],
)
def test_keys_are_shared_out(
    kernels: Kernels, sizes: tuple[int, ...], parts: int, warps: int, staged: bool, whole: int
) -> None:
    """Among warps of a block of threads, and such blocks. With many strips, or few keys, a warp has all of a strip's."""
    head_dim = max(sizes[5:])
    q, k, v = of_type(64 if head_dim <= 64 else 128 if head_dim <= 128 else 256, inputs(*sizes))
    check(kernels, q, k, v, seed=1)
    strips = -(-sizes[1] // sizes[2] * sizes[3] // 16) * sizes[0] * sizes[2]
    first, *then = kernels.launches()
    kernel = "sm80_qk_f16_pv_f16_split_kv_staged" if staged else "sm80_qk_f16_pv_f16_split_kv"
    assert first == (kernel, whole + (strips - whole * warps) * parts, 32 * warps, 1)
    assert [name for name, *_ in then] == (["sm80_combine_split_kv"] if parts > 1 else [])
    mask = randn(1, 1, sizes[3], sizes[4], seed=3) > 0
    mask[..., 0] = True
    check(kernels, q, k, v, attn_mask=mask, is_causal=True)


def test_few_keys_are_read_once_where_heads_that_share_them_are_many(kernels: Kernels) -> None:
    for batch, kernel in ((40, "sm80_qk_f16_pv_f16"), (41, "sm80_qk_f16_pv_f16_split_kv")):
        q, k, v = of_type(64, inputs(batch, 2, 1, 1, 50, 64, 64))
        check(kernels, q, k, v)
        assert [name for name, *_ in kernels.launches()] == [kernel]


def test_warps_that_add_up_wait_for_each_other(tmp_path: Path) -> None:
    """tests/on_cpu/races.h looks at what they share; without one of the barriers it says so."""
    kernels = Kernels(tmp_path / "whole", "sm_80", races=True)
    case = of_type(64, inputs(1, 4, 1, 4, 700, 64, 64))
    check(kernels, *case, seed=1)
    faulty = kernels.copy(tmp_path / "faulty", "sm80_qk_f16_pv_f16_split_kv")
    faulty.change(SPLIT_KV, "    __syncthreads();\n    if (warp < half) {", "    if (warp < half) {")
    with pytest.raises(RuntimeError, match="sm80_qk_f16_pv_f16_split_kv"):
        attention(faulty, *case, seed=1)


def test_what_is_added_up_comes_after_q(tmp_path: Path) -> None:
    """Where that lay, of heads too wide for registers to hold it."""
    kernels = Kernels(tmp_path / "whole", "sm_80", races=True)
    case = of_type(256, inputs(15, 1, 1, 16, 60, 256, 256))
    check(kernels, *case, seed=1)
    faulty = kernels.copy(tmp_path / "faulty", "sm80_qk_f16_pv_f16_split_kv")
    faulty.change(
        SPLIT_KV, "if constexpr (kStaged || !Config::kAhead) __syncthreads();", "if constexpr (kStaged) __syncthreads();"
    )
    with pytest.raises(RuntimeError, match="sm80_qk_f16_pv_f16_split_kv"):
        attention(faulty, *case, seed=1)


FAULTS_OF_STAGES = {
    "a stage is filled while it is read": (
        KEYS,
        "    __syncwarp();  // all have",
        "    // all have",
    ),
    "a lane reads what others have not brought": (
        KEYS,
        "      ptx::cp_async_wait<1>();\n      __syncwarp();\n",
        "      ptx::cp_async_wait<1>();\n",
    ),
    "all warps' stages are one": (SPLIT_KV, " + threadIdx.x / 32 * 2 * Config::kBlockBytes", ""),
    "warps are added up while others read": (SPLIT_KV, "if constexpr (kStaged || !", "if constexpr (!"),
}


def test_stages_are_filled_and_read_in_turn(tmp_path: Path) -> None:
    """41 strips: each of 40 warps has its own, and four share the last one."""
    judged = Kernels(tmp_path / "whole", "sm_80", races=True)
    case = of_type(128, inputs(41, 1, 1, 1, 130, 128, 128))
    check(judged, *case, seed=1)
    assert judged.launches() == [("sm80_qk_f16_pv_f16_split_kv_staged", 11, 128, 1)]
    for name, (file, right, wrong) in FAULTS_OF_STAGES.items():
        faulty = judged.copy(tmp_path / name, "sm80_qk_f16_pv_f16_split_kv_staged")
        faulty.change(file, right, wrong)
        with pytest.raises(RuntimeError, match=r"sm80_qk_f16_pv_f16_split_kv_staged.*unordered accesses"):
            attention(faulty, *case, seed=1)


def test_who_asks_too_early_for_a_stage_gets_what_was_there(kernels: Kernels, tmp_path: Path) -> None:
    case = of_type(64, inputs(81, 1, 1, 1, 200, 64, 64))
    right = attention(kernels, *case)[0]
    assert kernels.launches()[0][0] == "sm80_qk_f16_pv_f16_split_kv_staged"
    faulty = kernels.copy(tmp_path / "faulty", "sm80_qk_f16_pv_f16_split_kv_staged")
    faulty.change(KEYS, "ptx::cp_async_wait<1>();", "ptx::cp_async_wait<2>();")
    assert not torch.equal(fuzz.bits(attention(faulty, *case)[0]), fuzz.bits(right))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["bool of keys", "float32", "rows that see nothing", "keys of one warp alone"])
def test_masks_of_few_queries(kernels: Kernels, name: str, is_causal: bool) -> None:
    q, k, v = of_type(64, inputs(2, 4, 2, 5, 900, 40, 40))
    whole = randn(2, 4, 5, 900, seed=9)
    alone = torch.zeros(2, 4, 5, 900, dtype=torch.bool)
    alone[..., [1, 830, 831]] = True
    blind = whole > 0
    blind[:, 1:3, 2] = False
    masks = {
        "bool of keys": (torch.arange(900) < 600).expand(2, 1, 1, 900),
        "float32": whole,
        "rows that see nothing": blind,
        "keys of one warp alone": alone,
    }
    check(kernels, q, k, v, attn_mask=masks[name], is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["bool", "bool, rows apart", "float32 of heads", "bfloat16", "float16", "nothing"])
def test_keys_that_a_mask_hides_are_not_read(kernels: Kernels, name: str, is_causal: bool) -> None:
    """A cache that is not full yet, of which the rest is no number; 12 x 4500 keys are more than 32 blocks for a warp."""
    batch, keys, filled, queries = (12, 4500, 4100, 1) if name == "bool, rows apart" else (2, 900, 176, 5)
    q, k, v = of_type(64, inputs(batch, 2, 1, queries, keys, 16, 16))
    seen = (torch.arange(keys) < filled) & (torch.arange(keys) >= 40)
    least = torch.finfo(torch.float16).min
    masks = {
        "bool": seen.expand(1, 1, 1, keys),
        "bool, rows apart": torch.nn.functional.pad(seen.expand(batch, 1, 1, keys), (0, 1))[..., :keys],
        "float32 of heads": randn(batch, 2, queries, keys, seed=9).masked_fill(~seen, -math.inf),
        "bfloat16": torch.zeros(keys).masked_fill(~seen, -1e9).bfloat16(),
        "float16": torch.zeros(batch, 2, queries, keys).masked_fill(~seen, least).half(),
        "nothing": torch.zeros(1, keys, dtype=torch.bool),
    }
    mask = masks[name]
    seen = seen & (name != "nothing")
    expected, expected_lse = exact(
        q, k, v, attn_mask=mask if mask.dtype is torch.bool else mask.float().masked_fill(~seen, -math.inf), is_causal=is_causal
    )
    for block in range(0, keys, 16):
        # The few keys that is_causal leaves another kernel reads, hidden or not.
        if not seen[block : block + 16].any() and (block > 0 or not is_causal):
            k[:, :, block : block + 16] = v[:, :, block : block + 16] = math.nan
    out, lse = attention(kernels, q, k, v, mask, is_causal=is_causal)
    assert (out.double() - expected).abs().max() <= 0.003
    assert torch.equal(lse.isfinite(), expected_lse.isfinite())
    assert ((lse - expected_lse).abs() <= 1e-4)[expected_lse.isfinite()].all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of", ["queries", "heads", "both"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "queries"), [(6, 2, 2), (4, 1, 5), (8, 1, 5)])
def test_keys_that_a_row_alone_sees(
    kernels: Kernels, q_heads: int, kv_heads: int, queries: int, of: str, dtype: torch.dtype
) -> None:
    """Each 16 of them; of any head or query, in the first strip of 16 rows or a later one. Behind the mask is nothing."""
    keys = 601
    q, k, v = of_type(64, inputs(1, q_heads, kv_heads, queries, keys, 16, 16))
    heads, rows = (1 if of == "queries" else q_heads), (1 if of == "heads" else queries)
    alone = torch.randint(heads * rows, (1, -(-keys // 16)), generator=torch.Generator().manual_seed(queries))
    seen = (torch.arange(heads * rows)[:, None] == alone.repeat_interleave(16, 1)[:, :keys]).view(1, heads, rows, keys)
    mask = seen if dtype is torch.bool else randn(*seen.shape, seed=9).masked_fill(~seen, -math.inf).to(dtype)
    check(kernels, q, k, v, attn_mask=at_the_end_of_memory(mask))


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (64, (1, 3, 1, 33, 17, 40, 56)),
        (64, (1, 4, 1, 3, 700, 40, 56)),
        (64, (90, 2, 1, 2, 501, 40, 56)),  # by way of shared memory
        (128, (1, 2, 1, 20, 50, 80, 104)),
        (256, (1, 1, 1, 3, 31, 160, 200)),
        (256, (1, 3, 1, 2, 301, 160, 200)),
    ],
)
def test_nothing_behind_the_callers_tensors_is_read(kernels: Kernels, kernel: int, sizes: tuple[int, ...]) -> None:
    check(kernels, *(at_the_end_of_memory(x) for x in of_type(kernel, inputs(*sizes))))


def apart(seed: int, batch: int, heads: int, tokens: int) -> torch.Tensor:
    """[batch, tokens, heads, 40]; what is between them is no number, and of each seed there is more."""
    memory = torch.full((batch, tokens, heads + 1 + seed, 72 + 8 * seed), math.nan).half()
    x = memory[:, :, :heads, 8:48]
    return x.copy_(randn(*x.shape, seed=seed))


def check_strides(
    kernels: Kernels, batch: int, queries: int, keys: int, layout: str, kernel: str = INSTEAD_OF
) -> list[tuple[str, int]]:
    """Hold a call of tensors whose tokens come before heads, rows apart, to float64.

    Returns what is launched, and of how many blocks its clusters are.
    """
    tensors = [apart(seed, batch, heads, tokens) for seed, (heads, tokens) in enumerate([(4, queries), (2, keys), (2, keys)])]
    heads_first = [x.transpose(1, 2) for x in tensors]
    out, lse = attention(kernels, *(tensors if layout == "NHD" else heads_first), layout=layout, kernel=kernel)
    expected, expected_lse = exact(*heads_first)
    assert (out.transpose(1, 2) if layout == validation.TURNED else out).is_contiguous()
    assert ((out.transpose(1, 2) if layout == "NHD" else out).double() - expected).abs().max() <= 0.002
    assert (lse - expected_lse).abs().max() <= 1e-4
    return [(name, cluster) for name, _, _, cluster in kernels.launches()]


@pytest.mark.parametrize("layout", _ops.LAYOUTS)
@pytest.mark.parametrize(
    ("sizes", "launched"),
    [
        ((2, 20, 40), ["sm80_qk_f16_pv_f16"]),
        ((6, 3, 300), ["sm80_qk_f16_pv_f16_split_kv"]),
        ((2, 3, 900), ["sm80_qk_f16_pv_f16_split_kv", "sm80_combine_split_kv"]),
        ((41, 3, 100), ["sm80_qk_f16_pv_f16_split_kv_staged"]),
    ],
)
def test_any_strides(kernels: Kernels, sizes: tuple[int, int, int], launched: list[str], layout: str) -> None:
    assert check_strides(kernels, *sizes, layout) == [(name, 1) for name in launched]


def masks() -> dict[str, torch.Tensor]:
    """Of 2 x 4 heads, 20 queries and 41 keys."""
    whole = randn(2, 4, 20, 41, seed=9)
    blind = whole > 0
    blind[..., 7, :] = False
    apart = torch.zeros(2, 4, 20, 90)
    apart[..., 1:83:2] = whole
    even = torch.zeros(1, 4, 20, 48)
    even[..., :41] = whole[:1]
    return {
        "bool": whole > 0,
        "bool of keys": (torch.arange(41) < 30).expand(2, 1, 1, 41),
        "bool, a row that sees nothing": blind,
        "float16": whole.half(),
        "bfloat16 of rows": whole[:1, :, :, :1].bfloat16(),
        "float32, the same in all heads": whole[0, 0],
        "float32, keys apart": apart[..., 1:83:2],
        "float16, rows of whole vectors": even.half()[..., :41],
        "bfloat16, rows of whole vectors": even.bfloat16()[..., :41],
        "float32, rows of whole vectors": even[..., :41],
        "bool, rows of whole vectors": (even > 0)[..., :41],
        "float16, hides": whole.half().masked_fill(whole > 0.5, torch.finfo(torch.float16).min),
        "float32, hides": whole.masked_fill(whole > 0.5, -1e9),
        "-inf": whole.masked_fill(whole > 0.5, -math.inf),
    }


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", masks())
def test_masks(kernels: Kernels, name: str, is_causal: bool) -> None:
    q, k, v = of_type(64, inputs(2, 4, 2, 20, 41, 40, 40))
    mask = masks()[name]
    if "hides" in name:  # what is meant as -infinity is that
        out, lse = attention(kernels, q, k, v, mask, is_causal=is_causal)
        least = torch.finfo(torch.float16).min if mask.dtype == torch.float16 else -5e5
        expected, expected_lse = exact(
            q, k, v, attn_mask=mask.float().masked_fill(mask <= least, -math.inf), is_causal=is_causal
        )
        assert (out.double() - expected).abs().max() <= 0.01
        assert torch.equal(lse.isfinite(), expected_lse.isfinite())
    else:
        check(kernels, q, k, v, attn_mask=mask, is_causal=is_causal)


@pytest.mark.parametrize("sm_scale", [0.0, -0.3, 40.0])
def test_any_scale(kernels: Kernels, sm_scale: float) -> None:
    q, k, v = (
        randn(1, heads, tokens, 64, seed=seed).half() for seed, (heads, tokens) in enumerate([(2, 20), (1, 50), (1, 50)])
    )
    check(kernels, q, k, v, sm_scale=sm_scale)


def test_largest_values(kernels: Kernels) -> None:
    """Sums of them before they are divided are no larger than they are."""
    for keys in (50, 1000):
        q, k, v = of_type(128, inputs(1, 1, 1, 20, keys, 128, 128))
        v = torch.full_like(v, torch.finfo(v.dtype).max)
        out, _ = attention(kernels, q, k, v)
        assert out.isfinite().all()
        assert (out.double() / v[0, 0, 0, 0].double() - 1).abs().max() <= 0.01


def test_scores_whose_last_place_is_large(kernels: Kernels) -> None:
    """Less a level they round to more than that: FP16 has to hold it."""
    for keys in (50, 1000):
        for factor in 2.0 ** torch.arange(9, 13):
            q, k, v = of_type(64, inputs(1, 2, 1, 20, keys, 64, 64))
            assert attention(kernels, q * factor, k * factor, v)[0].isfinite().all(), factor


@pytest.mark.parametrize("keys", [40, 600])
def test_keys_behind_a_sink(kernels: Kernels, keys: int) -> None:
    """That has all but a ten thousandth of a row, and nothing as its value: beside 1 what is left is next to FP16's least number."""
    q, k, v = (randn(1, 1, tokens, 64, seed=seed).half() for seed, tokens in enumerate((4, keys, keys)))
    q[..., 0], k[..., 0], v[:, :, 0] = 8.0, 0.0, 0.0
    k[:, :, 0] = 0.0
    k[:, :, 0, 0] = math.log(keys * 1e4)
    check(kernels, q, k, v * 1024)  # so that the output is in FP16's range


def test_what_is_no_number_stays_in_its_row(kernels: Kernels) -> None:
    q, k, v = of_type(64, inputs(1, 2, 2, 20, 30, 64, 64))
    q[0, 1, 3, 5] = math.nan
    out, lse = attention(kernels, q, k, v)
    assert out[0, 1, 3].isnan().all()
    assert lse[0, 1, 3].isnan()
    assert int(out.isnan().any(-1).sum()) == int(lse.isnan().sum()) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1025, 16, 64, 64),  # queries
        (1, 1, 1, 65, 97, 64, 64),  # keys
        (1, 5, 1, 13, 97, 64, 64),
        (1, 1, 1, 65, 65, 128, 128),
        (1, 1, 1, 65, 33, 256, 256),
        (1, 1, 1, 16, 16, 60, 64),  # rows that do not start on 16 bytes
        (1, 1, 1, 16, 16, 64, 60),
    ],
)
def test_what_is_left_to_others(kernels: Kernels, sizes: tuple[int, ...]) -> None:
    kernel = 64 if sizes[5] <= 64 else sizes[5]
    with pytest.raises(RuntimeError, match="quant_k_int8"):
        attention(kernels, *of_type(kernel, inputs(*sizes)))


@pytest.mark.parametrize("dimension", range(4))
@pytest.mark.parametrize("uneven", range(3))
def test_rows_that_do_not_all_start_on_16_bytes(kernels: Kernels, uneven: int, dimension: int) -> None:
    """Of Q, K or V alone, batch elements, heads or tokens lie eight bytes further, or all do: that is left to others, too."""
    tensors = of_type(64, inputs(2, 2, 2, 16, 16, 64, 64))
    shape, strides = tensors[uneven].shape, [0, 0, 0, 1]
    for i in reversed(range(3)):
        strides[i] = strides[i + 1] * shape[i + 1] + (4 if i == dimension else 0)
    first = 4 if dimension == 3 else 0
    memory = torch.empty(first + shape[0] * strides[0], dtype=TYPES[64])
    tensors[uneven] = memory.as_strided(shape, strides, first).copy_(tensors[uneven])
    with pytest.raises(RuntimeError, match="quant_k_int8"):
        attention(kernels, *tensors)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(128, 48, 64), (128, 30, 128), (16, 96, 64)])
def test_fewer_on_hopper(tmp_path: Path, queries: int, keys: int, head_dim: int, *, masked: bool) -> None:
    """Whose own kernel in 16 bits serves more, with a mask or without."""
    kernels = Kernels(tmp_path, "sm_90a")
    mask = (torch.arange(keys) < keys - 5).expand(1, 1, 1, keys) if masked else None
    sizes = (1, 33, 33, queries, keys, head_dim, head_dim)
    q, k, v = of_type(head_dim, inputs(*sizes))
    out, _ = attention(kernels, q, k, v, mask, kernel=HOPPERS)
    assert error_by_size(out, q, k, v, attn_mask=mask) <= LIMITS[q.dtype] * 1.2
    for more in ((1, 66, 66, 129, keys, head_dim, head_dim), (1, 66, 66, 128, 97, head_dim, head_dim)):
        attn_mask = torch.ones(more[4], dtype=torch.bool) if masked else None
        q, k, v = of_type(head_dim, inputs(*more))
        with pytest.raises(RuntimeError, match=f"sm90_qk_f16_pv_f16{'_masked' if masked else ''}-d"):
            attention(kernels, q, k, v, attn_mask, kernel=HOPPERS)


IN_CLUSTERS = [  # of so many blocks of threads
    ((1, 4, 2, 5, 1200, 40, 56), 4),
    ((2, 2, 1, 3, 1250, 64, 64), 4),
    ((1, 2, 1, 3, 500, 64, 64), 8),
    ((1, 2, 1, 3, 500, 80, 128), 4),
    ((2, 2, 1, 9, 100, 200, 256), 2),
    ((3, 2, 1, 3, 100, 256, 256), 2),
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """On Hopper; unordered accesses to shared memory are errors."""
    return Kernels(tmp_path_factory.mktemp("races"), "sm_90a", races=True)


@pytest.mark.parametrize(("sizes", "blocks"), IN_CLUSTERS)
def test_clusters_add_up_their_parts(judged: Kernels, sizes: tuple[int, ...], blocks: int) -> None:
    """In one launch, and the same bits in any order of threads."""
    head_dim = max(sizes[5:])
    q, k, v = of_type(64 if head_dim <= 64 else 128 if head_dim <= 128 else 256, inputs(*sizes))
    mask = randn(1, 1, sizes[3], sizes[4], seed=3) > 0
    mask[:, :, :1] = False
    for attn_mask in (None, mask):
        results = []
        for seed in range(3):
            results.append(check(judged, q, k, v, attn_mask=attn_mask, kernel=HOPPERS, seed=seed))
            strips = -(-sizes[1] // sizes[2] * sizes[3] // 16) * sizes[0] * sizes[2]
            assert judged.launches() == [("sm80_qk_f16_pv_f16_split_kv", strips * blocks, 128, blocks)]
        for out, lse in results[1:]:
            assert torch.equal(fuzz.bits(out), fuzz.bits(results[0][0]))
            assert torch.equal(fuzz.bits(lse), fuzz.bits(results[0][1]))


@pytest.mark.parametrize("layout", _ops.LAYOUTS)
def test_clusters_take_any_strides(judged: Kernels, layout: str) -> None:
    assert check_strides(judged, 1, 3, 500, layout, HOPPERS) == [("sm80_qk_f16_pv_f16_split_kv", 4)]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("  ptx::cluster_sync();\n  const int fours", "  __syncthreads();\n  const int fours"),
        ("  ptx::cluster_sync();  // the other", "  // the other"),
    ],
)
def test_blocks_of_a_cluster_wait_for_each_other(judged: Kernels, tmp_path: Path, right: str, wrong: str) -> None:
    q, k, v = of_type(64, inputs(*IN_CLUSTERS[0][0]))
    attention(judged, q, k, v, kernel=HOPPERS)
    faulty = judged.copy(tmp_path / "faulty", "sm80_qk_f16_pv_f16_split_kv")
    faulty.change(SPLIT_KV, right, wrong)

    def in_some_orders() -> None:
        for seed in range(4):
            attention(faulty, q, k, v, kernel=HOPPERS, seed=seed)

    with pytest.raises(RuntimeError, match="sm80_qk_f16_pv_f16_split_kv"):
        in_some_orders()


def test_what_adds_parts_up_waits_for_them(tmp_path: Path) -> None:
    """It starts before the kernel that leaves the parts. If it waits at its end it adds up what was there; without a wait others would not wait for that one."""
    q, k, v = (x.bfloat16() for x in inputs(1, 4, 1, 1, 3000, 128, 128))  # 16 parts
    exact_out = exact(q, k, v)[0]

    def error(kernels: Kernels) -> float:
        out, _ = attention(kernels, q, k, v, kernel=HOPPERS)
        return relative_l1(out, exact_out)

    hopper = Kernels(tmp_path / "right", "sm_90a")
    assert error(hopper) <= LIMITS[q.dtype]
    assert [name for name, *_ in hopper.launches()][-1] == "sm80_combine_split_kv"
    faulty = hopper.copy(tmp_path / "faulty", "sm80_combine_split_kv")
    faulty.change("attention/sm80_combine_split_kv.cu", WAIT, WAIT_AT_END)
    assert not error(faulty) <= 0.5  # nor a number, perhaps
    never = hopper.copy(tmp_path / "never", "sm80_combine_split_kv")
    never.change("attention/sm80_combine_split_kv.cu", WAIT, "")
    with pytest.raises(RuntimeError, match="the one before it has not been waited for"):
        error(never)
