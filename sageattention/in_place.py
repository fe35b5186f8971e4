"""`torch.nn.functional.scaled_dot_product_attention`, to be put in its place: by `sageattn` where that serves, by PyTorch where not."""

from __future__ import annotations

import functools

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._device import DeviceContext

from . import _ops, aliases, dispatch, validation
from ._call import Asked, attend
from .recent import again, remember

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

    `TorchFunctionMode`s see this function as they would PyTorch's.

    PyTorch's are: tensors that are not on a GPU of compute capability 8.0 or later, gradients, dropout, head_dims over 256, float64,
    other than four dimensions, nested tensors and other classes of tensors, heads that are broadcast, a last dimension with strides,
    K of no tokens, models that are exported to ONNX. Within `torch.vmap` tensors do not say whether they want gradients: unless nothing
    does, as within `torch.no_grad()`, those calls are PyTorch's too.

    Args:
        query: [batch, q_heads, qo_len, head_dim].
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, its own head_dim].
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as PyTorch has them.

    Returns:
        [batch, q_heads, qo_len, value's head_dim], in query's dtype; under `autocast` in its. Where query is a transposed
        [batch, qo_len, q_heads, head_dim], so is this, as PyTorch's is.

    Raises: as `sageattn` of what it serves, else as PyTorch.
    """
    # A mode alone is asked for, not a class of tensors.
    if _compiles_within_mode() if torch.compiler.is_dynamo_compiling() else has_torch_function_unary(None):
        by_mode: torch.Tensor = handle_torch_function(
            scaled_dot_product_attention, (query, key, value), query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return by_mode
    if scale is not None and type(scale) is not float:
        scale = validation.as_float(scale)
    if (
        type(query) is torch.Tensor
        and not query.requires_grad
        and not dropout_p
        and not torch.is_autocast_enabled()
        and not query.is_nested
        and query.dim() == 4
    ):
        # What has been served needs no second look.
        out = again(query, key, value, _layout_of(query), is_causal, scale, True, attn_mask)
        if out is not None:
            return out
    attn_mask, is_causal = aliases.written_out(attn_mask, is_causal, query)
    learned = isinstance(scale, torch.Tensor) and _ops.may_require_grad(scale)  # which PyTorch refuses
    if dropout_p or learned or not _serves(query, key, value, attn_mask):
        exact: torch.Tensor = _exact(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return exact
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (aliases.in_dtype(x, dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype in validation.DTYPES:  # of another dtype it would be a slower kernel's
            attn_mask = attn_mask.to(dtype)
    asked = Asked(
        "sageattn", None, _layout_of(query), is_causal, return_lse=False, smooth_k=True, smooth_v=True, sm_scale=scale
    )
    served: torch.Tensor = attend(asked, query, key, value, attn_mask, remember)
    return served


def _compiles_within_mode() -> bool:
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    # A default device is one too, and nothing to this function.
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _layout_of(query: torch.Tensor) -> str:
    """The output lies in memory as the query does, as PyTorch's."""
    return "HND" if query.stride(1) >= query.stride(2) else validation.TURNED


def _serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    mask = q if attn_mask is None else attn_mask
    # Other classes have a way of their own with PyTorch's function.
    if not all(map(_is_tensor, (q, k, v, mask))):
        return False
    if torch.is_grad_enabled() and any(map(_ops.may_require_grad, (q, k, v, mask))):
        return False
    if torch.onnx.is_in_onnx_export() or _ops.within_forward_ad():
        return False
    if not all(map(_is_4d, (q, k, v))) or mask.is_nested or mask.layout != torch.strided:
        return False
    device = q.device
    if k.device != device or v.device != device or mask.device != device or not has_kernels(device.type, device.index):
        return False
    if (k.dtype != q.dtype or v.dtype != q.dtype) and not torch.is_autocast_enabled(device.type):
        return False
    (_, heads, _, head_dim), (_, kv_heads, kv_len, _), (_, v_heads, v_len, v_head_dim) = q.shape, k.shape, v.shape
    if kv_heads == 0 or kv_len == 0 or heads % kv_heads != 0 or v_heads != kv_heads or v_len != kv_len:
        return False
    # A branch: of `bool` PyTorch 2.6 compiles none that depends on sizes.
    if 0 < head_dim <= validation.LARGEST_HEAD_DIM and 0 < v_head_dim <= validation.LARGEST_HEAD_DIM:  # noqa: SIM103
        return True
    return False


def _is_tensor(x: torch.Tensor) -> bool:
    # Dynamo's have the type of what they stand for, an export's do not.
    exports = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    return type(x) is torch.Tensor or type(x) is torch.nn.Parameter or exports


def _is_4d(x: torch.Tensor) -> bool:
    return not x.is_nested and x.dim() == 4 and x.layout == torch.strided and x.dtype in validation.DTYPES and x.stride(3) == 1


@dispatch.constant
def has_kernels(device: str, index: int | None) -> bool:
    """Whether there are kernels for a device. A CPU's tensors `sageattn` would answer by a reference, slowly."""
    return device == "cuda" and torch.version.hip is None and _is_served(index)


@functools.cache
def _is_served(index: int | None) -> bool:
    return dispatch.is_served(dispatch.Gpu(torch.cuda.get_device_capability(index)))
