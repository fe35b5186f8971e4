"""The public attention functions: signatures as SageAttention's clients call them."""

from __future__ import annotations

import logging

# What annotations name is not for checkers alone: typing.get_type_hints asks for it (from Python 3.10 on).
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch

from . import _library, aliases, validation
from ._call import Asked, OneOrTwo, Result, attend, attend_packed
from .recent import again, remember
from .validation import REQUIRED


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
    attn_mask: torch.Tensor | None = ...,
    *,
    dropout_p: float = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
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
    attn_mask: torch.Tensor | None = ...,
    dropout_p: float = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
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
    attn_mask: torch.Tensor | None = ...,
    *,
    dropout_p: float = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
) -> Result: ...


def sageattn(
    q: torch.Tensor = REQUIRED,
    k: torch.Tensor = REQUIRED,
    v: torch.Tensor = REQUIRED,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    smooth_k: bool = True,
    attn_mask: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = True,
    **others: Any,
) -> Result:
    """Attention with 8-bit scores, in place of `torch.nn.functional.scaled_dot_product_attention`.

    Takes the kernel that `sageattention.explain` names, the fastest for the GPU at no less than the documented accuracy. On a GPU
    short calls and few queries go to kernels in 16 bits instead, which are more exact (docs/api.md, Which kernel). On CPU tensors
    the reference of the kernel that quantises always runs, which does that kernel's arithmetic step by step. Forward only. Inputs
    are not changed.

    Args:
        q: [batch, q_heads, qo_len, head_dim] ("HND") or [batch, qo_len, q_heads, head_dim] ("NHD"), float16, bfloat16 or
            float32, head_dim 1 to 256 with stride 1; any other strides. float32 is computed as bfloat16, which has its range.
        k: like q, with kv_heads, which divides q_heads (GQA, MQA), and kv_len.
        v: like k; its head_dim may differ.
        tensor_layout: "HND" or "NHD".
        is_causal: query i sees keys 0..i, as PyTorch's `is_causal` has it also where qo_len and kv_len differ.
        sm_scale: factor on the scores; head_dim ** -0.5 if None.
        return_lse: also return the log-sum-exp of the scores.
        smooth_k: subtract an estimate of K's mean over the tokens before rounding K to 8 bits, and where single channels of Q or
            K are much larger than others, share them out by factors and a rotation of both. Softmax does not see either, and
            log-sum-exp is corrected. Off, large offsets of channels cost accuracy; so here, as in SageAttention 2, False changes
            nothing: ComfyUI passes it. The functions named after a kernel, and `sageattn_varlen`, obey.
        attn_mask: broadcastable to [batch, q_heads, qo_len, kv_len] whatever the layout: bool (True: attend) or float16,
            bfloat16, float32, added to the scores (-5e5 and less: hidden). Beside `is_causal` both hold. A query that sees no
            key gets zeros, and log-sum-exp -inf.
        dropout_p, scale, enable_gqa: as `scaled_dot_product_attention` calls them, whose place `sageattn` may be put in:
            dropout_p must be 0, scale is sm_scale, grouped heads need no permission. Its order of arguments is understood too
            (attn_mask fourth), and by every function here its other names and flash-attn's: `sageattention/aliases.py`.

    Returns:
        The output, in q's shape (with v's head_dim), layout and dtype, contiguous; with `return_lse` also
        [batch, q_heads, qo_len] float32, natural logarithm.

    Raises:
        TypeError, ValueError: an argument is not as said above, or no kernel of this GPU computes it; the message says what can.
        RuntimeError: no kernel runs on this GPU, or a kernel file is missing or damaged.

    Source: SageAttention (arXiv 2410.02367) and SageAttention2 (arXiv 2411.10958).
    """
    del enable_gqa
    if type(tensor_layout) is not str:
        tensor_layout, is_causal, sm_scale, attn_mask, dropout_p = aliases.from_positions(
            tensor_layout, is_causal, sm_scale, attn_mask, dropout_p
        )
    if dropout_p:
        others = {"dropout_p": dropout_p, **others}
    if scale is not None:
        if sm_scale is None:
            sm_scale = scale
        else:
            others["scale"] = scale
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(sageattn, others, tensor_layout, q, k, v, is_causal, sm_scale)
    if sm_scale is not None and type(sm_scale) is not float:
        sm_scale = validation.as_float(sm_scale)
    if smooth_k is not True and validation.decided(smooth_k) is False:
        smooth_k = True
    if return_lse is False:
        out = again(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, attn_mask)
        if out is not None:
            return out
    # Where V is rounded to FP8, its mean is taken off first: it costs nothing that could be measured.
    asked = Asked("sageattn", None, tensor_layout, is_causal, return_lse, smooth_k, smooth_v=True, sm_scale=sm_scale)
    return attend(asked, q, k, v, attn_mask, remember)


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor = REQUIRED,
    k: torch.Tensor = REQUIRED,
    v: torch.Tensor = REQUIRED,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    attn_mask: torch.Tensor | None = None,
    **others: NoReturn,
) -> OneOrTwo:
    """Attention with INT8 scores and 16-bit probabilities and values: compute capability 8.0 and later.

    Q is rounded with one scale a row, K with one for each 16 keys. P and V are multiplied in the inputs' dtype with "fp32",
    so that bfloat16 values keep their range; where sums are in float16, in float16, V with scales that keep it in range.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, attn_mask: as in `sageattn`.
        qk_quant_gran: "per_thread" or "per_warp". Every kernel serves both names: its scales are finer than either's.
        pv_accum_dtype: "fp32"; "fp16+fp32" and "fp16" sum 64 keys in float16 on 8.6, 8.9 and 12.x: as exact, on GeForce up to
            twice as fast. Elsewhere they are "fp32".
        smooth_v: of no effect: V is not rounded to 8 bits.

    Returns, Raises: as in `sageattn`.
    """
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(
            sageattn_qk_int8_pv_fp16_cuda, others, tensor_layout, q, k, v, is_causal, sm_scale
        )
    asked = Asked(
        "sageattn_qk_int8_pv_fp16_cuda",
        pv_accum_dtype,
        tensor_layout,
        is_causal,
        return_lse,
        smooth_k,
        smooth_v,
        qk_quant_gran,
        sm_scale=sm_scale,
    )
    return attend(asked, q, k, v, attn_mask)


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor = REQUIRED,
    k: torch.Tensor = REQUIRED,
    v: torch.Tensor = REQUIRED,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **others: NoReturn,
) -> OneOrTwo:
    """`sageattn_qk_int8_pv_fp16_cuda` with float32 sums, under the name of SageAttention's Triton kernel. Nothing here uses Triton.

    Args:
        q, k, v, tensor_layout, is_causal, attn_mask, sm_scale, smooth_k, return_lse: as in `sageattn`.
        quantization_backend: "triton" or "cuda", of no effect.

    Returns, Raises: as in `sageattn`.
    """
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(
            sageattn_qk_int8_pv_fp16_triton, others, tensor_layout, q, k, v, is_causal, sm_scale
        )
    validation.one_of("quantization_backend", quantization_backend, ("triton", "cuda"))
    asked = Asked("sageattn_qk_int8_pv_fp16_cuda", "fp32", tensor_layout, is_causal, return_lse, smooth_k, sm_scale=sm_scale)
    return attend(asked, q, k, v, attn_mask)


