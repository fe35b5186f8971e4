"""What an operator needs besides its CUDA kernel: shapes for `torch.compile`, and the reference on CPU tensors."""

from __future__ import annotations

import torch

from sageattention import reference
from sageattention.validation import token_dimension


@torch.library.register_fake("sageattention::attention")
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
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    del k, attn_mask, is_causal, sm_scale, smooth_k, smooth_v, kernel
    tokens = token_dimension(tensor_layout)
    shape = (q.shape[0], q.shape[3 - tokens], q.shape[tokens]) if return_lse else (0,)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(shape, dtype=torch.float32)


@torch.library.impl("sageattention::attention", "CPU")
@torch.no_grad()  # as on a GPU: no gradient, rather than that of rounded numbers
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
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    del kernel, smooth_v
    if attn_mask is not None:
        raise NotImplementedError("attn_mask: not on CPU tensors")
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = reference.qk_int8_pv_f16(q, k, v, is_causal=is_causal, sm_scale=sm_scale, smooth_k=smooth_k)
    if tensor_layout == "NHD":
        out = out.transpose(1, 2)
    return out.contiguous(), lse if return_lse else lse.new_empty(0)


attention = torch.ops.sageattention.attention.default


def kernel_for(device: torch.device) -> str:
    """The fastest kernel with 16-bit probabilities and values."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return "sm90_qk_int8_pv_f16" if hopper else "sm80_qk_int8_pv_f16"
