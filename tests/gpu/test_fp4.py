"""The FP4 kernel on a GPU: against its reference on the CPU, bit by bit where the arithmetic is exact, and against float64.

It runs on compute capability 12.0 and 12.1, and, with kernels of SAGE_PROOF and operators of SAGE_EMULATE_FP4 (docs/sageattn3.md), on any.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import FP4, error_by_size, exact, relative_l1
from tensors import poison, randn

sageattn3 = pytest.importorskip("sageattn3", reason="not installed here")

from sageattn3 import _library, _ops, dispatch, reference  # noqa: E402

KERNEL = "sm120_qk_fp4_pv_fp4"


def _is_there() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        return KERNEL in _library.kernels.get(dispatch.kernel_folder(torch.cuda.current_device()), frozenset())
    except RuntimeError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _is_there(), reason=f"no {KERNEL} for a GPU here")]

DTYPES = [torch.float16, torch.bfloat16]


def qkv(
    batch: int,
    heads: int,
    qo_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On the CPU, with per-channel offsets, so that smoothing has something to do."""
    kv = (batch, kv_heads or heads, kv_len or qo_len)
    q = randn(batch, heads, qo_len, head_dim, seed=4 * seed) + randn(1, heads, 1, head_dim, seed=4 * seed + 3)
    k = randn(*kv, head_dim, seed=4 * seed + 1) + 2 * randn(1, kv[1], 1, head_dim, seed=4 * seed + 4)
    v = randn(*kv, v_head_dim or head_dim, seed=4 * seed + 2) + 3 * randn(
        1, kv[1], 1, v_head_dim or head_dim, seed=4 * seed + 5
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    smooth_v: bool = True,
    per_block_mean: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out: tuple[torch.Tensor, torch.Tensor] = _ops.attention(
        q, k, v, attn_mask, tensor_layout, is_causal, scale, smooth_k, smooth_v, True, KERNEL, per_block_mean
    )
    return out


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any) -> None:
    """The GPU's answer is the reference's, but for the order of sums, which now and then makes a number its neighbour."""
    poison()
    out, lse = attend(q.cuda(), k.cuda(), v.cuda(), None if attn_mask is None else attn_mask.cuda(), **options)
    expected, expected_lse = attend(q, k, v, attn_mask, **options)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    difference = (out.cpu().double() - expected.double()).abs().sum() / expected.double().abs().sum().clamp_min(1e-30)
    assert difference <= (0.005 if q.dtype == torch.float16 else 0.01), f"differs by {float(difference):.5f}"
    seen = expected_lse > -math.inf
    assert torch.equal(lse.cpu() > -math.inf, seen)
    differences = (lse.cpu() - expected_lse)[seen].abs()
    assert differences.mean() <= 1e-2  # of few keys one that rounded otherwise counts
    assert differences.max() <= 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "per_block_mean"), [(64, True), (128, True), (128, False), (256, True), (80, False)])
def test_matches_reference(dtype: torch.dtype, causal: bool, head_dim: int, per_block_mean: bool) -> None:
    check(
        *qkv(1, 4, 333, head_dim, kv_heads=2, kv_len=517, dtype=dtype),
        is_causal=causal,
        per_block_mean=per_block_mean,
    )


