"""What is measured: PyTorch's own attention first, ours, and the peers that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sageattention
from sageattention import dispatch

# q, k, v as [batch, heads, tokens, head_dim], and whether causal.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Any]
BASELINE = "cuDNN bf16"
# Kernels of ours that `sageattn` does not take everywhere.
KERNELS = {"mma.sync, FP16 PV": "sm80_qk_int8_pv_f16", "mma.sync, FP8 PV": "sm89_qk_int8_pv_f8"}


def sdpa(backend: SDPBackend) -> Attention:
    """PyTorch's attention on one backend."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def ours(kernel: str, attn_mask: torch.Tensor | None = None) -> Attention:
    """`sageattn` on a kernel of our choosing, with what it adds to that kernel."""
    smooth_v = "f8" in kernel

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5
        return sageattention._ops.attention(q, k, v, attn_mask, "HND", causal, scale, True, smooth_v, False, kernel)[0]

    return attention


def peer(module: str) -> Attention | None:
    """A FlashAttention with the interface of that module, which takes [batch, tokens, heads, head_dim]; None: not installed."""
    try:
        function = importlib.import_module(module).flash_attn_func
    except ImportError:
        return None

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


def fp4_kernel(q: torch.Tensor) -> str | None:
    """sageattn3's for calls of such tensors; None: it is not installed, or the device is not one that it serves."""
    try:
        import sageattn3
    except ImportError:
        return None
    try:
        return str(sageattn3.explain(q, q, q, is_causal=True).kernel)
    except ValueError:
        return None


def methods() -> dict[str, Attention]:
    """By name; the baseline is the first."""
    present = dispatch.gpu_of("cuda", None)[1] or frozenset()
    table = {
        BASELINE: sdpa(SDPBackend.CUDNN_ATTENTION),
        "FlashAttention-2 bf16": sdpa(SDPBackend.FLASH_ATTENTION),
        "sageattn": lambda q, k, v, causal: sageattention.sageattn(q, k, v, is_causal=causal),
        **{name: ours(kernel) for name, kernel in KERNELS.items() if kernel in present},
        "FlashAttention-3 bf16": peer("flash_attn_interface"),
    }
    return {name: attention for name, attention in table.items() if attention is not None}


Packed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool], Any]


def packed_methods() -> dict[str, Packed]:
    """Of packed [tokens, heads, head_dim] with cu_seqlens and the largest length; the first is the baseline."""

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, causal: bool) -> Any:
        operator = torch.ops.aten._flash_attention_forward
        return operator(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, False)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, causal: bool) -> Any:
        return sageattention.sageattn_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, is_causal=causal)

    table: dict[str, Packed] = {"FlashAttention-2 bf16": flash, "sageattn_varlen": varlen}
    try:
        function = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    except ImportError:
        return table

    def flash_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, causal: bool) -> Any:
        return function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=causal)

    return {**table, "FlashAttention-3 bf16": flash_3}
