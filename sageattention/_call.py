"""What the public functions share: a call checked, its kernel chosen, its operator called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _ops, dispatch, validation

if TYPE_CHECKING:
    from typing import Union

    Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def attend(
    function: str,
    pv_accum_dtype: str | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    smooth_k: bool,
    smooth_v: bool = False,
    qk_quant_gran: str = "per_thread",
    per_block_mean: bool | None = None,
) -> Result:
    """Attention by the kernel that serves `function`; arguments, results and errors are those of the public functions.

    per_block_mean: None where the kernels of the function know no such thing.
    """
    validation.one_of("tensor_layout", tensor_layout, ("HND", "NHD"))
    validation.tensors(q, k, v, tensor_layout)
    validation.one_of("qk_quant_gran", qk_quant_gran, ("per_thread", "per_warp"))
    if allowed := dispatch.ACCUMULATORS[function]:
        validation.one_of("pv_accum_dtype", pv_accum_dtype, allowed)
    validation.flags(is_causal=is_causal, smooth_k=smooth_k, smooth_v=smooth_v, return_lse=return_lse)
    if attn_mask is not None:
        validation.mask(attn_mask, q, k, tensor_layout)
    factor = q.shape[-1] ** -0.5 if sm_scale is None else validation.number("sm_scale", sm_scale)
    dtype = q.dtype
    if dtype == torch.float32:
        q, k, v = (_as_bfloat16(x) for x in (q, k, v))
    kernel, or_pytorch = _choice(function, pv_accum_dtype, q, v, attn_mask, packed=False)
    more: tuple[bool, ...] = ()
    if per_block_mean is not None:
        validation.flags(per_block_mean=per_block_mean)
        more = (per_block_mean,)
    out, lse = _ops.attention(
        q, k, v, attn_mask, tensor_layout, is_causal, factor, smooth_k, smooth_v, return_lse, or_pytorch, kernel, *more
    )
    out = out.float() if dtype == torch.float32 else out
    return (out, lse) if return_lse else out


def attend_packed(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    smooth_k: bool,
    smooth_v: bool,
) -> Result:
    """`attend` for sequences packed one after the other: [tokens, heads, head_dim]."""
    validation.tensors(q, k, v, "packed")
    validation.cumulative_lengths("cu_seqlens_q", cu_seqlens_q, q)
    validation.cumulative_lengths("cu_seqlens_k", cu_seqlens_k, q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected the length of cu_seqlens_q, {cu_seqlens_q.shape[0]}, got {cu_seqlens_k.shape[0]}"
        )
    longest_q = validation.length("max_seqlen_q", max_seqlen_q)
    longest_k = validation.length("max_seqlen_k", max_seqlen_k)
    validation.flags(is_causal=is_causal, smooth_k=smooth_k, smooth_v=smooth_v, return_lse=return_lse)
    factor = q.shape[-1] ** -0.5 if sm_scale is None else validation.number("sm_scale", sm_scale)
    dtype = q.dtype
    if dtype == torch.float32:
        q, k, v = (_as_bfloat16(x) for x in (q, k, v))
    kernel, _ = _choice(function, None, q, v, None, packed=True)
    out, lse = _ops.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, is_causal, factor, smooth_k, smooth_v, return_lse, kernel
    )
    out = out.float() if dtype == torch.float32 else out
    return (out, lse) if return_lse else out


def _as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    # Contiguous: of views that overlap PyTorch would choose strides, that of head_dim among them.
    return x.to(torch.bfloat16, memory_format=torch.contiguous_format)


def _choice(
    function: str,
    pv_accum_dtype: str | None,
    q: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    packed: bool,
) -> tuple[str, bool]:
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    # Branches, so that torch.compile makes constants of what it may not know.
    largest = max(head_dim, v_head_dim)
    size = 64 if largest <= 64 else 128 if largest <= 128 else 256
    uneven = True if head_dim % 8 or v_head_dim % 8 else False  # noqa: SIM210
    device = q.device
    return dispatch.kernel_for(  # type: ignore[no-any-return, unused-ignore]
        function,
        pv_accum_dtype,
        size,
        attn_mask is not None,
        dispatch.is_other_mask(attn_mask, q),
        packed,
        uneven,
        device.type,
        device.index,
    )
