"""Calls that PyTorch's own attention serves, by the shortest way for the host."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Callable, Optional

import torch
from torch.nn.attention import SDPBackend

from . import _library, dispatch

if TYPE_CHECKING:
    from .kernels import FewTokens

    Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# The function itself: programs put `sageattn` in its place, some before they import it.
_pytorch_attention = getattr(torch._C._nn, "scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention)

# What is asked before each such call; looked up once, which is a third of what asking takes.
_is_compiling, _is_autocast_enabled, _is_grad_enabled = (
    torch.compiler.is_compiling,
    torch.is_autocast_enabled,
    torch.is_grad_enabled,
)
_is_cudnn_enabled: Callable[[], bool] = getattr(torch._C, "_get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled)
_Tensor, _FLOAT16, _BFLOAT16 = torch.Tensor, torch.float16, torch.bfloat16


class ShortCalls:
    """Those of a GPU: which they are, by sizes, where PyTorch left to itself takes cuDNN's attention too.

    Args:
        kernel: which would serve them else.
        head_dim: up to which PyTorch serves them.
        few_tokens: what serves some of them before.
        multiprocessors: of the GPU.
    """

    def __init__(self, kernel: str, head_dim: int, few_tokens: FewTokens | None, multiprocessors: int) -> None:
        self._kernel, self._head_dim, self._few_tokens, self._multiprocessors = kernel, head_dim, few_tokens, multiprocessors
        # How calls of such sizes are served, `_attention`, remembered: models repeat them.
        self.attention = functools.lru_cache(maxsize=4096)(self._attention)

    def _attention(
        self,
        size: torch.Size,
        kv_size: torch.Size,
        v_size: torch.Size,
        tensor_layout: str,
        is_causal: bool,
        sm_scale: float | None,
    ) -> Attention | None:
        """PyTorch's, for contiguous tensors of these sizes. None: it is not faster, or something is unusual."""
        if (
            len(size) != 4
            or len(kv_size) != 4
            or kv_size != v_size
            or tensor_layout not in ("HND", "NHD")
            or 0 in size
            or 0 in kv_size
            or max(*size, *kv_size) >= 2**31
        ):
            return None
        tokens = 2 if tensor_layout == "HND" else 1
        queries, keys, heads, kv_heads, head_dim = size[tokens], kv_size[tokens], size[3 - tokens], kv_size[3 - tokens], size[3]
        few = self._few_tokens
        if (
            size[0] != kv_size[0]
            or head_dim != kv_size[3]
            or head_dim > self._head_dim
            or heads % kv_heads != 0
            or not (sm_scale is None or 0.0 < sm_scale < math.inf)
            # cuDNN gives NaN for rows that do not start on 16 bytes, or ends the process.
            or head_dim % 8 != 0
            or (few is not None and keys <= few.keys and queries <= few.queries_where_shared)
            or (few is not None and heads // kv_heads * queries <= few.rows_where_shared)
            or _library.library.fastest(
                self._kernel,
                self._multiprocessors,
                (size[0], heads, kv_heads, queries, keys, head_dim),
                is_causal,
                or_16_bit=few is not None,
            )
            != "PyTorch"
        ):
            return None
        if sm_scale is None and heads == kv_heads:
            # By position, which PyTorch takes sooner.
            served: Attention = (
                (lambda q, k, v: _pytorch_attention(q, k, v, None, 0.0, True)) if is_causal else _pytorch_attention
            )
        else:
            served = functools.partial(_pytorch_attention, is_causal=is_causal, scale=sm_scale, enable_gqa=heads != kv_heads)
        if tokens == 2:
            return served
        return lambda q, k, v: served(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).contiguous()

    def attention_of(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensor_layout: str,
        is_causal: bool,
        sm_scale: float | None,
    ) -> Attention | None:
        """PyTorch's, for such tensors wherever in memory they lie. None: it does not serve them."""
        attention = self.attention(q.shape, k.shape, v.shape, tensor_layout, is_causal, sm_scale)
        if (
            attention is None
            or not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous())
            or ((dtype := q.dtype) is not _BFLOAT16 and dtype is not _FLOAT16)
            # What surrounds a call changes nothing about it.
            or _is_autocast_enabled()
            or (_is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        ):
            return None
        return attention


class _ShortCalls(dict[int, Optional[ShortCalls]]):
    def __missing__(self, index: int) -> ShortCalls | None:
        self[index] = found = self._find(index) if index >= 0 else None
        return found

    @staticmethod
    def _find(index: int) -> ShortCalls | None:
        found = None
        if not torch.cuda.is_available():  # the index is another accelerator's
            return None
        for head_dim in (128, 256):
            try:
                kernel, or_pytorch, or_16_bit = dispatch.kernel_for(
                    dispatch.FIRST, None, head_dim, False, False, False, "cuda", index
                )
            except (RuntimeError, ValueError):  # which the call will say
                break
            if not or_pytorch:
                break
            x = torch.empty(1, 1, 128, head_dim, device=torch.device("cuda", index), dtype=torch.float16)
            choice = getattr(torch, "_fused_sdp_choice", None)  # no name that PyTorch promises
            if choice is None or choice(x, x, x) != SDPBackend.CUDNN_ATTENTION.value:
                break
            multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
            found = ShortCalls(kernel, head_dim, dispatch.FEW_TOKENS if or_16_bit else None, multiprocessors)
        return found


# By the index of a GPU; None: there are no such calls.
SHORT_CALLS = _ShortCalls()
dispatch.REMEMBERED.append(SHORT_CALLS)


def short_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    smooth_k: bool,
) -> torch.Tensor | None:
    """A call that PyTorch's own attention serves, served. None: it does not, or something is unusual.

    The operator does the same (csrc/torch/few_tokens.cpp), under torch.compile too, but takes half as long again to reach.
    """
    # Each line takes a tenth of a microsecond: those first by which most other calls are told.
    if (
        _is_compiling()
        or not type(q) is type(k) is type(v) is _Tensor
        or not type(is_causal) is type(smooth_k) is bool
        or type(tensor_layout) is not str
        or not (sm_scale is None or type(sm_scale) is float)
    ):
        return None
    short = SHORT_CALLS[q.get_device()]
    if short is None:
        return None
    try:
        attention = short.attention_of(q, k, v, tensor_layout, is_causal, sm_scale)
        if attention is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or not _is_cudnn_enabled():
            return None
        return attention(q, k, v)
    except RuntimeError:  # sparse, nested, of two devices or two dtypes: the operator says it in our words
        return None
