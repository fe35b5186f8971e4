"""What the public functions share: a call checked, its kernel chosen, its operator called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch

from . import _ops, aliases, dispatch, validation

if TYPE_CHECKING:
    from typing import Callable

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
# The same to type checkers of programs that call a function without overloads: of a union they would refuse `.shape`.
OneOrTwo = Any


# What the operator was told for calls that it has served, by what such calls have in common.
SERVED: dict[tuple[object, ...], int] = {}
dispatch.REMEMBERED.append(SERVED)


class Asked(NamedTuple):
    """What a call asks for beside its tensors, as the public functions have it."""

    function: str
    pv_accum_dtype: str | None  # None: the function has no such choice
    tensor_layout: str
    is_causal: bool
    return_lse: bool
    smooth_k: bool
    smooth_v: bool = False
    qk_quant_gran: str = "per_thread"
    per_block_mean: bool | None = None  # None: True, or the function has no such choice
    sm_scale: float | None = None


def attend(
    asked: Asked,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    served: Callable[..., None] | None = None,
) -> Result:
    """Attention by the kernel that serves a function; arguments, results and errors are those of the public functions.

    served: `remember` of recent.py, which is told of calls that the operator has served.
    """
    key = _key(asked, q, k, v, attn_mask)
    if key is not None and (number := SERVED.get(key)) is not None:
        try:
            out, lse = _ops.run(q, k, v, attn_mask, q.shape[3] ** -0.5 if asked.sm_scale is None else asked.sm_scale, number)
        except Exception as error:
            _raise_if_out_of_memory(error, q.device)
            alike = aliases.alike(q, k, v)
            if any(one is not other for one, other in zip(alike, (q, k, v))):
                return attend(asked, *alike, attn_mask, served)
            _refuse_in_words(q, k, v, attn_mask, asked.tensor_layout)
            raise
        if served is not None and not asked.return_lse:
            served(q, k, v, asked.tensor_layout, asked.is_causal, asked.sm_scale, asked.smooth_k, number, attn_mask)
        return (out, lse) if asked.return_lse else out
    if asked.tensor_layout != validation.TURNED:
        validation.one_of("tensor_layout", asked.tensor_layout, ("HND", "NHD"))
    validation.one_of("qk_quant_gran", asked.qk_quant_gran, ("per_thread", "per_warp"))
    if allowed := dispatch.ACCUMULATORS[asked.function]:
        validation.one_of("pv_accum_dtype", asked.pv_accum_dtype, allowed)
    asked = _decided(asked)
    validation.flags(asked.is_causal, asked.smooth_k, asked.smooth_v, asked.return_lse, asked.per_block_mean)
    attn_mask, is_causal = aliases.written_out(attn_mask, asked.is_causal, q)
    came, (q, k, v) = (q, k, v), aliases.alike(q, k, v)
    if q is not came[0] or k is not came[1] or v is not came[2]:
        key = None  # as they came the operator refuses them, which takes longer than this way
    if not _operator_checks(q, k, v, attn_mask):
        _check(q, k, v, attn_mask, asked.tensor_layout)
        return _attend(asked, is_causal, q, k, v, attn_mask)
    try:
        return _attend(asked, is_causal, q, k, v, attn_mask, key)
    except Exception:
        _refuse_in_words(q, k, v, attn_mask, asked.tensor_layout)
        raise


def _key(
    asked: Asked, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None
) -> tuple[object, ...] | None:
    """What calls have in common, of which one has been served: options of others need no second look, tensors the operator's alone.

    None: something is unusual. This halves what Python takes of a call.
    """
    _, pv_accum_dtype, tensor_layout, is_causal, return_lse, smooth_k, smooth_v, qk_quant_gran, per_block_mean, sm_scale = asked
    if (
        torch.compiler.is_compiling()
        or not type(q) is type(k) is type(v) is torch.Tensor
        or not type(is_causal) is type(return_lse) is type(smooth_k) is type(smooth_v) is bool
        or not type(tensor_layout) is type(qk_quant_gran) is str
        or not (sm_scale is None or (type(sm_scale) is float and sm_scale * 0.0 == 0.0))
        or not (pv_accum_dtype is None or type(pv_accum_dtype) is str)
        or not (per_block_mean is None or type(per_block_mean) is bool)
        or not q.dim() == v.dim() == 4
        or (device := q.get_device()) < 0
        or not device == k.get_device() == v.get_device()
        or (dtype := q.dtype) is torch.float32
    ):
        return None
    mask = None
    if attn_mask is not None:
        if type(attn_mask) is not torch.Tensor or attn_mask.get_device() != device:
            return None
        mask = attn_mask.dtype
    try:
        head_dim, v_head_dim = q.shape[3], v.shape[3]
    except RuntimeError:  # nested
        return None
    if not type(head_dim) is type(v_head_dim) is int:  # within torch.jit.trace
        return None
    return (*asked[:-1], dtype, head_dim, v_head_dim, device, mask)  # but for sm_scale, which is a number of the call


def _operator_checks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    """Whether the operator will refuse what `_check` does, in a tenth of the time: `_check` is then for its words.

    On CUDA tensors it does; beside others it may be a stand-in for shapes that is called, which computes whatever comes.
    """
    if torch.compiler.is_compiling():
        return False
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    # float32 is converted, and V's dtype with it.
    return all(type(x) is torch.Tensor and x.is_cuda for x in tensors) and q.dtype is not torch.float32


def _refuse_in_words(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, tensor_layout: str
) -> None:
    """Of what the operator has refused, raise what Python's checks say, if they say something."""
    try:
        _check(q, k, v, attn_mask, tensor_layout)
    except (TypeError, ValueError) as refused:
        raise refused from None


