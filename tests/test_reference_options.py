"""The CPU reference of every kernel: FP8 and float16 sums, masks, V's own head_dim, packed sequences; against float64."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import TOLERANCES, error_by_size, exact, relative_l1
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import randn

from sageattention import _ops, reference, sageattn, sageattn_qk_int8_pv_fp8_cuda, sageattn_varlen

KERNELS = list(TOLERANCES)
Pair = tuple[torch.Tensor, torch.Tensor]


def attend(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    smooth_k: bool = True,
    smooth_v: bool = False,
) -> Pair:
    """A kernel's reference, whichever `sageattn` would take."""
    scale = q.shape[-1] ** -0.5
    out, lse = _ops.attention(q, k, v, attn_mask, "HND", is_causal, scale, smooth_k, smooth_v, True, kernel)
    return out, lse


# ── Any shape ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Case(NamedTuple):
    """One call."""

    kernel: str
    heads: tuple[int, int]
    lengths: tuple[int, int]
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    is_causal: bool
    smooth: tuple[bool, bool]
    mask: str
    broadcast: tuple[bool, bool, bool, bool]
    seed: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (group, kv_heads), (qo_len, kv_len) = self.heads, self.lengths
        q = randn(2, group * kv_heads, qo_len, self.head_dim, seed=self.seed, dtype=self.dtype)
        k = randn(2, kv_heads, kv_len, self.head_dim, seed=self.seed + 1, dtype=self.dtype)
        return q, k, randn(2, kv_heads, kv_len, self.v_head_dim, seed=self.seed + 2, dtype=self.dtype)

    def attn_mask(self) -> torch.Tensor | None:
        if self.mask == "none":
            return None
        full = (2, self.heads[0] * self.heads[1], *self.lengths)
        shape = [1 if one else size for one, size in zip(self.broadcast, full, strict=True)]
        numbers = randn(*shape, seed=self.seed + 3, dtype=torch.float32)
        if self.mask == "bool":
            return numbers > -0.5
        if self.mask == "transposed":
            return numbers.transpose(2, 3).contiguous().transpose(2, 3) * 2
        if self.mask == "hidden":
            return numbers.masked_fill(numbers < -1, -math.inf)
        return (numbers * 2).to({"fp16": torch.float16, "bf16": torch.bfloat16}[self.mask])


LENGTHS = st.one_of(st.integers(1, 150), st.sampled_from([1, 63, 64, 65, 128, 200]))
HEAD_DIMS = st.one_of(st.integers(1, 256), st.sampled_from([64, 128, 129, 256]))
CASES = st.builds(
    Case,
    kernel=st.sampled_from(KERNELS),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    lengths=st.tuples(LENGTHS, LENGTHS),
    head_dim=HEAD_DIMS,
    v_head_dim=HEAD_DIMS,
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    is_causal=st.booleans(),
    smooth=st.tuples(st.booleans(), st.booleans()),
    mask=st.sampled_from(["none", "bool", "fp16", "bf16", "transposed", "hidden"]),
    broadcast=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**16),
)


