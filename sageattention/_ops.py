"""What the operators need besides their CUDA kernels: shapes for `torch.compile`, the reference on CPU tensors, what a profiler counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import register_flop_formula

from . import reference
from ._library import build, library, operators
from .validation import TURNED

ATTENTION, VARLEN = f"{build.namespace}::attention", f"{build.namespace}::attention_varlen"
NUMBERS = library.kernels  # of the attention kernels, by name
KERNELS = tuple(NUMBERS)


class Options(NamedTuple):
    """What a call asks for, but for its numbers: the operators take it as one, of which PyTorch hands over each in 0.2 µs.

    csrc/torch/attention.h says what each means.
    """

    kernel: str
    heads_first: bool
    is_causal: bool
    smooth_k: bool
    smooth_v: bool
    return_lse: bool
    per_block_mean: bool
    or_16_bit: bool
    out_turned: bool


def number_of(
    kernel: str,
    heads_first: bool,
    is_causal: bool,
    smooth_k: bool,
    smooth_v: bool,
    return_lse: bool,
    per_block_mean: bool = True,
    or_16_bit: bool = False,
    out_turned: bool = False,
) -> int:
    """The number of `Options`: csrc/torch/attention.h has the same bits."""
    return (
        heads_first
        | is_causal << 1
        | smooth_k << 2
        | smooth_v << 3
        | return_lse << 4
        | per_block_mean << 5
        | or_16_bit << 6
        | out_turned << 7
        | NUMBERS[kernel] << 8
    )


def options_of(number: int) -> Options:
    """The `Options` of a number."""
    return Options(KERNELS[number >> 8], *(number >> bit & 1 == 1 for bit in range(len(Options._fields) - 1)))


@torch.library.register_fake(ATTENTION)
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, sm_scale: float, options: int
) -> tuple[torch.Tensor, torch.Tensor]:
    del k, attn_mask, sm_scale
    asked = options_of(options)
    tokens = 2 if asked.heads_first else 1
    shape = (q.shape[0], q.shape[3 - tokens], q.shape[tokens]) if asked.return_lse else (0,)
    sizes = (*q.shape[:3], v.shape[3])
    out = q.new_empty([sizes[i] for i in (0, 2, 1, 3)]).transpose(1, 2) if asked.out_turned else q.new_empty(sizes)
    return out, q.new_empty(shape, dtype=torch.float32)


@torch.library.impl(ATTENTION, "CPU")
@torch.no_grad()
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, sm_scale: float, options: int
) -> tuple[torch.Tensor, torch.Tensor]:
    asked = options_of(options)
    if not asked.heads_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.autocast("cpu", enabled=False):  # of which float32 would become half precision
        out, lse = reference.attention(
            q,
            k,
            v,
            attn_mask,
            is_causal=asked.is_causal,
            sm_scale=sm_scale,
            smooth_k=asked.smooth_k,
            smooth_v=asked.smooth_v,
            per_block_mean=asked.per_block_mean,
            kernel=asked.kernel,
        )
    if not asked.heads_first:
        out = out.transpose(1, 2)
    out = out.transpose(1, 2).contiguous().transpose(1, 2) if asked.out_turned else out.contiguous()
    if not asked.return_lse:
        lse = lse.new_empty(0)
    # Views whose base nobody has: PyTorch forbids to write to such where an input wants gradients.
    out, lse = (x.clone(memory_format=torch.preserve_format) if x._is_view() else x for x in (out, lse))
    return out, lse


@torch.library.register_fake(VARLEN)
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sm_scale: float,
    options: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    del k, cu_seqlens_q, cu_seqlens_k, sm_scale
    shape = (q.shape[1], q.shape[0]) if options_of(options).return_lse else (0,)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(shape, dtype=torch.float32)


@torch.library.impl(VARLEN, "CPU")
@torch.no_grad()
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sm_scale: float,
    options: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    asked = options_of(options)
    with torch.autocast("cpu", enabled=False):
        out, lse = reference.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            is_causal=asked.is_causal,
            sm_scale=sm_scale,
            smooth_k=asked.smooth_k,
            smooth_v=asked.smooth_v,
            kernel=asked.kernel,
        )
    return out, lse if asked.return_lse else lse.new_empty(0)


# For `FlopCounterMode`, which else counts nothing: two products, as of PyTorch's own attention, whatever a mask or `is_causal` hides.
@register_flop_formula(operators.attention, get_raw=True)  # type: ignore[untyped-decorator, unused-ignore]
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sm_scale: float,
    options: int,
    *,
    out_val: Any = None,
) -> int:
    del attn_mask, sm_scale, out_val
    keys = k.shape[2 if options_of(options).heads_first else 1]
    flops: int = q.shape[:3].numel() * keys * 2 * (q.shape[3] + v.shape[3])
    return flops


@register_flop_formula(operators.attention_varlen, get_raw=True)  # type: ignore[untyped-decorator, unused-ignore]
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sm_scale: float,
    options: int,
    *,
    out_val: Any = None,
) -> int:
    del sm_scale, options, out_val
    if type(cu_seqlens_q) is torch.Tensor and not cu_seqlens_q.is_meta:
        pairs = int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff()).sum())
    else:  # a compiler's, without numbers: as if all sequences were alike
        pairs = q.shape[0] * k.shape[0] // max(cu_seqlens_q.shape[0] - 1, 1)
    flops: int = pairs * q.shape[1] * 2 * (q.shape[2] + v.shape[2])
    return flops


# With a schema: PyTorch 2.6 infers none of list[int].
@torch.library.custom_op(  # type: ignore[untyped-decorator, unused-ignore]
    f"{build.namespace}::no_derivative", mutates_args=(), schema="(Tensor gradient, SymInt[] sizes, str operator) -> Tensor"
)
def _no_derivative(gradient: torch.Tensor, sizes: list[int], operator: str) -> torch.Tensor:
    """An operator, so that graphs that never go back can be compiled."""
    del gradient, sizes
    raise RuntimeError(
        f"derivative for {operator} is not implemented: it goes forward only. Train with PyTorch's scaled_dot_product_attention, "
        "and call this one under torch.no_grad()"
    )


@_no_derivative.register_fake  # type: ignore[untyped-decorator, unused-ignore]
def _(gradient: torch.Tensor, sizes: list[int], operator: str) -> torch.Tensor:
    del operator
    return gradient.new_empty(sizes)


class _NotDifferentiable(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Going back is an error, not silence. ATen's own way to say so takes 10 µs of each call; LibTorch's stable ABI has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *arguments: Any) -> Any:
        return (attention_operator if name == ATTENTION else varlen_operator)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del output
        ctx.name, *arguments = inputs
        ctx.sizes = [x.shape if isinstance(x, torch.Tensor) else None for x in arguments]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *(None if sizes is None else _no_derivative(gradients[0], sizes, ctx.name) for sizes in ctx.sizes)


# From here on as Python calls them: layouts and kernels by name.
LAYOUTS = {"HND": (True, False), "NHD": (False, False), TURNED: (True, True)}  # heads_first, out_turned
attention_operator, varlen_operator = operators.attention.default, operators.attention_varlen.default


def attention(
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
    per_block_mean: bool = True,
    *,
    or_16_bit: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `attention`: csrc/torch/attention.h."""
    heads_first, out_turned = LAYOUTS[tensor_layout]
    options = number_of(kernel, heads_first, is_causal, smooth_k, smooth_v, return_lse, per_block_mean, or_16_bit, out_turned)
    return run(q, k, v, attn_mask, sm_scale, options)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, sm_scale: float, options: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the number of its options."""
    if within_forward_ad():
        _refuse_tangents(attention_operator, q, k, v, attn_mask)
    if _may_go_back(q, k, v, attn_mask):
        return _NotDifferentiable.apply(ATTENTION, q, k, v, attn_mask, sm_scale, options)  # type: ignore[no-any-return, unused-ignore]
    return attention_operator(q, k, v, attn_mask, sm_scale, options)  # type: ignore[no-any-return, unused-ignore]


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool,
    return_lse: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `attention_varlen`: csrc/torch/attention.h."""
    options = number_of(kernel, False, is_causal, smooth_k, smooth_v, return_lse)
    arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, sm_scale, options)
    if within_forward_ad():
        _refuse_tangents(varlen_operator, q, k, v)
    if _may_go_back(q, k, v):
        return _NotDifferentiable.apply(VARLEN, *arguments)  # type: ignore[no-any-return, unused-ignore]
    return varlen_operator(*arguments)  # type: ignore[no-any-return, unused-ignore]


