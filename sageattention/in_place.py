"""`torch.nn.functional.scaled_dot_product_attention`, to be put in its place: by `sageattn` where that serves, by PyTorch where not."""

from __future__ import annotations

import functools

import torch

from . import aliases, dispatch, validation
from .core import sageattn

_exact = torch._C._nn.scaled_dot_product_attention  # PyTorch's, also once something else is in its place


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`sageattn` for whoever calls PyTorch's attention; what that does not serve PyTorch computes, and refuses what it refuses.

        torch.nn.functional.scaled_dot_product_attention = sageattention.scaled_dot_product_attention

    PyTorch's are: tensors that are not on a GPU of compute capability 8.0 or later, gradients, dropout, head_dims over 256, float64,
    other than four dimensions, nested tensors and other classes of tensors, heads that are broadcast, a last dimension with strides.

    Args:
        query: [batch, q_heads, qo_len, head_dim].
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, its own head_dim].
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as PyTorch has them.

    Returns:
        [batch, q_heads, qo_len, value's head_dim], in query's dtype; under `autocast` in its.

    Raises: as `sageattn` of what it serves, else as PyTorch.
    """
    attn_mask, is_causal = aliases.written_out(attn_mask, is_causal, query)
    if dropout_p or not _serves(query, key, value, attn_mask):
        out: torch.Tensor = _exact(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return sageattn(query, key, value, is_causal=is_causal, sm_scale=scale, attn_mask=attn_mask)


def _serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    # Other classes have a way of their own with PyTorch's function; a compiler's only stand for tensors.
    if not torch.compiler.is_compiling() and not all(type(x) is torch.Tensor or type(x) is torch.nn.Parameter for x in tensors):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if any(x.is_nested or x.layout != torch.strided or not _has_kernels(x.device.type, x.device.index) for x in tensors):
        return False
    if any(x.dim() != 4 or x.dtype not in validation.DTYPES or x.stride(3) != 1 for x in (q, k, v)):
        return False
    heads, kv_heads, kv_len, largest = q.shape[1], k.shape[1], k.shape[2], validation.LARGEST_HEAD_DIM
    return bool(
        (k.dtype == q.dtype == v.dtype or torch.is_autocast_enabled(q.device.type))
        and kv_heads > 0
        and heads % kv_heads == 0
        and v.shape[1] == kv_heads
        and kv_len > 0
        and v.shape[2] == kv_len
        and 0 < q.shape[3] <= largest
        and 0 < v.shape[3] <= largest
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
@functools.cache
def _has_kernels(device: str, index: int | None) -> bool:
    """Whether there are kernels for a device. A CPU's tensors `sageattn` would answer by a reference, slowly."""
    return device == "cuda" and dispatch.is_served(dispatch.Gpu(torch.cuda.get_device_capability(index)))