@given(CASES)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_any_call_against_float64(case: Case) -> None:
    q, k, v = case.tensors()
    options: dict[str, Any] = {"attn_mask": case.attn_mask(), "is_causal": case.is_causal}
    out, lse = attend(case.kernel, q, k, v, smooth_k=case.smooth[0], smooth_v=case.smooth[1], **options)
    assert out.shape == (*q.shape[:3], case.v_head_dim)
    expected, expected_lse = exact(q, k, v, **options)
    tolerance = TOLERANCES[case.kernel]
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (out[empty] == 0).all()
    if not empty.all():
        assert error_by_size(out, q, k, v, **options) <= tolerance.any_shape
        assert (lse - expected_lse)[~empty].abs().max() <= tolerance.lse
    assert expected.shape == out.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_accuracy_of_every_kernel(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (randn(1, 2, tokens, 128, seed=seed, dtype=dtype) for seed, tokens in enumerate((256, 4096, 4096)))
    assert relative_l1(attend(kernel, q, k, v)[0], exact(q, k, v)[0]) <= TOLERANCES[kernel].relative_l1


# ── Masks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("least", [False, -math.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
def test_a_row_that_sees_no_key_is_zero(kernel: str, least: float) -> None:
    q, k, v = (randn(1, 2, 70, 64, seed=seed) for seed in range(3))
    v[:, :, 5] = math.nan
    mask = torch.ones(70, 70, dtype=torch.bool) if least is False else torch.zeros(70, 70)
    mask[10] = mask[:, 5] = least
    out, lse = attend(kernel, q, k, v, attn_mask=mask, smooth_v=False)
    assert (out[:, :, 10] == 0).all()
    assert (lse[:, :, 10] == -math.inf).all()
    seen = torch.arange(70) != 10
    assert lse[:, :, seen].isfinite().all()
    if reference.PRECISION[kernel].largest_v is None:  # else a block of keys shares V's scale, which the NaN takes
        assert out[:, :, seen].isfinite().all()


def test_a_mask_may_say_what_is_causal_says() -> None:
    q, k, v = (randn(1, 2, 150, 64, seed=seed) for seed in range(3))
    out, lse = sageattn(q, k, v, attn_mask=torch.ones(150, 150, dtype=torch.bool).tril(), return_lse=True)
    expected, expected_lse = sageattn(q, k, v, is_causal=True, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.01)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0.01)
    both: Any = sageattn(q, k, v, attn_mask=torch.ones(150, dtype=torch.bool), is_causal=True)
    torch.testing.assert_close(both, expected, rtol=0, atol=0.01)


def test_a_mask_is_of_the_scores_in_either_layout() -> None:
    q, k, v = (randn(2, 3, 20, 64, seed=seed) for seed in range(3))
    mask = randn(2, 3, 20, 20, seed=4)
    expected: Any = sageattn(q, k, v, attn_mask=mask)
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    out: Any = sageattn(a, b, c, tensor_layout="NHD", attn_mask=mask)
    assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_causal_mask_hides_does_not_show(value: float) -> None:
    q, k, v = (randn(1, 2, 100, 64, seed=seed) for seed in range(3))
    v[:, 0, 60, 3] = value
    out: Any = sageattn(q, k, v, is_causal=True)
    assert out[:, :, :60].isfinite().all()
    assert out[:, 1].isfinite().all()
    assert not out[:, 0, 60:, 3].isfinite().any()
    assert out[:, 0, 60:, 4:].isfinite().all()


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_smoothing_v_helps_fp8() -> None:
    q, k, v = (randn(1, 2, 300, 64, seed=seed) for seed in range(3))
    v = v + 8 * randn(1, 1, 1, 64, seed=9)
    expected = exact(q, k, v)[0]

    def error(smooth_v: bool) -> float:
        out: Any = sageattn_qk_int8_pv_fp8_cuda(q, k, v, smooth_v=smooth_v)
        return relative_l1(out, expected)

    assert error(smooth_v=True) < 0.3 * error(smooth_v=False)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_do_not_overflow_before_v_does(kernel: str) -> None:
    q, k = (randn(1, 1, 200, 64, seed=seed) for seed in range(2))
    out, _ = attend(kernel, q, k, torch.full_like(k, 60000.0))
    torch.testing.assert_close(out, torch.full_like(out, 60000.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if reference.PRECISION[kernel].largest_v is not None])
