"""The public attention functions: signatures as SageAttention3's clients call them."""

from __future__ import annotations

# What annotations name is not for checkers alone: typing.get_type_hints asks for it.
from typing import Any, Literal, NoReturn, overload

import torch

from . import aliases
from ._call import Asked, OneOrTwo, Result, attend, attend_packed
from .validation import REQUIRED


@overload
def sageattn3_blackwell(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    is_causal: bool = ...,
    per_block_mean: bool | None = ...,
    *,
    tensor_layout: str = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    smooth_k: bool = ...,
    smooth_v: bool = ...,
) -> torch.Tensor: ...
@overload
def sageattn3_blackwell(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    is_causal: bool = ...,
    per_block_mean: bool | None = ...,
    *,
    tensor_layout: str = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
    smooth_k: bool = ...,
    smooth_v: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sageattn3_blackwell(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    is_causal: bool = ...,
    per_block_mean: bool | None = ...,
    *,
    tensor_layout: str = ...,
    sm_scale: float | None = ...,
    return_lse: bool = ...,
    smooth_k: bool = ...,
    smooth_v: bool = ...,
) -> Result: ...


def sageattn3_blackwell(
    q: torch.Tensor = REQUIRED,
    k: torch.Tensor = REQUIRED,
    v: torch.Tensor = REQUIRED,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *sixth: bool | None,
    per_block_mean: bool | None = None,
    tensor_layout: str = "HND",
    sm_scale: float | None = None,
    return_lse: bool = False,
    smooth_k: bool = True,
    smooth_v: bool = True,
    **others: Any,
) -> Result:
    """Attention with Q, K, P and V in FP4 (e2m1 with a scale in e4m3 for each 16 numbers): compute capability 12.0 and 12.1.

    On CPU tensors it runs the reference, which does the kernels' arithmetic step by step; on other GPUs it is an error, and
    `sageattention.sageattn` is what to call. Forward only. Inputs are not changed.

    Args:
        q: [batch, q_heads, qo_len, head_dim] ("HND") or [batch, qo_len, q_heads, head_dim] ("NHD"), float16, bfloat16 or
            float32, head_dim 1 to 256 with stride 1; any other strides. float32 is computed as bfloat16, which has its range.
        k: like q, with kv_heads, which divides q_heads (GQA, MQA), and kv_len.
        v: like k; its head_dim may differ.
        attn_mask: broadcastable to [batch, q_heads, qo_len, kv_len] whatever the layout: bool (True: attend) or float16,
            bfloat16, float32, added to the scores (-5e5 and less: hidden). Beside `is_causal` both hold. A query that sees no
            key gets zeros, and log-sum-exp -inf.
        is_causal: query i sees keys 0..i, as PyTorch's `is_causal` has it also where qo_len and kv_len differ.
        sixth: `per_block_mean` by position; or, behind a float, `is_causal`: `scaled_dot_product_attention` has dropout_p fifth.
        per_block_mean: subtract a mean of Q of its own from each 128 queries before rounding them, else one of all queries. The
            scores get back what was taken. The latter takes less memory: 4 bytes less for each head, key and 128 queries. None is True.
        tensor_layout: "HND" or "NHD".
        sm_scale: factor on the scores; head_dim ** -0.5 if None.
        return_lse: also return the log-sum-exp of the scores.
        smooth_k: subtract an estimate of K's mean over the tokens before rounding K. Softmax does not see it, and log-sum-exp
            is corrected for it. Off, K with large per-channel offsets loses accuracy.
        smooth_v: subtract an estimate of V's mean where that gains something, and add it to the output.
        others: the names that `scaled_dot_product_attention` and flash-attn have for these (`aliases.py`), with the meaning
            they have there, and dropout_p, which must be 0.

    Returns:
        The output, in q's shape (with v's head_dim), layout and dtype, contiguous; with `return_lse` also
        [batch, q_heads, qo_len] float32, natural logarithm.

    Raises:
        TypeError, ValueError: an argument is not as said above; the message says what can.
        RuntimeError: no kernel runs on this GPU, or a kernel file is missing or damaged.

    Source: SageAttention3 (arXiv 2505.11594).
    """
    if len(sixth) > 1:
        raise TypeError(f"sageattn3_blackwell() takes up to 6 arguments by position, got {5 + len(sixth)}")
    if type(is_causal) is float:
        others["dropout_p"] = others.get("dropout_p") or is_causal
        is_causal = sixth[0] if sixth and sixth[0] is not None else False
    elif sixth:
        if per_block_mean is not None:
            raise TypeError("per_block_mean: given twice, sixth and by name")
        per_block_mean = sixth[0]
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(
            sageattn3_blackwell, others, tensor_layout, q, k, v, is_causal, sm_scale
        )
    asked = Asked(
        "sageattn3_blackwell",
        None,
        tensor_layout,
        is_causal,
        return_lse,
        smooth_k,
        smooth_v,
        per_block_mean=per_block_mean,
        sm_scale=sm_scale,
    )
    return attend(asked, q, k, v, attn_mask)


def sageattn3_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    smooth_v: bool = True,
    return_lse: bool = False,
    **others: NoReturn,
) -> OneOrTwo:
    """`sageattn3_blackwell` for sequences of different lengths, packed one after the other. The GPU is never waited for.

    Args:
        q: [tokens, q_heads, head_dim], dtype and strides as in `sageattn3_blackwell`. One mean is subtracted in each sequence.
        k: [kv_tokens, kv_heads, head_dim].
        v: like k; its head_dim may differ.
        cu_seqlens_q: [sequences + 1] int32 on q's device, ascending from 0 to tokens: sequence i has q[cu[i]:cu[i + 1]]. Lengths
            may be 0.
        cu_seqlens_k: the same for k and v. A query whose sequence has no keys gets zeros, and log-sum-exp -inf.
        max_seqlen_q, max_seqlen_k: at least the largest length of each.
        is_causal, sm_scale, smooth_k, smooth_v: as in `sageattn3_blackwell`, for each sequence.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        [tokens, q_heads, head_dim of v] in q's dtype; with `return_lse` also [q_heads, tokens] float32, natural logarithm.

    Raises: as in `sageattn3_blackwell`.
    """
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(sageattn3_varlen, others, "packed", q, k, v, is_causal, sm_scale)
    return attend_packed(
        "sageattn3_blackwell",
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        is_causal,
        sm_scale,
        return_lse,
        smooth_k,
        smooth_v,
    )
