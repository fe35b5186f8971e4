"""Quantised attention for PyTorch: `sageattn(q, k, v)` in place of `scaled_dot_product_attention`."""

from __future__ import annotations

from sageattention._library import build

__version__ = build.version

from sageattention.core import (
    explain,
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

__all__ = [
    "__version__",
    "explain",
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]