@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_smoothing(smooth_k: bool, smooth_v: bool) -> None:
    check(*qkv(2, 2, 200, 128), smooth_k=smooth_k, smooth_v=smooth_v)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_exact(head_dim: int) -> None:
    """Numbers that no rounding changes before the probabilities, none of which lies halfway between two of e2m1: all but the last bit is the
    reference's."""
    generator = torch.Generator().manual_seed(0)

    def choose(*numbers: float, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=generator)]

    half = choose(-1.0, 1.0, shape=(1, 2, 64, head_dim))
    q = torch.cat([half, -half], dim=2).repeat(1, 1, 2, 1).half()  # of mean 0
    k = choose(0.0, -0.5, 0.5, 1.0, -1.0, 2.0, -2.0, shape=(1, 2, 320, head_dim)).half()
    v = choose(0.0, 0.5, 1.0, -1.0, 2.0, -2.0, 4.0, shape=(1, 2, 320, head_dim)).half()
    out, lse = attend(q.cuda(), k.cuda(), v.cuda(), sm_scale=0.45 / math.log2(math.e), smooth_k=False, smooth_v=False)
    expected, expected_lse = attend(q, k, v, sm_scale=0.45 / math.log2(math.e), smooth_k=False, smooth_v=False)
    torch.testing.assert_close(out.cpu(), expected, rtol=2**-10, atol=2**-20)
    assert (out.cpu() == expected).double().mean() > 0.99
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_tail_lengths(causal: bool) -> None:
    for length in (1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 96, 97, 127, 128, 129, 191, 193, 255, 257):
        check(*qkv(1, 2, length, 64 if length % 2 else 128, dtype=DTYPES[length % 2], seed=length), is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 257), (257, 1), (113, 203), (203, 113), (128, 64), (64, 128), (300, 1024)])
def test_lengths_that_differ(qo_len: int, kv_len: int, causal: bool) -> None:
    check(*qkv(2, 2, qo_len, 128, kv_len=kv_len), is_causal=causal)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 16, 33, 72, 96, 127, 129, 160, 200])
def test_head_dims(head_dim: int) -> None:
    check(*qkv(1, 3, 129, head_dim, kv_len=195, v_head_dim=max(1, head_dim - 5), dtype=DTYPES[head_dim % 2]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (6, 3), (5, 5)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    check(*qkv(2, heads, 200, 128, kv_heads=kv_heads))


@pytest.mark.parametrize("causal", [False, True])
def test_masks(causal: bool) -> None:
    q, k, v = qkv(2, 2, 200, 64, kv_len=300)
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(2, 1, 200, 300, generator=generator) > 0.4
    seen[1, :, 7] = False  # a row that sees nothing
    seen[0, :, :, :130] = False  # blocks that nothing is seen of
    check(q, k, v, seen, is_causal=causal)
    added = torch.randn(2, 200, 300, generator=generator)
    check(q, k, v, added, is_causal=causal)
    check(q, k, v, added.masked_fill(~seen[:, 0], -1e9).to(torch.bfloat16), is_causal=causal)
    check(q, k, v, seen[:1, :, :1], is_causal=causal)


def test_strides() -> None:
    q, k, v = (x.cuda() for x in qkv(2, 4, 150, 128, kv_len=170))
    expected, expected_lse = attend(q, k, v)
    nhd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse = attend(nhd[0], nhd[1], nhd[2], tensor_layout="NHD")
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)
    for width, start in ((136, 0), (131, 0), (136, 1), (130, 2)):
        wide = []
        for x in (q, k, v):
            buffer = torch.full((*x.shape[:3], width), float("nan"), device="cuda", dtype=x.dtype)
            buffer[..., start : start + 128] = x
            wide.append(buffer[..., start : start + 128])
        assert torch.equal(attend(wide[0], wide[1], wide[2])[0], expected)
    one = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(attend(q, one, one)[0], attend(q, one.contiguous(), one.contiguous())[0])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal: bool) -> None:
    lengths_q, lengths_k = [5, 0, 200, 128, 33, 64], [70, 9, 0, 300, 33, 1]
    q, k, v = (x[0].transpose(0, 1) for x in qkv(1, 4, sum(lengths_q), 64, kv_heads=2, kv_len=sum(lengths_k)))
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    for head_dim in (64, 40):
        packed = [*(x[..., :head_dim] for x in (q, k, v)), cu_q, cu_k]
        options: Any = (causal, 0.125, True, True, True, KERNEL)
        poison()
        out, lse = _ops.attention_varlen(*[x.cuda() for x in packed], *options)
        expected, expected_lse = _ops.attention_varlen(*packed, *options)
        assert relative_l1(out.cpu(), expected.double()) <= 0.005
        seen = expected_lse > -math.inf
        assert torch.equal(lse.cpu() > -math.inf, seen)
        assert (lse.cpu() - expected_lse)[seen].abs().max() <= 0.1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy(causal: bool, head_dim: int) -> None:
    q, k, v = (randn(1, 4, 2048, head_dim, seed=seed).cuda() for seed in range(3))
    out, lse = attend(q, k, v, is_causal=causal)
    expected, expected_lse = exact(q, k, v, is_causal=causal)
    assert relative_l1(out, expected) <= FP4.relative_l1
    assert error_by_size(out, q, k, v, is_causal=causal) <= FP4.any_shape
    assert (lse - expected_lse).abs().max() <= FP4.lse


