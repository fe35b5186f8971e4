"""The kernels' options on a GPU, each by the operator itself: head_dims, masks, packed sequences, V's mean."""

from __future__ import annotations

import itertools
import math
from functools import partial

import model_inputs
import pytest
import tensors
import torch
from accuracy import TOLERANCES, exact, relative_l1

import sageattention
from sageattention import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


randn = partial(tensors.randn, device="cuda")


def attend(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    smooth_v: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    for size in (2**12, 2**16, 2**20, 2**22):  # what is not written, or read where nothing was, shows
        torch.full((size,), math.nan, device="cuda")
    scale = q.shape[-1] ** -0.5
    out: tuple[torch.Tensor, torch.Tensor] = sageattention._ops.attention(
        q, k, v, mask, "HND", causal, scale, True, smooth_v, True, kernel
    )
    return out


def limit(kernel: str) -> float:
    """For shapes with few keys, whose errors average out less."""
    return 2 * TOLERANCES[kernel].relative_l1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(256, 256), (128, 64), (192, 128), (72, 136), (33, 5), (256, 1)])
def test_head_dims(kernel: str, dtype: torch.dtype, causal: bool, head_dim: int, v_head_dim: int) -> None:
    if (head_dim % 8 or v_head_dim % 8) and not dispatch.KERNELS[kernel].uneven:
        pytest.skip("takes multiples of 8")
    q, k, v = (
        randn(1, 4, 700, head_dim, dtype=dtype),
        *(randn(1, 2, 700, d, dtype=dtype, seed=d + 1) for d in (head_dim, v_head_dim)),
    )
    out, lse = attend(kernel, q, k, v, causal=causal)
    expected, expected_lse = exact(q, k, v, is_causal=causal)
    assert relative_l1(out, expected) <= limit(kernel)
    assert (lse - expected_lse).abs().max() <= 0.1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_accuracy(kernel: str, head_dim: int, causal: bool) -> None:
    q, k, v = (randn(2, 4, 4096, head_dim, seed=i) for i in range(3))
    out, _ = attend(kernel, q, k, v, causal=causal)
    slack = 1.0 if head_dim == 128 and not causal else 1.1
    assert relative_l1(out, exact(q, k, v, is_causal=causal)[0]) <= slack * TOLERANCES[kernel].relative_l1


def test_values_as_large_as_float16_has(kernel: str) -> None:
    q, k = randn(1, 2, 2048, 128), randn(1, 2, 2048, 128, seed=1)
    v = torch.full_like(k, 60000.0)
    out, _ = attend(kernel, q, k, v)
    torch.testing.assert_close(out, v, rtol=1e-2 if "f8" in kernel else 1e-3, atol=0)


def test_zeros_under_a_causal_mask(kernel: str) -> None:
    zeros, v = torch.zeros(1, 2, 200, 128, device="cuda", dtype=torch.float16), randn(1, 2, 200, 128)
    out, lse = attend(kernel, zeros, zeros, v, causal=True)
    torch.testing.assert_close(
        out.float(), v.float().cumsum(2) / torch.arange(1, 201, device="cuda")[:, None], rtol=0, atol=0.2
    )
    assert lse.isfinite().all()


def test_smooth_v(kernel: str) -> None:
    """A mean of V that is eight times its spread costs FP8 all its precision, and nothing where it is subtracted."""
    q, k, v = (randn(1, 4, 4096, 128, seed=i) for i in range(3))
    shift = 8 * randn(1, 4, 1, 128, seed=3)
    expected = exact(q, k, v + shift)[0]
    error = relative_l1(attend(kernel, q, k, v + shift, smooth_v=True)[0] - shift, expected - shift)
    assert error <= 0.15


