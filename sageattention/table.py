"""The kernels of sageattention, and which one serves which function on which GPU."""

from __future__ import annotations

from .kernels import FewTokens, Kernel, Row

KERNELS = {
    "sm80_qk_int8_pv_f16": Kernel("8.0 and later", 0.0115),
    "sm80_qk_int8_pv_f16_accum_f16": Kernel("8.6, 8.9 and 12.x", 0.0115),
    "sm89_qk_int8_pv_f8": Kernel("8.9 and 12.x", 0.0385),
    "sm89_qk_int8_pv_f8_accum_f16": Kernel("8.9 and 12.x", 0.0385),
    "sm90_qk_int8_pv_f16": Kernel("9.0 alone", 0.0115, uneven=False, other_masks=False),
}

FLOAT32_SUMS = "float32 sums instead, as exact: kernels with float16 sums are for 8.6, 8.9 and, by CUDA 12.8 and later, 12.x"
WGMMA = "16-bit P and V on wgmma: faster than SageAttention's FP8 kernel for Hopper, and 3.5 times as exact"
WITHOUT_FP8 = "16-bit P and V instead, 3.5 times as exact: FP8 kernels are for 8.9 and, by CUDA 12.8 and later, 12.x"

# fmt: off
TABLE = (
    Row("sageattn", None, "9.0 alone", "sm90_qk_int8_pv_f16",
        "wgmma: the fastest kernel here for this GPU, and 3.5 times as exact as FP8"),
    Row("sageattn", None, "GeForce of 8.9 and 12.x", "sm89_qk_int8_pv_f8_accum_f16",
        "FP8 P and V, sums of 64 keys in float16: as exact as with float32 sums, which GeForce adds at half the rate"),
    Row("sageattn", None, "GPUs of 8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "FP8 P and V: this GPU multiplies them twice as fast as 16-bit ones"),
    Row("sageattn", None, "GeForce of 8.6", "sm80_qk_int8_pv_f16_accum_f16",
        "sums of 64 keys in float16: as exact as with float32 sums, which GeForce adds at half the rate"),
    Row("sageattn", None, "8.0 and later", "sm80_qk_int8_pv_f16",
        "mma.sync with 16-bit P and V and float32 sums, which runs everywhere"),

    Row("sageattn_qk_int8_pv_fp16_cuda", "fp32", "9.0 alone", "sm90_qk_int8_pv_f16",
        "the same arithmetic as the mma.sync kernel, on wgmma"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp32", "8.0 and later", "sm80_qk_int8_pv_f16",
        "float32 sums"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.6, 8.9 and 12.x", "sm80_qk_int8_pv_f16_accum_f16",
        "asked for: sums of 64 keys in float16, which cannot overflow, added up in float32: up to twice as fast on GeForce"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "9.0 alone", "sm90_qk_int8_pv_f16", FLOAT32_SUMS),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.0 and later", "sm80_qk_int8_pv_f16", FLOAT32_SUMS),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16", "8.6, 8.9 and 12.x", "sm80_qk_int8_pv_f16_accum_f16",
        "asked for: served like fp16+fp32, which is as fast and overflows less"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16", "9.0 alone", "sm90_qk_int8_pv_f16", FLOAT32_SUMS),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16", "8.0 and later", "sm80_qk_int8_pv_f16", FLOAT32_SUMS),

    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "GeForce of 8.9 and 12.x", "sm89_qk_int8_pv_f8_accum_f16",
        "FP8 P and V, sums of 64 keys in float16: as exact as with float32 sums, which GeForce adds at half the rate"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "float32 sums instead, as exact: but for GeForce, GPUs add them at the full rate, and its kernel is of CUDA 12.8 and later"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "9.0 alone", "sm90_qk_int8_pv_f16", WGMMA),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "9.0 and later", "sm80_qk_int8_pv_f16", WITHOUT_FP8),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32", "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "FP8 P and V, sums in float32"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32", "9.0 alone", "sm90_qk_int8_pv_f16", WGMMA),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32", "9.0 and later", "sm80_qk_int8_pv_f16", WITHOUT_FP8),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32", "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "served like fp32+fp32, which is as fast and more exact"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32", "9.0 alone", "sm90_qk_int8_pv_f16", WGMMA),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32", "9.0 and later", "sm80_qk_int8_pv_f16", WITHOUT_FP8),

    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", "9.0 alone", "sm90_qk_int8_pv_f16", WGMMA),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "FP8 P and V, sums in float32"),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", "9.0 and later", "sm80_qk_int8_pv_f16", WITHOUT_FP8),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "9.0 alone", "sm90_qk_int8_pv_f16", WGMMA),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "served like fp32+fp32"),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "9.0 and later", "sm80_qk_int8_pv_f16", WITHOUT_FP8),
)
# fmt: on

# Functions that are others with options of their own.
SERVED_AS = {"sageattn_qk_int8_pv_fp16_triton": "sageattn_qk_int8_pv_fp16_cuda", "sageattn_varlen": "sageattn"}

PACKED = "sageattn_varlen"  # the one for packed sequences

# What may serve calls of the table's first function in the place of its kernel.
FEW_TOKENS = FewTokens(
    "sm80_qk_f16_pv_f16",
    0.0025,
    queries=1024,
    keys=96,
    queries_where_shared=128,
    over_many_keys="sm80_qk_f16_pv_f16_split_kv",
    rows=64,
    rows_where_shared=32,
    short="sm90_qk_f16_pv_f16",
)

PER_BLOCK_MEAN: tuple[str, ...] = ()  # functions that have the argument of this name

# Options of single kernels' functions, which the others take as SageAttention does, and choose as they always do: as `aliases.OPTIONS`.
OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "pv_accum_dtype": (("fp32", "fp32+fp32", "fp32+fp16", "fp16+fp32", "fp16"), "the kernel's sums are of its own"),
    "qk_quant_gran": (("per_thread", "per_warp"), "every kernel's scales are finer"),
    "quantization_backend": (("triton", "cuda"), "nothing here uses Triton"),
    "smooth_v": ((False, True), "V's mean is taken off wherever V is rounded to 8 bits"),
}

# What to do where none of these kernels runs.
ELSEWHERE = "use a GPU of compute capability 8.0 or later"
