"""The CPU reference, called as users call it, against float64; and the properties of its parts.

The kernels are compared with it on a GPU (tests/gpu), so what holds here is what they are held to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import QK_INT8_PV_F16, error_by_size, exact, relative_l1
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import randn

from sageattention import reference, reference_fp4, sageattn, sageattn_qk_int8_pv_fp16_cuda

DTYPES = [torch.float16, torch.bfloat16]
# The same examples every time: a limit that is met by chance is no limit.
property_test = settings(max_examples=200, deadline=None, derandomize=True, database=None)

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv(
    heads: int,
    qo_len: int,
    head_dim: int,
    *,
    kv_heads: int = 0,
    kv_len: int = 0,
    batch: int = 1,
    seed: int = 0,
    dtype: Any = None,
) -> QKV:
    kv = (batch, kv_heads or heads, kv_len or qo_len, head_dim)
    dtype = dtype or torch.float16
    return (
        randn(batch, heads, qo_len, head_dim, seed=3 * seed, dtype=dtype),
        randn(*kv, seed=3 * seed + 1, dtype=dtype),
        randn(*kv, seed=3 * seed + 2, dtype=dtype),
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, smooth_k: bool = True, **options: Any) -> Any:
    """By `sageattn`, which always smooths, or without."""
    return sageattn(q, k, v, **options) if smooth_k else sageattn_qk_int8_pv_fp16_cuda(q, k, v, smooth_k=False, **options)


def attend_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(q, k, v, return_lse=True, **options)
    return out, lse


class Case(NamedTuple):
    """One call."""

    batch: int
    kv_heads: int
    group: int
    qo_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    layout: str
    is_causal: bool
    smooth_k: bool
    scale: float | None  # times head_dim ** -0.5
    views: tuple[str, str, str]
    seed: int

    def tensors(self) -> QKV:
        """In the order [batch, heads, tokens, head_dim]."""
        q_heads = self.kv_heads * self.group
        return qkv(
            q_heads, self.qo_len, self.head_dim,
            kv_heads=self.kv_heads, kv_len=self.kv_len, batch=self.batch, seed=self.seed, dtype=self.dtype,
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        scale = None if self.scale is None else self.scale * self.head_dim**-0.5
        return {"is_causal": self.is_causal, "sm_scale": scale}


VIEWS = ("contiguous", "other layout", "every second token", "part of the channels", "packed")
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 256]))
CASES = st.builds(
    Case,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    qo_len=LENGTHS,
    kv_len=LENGTHS,
    head_dim=st.one_of(st.integers(1, 128), st.sampled_from([1, 63, 64, 65, 128])),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["HND", "NHD"]),
    is_causal=st.booleans(),
    smooth_k=st.booleans(),
    scale=st.sampled_from([None, None, 0.0, -1.0, 0.3, 1.5]),
    views=st.tuples(*[st.sampled_from(VIEWS)] * 3),
    seed=st.integers(0, 2**16),
)


def as_view(x: torch.Tensor, view: str) -> torch.Tensor:
    """The same values in other memory; what lies between them is NaN."""
    if view == "contiguous":
        return x.contiguous()
    if view == "other layout":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    shape = list(x.shape)
    if view == "every second token":
        shape[2] *= 2
        buffer = torch.full(shape, float("nan"), dtype=x.dtype)
        buffer[:, :, 1::2] = x
        return buffer[:, :, 1::2]
    if view == "part of the channels":
        shape[3] += 3
        buffer = torch.full(shape, float("nan"), dtype=x.dtype)
        buffer[..., 1:-2] = x
        return buffer[..., 1:-2]
    return torch.stack([torch.full_like(x, float("nan")), x], dim=3)[:, :, :, 1]


@given(CASES)
@example(Case(1, 1, 1, 1, 1, 1, torch.float16, "HND", True, True, None, ("contiguous",) * 3, 0))
@example(Case(2, 2, 3, 257, 300, 128, torch.bfloat16, "NHD", True, True, -1.0, ("packed",) * 3, 1))
@property_test
def test_any_shape_against_float64(case: Case) -> None:
    q, k, v = case.tensors()
    views = [as_view(x, view) for x, view in zip((q, k, v), case.views, strict=True)]
    if case.layout == "NHD":
        views = [x.transpose(1, 2) for x in views]
    before = [x.clone() for x in views]
    out, lse = attend_lse(*views, tensor_layout=case.layout, smooth_k=case.smooth_k, **case.options())
    for x, y in zip(views, before, strict=True):
        assert torch.equal(x, y)
    assert out.shape == views[0].shape
    assert out.dtype == case.dtype
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    if case.layout == "NHD":
        out = out.transpose(1, 2)
    expected_lse = exact(q, k, v, **case.options())[1]
    assert lse.shape == expected_lse.shape
    assert error_by_size(out, q, k, v, **case.options()) <= QK_INT8_PV_F16.any_shape
    assert (lse - expected_lse).abs().max() <= QK_INT8_PV_F16.lse


@given(CASES)
@settings(property_test, max_examples=40)
def test_memory_layout_does_not_matter(case: Case) -> None:
    tensors = case.tensors()
    views = [as_view(x, view) for x, view in zip(tensors, case.views, strict=True)]
    expected, expected_lse = attend_lse(*tensors, smooth_k=case.smooth_k, **case.options())
    out, lse = attend_lse(*views, smooth_k=case.smooth_k, **case.options())
    # Matrix products may add in another order, and that may round an element of P to its other neighbour.
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy_at_4096_tokens(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = qkv(1, 4096, 128, dtype=dtype)
    out, lse = attend_lse(q, k, v, is_causal=causal)
    expected, expected_lse = exact(q, k, v, is_causal=causal)
    assert relative_l1(out, expected) <= QK_INT8_PV_F16.relative_l1
    assert (lse - expected_lse).abs().max() <= QK_INT8_PV_F16.lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets_of_k_and_v(dtype: torch.dtype) -> None:
    """Models have them in every channel. Smoothing takes K's away, and log-sum-exp does not show that it did."""
    q, k, v = qkv(1, 4096, 128, dtype=dtype)
    k, v = ((x + 8 * randn(1, 1, 1, 128, seed=seed)).to(dtype) for x, seed in ((k, 90), (v, 91)))
    expected, expected_lse = exact(q, k, v)
    out, lse = attend_lse(q, k, v)
    assert relative_l1(out, expected) <= QK_INT8_PV_F16.offsets
    assert (lse - expected_lse).abs().max() <= QK_INT8_PV_F16.lse
    # That smoothing is what does it: without it the scores are off by more.
    rough = attend_lse(q, k, v, smooth_k=False)[1]
    assert (rough - expected_lse).abs().mean() > 3 * (lse - expected_lse).abs().mean()


