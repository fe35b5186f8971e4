"""Checks of the public functions' arguments: each message names the argument, what was expected, what came and what helps."""

from __future__ import annotations

import inspect
import operator
import re
from typing import TYPE_CHECKING, Any

import torch

from .table import PACKED

if TYPE_CHECKING:
    from collections.abc import Sequence

# The default of q, k and v: none, to `inspect.signature`; but a call that names them otherwise is not refused by Python (aliases.py).
REQUIRED: Any = inspect.Parameter.empty

LARGEST_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# "HND" whose output lies in memory as "NHD": what scaled_dot_product_attention asks for. No function documents it.
TURNED = "HND, turned"
AXES = {
    "HND": "[batch, heads, tokens, head_dim]",
    TURNED: "[batch, heads, tokens, head_dim]",
    "NHD": "[batch, tokens, heads, head_dim]",
    "packed": "[tokens, heads, head_dim]",
}


def token_dimension(tensor_layout: str) -> int:
    """Which dimension counts tokens; the heads are in `3 -` that."""
    return 1 if tensor_layout == "NHD" else 2


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check that an option has one of its values.

    Raises:
        ValueError: it has not.
    """
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def shown(value: object) -> str:
    """A value for a message, without reading a tensor, which would wait for the GPU."""
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def flags(is_causal: object, smooth_k: object, smooth_v: object, return_lse: object, per_block_mean: object = None) -> None:
    """Check the flags of the public functions; per_block_mean may be None: True, or no argument of the function.

    Raises:
        TypeError: one is not a bool.
    """
    if type(is_causal) is type(smooth_k) is type(smooth_v) is type(return_lse) is bool and per_block_mean is None:
        return
    values = {"is_causal": is_causal, "smooth_k": smooth_k, "smooth_v": smooth_v, "return_lse": return_lse}
    values["per_block_mean"] = True if per_block_mean is None else per_block_mean
    for name, value in values.items():
        if value is not True and value is not False:
            raise TypeError(f"{name}: expected True or False, got {shown(value)}")


def decided(flag: Any) -> Any:
    """A flag. Where it depends on a length a compiler keeps open (`q.shape[2] > 1`), the length at hand decides it for the graph."""
    if isinstance(flag, torch.SymBool):
        return bool(flag)
    if type(flag) is bool and torch.compiler.is_compiling():
        return True if flag else False  # noqa: SIM210  Dynamo decides here; of bool(flag) it makes a symbol
    return flag


def is_bool(value: object) -> bool:
    """Whether it is a bool, Python's, NumPy's or a tensor's."""
    if isinstance(value, (float, torch.SymFloat, torch.SymInt)) or type(value) is int:
        return False  # of numbers that a compiler keeps open, which it cannot ask for a dtype, too
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def as_float(scale: Any) -> Any:
    """An int, or NumPy's float, as the float that calls are told from others by; anything else as it came."""
    if torch.compiler.is_compiling() or isinstance(scale, bool) or not isinstance(scale, (int, float)):
        return scale
    try:
        return float(scale)
    except OverflowError:  # which will be refused
        return scale


def factor(sm_scale: Any) -> float:
    """A real number as a float.

    Raises:
        TypeError: it is not a number.
    """
    if not isinstance(sm_scale, (str, bytes)) and not is_bool(sm_scale):
        try:
            return float(sm_scale)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor without data
            pass
    raise TypeError(f"sm_scale: expected a number or None, got {shown(sm_scale)}")


def length(name: str, value: Any) -> None:
    """Check a number of tokens. A GPU's integer is taken unread, which would wait for the GPU: nothing depends on it.

    Raises:
        TypeError, ValueError: it is not an integer, or negative.
    """
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        if value.numel() != 1 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name}: expected an int, got a tensor of shape {tuple(value.shape)}, {value.dtype}")
        return
    if not isinstance(value, (int, torch.SymInt)):  # which operator.index would make a constant of compiled graphs
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: expected an int, got {value!r}") from None
    # What a compiler keeps open cannot be looked at where it is a tensor's content.
    if not isinstance(value, torch.SymInt) and not torch.compiler.is_compiling() and value < 0:
        raise ValueError(f"{name}: expected 0 or more, got {value}")


