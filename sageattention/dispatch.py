"""Which kernel serves a call, and why: `TABLE` says it row by row, `KERNELS` what each kernel can do.

The first row of a function whose GPUs include the caller's and whose kernel can do what is asked is taken.
`sageattention.explain` prints the same choice.
"""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple

import torch

from . import _library, validation

Capability = tuple[int, int]


class Gpu(NamedTuple):
    """What the choice depends on."""

    capability: Capability
    geforce: bool = True  # whose tensor cores add products of floats in float32 at half the rate of float16


# On the CPU there is a reference of every kernel that is not for one GPU alone.
CPU = Gpu((1000, 0))

# Which GPUs.
GPUS: dict[str, Callable[[Gpu], bool]] = {
    "8.0 and later": lambda gpu: gpu.capability >= (8, 0),
    "8.9 and later": lambda gpu: gpu.capability >= (8, 9),
    "GeForce of 8.6": lambda gpu: gpu.geforce and gpu.capability == (8, 6),
    "GeForce of 8.9 and 12.x": lambda gpu: gpu.geforce and (gpu.capability == (8, 9) or gpu.capability[0] == 12),
    "8.9 and 12.x": lambda gpu: gpu.capability == (8, 9) or gpu.capability[0] == 12,
    "9.0 alone": lambda gpu: gpu.capability == (9, 0),
}


class Kernel(NamedTuple):
    """What an attention kernel can do; its reference on the CPU can do all."""

    gpus: str  # that it runs on
    error: float  # largest relative L1 error against float64: randn, 4096 tokens, head_dim 128
    uneven: bool = True  # head_dims that are no multiple of 8
    other_masks: bool = True  # masks that are added, of another dtype than q's
    # Up to so many queries, or keys, it gives way to PyTorch's own attention by cuDNN, where that was measured to be faster
    # (bench/notes.md), if it can do what is asked.
    few_queries: int = 0
    few_keys: int = 0


KERNELS = {
    "sm80_qk_int8_pv_f16": Kernel("8.0 and later", 0.0115),
    "sm80_qk_int8_pv_f16_accum_f16": Kernel("8.0 and later", 0.0115),
    "sm89_qk_int8_pv_f8": Kernel("8.9 and later", 0.0385),
    "sm89_qk_int8_pv_f8_accum_f16": Kernel("8.9 and later", 0.0385),
    "sm90_qk_int8_pv_f16": Kernel("9.0 alone", 0.0115, uneven=False, other_masks=False, few_queries=512, few_keys=256),
}
# The cuDNN that was measured, and later ones.
MEASURED_CUDNN = 91000


class Row(NamedTuple):
    """One line of the table."""

    function: str
    pv_accum_dtype: str | None  # None: the function has no such choice, or it changes nothing
    gpus: str  # that it is the choice for
    kernel: str
    reason: str


# fmt: off
TABLE = (
    Row("sageattn", None, "9.0 alone", "sm90_qk_int8_pv_f16",
        "wgmma: the fastest kernel here for this GPU, and 3.5 times as exact as FP8"),
    Row("sageattn", None, "GeForce of 8.9 and 12.x", "sm89_qk_int8_pv_f8_accum_f16",
        "FP8 P and V, sums of 64 keys in float16: as exact as with float32 sums, which GeForce adds at half the rate"),
    Row("sageattn", None, "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "FP8 P and V: this GPU multiplies them twice as fast as 16-bit ones"),
    Row("sageattn", None, "GeForce of 8.6", "sm80_qk_int8_pv_f16_accum_f16",
        "sums of 32 keys in float16: as exact as with float32 sums, which GeForce adds at half the rate"),
    Row("sageattn", None, "8.0 and later", "sm80_qk_int8_pv_f16",
        "mma.sync with 16-bit P and V and float32 sums, which runs everywhere"),

    Row("sageattn_qk_int8_pv_fp16_cuda", "fp32", "9.0 alone", "sm90_qk_int8_pv_f16",
        "the same arithmetic as the mma.sync kernel, on wgmma"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp32", "8.0 and later", "sm80_qk_int8_pv_f16",
        "float32 sums"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.0 and later", "sm80_qk_int8_pv_f16_accum_f16",
        "asked for: sums of 32 keys in float16, which cannot overflow, added up in float32: up to twice as fast on GeForce"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16", "8.0 and later", "sm80_qk_int8_pv_f16_accum_f16",
        "asked for: served like fp16+fp32, which is as fast and overflows less"),

    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32", "8.9 and later", "sm89_qk_int8_pv_f8",
        "FP8 P and V, sums in float32"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32", "8.9 and later", "sm89_qk_int8_pv_f8",
        "served like fp32+fp32, which is as fast and more exact"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "8.9 and later", "sm89_qk_int8_pv_f8_accum_f16",
        "asked for: FP8 P and V, sums of 64 keys in float16: up to twice as fast on GeForce"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "8.9 and later", "sm89_qk_int8_pv_f8",
        "float32 sums instead, no less exact: CUDA compiles the other kernel from 12.8 on"),

    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", "9.0 alone", "sm90_qk_int8_pv_f16",
        "16-bit P and V on wgmma: faster than SageAttention's FP8 kernel for Hopper, and 3.5 times as exact"),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "9.0 alone", "sm90_qk_int8_pv_f16",
        "served like fp32+fp32"),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", "8.9 and later", "sm89_qk_int8_pv_f8",
        "FP8 P and V, sums in float32"),
    Row("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "8.9 and later", "sm89_qk_int8_pv_f8",
        "served like fp32+fp32"),
)
# fmt: on


