"""Quantised attention for PyTorch: `sageattn(q, k, v)` in place of `scaled_dot_product_attention`."""

from __future__ import annotations

import sys

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
except (ImportError, OSError):
    # `python -m sageattention` imports the package before the report runs that says what is wrong with it. (Until Python runs
    # the module, sys.argv[0] is "-m"; which module, Python 3.9 does not tell.)
    if sys.argv[:1] != ["-m"] or __name__ not in getattr(sys, "orig_argv", [__name__]):
        raise

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
