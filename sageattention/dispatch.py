"""Which kernel serves a call, and why: `TABLE` says it row by row, `KERNELS` what each kernel can do.

The first row of a function whose GPUs include the caller's and whose kernel can do what is asked is taken.
`sageattention.explain` prints the same choice.
"""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple

import torch

from sageattention import _library, validation

Capability = tuple[int, int]

# On the CPU there is a reference of every kernel that is not for one GPU alone.
CPU: Capability = (1000, 0)

# Which GPUs, by compute capability. On Ada and the Blackwell of GeForce and workstations, FP16 products with float32 sums
# run at half the rate of FP8's.
GPUS: dict[str, Callable[[Capability], bool]] = {
    "8.0 and later": lambda c: c >= (8, 0),
    "8.9 and later": lambda c: c >= (8, 9),
    "8.9 and 12.x": lambda c: c == (8, 9) or c[0] == 12,
    "9.0 alone": lambda c: c == (9, 0),
}


class Kernel(NamedTuple):
    """What an attention kernel can do; its reference on the CPU is held to the dtypes alone."""

    gpus: str  # that it runs on
    error: float  # largest relative L1 error against float64: randn, 4096 tokens, head_dim 128
    bfloat16: bool = True
    largest_head_dim: int = 256
    uneven: bool = True  # head_dims that are no multiple of 8
    v_head_dim: bool = True  # V's head_dim may differ from Q's and K's
    masks: bool = True
    packed: bool = True  # sequences of any lengths one after the other (sageattn_varlen)
    lse: bool = True  # can return log-sum-exp
    short_only: bool = False  # for `Request.short` alone


# PyTorch's own attention, which on this GPU is faster than any of ours, and more exact, where there are few queries to make K's
# quantisation worth it, or few keys: bench/notes.md.
PYTORCH = "scaled_dot_product_attention"
FEW_QUERIES, FEW_KEYS = 512, 256

KERNELS = {
    "sm80_qk_int8_pv_f16": Kernel("8.0 and later", 0.0115),
    "sm80_qk_int8_pv_f16_accum_f16": Kernel("8.0 and later", 0.0115, bfloat16=False),
    "sm89_qk_int8_pv_f8": Kernel("8.9 and later", 0.0385),
    "sm89_qk_int8_pv_f8_accum_f16": Kernel("8.9 and later", 0.0385),
    "sm90_qk_int8_pv_f16": Kernel("9.0 alone", 0.0115, uneven=False, masks=False),
}
ABILITIES = KERNELS | {
    PYTORCH: Kernel(
        "9.0 alone",
        0.003,
        largest_head_dim=128,
        uneven=False,
        v_head_dim=False,
        masks=False,
        packed=False,
        lse=False,
        short_only=True,
    ),
}


class Row(NamedTuple):
    """One line of the table."""

    function: str
    pv_accum_dtype: str | None  # None: the function has no such choice, or it changes nothing
    gpus: str  # that it is the choice for
    kernel: str
    reason: str