# The values of `pv_accum_dtype` that each function has.
ACCUMULATORS = {
    function: tuple(dict.fromkeys(row.pv_accum_dtype for row in TABLE if row.function == function and row.pv_accum_dtype))
    for function in {row.function: None for row in TABLE}
}


# Functions that are others with options of their own.
_SERVED_AS = {"sageattn_qk_int8_pv_fp16_triton": "sageattn_qk_int8_pv_fp16_cuda", "sageattn_varlen": "sageattn"}


class Request(NamedTuple):
    """What a call asks of a kernel."""

    function: str
    pv_accum_dtype: str | None = None
    head_dim: int = 128  # the larger of QK's and V's
    masked: bool = False
    other_mask: bool = False  # which is added, and of another dtype than q's
    packed: bool = False
    uneven: bool = False  # a head_dim is no multiple of 8: rows do not start on 16 bytes


class Choice(NamedTuple):
    """A kernel and why it was taken."""

    kernel: str
    reason: str
    gpu: str  # compute capability, or "CPU"
    passed_over: tuple[str, ...]  # the kernels before it in the table, each with what it lacks
    or_pytorch: bool = False  # few queries or keys are PyTorch's own attention's

    def __str__(self) -> str:
        where = "the CPU's reference of it" if self.gpu == "CPU" else f"compute capability {self.gpu}"
        few = KERNELS[self.kernel]
        lines = [f"{self.kernel} on {where}: {self.reason}", *(f"  not {line}" for line in self.passed_over)]
        if self.or_pytorch:
            lines.append(
                f"  up to {few.few_queries} queries or {few.few_keys} keys: PyTorch's own attention by cuDNN, faster there and more "
                f"exact, where q, k and v have one head_dim and rows that start on 16 bytes"
            )
        return "\n".join(lines)


def choose(request: Request, gpu: Gpu, present: frozenset[str] | None = None, *, cudnn: int = MEASURED_CUDNN) -> Choice:
    """The kernel for a request on a GPU.

    Args:
        request: what is asked.
        gpu: the GPU, or `CPU`.
        present: the kernels that this installation has for the GPU; None: all.
        cudnn: the version of cuDNN that PyTorch has; 0: none.

    Raises:
        ValueError: none serves it; names what each lacks and which functions can serve it.
    """
    name = "CPU" if gpu == CPU else "{}.{}".format(*gpu.capability)
    passed_over: list[str] = []
    for row in _rows(request.function, request.pv_accum_dtype):
        if not GPUS[row.gpus](gpu) and GPUS[KERNELS[row.kernel].gpus](gpu):
            continue
        lack = _lack(row.kernel, request, gpu, present)
        if lack is None:
            or_pytorch = (
                KERNELS[row.kernel].few_queries > 0
                and request.function == "sageattn"
                and not (request.masked or request.packed)
                and request.head_dim <= 128
                and cudnn >= MEASURED_CUDNN
            )
            return Choice(row.kernel, row.reason, name, tuple(passed_over), or_pytorch)
        passed_over.append(f"{row.kernel}: {lack}")
    others = [
        row.function + (f" with pv_accum_dtype={row.pv_accum_dtype!r}" if row.function == request.function else "")
        for row in TABLE
        if GPUS[row.gpus](gpu) and _lack(row.kernel, request, gpu, present) is None
    ]
    function = "sageattn_varlen" if request.packed else request.function
    option = "" if request.pv_accum_dtype is None else f" with pv_accum_dtype={request.pv_accum_dtype!r}"
    what = "what can: " + ", ".join(dict.fromkeys(others)) if others else "no other function can either"
    raise ValueError(
        f"{function}{option} cannot be served on {'the ' if gpu == CPU else 'compute capability '}{name}: "
        f"{'; '.join(dict.fromkeys(passed_over))}; {what}"
    )


def _rows(function: str, pv_accum_dtype: str | None) -> tuple[Row, ...]:
    return tuple(row for row in TABLE if (row.function, row.pv_accum_dtype) == (function, pv_accum_dtype))


