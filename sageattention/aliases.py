"""Calls in the words of other attention functions, in whose place programs put these: `scaled_dot_product_attention`, flash-attn.

Whoever calls by the names of `core.py` comes here with tensors alone, which may be of several dtypes or batches, or a mask in other words.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from . import table, validation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

# What the same argument is called here, and what it is there as long as nobody gave it.
SAME: dict[str, tuple[str, Any]] = {
    "query": ("q", validation.REQUIRED),
    "key": ("k", validation.REQUIRED),
    "value": ("v", validation.REQUIRED),
    "scale": ("sm_scale", None),
    "softmax_scale": ("sm_scale", None),
    "causal": ("is_causal", False),
}

# Options that no kernel here has: the values that ask nothing of it, and what to say of others.
OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "dropout_p": ((0,), "there is no dropout here"),
    "window_size": (
        ((-1, -1), [-1, -1]),
        "there is no window here; an attn_mask hides what lies outside it, where one is taken",
    ),
    "softcap": ((0,), "scores are not capped here"),
    "alibi_slopes": ((None,), "there are no slopes here; an attn_mask adds the bias, where one is taken"),
    "return_softmax": ((False,), "probabilities are never in memory; return_lse=True gives their log-sum-exp"),
    "return_attn_probs": ((False,), "probabilities are never in memory; return_lse=True gives their log-sum-exp"),
    "deterministic": ((False, True), "every call is deterministic"),
    # Of sageattn_varlen; to others it is an argument of their own.
    "tensor_layout": (("NHD",), "packed sequences have one layout, [tokens, heads, head_dim]"),
    "enable_gqa": ((False, True), "grouped heads need no permission"),
    "low_precision_attention": ((False, True), "ComfyUI's leave to take such as these"),
    **table.OPTIONS,
}


def resolved(
    function: Callable[..., object],
    others: Mapping[str, Any],
    tensor_layout: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    sm_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool, float | None]:
    """The arguments that have other names too, of a call that may have used those.

    Args:
        function: that was called.
        others: the arguments that are not in its signature.
        tensor_layout: "HND", "NHD" or, for `sageattn_varlen`, "packed".
        q, k, v, is_causal, sm_scale: as they came under their own names, or their defaults.

    Raises:
        TypeError: the function has no such argument, which names the nearest that it has; or has it twice.
        ValueError: an option asks for what is not computed here; `causal` asks for another mask than `is_causal`.
    """
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "is_causal": is_causal, "sm_scale": sm_scale}
    for name, value in others.items():
        if name in SAME:
            meant, default = SAME[name]
            if arguments[meant] is not default:
                raise TypeError(f"{name}: {meant} is given already, and means the same")
            arguments[meant] = value
        elif name == "output_dtype":
            pass  # until all names are known
        elif name in OPTIONS:
            check_option(name, value)
        else:
            _refuse(function, name)
    q, k, v, is_causal, sm_scale = arguments.values()
    if others.get("output_dtype") is not None:
        _check_output_dtype(q, k, v, tensor_layout, others["output_dtype"])
    if others.get("causal"):
        _check_causal(q, k, v, tensor_layout)
    return q, k, v, is_causal, sm_scale


def check_option(name: str, value: object) -> None:
    """Raise ValueError if an option of `OPTIONS` asks for something."""
    served, otherwise = OPTIONS[name]
    try:
        asks_nothing = value in served
    except (RuntimeError, ValueError):  # arrays of several numbers are equal to none
        asks_nothing = False
    if not asks_nothing:
        expected = " or ".join(map(repr, served))
        raise ValueError(f"{name}: expected {expected}, got {validation.shown(value)}; {otherwise}")


def _refuse(function: Callable[..., object], name: str) -> NoReturn:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [parameter.name for parameter in inspect.signature(function).parameters.values() if parameter.kind in named]
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    raise TypeError(f"{function.__name__}() has no argument {name!r}: {meant}")


def _check_output_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str, output_dtype: object) -> None:
    q, _, _ = alike(q, k, v, 3 if tensor_layout == "packed" else 4)
    if isinstance(q, torch.Tensor) and output_dtype != q.dtype:  # what is no tensor will be refused
        raise ValueError(
            f"output_dtype: expected None or {q.dtype}, got {validation.shown(output_dtype)}; the output has q's dtype, or autocast's: "
            "convert it, with out.to(dtype)"
        )


def _check_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str) -> None:
    """Flash-attn's `causal` lets the last query see the last key, `is_causal` the first query the first key."""
    if tensor_layout == "packed":
        raise ValueError(
            "causal: expected False, got True; is_causal is not the same where lengths differ, and no length is read"
        )
    validation.one_of("tensor_layout", tensor_layout, ("HND", "NHD"))
    validation.tensors(*alike(q, k, v), tensor_layout)
    tokens = validation.token_dimension(tensor_layout)
    if q.shape[tokens] != k.shape[tokens]:
        raise ValueError(
            f"causal: expected as many queries as keys, got {q.shape[tokens]} and {k.shape[tokens]}: flash-attn lets the last query "
            "see the last key, is_causal the first query the first key; ask for is_causal, or pass an attn_mask"
        )


