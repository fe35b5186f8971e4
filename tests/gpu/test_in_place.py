"""`sageattention.scaled_dot_product_attention` on a GPU: by `sageattn` what that serves, all else PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import relative_l1
from torch.nn.attention import bias

import sageattention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
exact = torch.nn.functional.scaled_dot_product_attention


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, device="cuda").to(dtype) for _ in range(3)]


@pytest.mark.parametrize("tokens", [50, 300, 2100])
def test_what_sageattn_serves(tokens: int) -> None:
    q, k, v = tensors(1, 4, tokens, 64)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril(5)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((None, 0.0, True), {"is_causal": True}),
        ((mask,), {"attn_mask": mask}),
        ((bias.causal_lower_right(tokens, tokens),), {"is_causal": True}),
        ((bias.causal_lower_right(tokens, tokens + 9),), {"attn_mask": mask.new_ones(tokens, tokens + 9).tril(9)}),
    ]
    for arguments, options in calls:
        keys = (
            tensors(1, 4, tokens + 9, 64)[1:] if "attn_mask" in options and options["attn_mask"].shape[1] > tokens else (k, v)
        )
        for _ in range(3):
            out = sageattention.scaled_dot_product_attention(q, *keys, *arguments)
            assert torch.equal(out, sageattention.sageattn(q, *keys, **options))
        assert not torch.equal(out, exact(q, *keys, *arguments))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = sageattention.scaled_dot_product_attention(q.float(), k.float(), v)
    assert torch.equal(out, sageattention.sageattn(q, k, v))
    compiled = torch.compile(sageattention.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), sageattention.sageattn(q, k, v))


def test_what_pytorch_computes() -> None:
    q, k, v = tensors(1, 4, 300, 64)
    others: list[tuple[list[torch.Tensor], dict[str, Any]]] = [
        (tensors(1, 1, 300, 512), {}),
        (tensors(4, 300, 64), {"is_causal": True}),
        (tensors(1, 2, 300, 64, dtype=torch.float64), {}),
        ([q[:, :1], k, v], {}),
        ([q.cpu(), k.cpu(), v.cpu()], {}),
    ]
    for some, options in others:
        assert torch.equal(sageattention.scaled_dot_product_attention(*some, **options), exact(*some, **options))
    out = sageattention.scaled_dot_product_attention(q, k, v, dropout_p=0.9)
    assert relative_l1(out, exact(q, k, v)) > 0.5
    wants = [x.requires_grad_() for x in (q, k, v)]
    grads, expected = (torch.autograd.grad(f(*wants).sum(), wants) for f in (sageattention.scaled_dot_product_attention, exact))
    for pair in zip(grads, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tokens", [50, 300, 2100])
def test_the_output_lies_as_the_query_does(tokens: int) -> None:
    x = tensors(2, tokens, 3 * 256)[0]
    q, k, v = (y.unflatten(-1, (4, 64)).transpose(1, 2) for y in x.chunk(3, dim=-1))
    for _ in range(5):
        out = sageattention.scaled_dot_product_attention(q, k, v)
        assert torch.equal(out, sageattention.sageattn(q, k, v))
        assert out.transpose(1, 2).view(2, tokens, 256).is_contiguous()