def _lack(name: str, request: Request, gpu: Gpu, present: frozenset[str] | None) -> str | None:
    """What keeps a kernel from serving a request, in words."""
    kernel = KERNELS[name]
    if not GPUS[kernel.gpus](gpu):
        return f"runs on compute capability {kernel.gpus}"
    if gpu == CPU:
        return None
    if present is not None and name not in present:
        return "not among the kernels installed for this GPU"
    if request.uneven and not kernel.uneven:
        return "head_dims that are multiples of 8"
    if request.other_mask and not kernel.other_masks:
        return "an attn_mask that is bool or of q's dtype, float16 or bfloat16"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def kernel_for(
    function: str,
    pv_accum_dtype: str | None,
    head_dim: int,
    masked: bool,
    other_mask: bool,
    packed: bool,
    uneven: bool,
    device: str,
    index: int | None,
) -> tuple[str, bool]:
    """The kernel that serves a call on the device of its tensors, and whether short ones are PyTorch's: `choose`, remembered.

    Raises:
        ValueError: none serves it.
        RuntimeError: there is no such GPU, or no kernels for it.
    """
    choice = _remembered(Request(function, pv_accum_dtype, head_dim, masked, other_mask, packed, uneven), device, index)
    return choice.kernel, choice.or_pytorch


@functools.cache
def _remembered(request: Request, device: str, index: int | None) -> Choice:
    return choose(request, *gpu_of(device, index), cudnn=_cudnn())


def _cudnn() -> int:
    return torch.backends.cudnn.version() or 0 if torch.backends.cudnn.is_available() else 0


def gpu_of(device: str, index: int | None) -> tuple[Gpu, frozenset[str] | None]:
    """What a device is, and the kernels that this installation has for it (None: the CPU's references).

    Raises:
        RuntimeError: there is no such GPU, or no kernels for it.
    """
    if device != "cuda":
        return CPU, None
    index = torch.cuda.current_device() if index is None else index
    gpu = Gpu(torch.cuda.get_device_capability(index), "GeForce" in torch.cuda.get_device_name(index))
    return gpu, _library.kernels.get(kernel_folder(index), frozenset())


def kernel_folder(index: int) -> str:
    """The folder of the kernel set that a GPU runs, such as "sm_90a".

    Raises:
        RuntimeError: there is no such GPU, or none of the folders runs on it.
    """
    return _library.operators.kernel_architecture(index)  # type: ignore[no-any-return, unused-ignore]


def is_other_mask(attn_mask: torch.Tensor | None, q: torch.Tensor) -> bool:
    """Whether a mask is added, and of another dtype than that in which q is computed."""
    computed = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    return attn_mask is not None and attn_mask.dtype not in {torch.bool, computed}


def forget() -> None:
    """Choose anew: another kernel set has been named."""
    _remembered.cache_clear()


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    smooth_k: bool = True,
    attn_mask: torch.Tensor | None = None,
    *,
    function: str = "sageattn",
    pv_accum_dtype: str | None = None,
    architecture: str | None = None,
) -> Choice:
    """Which kernel serves a call, and why. Nothing is computed.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, return_lse, smooth_k, attn_mask: the arguments of `sageattn`; with
            tensors of three dimensions those of `sageattn_varlen`.
        function: the name of the function that is called, if not `sageattn`.
        pv_accum_dtype: its argument of that name; the default if None.
        architecture: a compute capability such as "8.9", to ask about another GPU, a GeForce where there are such, as if every kernel
            were installed for it; the device of the tensors if None.

    Returns:
        The kernel's name, the reason, the GPU, and the kernels that were passed over with what each lacks; `print` shows it.

    Raises:
        TypeError, ValueError: the call would fail, with the same message.
        RuntimeError: no kernel runs on this GPU.
    """
    del is_causal, sm_scale, return_lse, smooth_k
    packed = isinstance(q, torch.Tensor) and q.dim() == 3
    validation.tensors(q, k, v, "packed" if packed else tensor_layout)
    if attn_mask is not None:
        validation.mask(attn_mask, q, k, tensor_layout)
    function = _SERVED_AS.get(function, function)
    validation.one_of("function", function, [*ACCUMULATORS, *_SERVED_AS])
    allowed = ACCUMULATORS[function]
    if pv_accum_dtype is not None or allowed:
        pv_accum_dtype = allowed[0] if pv_accum_dtype is None else pv_accum_dtype
        validation.one_of("pv_accum_dtype", pv_accum_dtype, allowed)
    request = Request(
        function,
        pv_accum_dtype,
        head_dim=max(q.shape[-1], v.shape[-1]),
        masked=attn_mask is not None,
        other_mask=is_other_mask(attn_mask, q),
        packed=packed,
        uneven=q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0,
    )
    if architecture is None:
        return choose(request, *gpu_of(q.device.type, q.device.index), cudnn=_cudnn())
    return choose(request, Gpu(validation.capability("architecture", architecture)))