# fmt: off
TABLE = (
    Row("sageattn", None, "9.0 alone", PYTORCH,
        "PyTorch's own attention: for few queries or keys faster here than 8-bit scores, and more exact"),
    Row("sageattn", None, "9.0 alone", "sm90_qk_int8_pv_f16",
        "wgmma: the fastest kernel here for this GPU, and 3.5 times as exact as FP8"),
    Row("sageattn", None, "8.9 and 12.x", "sm89_qk_int8_pv_f8",
        "FP8 P and V: this GPU multiplies them twice as fast as 16-bit ones with float32 sums"),
    Row("sageattn", None, "8.0 and later", "sm80_qk_int8_pv_f16",
        "mma.sync with 16-bit P and V and float32 sums, which runs everywhere and no model overflows"),

    Row("sageattn_qk_int8_pv_fp16_cuda", "fp32", "9.0 alone", "sm90_qk_int8_pv_f16",
        "the same arithmetic as the mma.sync kernel, on wgmma"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp32", "8.0 and later", "sm80_qk_int8_pv_f16",
        "float32 sums, which no model overflows"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.0 and later", "sm80_qk_int8_pv_f16_accum_f16",
        "asked for: sums of 16 keys in float16, which cannot overflow, added up in float32: up to twice as fast on GeForce"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16", "8.0 and later", "sm80_qk_int8_pv_f16_accum_f16",
        "asked for: served like fp16+fp32, which is as fast and overflows less"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.0 and later", "sm80_qk_int8_pv_f16",
        "tensor cores sum products of bfloat16 in float32 only"),
    Row("sageattn_qk_int8_pv_fp16_cuda", "fp16", "8.0 and later", "sm80_qk_int8_pv_f16",
        "tensor cores sum products of bfloat16 in float32 only"),

    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32", "8.9 and later", "sm89_qk_int8_pv_f8",
        "FP8 P and V, sums in float32"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32", "8.9 and later", "sm89_qk_int8_pv_f8",
        "served like fp32+fp32, which is as fast and more exact"),
    Row("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "8.9 and later", "sm89_qk_int8_pv_f8_accum_f16",
        "asked for: FP8 P and V, sums of a few keys in float16: up to twice as fast on GeForce"),
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
    bfloat16: bool = False
    head_dim: int = 128  # the larger of QK's and V's
    v_differs: bool = False  # they are not the same
    masked: bool = False
    packed: bool = False
    uneven: bool = False  # a head_dim is no multiple of 8: rows do not start on 16 bytes
    short: bool = False  # at most `FEW_QUERIES` or `FEW_KEYS`, but some, and no gradient is asked for
    lse: bool = False  # log-sum-exp is to be returned


class Choice(NamedTuple):
    """A kernel and why it was taken."""

    kernel: str  # or `PYTORCH`
    reason: str
    gpu: str  # compute capability, or "CPU"
    passed_over: tuple[str, ...]  # the kernels before it in the table, each with what it lacks

    def __str__(self) -> str:
        where = "the CPU's reference of it" if self.gpu == "CPU" else f"compute capability {self.gpu}"
        return "\n".join([f"{self.kernel} on {where}: {self.reason}", *(f"  not {line}" for line in self.passed_over)])


def choose(request: Request, capability: Capability, present: frozenset[str] | None = None) -> Choice:
    """The kernel for a request on a GPU.

    Args:
        request: what is asked.
        capability: the GPU's compute capability, or `CPU`.
        present: the kernels that this installation has for the GPU; None: all.

    Raises:
        ValueError: none serves it; names what each lacks and which functions can serve it.
    """
    gpu = "CPU" if capability == CPU else "{}.{}".format(*capability)
    passed_over: list[str] = []
    for row in _rows(request.function, request.pv_accum_dtype):
        if not GPUS[row.gpus](capability) and GPUS[ABILITIES[row.kernel].gpus](capability):
            continue
        lack = _lack(row.kernel, request, capability, present)
        if lack is None:
            return Choice(row.kernel, row.reason, gpu, tuple(passed_over))
        passed_over.append(f"{row.kernel}: {lack}")
    others = [
        row.function + (f" with pv_accum_dtype={row.pv_accum_dtype!r}" if row.function == request.function else "")
        for row in TABLE
        if GPUS[row.gpus](capability) and _lack(row.kernel, request, capability, present) is None
    ]
    name = "sageattn_varlen" if request.packed else request.function
    option = "" if request.pv_accum_dtype is None else f" with pv_accum_dtype={request.pv_accum_dtype!r}"
    what = "what can: " + ", ".join(dict.fromkeys(others)) if others else "no other function can either"
    raise ValueError(
        f"{name}{option} cannot be served on {'the ' if gpu == 'CPU' else 'compute capability '}{gpu}: "
        f"{'; '.join(dict.fromkeys(passed_over))}; {what}"
    )


def _rows(function: str, pv_accum_dtype: str | None) -> tuple[Row, ...]:
    return tuple(row for row in TABLE if (row.function, row.pv_accum_dtype) == (function, pv_accum_dtype))


