"""What the operators need besides their CUDA kernels: shapes for `torch.compile`, and the reference on CPU tensors."""

from __future__ import annotations

import torch

from . import reference
from ._library import build, operators
from .validation import token_dimension

ATTENTION, VARLEN = f"{build.namespace}::attention", f"{build.namespace}::attention_varlen"


@torch.library.register_fake(ATTENTION)
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool,
    return_lse: bool,
    or_pytorch: bool,
    kernel: str,
    per_block_mean: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    del k, attn_mask, is_causal, sm_scale, smooth_k, smooth_v, or_pytorch, kernel, per_block_mean
    tokens = token_dimension(tensor_layout)
    shape = (q.shape[0], q.shape[3 - tokens], q.shape[tokens]) if return_lse else (0,)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(shape, dtype=torch.float32)


@torch.library.impl(ATTENTION, "CPU")
@torch.no_grad()
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool,
    return_lse: bool,
    or_pytorch: bool,
    kernel: str,
    per_block_mean: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    del or_pytorch
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = reference.attention(
        q,
        k,
        v,
        attn_mask,
        is_causal=is_causal,
        sm_scale=sm_scale,
        smooth_k=smooth_k,
        smooth_v=smooth_v,
        per_block_mean=per_block_mean,
        kernel=kernel,
    )
    if tensor_layout == "NHD":
        out = out.transpose(1, 2)
    return out.contiguous(), lse if return_lse else lse.new_empty(0)


@torch.library.register_fake(VARLEN)
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool,
    return_lse: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    del k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, sm_scale, smooth_k, smooth_v, kernel
    shape = (q.shape[1], q.shape[0]) if return_lse else (0,)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(shape, dtype=torch.float32)


@torch.library.impl(VARLEN, "CPU")
@torch.no_grad()
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool,
    return_lse: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    del max_seqlen_q, max_seqlen_k
    out, lse = reference.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        is_causal=is_causal,
        sm_scale=sm_scale,
        smooth_k=smooth_k,
        smooth_v=smooth_v,
        kernel=kernel,
    )
    return out, lse if return_lse else lse.new_empty(0)


attention = operators.attention.default
attention_varlen = operators.attention_varlen.default
