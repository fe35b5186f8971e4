"""What `explain` says is what runs, and what runs is right: the public functions on a GPU, each option of each."""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from typing import Any

import pytest
import tensors
import torch
from accuracy import TOLERANCES, error_by_size, exact, relative_l1

import sageattention
from sageattention import _call, _library, _ops, dispatch, explain, recent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FUNCTIONS = [
    (function, accumulators) for function, allowed in dispatch.ACCUMULATORS.items() for accumulators in allowed or (None,)
]


randn = partial(tensors.randn, device="cuda")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (128, 128), (128, 80), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("function", "accumulators"), FUNCTIONS)
def test_every_function(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    accumulators: str | None,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    masked: bool,
) -> None:
    qo_len, kv_len = 521, 333
    q = randn(2, 4, qo_len, head_dim, seed=0, dtype=dtype)
    k, v = (randn(2, 2, kv_len, size, seed=seed, dtype=dtype) for seed, size in ((1, head_dim), (2, v_head_dim)))
    options: dict[str, Any] = (
        {"attn_mask": torch.ones(qo_len, kv_len, device="cuda", dtype=torch.bool).tril(100)} if masked else {}
    )
    try:
        choice = explain(q, k, v, function=function, pv_accum_dtype=accumulators, **options)
    except ValueError as error:
        if torch.cuda.get_device_capability() < (8, 9) and "fp8" in function:
            pytest.skip(str(error))
        raise
    called: list[str] = []
    operator = _ops.attention

    def spy(*arguments: Any, **named: Any) -> Any:
        called.append(arguments[-1])
        return operator(*arguments, **named)

    monkeypatch.setattr(_ops, "attention", spy)
    monkeypatch.setattr(_call, "SERVED", {})
    monkeypatch.setattr(recent, "KINDS", recent._Kinds())
    how = {} if accumulators is None else {"pv_accum_dtype": accumulators}
    out = getattr(sageattention, function)(q, k, v, **options, **how)
    assert called == [choice.kernel]
    assert out.shape == (2, 4, qo_len, v_head_dim)
    assert out.dtype == dtype
    assert error_by_size(out, q, k, v, **options) <= TOLERANCES[choice.kernel].any_shape


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 1), (192, 2000), (640, 77), (150, 300)])
def test_short_sequences(qo_len: int, kv_len: int, dtype: torch.dtype, head_dim: int, causal: bool, layout: str) -> None:
    """Whoever serves them: as exact as it is said to be, contiguous, the same under torch.compile."""
    q = randn(2, 4, qo_len, head_dim, seed=0, dtype=dtype)
    k, v = (randn(2, 2, kv_len, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    qkv = [q, k, v] if layout == "HND" else [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    arguments: dict[str, Any] = {**dict(zip("qkv", qkv, strict=True)), "tensor_layout": layout, "is_causal": causal}
    choice = explain(**arguments)
    out: Any = sageattention.sageattn(**arguments)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.compiler.reset()
    compiled = torch.compile(sageattention.sageattn, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), out)
    if layout == "NHD":
        out = out.transpose(1, 2)
    assert error_by_size(out, q, k, v, is_causal=causal) <= TOLERANCES[choice.kernel].any_shape


@pytest.mark.parametrize(("function", "accumulators"), FUNCTIONS)
def test_what_was_served_is_served_again(function: str, accumulators: str | None) -> None:
    """Without a second look, and to the bit."""
    if torch.cuda.get_device_capability() < (8, 9) and "fp8" in function:
        pytest.skip("FP8 kernels are for compute capability 8.9 and later")
    call = getattr(sageattention, function)
    how = {} if accumulators is None else {"pv_accum_dtype": accumulators}
    for tokens in (20, 700, 1300):
        q, k, v = (randn(1, 4, tokens, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))
        mask = torch.rand(1, 1, tokens, tokens, device="cuda") > 0.5
        for named in (
            {},
            {"is_causal": True},
            {"sm_scale": 0.3},
            {"return_lse": True},
            {"attn_mask": mask},
            {"attn_mask": mask.bfloat16()},
        ):
            dispatch.forget()
            first, second = (call(q, k, v, **how, **named) for _ in range(2))
            for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, second)), strict=True):
                assert torch.equal(one, other)
    wanted = q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="derivative"):
        call(wanted, k, v, **how).sum().backward()