def _lack(name: str, request: Request, capability: Capability, present: frozenset[str] | None) -> str | None:
    """What keeps a kernel from serving a request, in words."""
    kernel = ABILITIES[name]
    if not GPUS[kernel.gpus](capability):
        return f"runs on compute capability {kernel.gpus}"
    if request.bfloat16 and not kernel.bfloat16:
        return "float16 only"
    if capability == CPU:
        return None
    if kernel.short_only and not request.short:
        return f"for at most {FEW_QUERIES} queries or {FEW_KEYS} keys, without gradients"
    if name in KERNELS and present is not None and name not in present:
        return "not among the kernels installed for this GPU"
    if request.head_dim > kernel.largest_head_dim:
        return f"head_dim up to {kernel.largest_head_dim}, not {request.head_dim}"
    if request.uneven and not kernel.uneven:
        return "head_dims that are multiples of 8"
    if request.v_differs and not kernel.v_head_dim:
        return "V's head_dim must be that of Q and K"
    if request.masked and not kernel.masks:
        return "no attn_mask"
    if request.packed and not kernel.packed:
        return "no packed sequences"
    if request.lse and not kernel.lse:
        return "no log-sum-exp"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def kernel_for(
    function: str,
    pv_accum_dtype: str | None,
    bfloat16: bool,
    head_dim: int,
    v_differs: bool,
    masked: bool,
    packed: bool,
    uneven: bool,
    short: bool,
    lse: bool,
    device: str,
    index: int | None,
) -> str:
    """The kernel that serves a call on the device of its tensors: `choose`, remembered.

    Raises:
        ValueError: none serves it.
        RuntimeError: there is no such GPU, or no kernels for it.
    """
    request = Request(function, pv_accum_dtype, bfloat16, head_dim, v_differs, masked, packed, uneven, short, lse)
    return _remembered(request, device, index).kernel


@functools.cache
def _remembered(request: Request, device: str, index: int | None) -> Choice:
    return choose(request, *gpu_of(device, index))


def gpu_of(device: str, index: int | None) -> tuple[Capability, frozenset[str] | None]:
    """Compute capability of a device, and the kernels that this installation has for it (None: the CPU's references).

    Raises:
        RuntimeError: there is no such GPU, or no kernels for it.
    """
    if device != "cuda":
        return CPU, None
    index = torch.cuda.current_device() if index is None else index
    return torch.cuda.get_device_capability(index), _library.kernels.get(kernel_folder(index), frozenset())


def kernel_folder(index: int) -> str:
    """The folder of the kernel set that a GPU runs, such as "sm_90a".

    Raises:
        RuntimeError: there is no such GPU, or none of the folders runs on it.
    """
    return torch.ops.sageattention.kernel_architecture(index)  # type: ignore[no-any-return, unused-ignore]


def is_short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str) -> bool:
    """Whether a call is what `Request.short` says."""
    tokens = validation.token_dimension(tensor_layout)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    # A branch, so that torch.compile makes a constant of it.
    return True if (q.shape[tokens] <= FEW_QUERIES or k.shape[tokens] <= FEW_KEYS) and q.numel() > 0 else False  # noqa: SIM210


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
        architecture: a compute capability such as "8.9", to ask about another GPU, as if every kernel were installed for it; the
            device of the tensors if None.

    Returns:
        The kernel's name, the reason, the GPU, and the kernels that were passed over with what each lacks; `print` shows it.

    Raises:
        TypeError, ValueError: the call would fail, with the same message.
        RuntimeError: no kernel runs on this GPU.
    """
    del is_causal, sm_scale, smooth_k
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
        bfloat16=q.dtype != torch.float16,
        head_dim=max(q.shape[-1], v.shape[-1]),
        v_differs=q.shape[-1] != v.shape[-1],
        masked=attn_mask is not None,
        packed=packed,
        uneven=q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0,
        short=not packed and is_short(q, k, v, tensor_layout),
        lse=return_lse,
    )
    if architecture is None:
        return choose(request, *gpu_of(q.device.type, q.device.index))
    return choose(request, validation.capability("architecture", architecture))