def test_quantised_values(kernel: str) -> None:
    v = randn(1, 2, 150, 16, seed=0, dtype=torch.float32) * 100 + 500
    precision = reference.PRECISION[kernel]
    assert precision.largest_v is not None
    values = reference.quantise_v(v, precision, smooth_v=True)
    assert values.scale.shape == (1, 2, 3, 16)
    if precision.twice:
        assert values.smoothed.all()
        torch.testing.assert_close(values.mean, reference.sampled_mean(v)[0])
    else:
        assert not values.smoothed.any()
        assert not values.mean.any()
    # The largest of each block and channel uses the whole range, or with scales that are powers of two half of it, and each is off by
    # half a step of its format's bits at most.
    largest = torch.stack([block.abs().amax(dim=2) for block in values.data.split(64, dim=2)], dim=2)
    assert (largest <= precision.largest_v).all()
    if precision.twice:
        torch.testing.assert_close(largest, torch.full_like(largest, precision.largest_v))
    else:
        assert (largest > precision.largest_v / 2).all()
        assert (torch.frexp(values.scale)[0] == 0.5).all()
    scale = values.scale * reference.SCALE_UNIT
    restored = values.data * scale.repeat_interleave(64, 2)[:, :, :150] + values.mean
    steps = 16 if precision.twice else 2048
    assert ((restored - v).abs() <= (v - values.mean).abs() / steps + scale.amax() * 2**-10).all()


def test_a_key_that_smoothing_would_enlarge_keeps_its_block_as_it_is() -> None:
    v = randn(1, 2, 150, 64, seed=0, dtype=torch.float32) + 5
    v[:, :, 70] = 0.01
    values = reference.quantise_v(v, reference.PRECISION["sm89_qk_int8_pv_f8"], smooth_v=True)
    expected = torch.arange(150) // 64 != 1
    assert torch.equal(values.smoothed, expected.expand(1, 2, 150))


def test_a_mean_that_gains_nothing_is_none() -> None:
    v = randn(1, 2, 150, 64, seed=2, dtype=torch.float32)
    v[..., 3] += 5
    mean = reference.quantise_v(v, reference.PRECISION["sm89_qk_int8_pv_f8"], smooth_v=True).mean
    assert (mean[..., 3] > 4).all()
    assert not mean[..., torch.arange(64) != 3].any()


@pytest.mark.parametrize("strides", [(36, 3, 6, 1), (770, 1, 2, 1), (1, 1, 1, 1)])
def test_float32_of_any_strides_reaches_the_operator_with_rows(
    monkeypatch: pytest.MonkeyPatch, strides: tuple[int, ...]
) -> None:
    """Of views that overlap, as sliding windows do, the operator's CPU reference would take any strides, its kernels would not."""
    seen: list[int] = []
    operator = _ops.attention

    def spy(*arguments: Any, **named: Any) -> Any:
        seen.extend(x.stride(3) for x in arguments[:3])
        return operator(*arguments, **named)

    monkeypatch.setattr(_ops, "attention", spy)
    x = randn(1, 1, 1, 4000, seed=0, dtype=torch.float32).flatten().as_strided((1, 2, 20, 3), strides)
    out: Any = sageattn(x, x, x)
    assert seen == [1, 1, 1]
    half = x.contiguous().bfloat16()
    assert torch.equal(out, sageattn(half, half, half).float())


def test_a_single_channel_may_have_any_stride() -> None:
    """As of a transposed tensor: there is no next element."""
    q, k, v = (randn(1, 2, 1, 40, seed=seed, dtype=torch.float16).transpose(2, 3) for seed in range(3))
    assert q.stride(3) != 1
    expected: Any = sageattn(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)))
    assert torch.equal(sageattn(q, k, v), expected)


def test_float32_is_computed_as_bfloat16() -> None:
    q, k, v = (randn(1, 2, 40, 64, seed=seed, dtype=torch.float32) for seed in range(3))
    out, lse = sageattn(q, k, v, return_lse=True)
    expected, expected_lse = sageattn(q.bfloat16(), k.bfloat16(), v.bfloat16(), return_lse=True)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected.float())
    assert torch.equal(lse, expected_lse)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    a, b, c = (x[0].transpose(0, 1) for x in (q, k, v))
    packed: Any = sageattn_varlen(a, b, c, cu, cu, 40, 40)
    assert torch.equal(packed.transpose(0, 1)[None], out)