def capability(architecture: object) -> tuple[int, int]:
    """A compute capability such as "8.9".

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)", str(architecture))
    if found is None:
        raise ValueError(f"architecture: expected a compute capability such as '8.9', got {architecture!r}")
    return int(found[1]), int(found[2])


def tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str) -> None:
    """Check the three tensors of an attention call against each other.

    Args:
        q, k, v: as the public functions describe them.
        tensor_layout: "HND", "NHD" or, for `sageattn_varlen`, "packed".

    Raises:
        TypeError: not a dense tensor, or a dtype that is not computed, or dtypes that differ.
        ValueError: anything else that the kernels cannot compute.
    """
    rank = 3 if tensor_layout == "packed" else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            got = "nothing" if x is REQUIRED else type(x).__name__
            raise TypeError(f"{name}: expected a torch.Tensor, got {got}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(
                f"{name}: expected a dense tensor, got a nested or sparse one; {PACKED} takes sequences of different lengths"
            )
        if x.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions {AXES[tensor_layout]}, got {x.dim()}: {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected dtype float16, bfloat16 or float32, got {x.dtype}; convert it, with x.to(…)")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}; call .contiguous() on it"
            )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        name, x = ("k", k) if k.dtype != q.dtype else ("v", v)
        raise TypeError(f"{name}: expected dtype {q.dtype} as q, got {x.dtype}; convert it, with x.to(q.dtype)")
    if k.device != q.device or v.device != q.device:
        name, x = ("k", k) if k.device != q.device else ("v", v)
        raise ValueError(f"{name}: expected device {q.device} as q, got {x.device}; move it, with x.to(q.device)")
    _shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape), tensor_layout)


def _shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], tensor_layout: str) -> None:
    tokens = 0 if tensor_layout == "packed" else token_dimension(tensor_layout)
    heads = 2 if tensor_layout == "NHD" else 1
    if k[:-1] != v[:-1]:
        raise ValueError(f"v: expected the shape of k but for head_dim, {k}, got {v}")
    if tensor_layout != "packed" and k[0] != q[0]:
        raise ValueError(f"k: expected batch {q[0]} as q, got {k[0]}")
    if k[-1] != q[-1]:
        raise ValueError(f"k: expected head_dim {q[-1]} as q, got {k[-1]}")
    for name, shape in (("q", q), ("v", v)):
        if not 1 <= shape[-1] <= LARGEST_HEAD_DIM:
            raise ValueError(f"{name}: expected head_dim 1 to {LARGEST_HEAD_DIM}, got {shape[-1]}")
    if k[heads] < 1 or q[heads] % k[heads] != 0:
        raise ValueError(f"k: expected a number of heads that divides q's {q[heads]}, got {k[heads]}")
    if tensor_layout != "packed" and k[tokens] < 1 and 0 not in q:
        raise ValueError("k: expected at least one token, got none")


def mask(attn_mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, tensor_layout: str) -> None:
    """Check `attn_mask` against the scores, [batch, q_heads, qo_len, kv_len] in either layout.

    Raises:
        TypeError: not a tensor, or neither bool nor a floating dtype.
        ValueError: sparse, nested, another device, or not broadcastable.
    """
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask: expected a torch.Tensor or None, got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise TypeError(
            f"attn_mask: expected dtype bool (True: attend), float16, bfloat16 or float32 (added to the scores), "
            f"got {attn_mask.dtype}"
        )
    if attn_mask.is_nested:
        raise ValueError("attn_mask: expected a dense tensor, got a nested one; torch.nested.to_padded_tensor makes one")
    if attn_mask.layout != torch.strided:
        raise ValueError(f"attn_mask: expected a dense tensor, got layout {attn_mask.layout}; x.to_dense() makes one")
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask: expected device {q.device} as q, got {attn_mask.device}")
    tokens = token_dimension(tensor_layout)
    scores = (q.shape[0], q.shape[3 - tokens], q.shape[tokens], k.shape[tokens])
    shape = tuple(attn_mask.shape)
    # (Of `a in (1, b)` torch.compile makes False where b is a length that it keeps open.)
    if len(shape) > 4 or any(not (a == 1 or a == b) for a, b in zip(shape[::-1], scores[::-1])):  # noqa: PLR1714
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to [batch, q_heads, qo_len, kv_len], {scores}, got {shape}"
        )


def cumulative_lengths(name: str, value: torch.Tensor, q: torch.Tensor) -> None:
    """Check `cu_seqlens_q` or `cu_seqlens_k`; what they hold is not read, which would wait for the GPU.

    Raises:
        TypeError, ValueError: not one dimension of int32 on q's device, or empty.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype int32, got {value.dtype}; convert it, with x.int()")
    if value.dim() != 1 or value.shape[0] < 1:
        raise ValueError(f"{name}: expected one dimension [sequences + 1], got shape {tuple(value.shape)}")
    if value.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q, got {value.device}; move it, with x.to(q.device)")