def test_smoothing_is_neutral_where_k_is_constant() -> None:
    """All keys alike: P is uniform, the output V's mean, whatever the offset."""
    q, k, v = qkv(2, 50, 64, kv_len=130)
    k = k[:, :, :1].expand(-1, -1, 130, -1) * 100
    out, lse = attend_lse(q, k, v)
    expected, expected_lse = exact(q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smooth", [False, True])
def test_outlier_channels(dtype: torch.dtype, smooth: bool) -> None:
    q, k, v = qkv(2, 1024, 128, dtype=dtype)
    q[..., ::16] *= 30
    k[..., ::16] *= 30
    out, lse = attend_lse(q, k, v, smooth_k=smooth)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert relative_l1(out, exact(q, k, v)[0]) <= QK_INT8_PV_F16.outliers


def test_values_near_the_end_of_the_range() -> None:
    q, k, v = qkv(1, 300, 64)
    torch.testing.assert_close(attend(q, k, torch.full_like(v, 60000.0)), torch.full_like(q, 60000.0), rtol=1e-3, atol=0)
    wide = torch.full_like(v, 1e33, dtype=torch.bfloat16)
    out = attend(q.bfloat16(), k.bfloat16(), wide)
    torch.testing.assert_close(out, wide, rtol=1e-2, atol=0)


@pytest.mark.parametrize("value", [0.0, 1e-7, 6e4])
def test_tensors_of_one_value(value: float) -> None:
    v = randn(1, 1, 70, 32, seed=0)
    same = torch.full_like(v, value)
    out, lse = attend_lse(same, same, v)
    torch.testing.assert_close(out.double(), v.double().mean(dim=2, keepdim=True).expand_as(v), rtol=0, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact(same, same, v)[1], rtol=1e-3, atol=1e-3)


def test_nan_is_not_hidden() -> None:
    q, k, v = qkv(2, 100, 64)
    q[0, 0, 3, 5] = float("nan")
    k[0, 1, 7, 9] = float("nan")
    out = attend(q, k, v, smooth_k=False)
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, :3].isfinite().all()
    assert out[0, 0, 4:].isfinite().all()
    assert out[0, 1].isnan().all()
    v[0, 0, 9, 2] = float("nan")
    out = attend(*qkv(2, 100, 64)[:2], v)
    assert out[0, 0, :, 2].isnan().all()
    assert out[0, 0, :, 3:].isfinite().all()