_COMPILES_BATCHED = torch.__version__ >= TorchVersion("2.8")  # what asks for what torch.vmap makes of a tensor


def may_require_grad(x: torch.Tensor | None) -> bool:
    """Whether a gradient may be wanted of a tensor. What torch.func makes of one says that none is, though that be."""
    return x is not None and (x.requires_grad or _may_hide(x))


def _may_hide(x: torch.Tensor) -> bool:
    """Whether a transform of torch.func (`vmap`, `grad`, `jvp`) has wrapped a tensor: what is inside may be another's to differentiate."""
    functorch = torch._C._functorch
    if torch.compiler.is_dynamo_compiling():
        # It can ask whether there is a gradient's transform, not whether that has wrapped this tensor.
        return _COMPILES_BATCHED and (functorch.is_batchedtensor(x) or functorch.maybe_current_level() is not None)
    return bool(functorch.is_batchedtensor(x) or functorch.is_gradtrackingtensor(x))


def _may_go_back(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient may be asked for, which is to be an error."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors if torch.compiler.is_dynamo_compiling() else ():
        if x is not None and _may_hide(x):
            torch._dynamo.graph_break()  # PyTorch 2.15 would compile the call, and forget the error
    return any(map(may_require_grad, tensors))


def within_forward_ad() -> bool:
    """Whether derivatives are carried forward (`torch.func.jvp`)."""
    return getattr(forward_ad, "_current_level", -1) >= 0  # no name that PyTorch promises


def wants_derivative(x: torch.Tensor) -> bool:
    """Whether one may be asked for, by a tensor that is to become a number."""
    if torch.is_grad_enabled() and may_require_grad(x):
        return True
    return within_forward_ad() and _may_have_tangent(x)


@torch._disable_dynamo  # type: ignore[untyped-decorator, unused-ignore]
def _may_have_tangent(*tensors: torch.Tensor | None) -> bool:
    """Asked by Python alone: a function of its own is compiled where its caller is not, and a compiler sees no tangents."""
    return any(x is not None and (_may_hide(x) or forward_ad.unpack_dual(x).tangent is not None) for x in tensors)


def _refuse_tangents(operator: Any, *tensors: torch.Tensor | None) -> None:
    """Within forward-mode differentiation (`torch.func.jvp`), where PyTorch would take the output for a constant.

    A compiler leaves the call to Python, or says this.
    """
    if torch.compiler.is_compiling() or _may_have_tangent(*tensors):
        raise RuntimeError(f"forward derivative for {operator.name()} is not implemented")