def test_offsets_do_not_hurt() -> None:
    q, k, v = (randn(1, 2, 2048, 128, dtype=torch.bfloat16, seed=seed).cuda() for seed in range(3))
    q, k, v = (x + scale * randn(1, 2, 1, 128, dtype=torch.bfloat16, seed=seed).cuda() for x, scale, seed in
               ((q, 4, 7), (k, 8, 8), (v, 8, 9)))  # fmt: skip
    out, _ = attend(q, k, v)
    assert relative_l1(out, exact(q, k, v)[0]) <= FP4.offsets


def test_inputs_are_not_changed_and_runs_are_bit_identical() -> None:
    tensors = [x.cuda() for x in qkv(2, 4, 700, 128)]
    before = [x.clone() for x in tensors]
    first, _ = attend(tensors[0], tensors[1], tensors[2], is_causal=True)
    for _ in range(3):
        assert torch.equal(attend(tensors[0], tensors[1], tensors[2], is_causal=True)[0], first)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)


def test_nan_is_not_hidden() -> None:
    q, k, v = (x.cuda() for x in qkv(1, 2, 300, 64))
    q[0, 0, 3, 5] = float("nan")
    k[0, 1, 7, 9] = float("nan")
    out, _ = attend(q, k, v, smooth_k=False)
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, :3].isfinite().all()
    assert out[0, 0, 4:].isfinite().all()
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_no_number(bad: float) -> None:
    """Of a key that the mean of V is sampled from: queries that see no key of its block do without both."""
    q, k, v = (x.cuda() for x in qkv(1, 1, 320, 64))
    v[0, 0, int(reference.sampled_tokens(320)[-1]), 3] = bad
    out, _ = attend(q, k, v, is_causal=True)
    assert out[0, 0, :256].isfinite().all()
    assert not out[0, 0, -1, 3].isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_do_not_overflow(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).cuda() for x in qkv(1, 2, 500, 128))
    large = 60000.0 if dtype == torch.float16 else 1e37
    out, _ = attend(q, k, torch.full_like(v, large))
    torch.testing.assert_close(out, torch.full_like(v, large), rtol=8e-3, atol=0)
    check(q.cpu(), (k * 1000).cpu(), v.cpu(), sm_scale=0.0001)


@pytest.mark.parametrize("padding", [None, (0, 1, 700)])
def test_attention_sink(padding: tuple[int, ...] | None) -> None:
    """A key that takes nearly all of each row, with a value near zero: what is left of the others is what counts. Each sequence's first is one."""
    seats = padding or (0,)
    q, k, v = (randn(len(seats), 2, 1024, 128, seed=seed) for seed in range(3))
    q = q + 1.0
    for sequence, seat in enumerate(seats):
        k[sequence, :, seat] = 1.5
        v[sequence, :, seat] = 0.0
    mask = None if padding is None else torch.arange(1024) >= torch.tensor(seats)[:, None, None, None]
    check(q, k, v, attn_mask=mask, is_causal=True)
