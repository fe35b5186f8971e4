"""Which kernel serves a call, and why: `TABLE` says it row by row, `KERNELS` what each kernel can do.

The first row of a function whose GPUs include the caller's and whose kernel can do what is asked is taken. Both are the
package's own, in its `table.py`; `explain` prints the same choice.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from . import _library, aliases, validation
from .kernels import CPU, GPUS, Gpu, Kernel
from .table import ELSEWHERE, FEW_TOKENS, KERNELS, PACKED, PER_BLOCK_MEAN, SERVED_AS, TABLE

if TYPE_CHECKING:
    from typing import Callable

__all__ = [
    "ACCUMULATORS",
    "CPU",
    "ELSEWHERE",
    "FEW_TOKENS",
    "FIRST",
    "GPUS",
    "KERNELS",
    "REMEMBERED",
    "TABLE",
    "Choice",
    "Gpu",
    "Kernel",
    "Request",
    "choose",
    "constant",
    "explain",
    "forget",
    "gpu_of",
    "is_other_mask",
    "is_served",
    "kernel_folder",
    "kernel_for",
]

Function = TypeVar("Function", bound="Callable[..., object]")


def constant(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports torch._dynamo: that takes 0.7 s, and fails within torch.device("meta")."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


FIRST = TABLE[0].function  # what others are served as, and asked about where none is named

# The values of `pv_accum_dtype` that each function has.
ACCUMULATORS = {
    function: tuple(dict.fromkeys(row.pv_accum_dtype for row in TABLE if row.function == function and row.pv_accum_dtype))
    for function in {row.function: None for row in TABLE}
}


class Request(NamedTuple):
    """What a call asks of a kernel."""

    function: str
    pv_accum_dtype: str | None = None
    other_mask: bool = False  # which is added, and of another dtype than q's
    packed: bool = False
    uneven: bool = False  # a head_dim is no multiple of 8: rows do not start on 16 bytes


class Choice(NamedTuple):
    """A kernel and why it was taken."""

    kernel: str  # that serves calls of any length
    reason: str
    gpu: str  # compute capability, or "CPU"
    passed_over: tuple[str, ...]  # the kernels for this GPU that come before it in the table, each with what it lacks
    or_16_bit: bool = False  # short calls are other kernels', which do not quantise: `print` says up to which sizes

    def __str__(self) -> str:
        where = "the CPU's reference of it" if self.gpu == "CPU" else f"compute capability {self.gpu}"
        lines = [f"{self.kernel} on {where}: {self.reason}", *(f"  not {line}" for line in self.passed_over)]
        if self.or_16_bit and FEW_TOKENS is not None:
            shared = KERNELS[self.kernel].is_hoppers
            lines.append(
                f"  up to {FEW_TOKENS.queries_where_shared if shared else FEW_TOKENS.queries} queries and {FEW_TOKENS.keys} keys (fewer "
                f"of head_dims over 64): {FEW_TOKENS.name}, in 16 bits, faster there and more exact, where rows start on 16 bytes"
            )
            rows = FEW_TOKENS.rows_where_shared if shared else FEW_TOKENS.rows
            lines.append(
                f"  up to {rows} queries times heads that share K and V, over any number of keys: {FEW_TOKENS.over_many_keys}, likewise"
            )
            if shared:
                lines.append(
                    f"  up to some 1000 queries, or 500 keys, and under an attn_mask that adds a number to each score of each head: "
                    f"{FEW_TOKENS.short}, likewise, for sizes that it is expected to be faster at"
                )
        return "\n".join(lines)


def choose(request: Request, gpu: Gpu, present: frozenset[str] | None = None) -> Choice:
    """The kernel for a request on a GPU.

    Args:
        request: what is asked.
        gpu: the GPU, or `CPU`.
        present: the kernels that this installation has for the GPU; None: all.

    Raises:
        ValueError: none serves it; names what each lacks and which functions can serve it.
    """
    name = "CPU" if gpu == CPU else "{}.{}".format(*gpu.capability)
    passed_over: list[str] = []
    rows = [row for row in TABLE if (row.function, row.pv_accum_dtype) == (request.function, request.pv_accum_dtype)]
    for row in [row for row in rows if GPUS[row.gpus](gpu)] or [row for row in rows if not GPUS[KERNELS[row.kernel].gpus](gpu)]:
        lack = _lack(row.kernel, request, gpu, present)
        if lack is None:
            or_16_bit = (
                FEW_TOKENS is not None
                and request.function == FIRST
                and not (request.packed or request.uneven)
                and gpu != CPU
                and (present is None or FEW_TOKENS.kernels(shared=KERNELS[row.kernel].is_hoppers) <= present)
            )
            return Choice(row.kernel, row.reason, name, tuple(passed_over), or_16_bit)
        passed_over.append(f"{row.kernel}: {lack}")
    others = [
        row.function + (f" with pv_accum_dtype={row.pv_accum_dtype!r}" if row.function == request.function else "")
        for row in TABLE
        if GPUS[row.gpus](gpu) and _lack(row.kernel, request, gpu, present) is None
    ]
    function = PACKED if request.packed else request.function
    option = "" if request.pv_accum_dtype is None else f" with pv_accum_dtype={request.pv_accum_dtype!r}"
    what = "what can: " + ", ".join(dict.fromkeys(others)) if others else f"no other function can either; {ELSEWHERE}"
    raise ValueError(
        f"{function}{option} cannot be served on {'the ' if gpu == CPU else 'compute capability '}{name}: "
        f"{'; '.join(dict.fromkeys(passed_over))}; {what}"
    )


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


@constant
def kernel_for(
    function: str,
    pv_accum_dtype: str | None,
    other_mask: bool,
    packed: bool,
    uneven: bool,
    device: str,
    index: int | None,
) -> tuple[str, bool]:
    """The kernel for a call on the device of its tensors, and whether short ones are those' in 16 bits: `choose`, kept.

    Raises:
        ValueError: none serves it.
        RuntimeError: there is no such GPU, or no kernels for it.
    """
    return _remembered(device, index, function, pv_accum_dtype, other_mask, packed, uneven)


@functools.cache
def _remembered(device: str, index: int | None, *request: Any) -> tuple[str, bool]:
    choice = choose(Request(*request), *gpu_of(device, index))
    return choice.kernel, choice.or_16_bit


# What others remember of choices: `forget`.
REMEMBERED: list[dict[Any, Any]] = []


def is_served(gpu: Gpu) -> bool:
    """Whether some kernel is for such GPUs."""
    return any(GPUS[kernel.gpus](gpu) for kernel in KERNELS.values())


def gpu_of(device: str, index: int | None) -> tuple[Gpu, frozenset[str] | None]:
    """What a device is, and the kernels that this installation has for it (None: the CPU's references).

    Raises:
        RuntimeError: there is no such GPU, or no kernels for it.
    """
    if device != "cuda":
        return CPU, None
    if torch.version.hip is not None:  # which calls its GPUs "cuda" too
        raise RuntimeError(
            f"{_library.build.package}: the kernels are for NVIDIA's GPUs, and this PyTorch is for AMD's (ROCm {torch.version.hip}); "
            f"{ELSEWHERE}"
        )
    index = torch.cuda.current_device() if index is None else index
    name = torch.cuda.get_device_name(index)
    gpu = Gpu(torch.cuda.get_device_capability(index), "GeForce" in name)
    if not is_served(gpu):
        served = ", ".join(dict.fromkeys(kernel.gpus for kernel in KERNELS.values()))
        raise RuntimeError(
            f"{_library.build.package}: no kernel runs on compute capability {'{}.{}'.format(*gpu.capability)} (device {index}, {name}), "
            f"they are for {served}; {ELSEWHERE}"
        )
    return gpu, _library.kernels.get(kernel_folder(index), frozenset())


def kernel_folder(index: int) -> str:
    """The folder of the kernel set that a GPU runs, such as "sm_90a".

    Raises:
        RuntimeError: there is no such GPU, or none of the folders runs on it.
    """
    return _library.library.kernel_architecture(index)


def is_other_mask(attn_mask: torch.Tensor | None, q: torch.Tensor) -> bool:
    """Whether a mask is added, and of another dtype than that in which q is computed."""
    computed = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    return attn_mask is not None and attn_mask.dtype not in {torch.bool, computed}


def forget() -> None:
    """Choose anew: another kernel set has been named."""
    _remembered.cache_clear()
    for remembered in REMEMBERED:
        remembered.clear()


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
    smooth_v: bool = False,
    per_block_mean: bool | None = None,
    function: str = FIRST,
    pv_accum_dtype: str | None = None,
    architecture: str | None = None,
) -> Choice:
    """Which kernel serves such calls, why, and which take short ones in its place. Nothing is computed.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, return_lse, smooth_k, attn_mask: the arguments of the call; with tensors of
            three dimensions that of the function for packed sequences.
        smooth_v, per_block_mean: those too, of functions that have them: they change no choice.
        function: the name of the function that is called, if not the package's first.
        pv_accum_dtype: its argument of that name; the default if None. Of functions that take it but choose as they do, it changes nothing.
        architecture: a compute capability such as "8.9", to ask about another GPU, a GeForce where there are such, as if every kernel
            were installed for it; the device of the tensors if None.

    Returns:
        The kernel's name, the reason, the GPU, and the kernels that were passed over with what each lacks; `print` shows it.

    Raises:
        TypeError, ValueError: the call would fail, with the same message; or its arguments have other names or another order than here.
        ValueError: no kernel serves the `architecture` that is named, or it is no compute capability.
        RuntimeError: no kernel runs on the GPU of the tensors.
    """
    validation.one_of("function", function, [*ACCUMULATORS, *SERVED_AS])
    packed = function == PACKED or (function == FIRST and isinstance(q, torch.Tensor) and q.dim() == 3)
    validation.one_of("tensor_layout", tensor_layout, ("HND", "NHD"))
    validation.flags(is_causal, smooth_k, smooth_v, return_lse, per_block_mean)
    if per_block_mean is not None and (packed or function not in PER_BLOCK_MEAN):
        raise TypeError(f"{PACKED if packed else function}() has no argument 'per_block_mean'")
    q, k, v = aliases.alike(q, k, v, 3 if packed else 4)
    validation.tensors(q, k, v, "packed" if packed else tensor_layout)
    if sm_scale is not None:
        validation.factor(sm_scale)
    if attn_mask is not None:
        if packed:
            raise TypeError(f"{PACKED}() has no argument 'attn_mask'")
        attn_mask, _ = aliases.written_out(attn_mask, is_causal, q)
    if attn_mask is not None:
        validation.mask(attn_mask, q, k, tensor_layout)
    if pv_accum_dtype is not None:
        if allowed := ACCUMULATORS.get(function):
            validation.one_of("pv_accum_dtype", pv_accum_dtype, allowed)
        else:
            aliases.check_option("pv_accum_dtype", pv_accum_dtype)
            pv_accum_dtype = None
    function = SERVED_AS.get(function, function)
    if pv_accum_dtype is None:
        pv_accum_dtype = next(iter(ACCUMULATORS[function]), None)
    request = Request(
        function,
        pv_accum_dtype,
        other_mask=is_other_mask(attn_mask, q),
        packed=packed,
        uneven=q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0,
    )
    if architecture is None:
        return choose(request, *gpu_of(q.device.type, q.device.index))
    return choose(request, Gpu(validation.capability(architecture)))