def _raise_if_out_of_memory(error: Exception, device: torch.device) -> None:
    """LibTorch's stable ABI has one kind of error, and programs wait for this one: they then take a smaller tile, or unload a model."""
    if type(error) is RuntimeError and "PyTorch refused aoti_torch_empty_strided" in str(error):
        if device.type == "cuda":
            torch.cuda.mem_get_info(device)  # which fails too, and says why, where an earlier kernel's fault has ended all
        raise torch.OutOfMemoryError(f"out of memory for the output or for what lies between kernels: {error}") from error


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, tensor_layout: str) -> None:
    validation.tensors(q, k, v, tensor_layout)
    if attn_mask is not None:
        validation.mask(attn_mask, q, k, tensor_layout)


def _factor(sm_scale: Any, q: torch.Tensor) -> float:
    """What scores are multiplied by."""
    if sm_scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(sm_scale, torch.Tensor) and _ops.wants_derivative(sm_scale):
        raise TypeError(
            "sm_scale: expected a number, got a tensor that wants a gradient, which would be lost: multiply q by it instead"
        )
    return validation.factor(sm_scale)


def _attend(
    asked: Asked,
    is_causal: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key: tuple[object, ...] | None = None,
) -> Result:
    """is_causal: in the place of what was asked, where a mask came that says so; key: under which `SERVED` has the call from now on."""
    factor = _factor(asked.sm_scale, q)
    kernel, or_16_bit = _choice(asked.function, asked.pv_accum_dtype, q, v, attn_mask, packed=False)
    per_block_mean = asked.per_block_mean is not False
    out, lse = _computed(
        _ops.attention, q, k, v, attn_mask, asked.tensor_layout, is_causal, factor, asked.smooth_k, asked.smooth_v, asked.return_lse,
        kernel, per_block_mean=per_block_mean, or_16_bit=or_16_bit,
    )  # fmt: skip
    if key is not None:
        heads_first, out_turned = _ops.LAYOUTS[asked.tensor_layout]
        SERVED[key] = _ops.number_of(
            kernel,
            heads_first,
            is_causal,
            asked.smooth_k,
            asked.smooth_v,
            asked.return_lse,
            per_block_mean,
            or_16_bit,
            out_turned,
        )
    return (out, lse) if asked.return_lse else out


def _computed(
    operator: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **named: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an operator computes, float32 as bfloat16."""
    dtype = q.dtype
    if dtype == torch.float32:
        # Contiguous: of views that overlap PyTorch would choose strides, that of head_dim among them.
        q, k, v = (x.to(torch.bfloat16, memory_format=torch.contiguous_format) for x in (q, k, v))
    try:
        out, lse = operator(q, k, v, *others, **named)
    except RuntimeError as error:
        _raise_if_out_of_memory(error, q.device)
        raise
    return out.float() if dtype == torch.float32 else out, lse


def _decided(asked: Asked) -> Asked:
    """The same with flags that no compiler keeps open."""
    decided = validation.decided
    return Asked(
        asked.function,
        asked.pv_accum_dtype,
        asked.tensor_layout,
        decided(asked.is_causal),
        decided(asked.return_lse),
        decided(asked.smooth_k),
        decided(asked.smooth_v),
        asked.qk_quant_gran,
        decided(asked.per_block_mean),
        asked.sm_scale,
    )


def attend_packed(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    smooth_k: bool,
    smooth_v: bool,
) -> Result:
    """`attend` for sequences packed one after the other: [tokens, heads, head_dim]."""
    q, k, v = aliases.alike(q, k, v, 3)
    validation.tensors(q, k, v, "packed")
    validation.cumulative_lengths("cu_seqlens_q", cu_seqlens_q, q)
    validation.cumulative_lengths("cu_seqlens_k", cu_seqlens_k, q)
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected the length of cu_seqlens_q, {cu_seqlens_q.shape[0]}, got {cu_seqlens_k.shape[0]}"
        )
    # Grids are sized without them: csrc/kernels/sequences.h.
    validation.length("max_seqlen_q", max_seqlen_q)
    validation.length("max_seqlen_k", max_seqlen_k)
    is_causal, smooth_k, smooth_v, return_lse = map(validation.decided, (is_causal, smooth_k, smooth_v, return_lse))
    validation.flags(is_causal, smooth_k, smooth_v, return_lse)
    factor = _factor(sm_scale, q)
    kernel, *_ = _choice(function, None, q, v, None, packed=True)
    out, lse = _computed(
        _ops.attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, factor, smooth_k, smooth_v, return_lse, kernel
    )
    return (out, lse) if return_lse else out


def _choice(
    function: str,
    pv_accum_dtype: str | None,
    q: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    packed: bool,
) -> tuple[str, bool]:
    # A branch, so that torch.compile makes a constant of what it may not know.
    uneven = True if q.shape[-1] % 8 or v.shape[-1] % 8 else False  # noqa: SIM210
    device = q.device
    return dispatch.kernel_for(  # type: ignore[no-any-return, unused-ignore]
        function,
        pv_accum_dtype,
        dispatch.is_other_mask(attn_mask, q),
        packed,
        uneven,
        device.type,
        device.index,
    )