def from_positions(
    fourth: Any, fifth: Any, sixth: Any, attn_mask: torch.Tensor | None, dropout_p: float
) -> tuple[str, Any, Any, torch.Tensor | None, float]:
    """What a call means whose fourth argument is no string: `scaled_dot_product_attention` has attn_mask, dropout_p, is_causal there.

    Bools say whose place it is: a layout is none, nor are dropout_p and the factor on the scores. Beside a dropout_p that came fifth
    what is no bool is the factor, by its name, but for what a program may take for a bool.

    Args:
        fourth, fifth, sixth: where `sageattn` has tensor_layout, is_causal and sm_scale, which may also have come by name.
        attn_mask, dropout_p: as they came by name.

    Returns:
        tensor_layout, is_causal, sm_scale, attn_mask, dropout_p.

    Raises:
        TypeError: two masks, or a sixth argument that may be meant for PyTorch's is_causal and is no bool.
    """
    if isinstance(fourth, torch.Tensor):
        if attn_mask is not None:
            raise TypeError("attn_mask: given twice, fourth as scaled_dot_product_attention has it, and by name")
        attn_mask = fourth
    elif fourth is not None:
        return fourth, fifth, sixth, attn_mask, dropout_p  # and the layout will be refused
    if isinstance(sixth, (bool, torch.SymBool)):
        return "HND", sixth, None, attn_mask, dropout_p or fifth
    if isinstance(fifth, (bool, torch.SymBool)):
        return "HND", fifth, sixth, attn_mask, dropout_p
    if validation.is_bool(sixth) or (type(sixth) is int and sixth in (0, 1)):
        raise TypeError(
            f"is_causal: expected True or False, sixth as scaled_dot_product_attention has it, got {validation.shown(sixth)}; a factor on "
            "the scores is a float here, or named scale"
        )
    return "HND", False, sixth, attn_mask, dropout_p or fifth


def written_out(attn_mask: Any, is_causal: bool, q: torch.Tensor) -> tuple[Any, bool]:
    """Without `torch.nn.attention.bias.CausalBias`, a tensor nobody has written to: its attributes say what it means.

    Args:
        attn_mask, is_causal: as they came.
        q: on whose device the mask is written out where it has to be.
    """
    if attn_mask is None or type(attn_mask) is torch.Tensor:
        return attn_mask, is_causal
    bias = sys.modules.get("torch.nn.attention.bias")  # whoever has such a mask has imported it, which takes seconds
    if bias is None or not isinstance(attn_mask, bias.CausalBias):
        return attn_mask, is_causal
    queries, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if queries == keys or attn_mask.variant == bias.CausalVariant.UPPER_LEFT:
        return None, True
    return torch.ones(queries, keys, dtype=torch.bool, device=getattr(q, "device", None)).tril(keys - queries), is_causal


def alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors that differ as PyTorch's attention takes them: autocast's dtype for several, a batch of one for all of the others.

    rank: their dimensions, 3 of packed sequences, which have no batch.
    """
    if not all(isinstance(x, torch.Tensor) and x.dim() == rank and not x.is_nested for x in (q, k, v)):
        return q, k, v  # which will be refused
    device = q.device.type
    # (PyTorch knows no autocast of meta.)
    if (k.dtype != q.dtype or v.dtype != q.dtype) and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (in_dtype(x, dtype) for x in (q, k, v))
    batches = [x.shape[0] for x in (q, k, v)]
    if rank == 4 and (batches[0] != batches[1] or batches[1] != batches[2]):
        batch = next(size for size in batches if size != 1)
        q, k, v = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (q, k, v))
    return q, k, v


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x of another dtype, its dimensions in the order in memory that they have, where head_dim stays the last of these."""
    converted = x.to(dtype)
    # Of views that overlap PyTorch chooses an order of its own.
    return converted if converted.stride(-1) == 1 or x.stride(-1) != 1 else converted.contiguous()
