"""Checks of the public functions' arguments: each message names the argument, what was expected and what came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_HEAD_DIM = 128


def token_dimension(tensor_layout: str) -> int:
    """Which dimension counts tokens; the heads are in `3 -` that."""
    return 2 if tensor_layout == "HND" else 1


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check that an option has one of its values.

    Raises:
        ValueError: it has not.
    """
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def boolean(name: str, value: object) -> None:
    """Check a flag.

    Raises:
        TypeError: it is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def number(name: str, value: Any) -> float:
    """A real number as a float.

    Raises:
        TypeError: it is not a number.
    """
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name}: expected a number or None, got {value!r}")


def tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str) -> None:
    """Check the three tensors of an attention call against each other.

    Raises:
        TypeError: not a tensor, or a dtype other than float16 and bfloat16, or dtypes that differ.
        ValueError: anything else that the kernels cannot compute.
    """
    one_of("tensor_layout", tensor_layout, ("HND", "NHD"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            axes = "[batch, heads, tokens, head_dim]" if tensor_layout == "HND" else "[batch, tokens, heads, head_dim]"
            raise ValueError(f"{name}: expected 4 dimensions {axes}, got {x.dim()}: {tuple(x.shape)}")
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name}: expected dtype float16 or bfloat16, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q, got {x.device}")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got stride {x.stride(3)}; call .contiguous() on it"
            )
    tokens = token_dimension(tensor_layout)
    heads = 3 - tokens
    if k.shape != v.shape:
        raise ValueError(f"v: expected the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected batch {q.shape[0]} as q, got {k.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected head_dim {q.shape[3]} as q, got {k.shape[3]}")
    if not 1 <= q.shape[3] <= LARGEST_HEAD_DIM:
        raise ValueError(f"q: expected head_dim 1 to {LARGEST_HEAD_DIM}, got {q.shape[3]}")
    if k.shape[heads] < 1 or q.shape[heads] % k.shape[heads] != 0:
        raise ValueError(f"k: expected a number of heads that divides q's {q.shape[heads]}, got {k.shape[heads]}")
    if k.shape[tokens] < 1 and q.numel() > 0:
        raise ValueError("k: expected at least one token, got none")