def test_grouped_heads_are_repeated_heads() -> None:
    q, k, v = qkv(6, 90, 48, kv_heads=2)
    out = attend(q, k, v)
    torch.testing.assert_close(out, attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)), rtol=1e-2, atol=1e-3)


def test_expanded_heads() -> None:
    q, k, v = qkv(4, 90, 48, kv_heads=1)
    expected = attend(q, k, v, is_causal=True)
    out = attend(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((0, 2, 5, 64), (0, 2, 5, 64)),
        ((1, 2, 0, 64), (1, 2, 5, 64)),
        ((1, 2, 0, 64), (1, 2, 0, 64)),
        ((1, 0, 5, 64), (1, 1, 5, 64)),
        ((0, 2, 5, 64), (0, 2, 0, 64)),
        ((1, 0, 5, 64), (1, 1, 0, 64)),
    ],
)
@pytest.mark.parametrize("smooth_k", [True, False])
def test_nothing_to_compute(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], smooth_k: bool) -> None:
    q, kv = torch.zeros(q_shape, dtype=torch.float16), torch.zeros(kv_shape, dtype=torch.float16)
    out, lse = attend_lse(q, kv, kv, smooth_k=smooth_k)
    assert out.shape == q_shape
    assert lse.shape == q_shape[:3]


def test_a_causal_row_sees_no_later_block() -> None:
    """Keys of a later block of 64 share no scale with the row's own, so nothing of them may show."""
    q, k, v = qkv(2, 256, 64)
    out, lse = attend_lse(q, k, v, is_causal=True, smooth_k=False)
    k[:, :, 128:] = 50
    v[:, :, 128:] = -50
    other, other_lse = attend_lse(q, k, v, is_causal=True, smooth_k=False)
    assert torch.equal(out[:, :, :128], other[:, :, :128])
    assert torch.equal(lse[:, :, :128], other_lse[:, :, :128])
    assert not torch.equal(out[:, :, 128:], other[:, :, 128:])


# Steps between neighbouring keys' scores, in powers of two: rising by 1 to 64 within a chunk.
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("step", [0.05, 0.12, 0.13, 0.49, 0.51, 1.0])
def test_order_of_keys_does_not_matter(step: float, head_dim: int) -> None:
    """Rising scores rescale the output at almost every chunk, falling ones never: the result is the same.

    Two channels of K have the same magnitude in every key, which makes all scales alike in any order, and carry a sum that
    Q turns into the score; so only the running maximum differs between the orders.
    """
    keys = 320
    score = (torch.arange(keys) * step).clamp(max=120.0)
    k = torch.zeros(1, 1, keys, head_dim)
    k[..., 0] = 127.0
    k[..., 1] = score.round()  # integers up to 127: exact in INT8
    q = torch.zeros(1, 1, 8, head_dim)
    q[..., 1] = torch.linspace(0.1, 1.0, 8)
    v = randn(1, 1, keys, head_dim, seed=5)
    q16, k16 = q.half(), k.half()
    # sm_scale such that a score is a power of two.
    options: dict[str, Any] = {"sm_scale": 0.6931471805599453, "smooth_k": False}
    expected, expected_lse = exact(q16, k16, v, sm_scale=options["sm_scale"])
    shuffled = torch.randperm(keys, generator=torch.Generator().manual_seed(1))
    for order in (torch.arange(keys), torch.arange(keys).flip(0), shuffled):
        out, lse = attend_lse(q16, k16[:, :, order], v[:, :, order], **options)
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
        # Folding MAGIC into the exponent's offset rounds that by up to a unit of the integer scores, here 1/127, and by 0.75 of it at most.
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=0.75 / 127)


def test_the_limit_that_renews_maxima_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(2, 200, 128, dtype=torch.float16)
    q = q * 8  # scores far apart, so that maxima do grow
    lazy, lazy_lse = attend_lse(q, k, v)
    precision = reference.PRECISION["sm80_qk_int8_pv_f16"]
    monkeypatch.setitem(reference.PRECISION, "sm80_qk_int8_pv_f16", precision._replace(limit=0.0))
    eager, eager_lse = attend_lse(q, k, v)
    torch.testing.assert_close(lazy, eager, rtol=5e-3, atol=2e-3)
    torch.testing.assert_close(lazy_lse, eager_lse, rtol=0, atol=1e-3)
    assert not torch.equal(lazy, eager)  # the limit is in use


