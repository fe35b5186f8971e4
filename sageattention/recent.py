"""Calls that are like earlier ones, by the shortest way for the host: one look tells it of all tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _ops, dispatch

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    # What calls have in common: guards that look at _FIRST, k (which differs most often), q, v and a mask; whether there is one;
    # tensor_layout, is_causal, sm_scale, smooth_k. And what the operator is told of them: its factor and the number of its options. A
    # plain tuple, which is unpacked sooner than one with names.
    Kind = tuple[Callable[..., bool], bool, str, bool, Optional[float], bool, float, int]

# What torch.compile tells tensors by: type, dispatch keys together with what surrounds the call (autocast, inference mode,
# transforms), dtype, device, requires_grad, sizes, strides. They hold no tensor. PyTorch does not promise this name: where it is
# missing nothing is remembered.
_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

# What is asked before each call, looked up once.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

# Guards that look at a nested tensor, or at what torch.vmap makes of it, end the process. So `again` looks for nested ones, and guards
# at this first, which within torch.func's transforms is not as it was: then they look no further.
_FIRST = torch.empty((), device="cpu")


class _Kinds(dict["tuple[int, ...]", "tuple[Kind, ...]"]):
    """By k's sizes, the last made first. What is in it is replaced, never changed, since other threads read it."""

    __slots__ = ("before", "newest", "once")

    def __init__(self) -> None:
        super().__init__()
        # Of all, those that served calls last: a model's self-attention and its cross-attention.
        self.newest: Kind | None = None
        self.before: Kind | None = None
        self.once: set[tuple[object, ...]] = set()  # what is known of calls of which there has been one

    def clear(self) -> None:
        super().clear()
        self.newest = self.before = None
        self.once.clear()


KINDS = _Kinds()
dispatch.REMEMBERED.append(KINDS)


def again(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    smooth_k: bool,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """A call of a kind that is known, served. None: it is of none, or something is unusual."""
    if _is_dynamo_compiling() or (kind := KINDS.newest) is None:
        return None
    newest, others, masked = kind, None, attn_mask is not None
    try:
        if q.is_nested or k.is_nested or v.is_nested or (attn_mask is not None and attn_mask.is_nested):
            return None
        while kind is not None:
            check, with_mask, layout, causal, scale, smooth, factor, options = kind
            if (
                with_mask is masked
                and causal is is_causal
                and smooth is smooth_k
                and layout == tensor_layout
                and (scale is sm_scale or (type(sm_scale) is float and scale == sm_scale))
                and (check(_FIRST, k, q, v, attn_mask) if masked else check(_FIRST, k, q, v))
            ):
                if kind is not newest:
                    KINDS.before, KINDS.newest = newest, kind
                return None if _ops.within_forward_ad() else _ops.attention_operator(q, k, v, attn_mask, factor, options)[0]
            if others is None:
                # The same twice, which two threads can leave, would be looked at without an end.
                if kind is newest and (kind := KINDS.before) is not None and kind is not newest:
                    continue
                others = iter(KINDS.get(k.shape, ()))
            kind = next(others, None)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # the long way says it in our words
        pass
    return None


def remember(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    smooth_k: bool,
    options: int,
    attn_mask: torch.Tensor | None = None,
) -> None:
    """What can be, of a call that the long way has served. The third alike makes a kind, which takes what five of its calls save.

    Of calls whose lengths are new each time, such as a language model's, that would be lost: of them k's sizes are kept alone.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, attn_mask: of the call.
        options: what the operator was told that served it.
    """
    size = k.shape
    if _TensorGuards is None or type(size[0]) is not int:  # within torch.jit.trace
        return
    alike = KINDS.get(size)
    if alike is None:
        if len(KINDS) >= 1024:
            KINDS.clear()
        KINDS[size] = ()
        return
    tensors = (_FIRST, k, q, v) if attn_mask is None else (_FIRST, k, q, v, attn_mask)
    if len(set(map(id, tensors))) < len(tensors):  # guards know no tensor that comes twice
        return
    mask = None if attn_mask is None else (attn_mask.shape, attn_mask.dtype)
    known = (size, q.shape, v.shape, mask, tensor_layout, is_causal, sm_scale, smooth_k, options)
    if known not in KINDS.once:
        if len(KINDS.once) >= 1024:
            KINDS.once.clear()
        KINDS.once.add(known)
        return
    KINDS.once.discard(known)
    if any(x.requires_grad for x in tensors):
        return
    try:
        # Without the arguments that have names this ends the process.
        guards = _TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        )
    except (RuntimeError, TypeError, ValueError):  # it has been served all the same
        return
    factor = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    kind = (guards.check, attn_mask is not None, tensor_layout, is_causal, sm_scale, smooth_k, factor, options)
    KINDS[size] = (kind, *alike[:7])
    KINDS.before, KINDS.newest = KINDS.newest, kind
