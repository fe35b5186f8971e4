"""Quantised attention for PyTorch: `sageattn(q, k, v)` in place of `scaled_dot_product_attention`."""

from __future__ import annotations

try:
    from ._library import build
    from .core import (
        sageattn,
        sageattn_qk_int8_pv_fp8_cuda,
        sageattn_qk_int8_pv_fp8_cuda_sm90,
        sageattn_qk_int8_pv_fp16_cuda,
        sageattn_qk_int8_pv_fp16_triton,
        sageattn_varlen,
    )
    from .dispatch import explain
    from .in_place import scaled_dot_product_attention

    __version__ = build.version
except Exception as error:
    from . import doctor

    if not doctor.is_asked_for():
        raise
    doctor.import_failure = error

__all__ = [
    "__version__",
    "explain",
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
    "scaled_dot_product_attention",
]