@pytest.mark.parametrize("kernel", [name for name, how in reference.PRECISION.items() if how.sums == torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("value", [4.5, -4.5])
def test_the_largest_sums_that_may_be_are_numbers_in_float16(kernel: str, head_dim: int, value: float) -> None:
    """All keys but the first block's have P just below what renews the row's maximum, and the largest values of one sign."""
    precision = reference.PRECISION[kernel]
    each = precision.limit / (reference.chunk_n(head_dim, precision) // 4)  # a thread holds a quarter of a row's chunk
    q, k = torch.zeros(1, 1, 8, head_dim), torch.zeros(1, 1, 320, head_dim)
    q[..., 0], k[:, :, 64:, 0] = 1.0, math.log2(each * 0.99) - precision.level
    v = torch.full((1, 1, 320, head_dim), value, dtype=torch.float16)
    options: dict[str, Any] = {"is_causal": False, "sm_scale": math.log(2.0), "smooth_k": False, "kernel": kernel}
    out, _ = reference.attention(q.half(), k.half(), v, **options)
    torch.testing.assert_close(out, v[:, :, :8], rtol=1 / 16, atol=0)  # e4m3 rounds P


@given(
    kv_len=LENGTHS,
    head_dim=st.integers(1, 128),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    smooth=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(property_test, max_examples=60)
def test_quantised_keys(kv_len: int, head_dim: int, size: float, smooth: bool, seed: int) -> None:
    k = randn(1, 2, kv_len, head_dim, seed=seed, dtype=torch.float32) * size + (3 * size if smooth else 0)
    mean = reference.sampled_mean(k)[0] if smooth else torch.zeros(1, 2, 1, head_dim)
    integers, scale = reference.quantise_k(k, mean)
    assert integers.shape == k.shape
    assert scale.shape == k.shape[:3]
    assert torch.equal(integers, integers.round())
    assert integers.abs().max() <= 127
    centred = (k - mean).double()
    # Half a step, and what float32 adds to the quotient.
    assert ((integers * scale.double()[..., None] - centred).abs() <= scale.double()[..., None] * 0.50002).all()
    # csrc/kernels/quant/quant_k_int8.h: the keys of a block of 64 with the same (key % 8) // 2 share a scale.
    key = torch.arange(kv_len)
    group = key // 64 * 4 + key % 8 // 2
    for g in group.unique():
        members = group == g
        assert members.sum() <= 16
        largest = centred[:, :, members].abs().amax(dim=(2, 3))
        smallest = 2 * reference.SMALLEST_MAGNITUDE  # halves are what is rounded
        used = torch.where(largest < smallest, 0.0, 127.0)
        largest = largest.clamp_min(smallest)
        torch.testing.assert_close(
            scale[:, :, members].double(), (largest / 127)[..., None].expand(-1, -1, int(members.sum())), rtol=1e-6, atol=1e-32
        )
        # The largest element of a group uses the whole range.
        assert torch.equal(integers[:, :, members].abs().amax(dim=(2, 3)), used)


@pytest.mark.parametrize("kv_len", [1, 5, 63, 64, 65, 100, 103, 104, 127, 128, 1000, 4096])
def test_sampled_tokens(kv_len: int) -> None:
    """One in each of 64 equal stretches, all of fewer; of regular patterns all phases are met."""
    tokens = reference.sampled_tokens(kv_len)
    samples = min(kv_len, 64)
    assert len(tokens) == samples
    for i, token in enumerate(tokens.tolist()):
        assert i * kv_len // samples <= token < -(-(i + 1) * kv_len // samples)  # a token on an edge is of both
    # One after the other; neighbours in their stretches are 0.618 of one apart at least, so that of 104 tokens none is taken twice.
    steps = tokens.diff()
    assert (steps >= (0 if 64 < kv_len < 104 else 1)).all()
    if kv_len == 4096:
        for period in (8, 16, 32, 64):
            assert len(set((tokens % period).tolist())) >= period * 5 // 8


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 100, 4096])
def test_sampled_mean(tokens: int) -> None:
    """The mean of like tokens, which one unlike the others hardly moves; the spread is the mean distance from it."""
    k = randn(1, 2, tokens, 128, seed=tokens, dtype=torch.float32) + 5
    mean, spread = reference.sampled_mean(k)
    error = (mean - 5).abs().mean()
    assert error <= 1.2 * (0.8 / min(tokens, 64) ** 0.5)
    if tokens >= 63:
        assert spread.mean() == pytest.approx(0.8, rel=0.1)
        k[:, :, reference.sampled_tokens(tokens)[3]] = 300.0
        moved, _ = reference.sampled_mean(k)
        assert (moved - mean).abs().mean() <= 0.1


def test_rotation() -> None:
    """None where channels are alike; else by factors that have K as far above what is typical as Q is, and no product changes."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 300, 64), torch.randn(1, 2, 200, 64)

    def found(q: torch.Tensor, k: torch.Tensor) -> tuple[list[bool], torch.Tensor]:
        rotation = reference.find_rotation(q, reference.sampled_mean(k)[1])
        return rotation.applies.flatten().tolist(), rotation.factor[0, :, 0]

    assert found(q, k)[0] == [False, False]
    mean = q.clone()
    mean[:, 1, :, 7] += 20.0  # of one of the heads that share K
    applies, factor = found(mean, k)
    assert applies == [True, False]
    assert (factor[1] == 1.0).all()
    assert factor[0, 7] == 0.25
    assert factor[0].log2().abs().median() == 0.0
    k[0, 1, :, 5] += 160 * torch.cos(torch.arange(200.0))
    applies, factor = found(q, k)
    assert applies == [False, True]
    assert factor[1, 5] == 8.0
    less, more = q.clone(), q.clone()
    less[:, 2:, :, 5] *= 0.01
    more[:, 3, :, 5] *= 80
    assert found(less, k)[1][1, 5] == 16.0
    assert found(more, k)[1][1, 5] == 1.0  # one of the heads that share K is large there too
    some = q[:, :, :1].clone()  # fewer queries than heads that share K: all heads are looked at
    some[:, 2, :, 5], some[:, 3, :, 5] = 0.01, 80.0
    assert found(some, k)[1][1, 5] == 1.0
    q[0, 2, 0] *= 50.0  # a row that is large altogether says nothing of channels
    assert found(q, k)[1][1, 5] == 8.0
    q[0, 2, 0, 7], q[0, 3, 0, 9] = math.inf, math.nan
    assert found(q, k)[1][1, 5] == 8.0
    for head_dim in (64, 128, 256):
        q, k = torch.randn(1, 2, 9, head_dim - 8, dtype=torch.double), torch.randn(1, 2, 7, head_dim - 8, dtype=torch.double)
        q[..., 3] += 100.0
        rotation = reference.find_rotation(q, reference.sampled_mean(k.float())[1])
        turned_q, turned_k = (
            rotation.of(q, rotation.factor.double(), head_dim),
            rotation.of(k, 1.0 / rotation.factor.double(), head_dim),
        )
        torch.testing.assert_close(turned_q @ turned_k.mT * rotation.unit(head_dim), q @ k.mT)
        assert turned_q.abs().amax() < 0.45 * turned_q.norm(dim=-1).amax()


@pytest.mark.parametrize("kernel", [*reference.PRECISION, *reference_fp4.PRECISION])
@pytest.mark.parametrize(("filled", "room", "bias"), [(300, 1024, 100), (40, 77, 30), (20, 4096, 100), (1, 200, 100)])
def test_a_cache_that_is_not_full(filled: int, room: int, bias: float, kernel: str) -> None:
    """Zeros that a mask hides cost nothing where K has a bias, as they would beside their neighbours."""
    q, k, v = qkv(2, 64, 64, kv_len=room)
    k[:, :, :, 3] += bias
    k[:, :, filled:] = v[:, :, filled:] = 0
    options: dict[str, Any] = {"is_causal": False, "sm_scale": 0.125, "smooth_k": True, "kernel": kernel}
    out, lse = reference.attention(q, k, v, (torch.arange(room) < filled)[None], **options)
    expected, expected_lse = exact(q, k[:, :, :filled], v[:, :, :filled])
    alone = reference.attention(q, k[:, :, :filled], v[:, :, :filled], **options)[0]
    assert relative_l1(out, expected) <= 1.1 * relative_l1(alone, expected) + 1e-4
    assert (lse - expected_lse).abs().max() <= (0.3 if "fp4" in kernel else 0.15)


@pytest.mark.parametrize("hides", [-8192.0, -1e4, -1e5])
@pytest.mark.parametrize("kernel", [*reference.PRECISION, *reference_fp4.PRECISION])
def test_keys_that_a_mask_of_keys_puts_far_away(kernel: str, hides: float) -> None:
    """-10000 and the like, as diffusers hide padding, is no weight beside others: their keys may be as large as they like. Alone they are what they were."""
    q, k, v = qkv(2, 64, 64, kv_len=300, batch=2, dtype=torch.bfloat16)
    seen = torch.stack([torch.arange(300) < 180, torch.zeros(300, dtype=torch.bool)])[:, None, None]
    mask = torch.where(seen, 0.0, hides).bfloat16()
    k[0, :, 180:] *= 100
    options: dict[str, Any] = {"is_causal": False, "sm_scale": 0.125, "smooth_k": True, "kernel": kernel}
    out, _ = reference.attention(q, k, v, mask, **options)
    for i, keys in enumerate((180, 300)):
        some = q[i : i + 1], k[i : i + 1, :, :keys], v[i : i + 1, :, :keys]
        expected, _ = exact(*some)
        alone, _ = reference.attention(*some, **options)
        assert relative_l1(out[i], expected[0]) <= 1.1 * relative_l1(alone, expected) + 1e-3


FAR_APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two groups": lambda key: (key >= 1) & (key < 30) | (key >= 4000) & (key < 4020),
    "one of each 64": lambda key: key % 64 == 1,
    "sinks and a window": lambda key: (key < 4) | (key >= 3800) & (key < 4000),
}


@pytest.mark.parametrize("kernel", [*reference.PRECISION, *reference_fp4.PRECISION])
@pytest.mark.parametrize("which", sorted(FAR_APART))
def test_seen_keys_that_are_far_apart(which: str, kernel: str) -> None:
    """They cost what they would beside each other, and the first of them, unlike the others, is not their mean."""
    q, k, v = qkv(2, 64, 64, kv_len=4096)
    k[:, :, :, 3] += 100
    k[:, :, 0] = 8 * randn(64, seed=9)
    seen = FAR_APART[which](torch.arange(4096))
    options: dict[str, Any] = {"is_causal": False, "sm_scale": 0.125, "smooth_k": True, "kernel": kernel}
    expected, _ = exact(q, k[:, :, seen], v[:, :, seen])
    error, alone = (
        relative_l1(reference.attention(*some, **options)[0], expected)
        for some in ((q, k, v, seen[None]), (q, k[:, :, seen], v[:, :, seen]))
    )
    assert error <= 1.25 * alone + 1e-3


@pytest.mark.parametrize("kernel", [*reference.PRECISION, *reference_fp4.PRECISION])
def test_what_no_query_sees_changes_no_bit(kernel: str) -> None:
    q, k, v = qkv(2, 70, 64, kv_len=333, batch=2)
    seen = torch.stack([torch.arange(333) < 150, randn(333, seed=7) > 0])
    mask = (randn(2, 2, 70, 333, seed=8) > 0) & seen[:, None, None]
    results = [
        reference.attention(
            q,
            k.masked_fill(~seen[:, None, :, None], number),
            v.masked_fill(~seen[:, None, :, None], number),
            mask,
            is_causal=False,
            sm_scale=0.125,
            smooth_k=True,
            smooth_v=True,
            kernel=kernel,
        )
        for number in (0.0, 1e4, math.nan)
    ]
    for out, lse in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_keys_past_the_last_query_change_no_bit() -> None:
    q, k, v = qkv(2, 70, 64, kv_len=333)
    some = attend(q, k[:, :, :70], v[:, :, :70], is_causal=True)
    k[:, :, 70:] = v[:, :, 70:] = math.nan
    assert torch.equal(attend(q, k, v, is_causal=True), some)
    whole = randn(70, 333, seed=3)
    for mask in (whole[0, 0], whole[0, :1], whole[0], whole[:, :1], whole):
        cut = mask[..., :70] if mask.dim() > 0 else mask
        some = attend(q, k[:, :, :70], v[:, :, :70], attn_mask=cut, is_causal=True)
        assert torch.equal(attend(q, k, v, attn_mask=mask, is_causal=True), some)


def test_rounding_is_to_nearest_even() -> None:
    x = torch.tensor([-127.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 127.0])
    assert reference.round_to_int8(x, torch.tensor(127.0)).tolist() == [-127, -2, -2, 0, 0, 2, 2, 127]