@pytest.mark.parametrize("mask", [None, torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("batch", "qo_len", "kv_len", "head_dim"),
    [
        (300, 16, 16, 40),
        (2, 100, 96, 64),
        (2, 128, 64, 128),
        (2, 1, 30, 128),
        (2, 16, 32, 160),
        (2, 1, 97, 64),
        (1, 1, 20000, 128),
        (9, 3, 3001, 72),
        (200, 1, 130, 128),
        (3, 16, 1500, 256),
        # Blocks of threads in clusters of eight, and of four.
        (1, 1, 500, 64),
        (2, 2, 500, 128),
        # More than an H200 looks at once, and some over.
        (1100, 2, 100, 64),
        (600, 1, 130, 128),
        (600, 1, 200, 256),
    ],
)
def test_few_tokens(
    batch: int, qo_len: int, kv_len: int, head_dim: int, layout: str, causal: bool, mask: torch.dtype | None
) -> None:
    """In 16 bits, by whichever kernel: more exact than what quantises can be."""
    q = randn(batch, 4, qo_len, head_dim, seed=0, dtype=torch.bfloat16)
    k, v = (randn(batch, 2, kv_len, head_dim, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    options: dict[str, Any] = {"is_causal": causal}
    if mask is not None:
        numbers = randn(1, 4, qo_len, kv_len, seed=3, dtype=torch.float32)
        options["attn_mask"] = numbers > -1 if mask == torch.bool else numbers.to(mask)
    a, b, c = (x if layout == "HND" else x.transpose(1, 2).contiguous() for x in (q, k, v))
    assert explain(a, b, c, layout, attn_mask=options.get("attn_mask")).or_16_bit
    results: Any = sageattention.sageattn(a, b, c, layout, return_lse=True, **options)
    out, lse = results
    assert out.is_contiguous()
    out = out if layout == "HND" else out.transpose(1, 2)
    expected = exact(q, k, v, **options)[1]
    seen = expected.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse - expected)[seen].abs().max() <= 1e-3
    assert not out[~seen].any()
    assert error_by_size(out, q, k, v, **options) <= 0.004 * max(1.0, kv_len / 96) ** 0.5
    again = sageattention.sageattn(a, b, c, layout, **options)
    assert torch.equal(again if layout == "HND" else again.transpose(1, 2), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "qo_len", "kv_len", "head_dim", "causal"),
    [
        (2, 20, 20, 1024, 1024, 64, False),
        (2, 10, 10, 4096, 77, 64, False),
        (2, 8, 8, 1024, 1024, 80, False),
        (3, 5, 1, 577, 577, 64, False),
        (1, 32, 8, 513, 513, 128, True),
        (40, 9, 3, 250, 190, 40, True),
        (8, 16, 16, 256, 256, 128, False),
        (1, 1, 1, 131, 65, 8, False),
        (2, 8, 8, 256, 256, 160, False),
        (1, 16, 8, 500, 500, 256, True),
    ],
)
def test_short_sequences_in_16_bits(
    batch: int,
    heads: int,
    kv_heads: int,
    qo_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
    layout: str,
    dtype: torch.dtype,
) -> None:
    """On Hopper in 16 bits: more exact than what quantises can be."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("quantised here")
    q = randn(batch, heads, qo_len, head_dim, seed=0, dtype=dtype)
    k, v = (randn(batch, kv_heads, kv_len, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    a, b, c = (x if layout == "HND" else x.transpose(1, 2).contiguous() for x in (q, k, v))
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = (batch, heads, kv_heads, qo_len, kv_len, head_dim, head_dim)
    assert _library.library.faster_in_16_bits(explain(a, b, c, layout).kernel, multiprocessors, sizes, causal)
    results: Any = sageattention.sageattn(a, b, c, layout, causal, return_lse=True)
    out, lse = results
    assert out.is_contiguous()
    assert torch.equal(sageattention.sageattn(a, b, c, layout, causal), out)
    out = out if layout == "HND" else out.transpose(1, 2)
    expected, expected_lse = exact(q, k, v, is_causal=causal)
    assert (lse - expected_lse).abs().max() <= 0.01
    assert relative_l1(out, expected) <= (0.004 if dtype == torch.bfloat16 else 0.0006)


@pytest.mark.parametrize(("tokens", "head_dim"), [(128, 64), (96, 128), (300, 64), (130, 256)])
def test_short_sequences_under_masks(tokens: int, head_dim: int) -> None:
    """On Hopper, in 16 bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("quantised here")
    q, k, v = (randn(3, 4, tokens, head_dim, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    mask = torch.arange(tokens, device="cuda") < tokens - 10
    for attn_mask in (
        mask.expand(3, 1, 1, tokens),
        torch.zeros(tokens, tokens, device="cuda").masked_fill(~mask, -1e9).bfloat16(),
    ):
        out = sageattention.sageattn(q, k, v, attn_mask=attn_mask)
        assert error_by_size(out, q, k, v, attn_mask=mask) <= 0.004


@pytest.mark.parametrize(("queries", "causal", "heads"), [(1, False, 32), (4, False, 32), (0, True, 32), (1, False, 560)])
@pytest.mark.parametrize("masked", [False, True])
def test_new_lengths_take_no_longer(queries: int, causal: bool, heads: int, masked: bool) -> None:
    """As a language model brings them, with every token and prompt."""
    took = []
    for keys in range(2001, 2001 + 40):
        q = randn(1, heads, queries or keys, 128, seed=0, dtype=torch.bfloat16)
        k, v = (randn(1, 8, keys, 128, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
        mask = torch.ones(1, 1, 1, keys, device="cuda", dtype=torch.bool) if masked else None
        torch.cuda.synchronize()
        start = time.perf_counter()
        sageattention.sageattn(q, k, v, is_causal=causal, attn_mask=mask)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    assert statistics.median(took) < 0.005


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "head_dim"), [(1, 64, 64), (2, 4, 128), (3, 16, 40), (1, 5, 200)])
def test_biases_of_each_head(batch: int, heads: int, head_dim: int, dtype: torch.dtype, layout: str) -> None:
    """On Hopper in 16 bits; queries that see nothing are zeros whoever serves them."""
    q, k, v = (randn(batch, heads, 512, head_dim, seed=seed, dtype=dtype) for seed in range(3))
    a, b, c = (x if layout == "HND" else x.transpose(1, 2).contiguous() for x in (q, k, v))
    bias = randn(1, heads, 512, 512, seed=3, dtype=dtype)
    bias[0, 1, 7] = torch.finfo(dtype).min
    bias[0, 1, 400:460] = -math.inf
    bias[0, 2, 9] = -1e4
    if dtype == torch.bfloat16:
        bias[0, 3, 300:310] = -1e9
    bias[:, :, :, 77] = torch.finfo(dtype).min
    results: Any = sageattention.sageattn(a, b, c, layout, attn_mask=bias, return_lse=True)
    out, lse = results
    alone: Any = sageattention.sageattn(a, b, c, layout, attn_mask=bias)
    assert torch.equal(alone, out)
    assert out.is_contiguous()
    out = out if layout == "HND" else out.transpose(1, 2)
    least = torch.finfo(dtype).min if dtype == torch.float16 else -5e5
    hidden = bias.float().masked_fill(bias <= least, -math.inf)
    expected_lse = exact(q, k, v, attn_mask=hidden)[1]
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert not out[~seen].any()
    assert (lse - expected_lse)[seen].abs().max() <= 0.06
    in_16_bits = torch.cuda.get_device_capability() == (9, 0)
    assert error_by_size(out, q, k, v, attn_mask=hidden) <= (0.006 if in_16_bits else 0.05)


def misaligned(x: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """The same numbers in rows that start anywhere, among NaN."""
    buffer = torch.full((*x.shape[:-1], width), float("nan"), device=x.device, dtype=x.dtype)
    buffer[..., start : start + x.shape[-1]] = x
    return buffer[..., start : start + x.shape[-1]]


@pytest.mark.parametrize(("head_dim", "start", "width"), [(128, 3, 137), (40, 1, 46), (64, 8, 72), (64, 0, 68)])
def test_short_calls_of_rows_that_start_anywhere(head_dim: int, start: int, width: int) -> None:
    q, k, v = (randn(2, 4, tokens, head_dim, seed=seed, dtype=torch.bfloat16) for seed, tokens in enumerate((100, 300, 300)))
    expected = sageattention.sageattn_qk_int8_pv_fp16_cuda(q, k, v)
    out = sageattention.sageattn(*(misaligned(x, start, width) for x in (q, k, v)))
    torch.testing.assert_close(out, expected, rtol=0, atol=0.03)
    assert error_by_size(out, q, k, v) <= 0.015


@pytest.mark.parametrize("tokens", [128, 704, 700])
def test_what_surrounds_a_call_changes_nothing(tokens: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k, v = (randn(2, 4, tokens, 64, seed=seed, dtype=dtype) for seed in range(3))
        expected = sageattention.sageattn(q, k, v, is_causal=True)
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            with sdpa_kernel(backend):
                assert torch.equal(sageattention.sageattn(q, k, v, is_causal=True), expected)
        for other in (torch.float16, torch.bfloat16):
            with torch.autocast("cuda", dtype=other):
                out = sageattention.sageattn(q, k, v, is_causal=True)
            assert out.dtype == dtype
            assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [128, 3000])
def test_tensors_that_differ_after_like_calls(tokens: int) -> None:
    """What was served once is not looked at again in Python: the operator refuses what differs, which is then made alike."""
    q, k, v = (randn(2, 4, tokens, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    for _ in range(3):
        expected = sageattention.sageattn(q, k, v)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for some in ((q, k.float(), v), (q.float(), k.float(), v)):
            assert torch.equal(sageattention.sageattn(*some), expected)
    with pytest.raises(TypeError, match="k: expected dtype"):
        sageattention.sageattn(q, k.float(), v)
    for some in ((q[:1], k, v), (q, k[:1], v[:1]), (q, k, v[:1])):
        whole = [x.expand(2, -1, -1, -1).contiguous() for x in some]
        assert torch.equal(sageattention.sageattn(*some), sageattention.sageattn(*whole))


@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_of_short_calls(causal: bool) -> None:
    q, k, v = (randn(2, 4, tokens, 64, seed=seed, dtype=torch.bfloat16) for seed, tokens in enumerate((128, 200, 200)))
    _, lse = sageattention.sageattn(q, k, v, is_causal=causal, return_lse=True)
    assert lse.shape == (2, 4, 128)
    assert lse.is_contiguous()
    assert (lse - exact(q, k, v, is_causal=causal)[1]).abs().max() <= 0.06


def test_export_with_a_dynamic_length() -> None:
    """One graph serves both sides of the lengths at which short calls end."""

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return sageattention.sageattn(q, k, v)

    def qkv(tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(randn(1, 2, tokens, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))

    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(Layer(), qkv(300), dynamic_shapes=[{2: length}] * 3).module()
    for tokens in (40, 300, 513, 2000):
        assert torch.equal(exported(*qkv(tokens)), sageattention.sageattn(*qkv(tokens)))
