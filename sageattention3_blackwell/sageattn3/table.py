"""The kernel of sageattn3, and which function it serves."""

from __future__ import annotations

from .kernels import Kernel, Row

KERNELS = {
    "sm120_qk_fp4_pv_fp4": Kernel("12.0 and 12.1", 0.19),
}

TABLE = (
    Row("sageattn3_blackwell", None, "12.0 and 12.1", "sm120_qk_fp4_pv_fp4",
        "block-scaled FP4 products of Q and K and of P and V, sums in float32"),
)  # fmt: skip

# Functions that are others with options of their own.
SERVED_AS = {"sageattn3_varlen": "sageattn3_blackwell"}
PACKED = "sageattn3_varlen"  # the one for packed sequences
FEW_TOKENS = None  # no kernel for calls of few tokens
PER_BLOCK_MEAN = ("sageattn3_blackwell",)  # functions that have the argument of this name

# Options of other functions that ask nothing of these, as `aliases.OPTIONS`: of sageattention's, which programs hand to this one too.
OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "pv_accum_dtype": (("fp32", "fp32+fp32", "fp32+fp16"), "sums are in float32 here"),
    "qk_quant_gran": (("per_thread", "per_warp"), "16 numbers share a scale here"),
    "quantization_backend": (("triton", "cuda"), "nothing here uses Triton"),
}

# What to do where none of these kernels runs.
# PyPI's package of that name is another project's.
ELSEWHERE = (
    "use sageattention.sageattn instead, which serves compute capability 8.0 and later: its package is where this one came from"
)