# ── Packed sequences ─────────────────────────────────────────────────────────────────────────────────────────────────


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_sequences_are_each_for_itself(dtype: torch.dtype, is_causal: bool) -> None:
    lengths_q, lengths_k = [5, 0, 70, 1, 0, 130, 3], [7, 4, 70, 1, 0, 64, 0]
    q = randn(sum(lengths_q), 4, 64, seed=0, dtype=dtype)
    k = randn(sum(lengths_k), 2, 64, seed=1, dtype=dtype)
    v = randn(sum(lengths_k), 2, 48, seed=2, dtype=dtype)
    arguments = (cumulative(lengths_q), cumulative(lengths_k), max(lengths_q), max(lengths_k))
    out, lse = sageattn_varlen(q, k, v, *arguments, is_causal=is_causal, return_lse=True)
    assert out.shape == (sum(lengths_q), 4, 48)
    assert lse.shape == (4, sum(lengths_q))
    packed = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    results = zip(out.split(lengths_q), lse.split(lengths_q, dim=1), strict=True)
    for (a, b, c), (got, got_lse) in zip(packed, results, strict=True):
        if len(b) == 0:
            assert (got == 0).all()
            assert (got_lse == -math.inf).all()
        else:
            expected, expected_lse = sageattn(
                a[None], b[None], c[None], tensor_layout="NHD", is_causal=is_causal, return_lse=True
            )
            assert torch.equal(got, expected[0])
            assert torch.equal(got_lse, expected_lse[0])


def test_starts_of_any_strides_reach_the_operator_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a column: the kernels read them one after the other."""
    seen: list[tuple[int, ...]] = []
    operator = _ops.attention_varlen

    def spy(*arguments: Any) -> Any:
        seen.extend(x.stride() for x in arguments[3:5])
        return operator(*arguments)

    monkeypatch.setattr(_ops, "attention_varlen", spy)
    q, k, v = (randn(70, 2, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    starts = torch.tensor([[0, 0], [30, 40], [70, 70]], dtype=torch.int32)
    out: Any = sageattn_varlen(q, k, v, starts[:, 0], starts[:, 1], 40, 40)
    assert seen == [(1,), (1,)]
    assert torch.equal(out, sageattn_varlen(q, k, v, cumulative([30, 40]), cumulative([40, 30]), 40, 40))


def test_thousands_of_short_sequences() -> None:
    lengths = [i % 4 for i in range(2000)]
    q, k, v = (randn(sum(lengths), 2, 32, seed=seed) for seed in range(3))
    cu = cumulative(lengths)
    out: Any = sageattn_varlen(q, k, v, cu, cu, 3, 3)
    alone = torch.tensor([length == 1 for length in lengths for _ in range(length)])
    torch.testing.assert_close(out[alone], v[alone], rtol=1e-3, atol=0)  # one key has all of the weight
    assert out.isfinite().all()


def test_nothing_packed() -> None:
    q, kv = torch.zeros(0, 2, 64, dtype=torch.float16), torch.zeros(0, 1, 64, dtype=torch.float16)
    cu = torch.zeros(1, dtype=torch.int32)
    out, lse = sageattn_varlen(q, kv, kv, cu, cu, 0, 0, return_lse=True)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)


def test_options_are_the_numbers_that_the_operators_take() -> None:
    """csrc/torch/attention.h reads the same bits, and nothing else says so to both."""
    header = (Path(__file__).parents[1] / "csrc" / "torch" / "attention.h").read_text(encoding="utf-8")
    bits = {name: int(bit) for name, bit in re.findall(r"(\w+)\(bits & (\d+)\)", header)}
    flags = _ops.Options._fields[1:]
    assert list(bits) == list(flags)
    for kernel in _ops.KERNELS:
        for wanted in itertools.product([False, True], repeat=len(flags)):
            number = _ops.number_of(kernel, *wanted)
            assert _ops.options_of(number) == (kernel, *wanted)
            assert {name: number & bit > 0 for name, bit in bits.items()} == dict(zip(flags, wanted, strict=True))
            assert number >> int(re.findall(r"kernel\(bits >> (\d+)\)", header)[0]) == _ops.NUMBERS[kernel]