def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor = REQUIRED,
    k: torch.Tensor = REQUIRED,
    v: torch.Tensor = REQUIRED,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    attn_mask: torch.Tensor | None = None,
    **others: NoReturn,
) -> OneOrTwo:
    """Attention with INT8 scores and FP8 (e4m3) probabilities and values: compute capability 8.9 and later.

    V is rounded with one scale for a channel of 64 keys. GPUs without an FP8 kernel (9.0 and later but 12.x; 12.x by CUDA before 12.8)
    compute with 16-bit probabilities and values instead, which is more exact; `explain` says so.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, attn_mask: as in `sageattn`.
        qk_quant_gran: as in `sageattn_qk_int8_pv_fp16_cuda`.
        pv_accum_dtype: "fp32+fp16", the default: on GeForce, which adds products in float32 at half the rate, float16 sums of
            64 keys (SageAttention2++), of P and V that are scaled so that they do not overflow. "fp32+fp32" and "fp32": float32 sums.
        smooth_v: subtract V's mean over the tokens and add it to the output: more exact where V has large per-channel offsets.

    Returns, Raises: as in `sageattn`.
    """
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(
            sageattn_qk_int8_pv_fp8_cuda, others, tensor_layout, q, k, v, is_causal, sm_scale
        )
    asked = Asked(
        "sageattn_qk_int8_pv_fp8_cuda",
        pv_accum_dtype,
        tensor_layout,
        is_causal,
        return_lse,
        smooth_k,
        smooth_v,
        qk_quant_gran,
        sm_scale=sm_scale,
    )
    return attend(asked, q, k, v, attn_mask)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor = REQUIRED,
    k: torch.Tensor = REQUIRED,
    v: torch.Tensor = REQUIRED,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    attn_mask: torch.Tensor | None = None,
    **others: NoReturn,
) -> OneOrTwo:
    """What SageAttention computes with INT8 scores and FP8 probabilities and values on Hopper.

    On compute capability 8.9 and 12.x FP8 kernels serve it, on other GPUs from 9.0 on ones with 16-bit probabilities and values,
    which are more exact, and on 9.0 faster too. Below 8.9 it is an error. Where V is rounded to FP8 its mean is taken off first.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, attn_mask: as in `sageattn`.
        qk_quant_gran: as in `sageattn_qk_int8_pv_fp16_cuda`.
        pv_accum_dtype: "fp32+fp32" or "fp32", which mean the same.

    Returns, Raises: as in `sageattn`.
    """
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(
            sageattn_qk_int8_pv_fp8_cuda_sm90, others, tensor_layout, q, k, v, is_causal, sm_scale
        )
    asked = Asked(
        "sageattn_qk_int8_pv_fp8_cuda_sm90",
        pv_accum_dtype,
        tensor_layout,
        is_causal,
        return_lse,
        smooth_k,
        smooth_v=True,  # as sageattn does
        qk_quant_gran=qk_quant_gran,
        sm_scale=sm_scale,
    )
    return attend(asked, q, k, v, attn_mask)