def masks(batch: int, heads: int, rows: int, keys: int) -> dict[str, torch.Tensor]:
    full = torch.rand(batch, heads, rows, keys, device="cuda") > 0.4
    full[:, :, :, 128:256] = False  # tiles hidden whole
    full[:, :, :, 256:320] = True
    full[0, :, 128:256, :128] = True
    full[1, 2, 17] = False  # a row that sees nothing
    bias = torch.randn(batch, heads, rows, keys, device="cuda")
    return {
        "bool": full,
        "heads": full[:, :1],
        "batch": full[:1],
        "2d": full[0, 0],
        "keys": torch.rand(batch, 1, 1, keys, device="cuda") > 0.5,
        "rows": torch.rand(rows, 1, device="cuda") > 0.3,
        "transposed": full.transpose(2, 3).contiguous().transpose(2, 3),
        "fp32": bias[:, :1],
        "fp16": bias[:1].half(),
        "bf16": bias[0, 0].bfloat16(),
        "-inf": bias.masked_fill(~full, -math.inf),
        "least": torch.where(full, 0.0, torch.finfo(torch.float32).min),
        "slice": torch.randn(batch, 1, rows + 3, 2 * keys, device="cuda")[:, :, 3:, ::2],
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks(kernel: str, head_dim: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = randn(2, 4, 300, head_dim), randn(2, 2, 400, head_dim, seed=1), randn(2, 2, 400, head_dim, seed=2)
    for name, mask in masks(2, 4, 300, 400).items():
        if not model_inputs.takes(kernel, mask, q):
            continue
        out, lse = attend(kernel, q, k, v, mask, causal=causal)
        meant = mask if mask.dtype == torch.bool else mask.double().masked_fill(mask.double() <= -1e6, -math.inf)
        expected, expected_lse = exact(q, k, v, is_causal=causal, attn_mask=meant)
        blind = expected_lse == -math.inf
        assert torch.equal(lse == -math.inf, blind), name
        assert (out[blind] == 0).all(), name
        assert relative_l1(out, expected) <= limit(kernel), name
        assert (lse - expected_lse)[~blind].abs().max() <= 0.15, name


def test_a_mask_as_far_apart_as_may_be(kernel: str) -> None:
    q, k, v = (randn(1, 2, tokens, 64, dtype=torch.bfloat16, seed=i) for i, tokens in enumerate((10, 70, 70)))
    near = randn(10, 70, dtype=torch.bfloat16, seed=5)
    rows, keys = (n // 2 - 1 for n in (1 << 27, 1 << 24))  # bytes to elements
    far = (
        torch.empty(9 * rows + 69 * keys + 1, device="cuda", dtype=torch.bfloat16)
        .as_strided((10, 70), (rows, keys))
        .copy_(near)
    )
    for found, expected in zip(attend(kernel, q, k, v, far), attend(kernel, q, k, v, near), strict=True):
        assert torch.equal(found, expected)
    for strides, message in (((rows + 1, keys), "rows under 134217728"), ((rows, keys + 1), "keys under 16777216")):
        with pytest.raises((ValueError, RuntimeError), match=f"attn_mask: expected {message} bytes apart"):
            attend(kernel, q[:, :, :9], k[:, :, :69], v[:, :, :69], far.as_strided((9, 69), strides))


@pytest.mark.parametrize("filled", [40, 300, 700])
def test_a_cache_that_is_not_full(kernel: str, filled: int) -> None:
    """Whatever keys hold that a mask hides from all queries changes no bit, and costs nothing where K has a bias."""
    q, k, v = (randn(2, 4, tokens, 128, seed=i) for i, tokens in enumerate((200, 1000, 1000)))
    k[..., 3] += 50
    at, rows = torch.arange(1000, device="cuda"), torch.arange(200, device="cuda")[:, None]
    seen = at < filled
    for mask in (
        seen[None],
        seen & (at <= rows + filled // 2),
        (seen & ((at < 5) | (at >= filled - 5)))[None],
        torch.where(seen, 0.0, -1e4).to(q.dtype)[None],
        torch.zeros(200, 1000, dtype=q.dtype, device="cuda").masked_fill(~seen, -math.inf),
    ):
        results = []
        large = 100.0 if mask.dtype != torch.bool and mask.isfinite().all() else 1e4  # -1e4 is far below scores of 100
        for number in (0.0, large):
            k[:, :, filled:] = v[:, :, filled:] = number
            results.append(attend(kernel, q, k, v, mask))
        meant = mask if mask.dtype == torch.bool else mask.double()
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        assert relative_l1(results[0][0], exact(q, k, v, attn_mask=meant)[0]) <= limit(kernel)


def test_nan_in_a_mask_is_not_hidden(kernel: str) -> None:
    q, k, v = (randn(1, 1, 100, 64, seed=i) for i in range(3))
    mask = torch.zeros(100, 100, device="cuda", dtype=q.dtype)
    mask[5, 7] = math.nan
    out, _ = attend(kernel, q, k, v, mask)
    assert out[0, 0, 5].isnan().all()
    assert out[0, 0, :5].isfinite().all()


# Of queries and keys. Hopper's kernel takes long ones by pairs of blocks, which share a sequence's last rows or have those of a head each.
PACKED = {
    "short": ([0, 1, 128, 129, 5, 0, 300, 64, 1, 257, 3], [7, 1, 128, 100, 0, 0, 200, 500, 129, 256, 65]),
    "long": ([1161, 385, 760, 0, 1730, 577], [300, 129, 64, 200, 513, 7]),
}


@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 2), (128, 4), (256, 1)])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_packed_sequences_are_what_each_is_alone(
    kernel: str, lengths: tuple[list[int], list[int]], head_dim: int, kv_heads: int, causal: bool, smooth_v: bool
) -> None:
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda") for x in lengths)
    q = randn(sum(lengths[0]), 4, head_dim)
    k, v = (randn(sum(lengths[1]), kv_heads, head_dim, seed=i) for i in (1, 2))
    out, lse = sageattention._ops.attention_varlen(q, k, v, cu_q, cu_k, causal, head_dim**-0.5, True, smooth_v, True, kernel)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        if k0 == k1:
            assert (out[q0:q1] == 0).all()
            assert (lse[:, q0:q1] == -math.inf).all()
        elif q0 < q1:
            one = (x.transpose(0, 1).unsqueeze(0) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            expected, expected_lse = attend(kernel, *one, causal=causal, smooth_v=smooth_v)
            assert torch.equal(out[q0:q1], expected[0].transpose(0, 1))
            assert torch.equal(lse[:, q0:q1], expected_lse[0])


def test_thousands_of_packed_sequences_in_a_graph(kernel: str) -> None:
    lengths = torch.randint(0, 40, (5000,), generator=torch.Generator().manual_seed(0))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().cuda()
    q, k, v = (randn(int(lengths.sum()), 2, 64, seed=i) for i in range(3))
    arguments = (cu, cu, True, 0.125, True, False, False, kernel)
    expected, _ = sageattention._ops.attention_varlen(q, k, v, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = sageattention._ops.attention_varlen(q, k, v, *arguments)
    graph.replay()
    assert torch.equal(out, expected)
    for i in (1, 17, 999, 2500, 4999):
        a, b = cu[i : i + 2].tolist()
        one = (x[a:b].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        assert torch.equal(out[a:b], attend(kernel, *one, causal=True)[0][0].transpose(0, 1))
