"""The public attention functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from sageattention import _ops, validation

if TYPE_CHECKING:
    from typing import Literal

    import torch


@overload
def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = ...,
    is_causal: bool = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    smooth_k: bool = ...,
) -> torch.Tensor: ...
@overload
def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = ...,
    is_causal: bool = ...,
    sm_scale: float | None = ...,
    *,
    return_lse: Literal[True],
    smooth_k: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = ...,
    is_causal: bool = ...,
    sm_scale: float | None = ...,
    return_lse: bool = ...,
    smooth_k: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    smooth_k: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with 8-bit scores, in place of `torch.nn.functional.scaled_dot_product_attention`.

    Takes the fastest kernel of this package for the device; on CPU tensors it runs the reference, which does the
    kernels' arithmetic step by step. Forward only. Inputs are not changed.

    Args:
        q: [batch, q_heads, qo_len, head_dim] ("HND") or [batch, qo_len, q_heads, head_dim] ("NHD"), float16 or
            bfloat16, head_dim 1 to 128 with stride 1; any other strides.
        k: like q, with kv_heads, which divides q_heads (GQA, MQA), and kv_len.
        v: shape of k.
        tensor_layout: "HND" or "NHD".
        is_causal: query i sees keys 0..i, as PyTorch's `is_causal` has it also where qo_len and kv_len differ.
        sm_scale: factor on the scores; head_dim ** -0.5 if None.
        return_lse: also return the log-sum-exp of the scores.
        smooth_k: subtract an estimate of K's mean over the tokens before rounding K to 8 bits. Softmax does not see
            it, and log-sum-exp is corrected for it. Off, K with large per-channel offsets loses accuracy.

    Returns:
        The output, in q's shape, layout and dtype, contiguous; with `return_lse` also [batch, q_heads, qo_len] float32,
        natural logarithm.

    Raises:
        TypeError, ValueError: an argument is not as said above.
        RuntimeError: no kernel runs on this GPU, or a kernel file is missing or damaged.

    Source: SageAttention (arXiv 2410.02367) and SageAttention2 (arXiv 2411.10958).
    """
    return sageattn_qk_int8_pv_fp16_cuda(
        q,
        k,
        v,
        tensor_layout=tensor_layout,
        is_causal=is_causal,
        sm_scale=sm_scale,
        return_lse=return_lse,
        smooth_k=smooth_k,
    )


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with INT8 scores and 16-bit probabilities and values: compute capability 8.0 and later.

    On compute capability 9.0 it runs on wgmma, elsewhere on mma.sync; the arithmetic is the same.

    Q is rounded with one scale a row, K with one for each 16 keys. P and V are multiplied in the inputs' dtype: bfloat16
    values keep their range.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse: as in `sageattn`.
        qk_quant_gran: "per_thread" or "per_warp". One kernel serves both names: its scales are finer than either's.
        pv_accum_dtype: "fp32", which no model's values overflow.
        smooth_v: of no effect: float32 accumulation has no need for it.

    Returns, Raises: as in `sageattn`.
    """
    del smooth_v
    validation.tensors(q, k, v, tensor_layout)
    validation.one_of("qk_quant_gran", qk_quant_gran, ("per_thread", "per_warp"))
    validation.one_of("pv_accum_dtype", pv_accum_dtype, ("fp32",))
    for name, flag in (("is_causal", is_causal), ("smooth_k", smooth_k), ("return_lse", return_lse)):
        validation.boolean(name, flag)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else validation.number("sm_scale", sm_scale)
    kernel = _ops.kernel_for(q.device)
    out, lse = _ops.attention(q, k, v, None, tensor_layout, is_causal, scale, smooth_k, False, return_lse, kernel)
    return (out, lse) if return_lse else out