def sageattn_varlen(
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
    return_lse: bool = False,
    **others: NoReturn,
) -> OneOrTwo:
    """`sageattn` for sequences of different lengths, packed one after the other. The GPU is never waited for.

    Args:
        q: [tokens, q_heads, head_dim], dtype and strides as in `sageattn`.
        k: [kv_tokens, kv_heads, head_dim].
        v: like k; its head_dim may differ.
        cu_seqlens_q: [sequences + 1] int32 on q's device, ascending from 0 to tokens: sequence i has q[cu[i]:cu[i + 1]]. Lengths
            may be 0.
        cu_seqlens_k: the same for k and v. A query whose sequence has no keys gets zeros, and log-sum-exp -inf.
        max_seqlen_q, max_seqlen_k: at least the largest length of each. An integer on a GPU is not read.
        is_causal, sm_scale, smooth_k: as in `sageattn`, for each sequence.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        [tokens, q_heads, head_dim of v] in q's dtype; with `return_lse` also [q_heads, tokens] float32, natural logarithm.

    Raises: as in `sageattn`.
    """
    if others:
        q, k, v, is_causal, sm_scale = aliases.resolved(sageattn_varlen, others, "packed", q, k, v, is_causal, sm_scale)
    return attend_packed(
        "sageattn",
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
        smooth_v=True,
    )


def _is_installed(kernel: str) -> bool:
    return any(kernel in names for names in _library.kernels.values())


# What programs ask of SageAttention before they call it: which of its three libraries of kernels was compiled.
SM80_ENABLED = _is_installed("sm80_qk_int8_pv_f16")
SM89_ENABLED = _is_installed("sm89_qk_int8_pv_f8")
SM90_ENABLED = _is_installed("sm90_qk_int8_pv_f16")


def get_cuda_arch_versions() -> list[str]:
    """Of each GPU of the process a name such as "sm90": what installers ask of SageAttention before they take its place."""
    return ["sm{}{}".format(*torch.cuda.get_device_capability(device)) for device in range(torch.cuda.device_count())]


if not TYPE_CHECKING:  # to type checkers the module has what it defines

    def __getattr__(name: str) -> NoReturn:
        """What else other programs look for in SageAttention's module of this name."""
        # KJNodes swallows the error, and would send its user after a newer version; what is logged shows in ComfyUI's console.
        if name in {"per_thread_int8_triton", "per_block_int8_triton", "per_warp_int8_cuda", "per_channel_fp8"}:
            logging.getLogger("sageattention").info(
                "no %s: KJNodes' memory-efficient nodes and others that run SageAttention's private kernels by themselves cannot be "
                "applied with this package; choose 'Patch Sage Attention KJ' (docs/api.md, Clients)",
                name,
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
