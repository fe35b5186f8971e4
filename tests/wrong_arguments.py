"""Calls that are refused, and what is said of them: on CPU tensors (test_api.py) as on a GPU's (gpu/test_errors.py)."""

from __future__ import annotations

from typing import Any

import numpy
import torch

Q, K, V = torch.randn(3, 2, 4, 10, 64, generator=torch.Generator().manual_seed(0)).half()
# What it is called, the arguments that are not those of a good call, the error and its words.
CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("layout", {"tensor_layout": "BHSD"}, ValueError, "tensor_layout: expected one of 'HND', 'NHD', got 'BHSD'"),
    (
        "sm_scale a bool of numpy", {"sm_scale": numpy.True_}, TypeError,
        "sm_scale: expected a number or None, got " + repr(numpy.True_),
    ),
    (
        "sm_scale without data", {"sm_scale": torch.ones((), device="meta")}, TypeError,
        "sm_scale: expected a number or None, got a tensor",
    ),
    ("sm_scale no float", {"sm_scale": 10**400}, TypeError, f"sm_scale: expected a number or None, got {10**400}"),
    (
        "window of an array", {"window_size": numpy.array([-1, -1])}, ValueError,
        "window_size: expected (-1, -1) or [-1, -1], got array([-1, -1]); there is no window here; an attn_mask hides what lies outside it, "
        "where one is taken",
    ),
    ("layout no string", {"tensor_layout": 1}, ValueError, "tensor_layout: expected one of 'HND', 'NHD', got 1"),
    ("q no tensor", {"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
    ("v no tensor", {"v": None}, TypeError, "v: expected a torch.Tensor, got NoneType"),
    (
        "q sparse", {"q": Q.to_sparse()}, TypeError,
        "q: expected a dense tensor, got a nested or sparse one; sageattn_varlen takes sequences of different lengths",
    ),
    (
        "k nested", {"k": torch.nested.nested_tensor(list(K), layout=torch.jagged)}, TypeError,
        "k: expected a dense tensor, got a nested or sparse one; sageattn_varlen takes sequences of different lengths",
    ),
    ("q rank", {"q": Q[0]}, ValueError, "q: expected 4 dimensions [batch, heads, tokens, head_dim], got 3: (4, 10, 64)"),
    (
        "k rank NHD", {"k": K[..., None], "tensor_layout": "NHD"}, ValueError,
        "k: expected 4 dimensions [batch, tokens, heads, head_dim], got 5: (2, 4, 10, 64, 1)",
    ),
    (
        "q dtype", {"q": Q.double()}, TypeError,
        "q: expected dtype float16, bfloat16 or float32, got torch.float64; convert it, with x.to(…)",
    ),
    (
        "k dtype", {"k": K.to(torch.int8)}, TypeError,
        "k: expected dtype float16, bfloat16 or float32, got torch.int8; convert it, with x.to(…)",
    ),
    (
        "dtypes differ", {"v": V.bfloat16()}, TypeError,
        "v: expected dtype torch.float16 as q, got torch.bfloat16; convert it, with x.to(q.dtype)",
    ),
    ("devices differ", {"k": K.to("meta")}, ValueError, "k: expected device cpu as q, got meta; move it, with x.to(q.device)"),
    (
        "strided channels", {"v": torch.empty(2, 4, 10, 128, dtype=torch.float16)[..., ::2]}, ValueError,
        "v: expected a contiguous last dimension, got stride 2; call .contiguous() on it",
    ),
    (
        "transposed channels", {"q": Q.transpose(2, 3)}, ValueError,
        "q: expected a contiguous last dimension, got stride 64; call .contiguous() on it",
    ),
    (
        "k and v differ", {"v": V[:, :, :9]}, ValueError,
        "v: expected the shape of k but for head_dim, (2, 4, 10, 64), got (2, 4, 9, 64)",
    ),
    ("batch", {"k": K[[0, 1, 0]], "v": V[[0, 1, 0]]}, ValueError, "k: expected batch 2 as q, got 3"),
    ("head_dim differs", {"k": K[..., :32], "v": V[..., :32]}, ValueError, "k: expected head_dim 64 as q, got 32"),
    (
        "head_dim", dict.fromkeys("qkv", torch.empty(1, 1, 5, 257, dtype=torch.float16)), ValueError,
        "q: expected head_dim 1 to 256, got 257",
    ),
    (
        "no head_dim", dict.fromkeys("qkv", torch.empty(1, 1, 5, 0, dtype=torch.float16)), ValueError,
        "q: expected head_dim 1 to 256, got 0",
    ),
    ("heads", {"k": K[:, :3], "v": V[:, :3]}, ValueError, "k: expected a number of heads that divides q's 4, got 3"),
    ("more kv heads", {"q": Q[:, :2]}, ValueError, "k: expected a number of heads that divides q's 2, got 4"),
    ("no kv heads", {"k": K[:, :0], "v": V[:, :0]}, ValueError, "k: expected a number of heads that divides q's 4, got 0"),
    (
        "heads NHD", {"k": K[:, :, :3], "v": V[:, :, :3], "tensor_layout": "NHD"}, ValueError,
        "k: expected a number of heads that divides q's 10, got 3",
    ),
    ("no keys", {"k": K[:, :, :0], "v": V[:, :, :0]}, ValueError, "k: expected at least one token, got none"),
    (
        "v head_dim", {"v": torch.empty(2, 4, 10, 300, dtype=torch.float16)}, ValueError,
        "v: expected head_dim 1 to 256, got 300",
    ),
    ("mask no tensor", {"attn_mask": [0]}, TypeError, "attn_mask: expected a torch.Tensor or None, got list"),
    (
        "mask dtype", {"attn_mask": torch.ones(10, 10, dtype=torch.int64)}, TypeError,
        "attn_mask: expected dtype bool (True: attend), float16, bfloat16 or float32 (added to the scores), got torch.int64",
    ),
    (
        "mask nested", {"attn_mask": torch.nested.nested_tensor([torch.zeros(4, 10, 10), torch.zeros(4, 10, 10)])}, ValueError,
        "attn_mask: expected a dense tensor, got a nested one; torch.nested.to_padded_tensor makes one",
    ),
    (
        "mask sparse", {"attn_mask": torch.ones(10, 10).to_sparse()}, ValueError,
        "attn_mask: expected a dense tensor, got layout torch.sparse_coo; x.to_dense() makes one",
    ),
    (
        "mask device", {"attn_mask": torch.ones(10, 10, device="meta")}, ValueError,
        "attn_mask: expected device cpu as q, got meta",
    ),
    (
        "mask shape", {"attn_mask": torch.ones(3, 1, 1, 10)}, ValueError,
        "attn_mask: expected a shape that broadcasts to [batch, q_heads, qo_len, kv_len], (2, 4, 10, 10), got (3, 1, 1, 10)",
    ),
    (
        "mask rank", {"attn_mask": torch.ones(1, 1, 1, 1, 10)}, ValueError,
        "attn_mask: expected a shape that broadcasts to [batch, q_heads, qo_len, kv_len], (2, 4, 10, 10), got (1, 1, 1, 1, 10)",
    ),
    ("flag a tensor", {"is_causal": torch.tensor(True)}, TypeError, "is_causal: expected True or False, got a tensor"),
    ("flag", {"is_causal": 1}, TypeError, "is_causal: expected True or False, got 1"),
    ("no number", {"sm_scale": "0.1"}, TypeError, "sm_scale: expected a number or None, got '0.1'"),
]  # fmt: skip

CU = torch.tensor([0, 4, 10], dtype=torch.int32)
PACKED = {"q": Q[0].transpose(0, 1), "k": K[0].transpose(0, 1), "v": V[0].transpose(0, 1)}
# The same of packed sequences.
PACKED_CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rank", {"q": Q}, ValueError, "q: expected 3 dimensions [tokens, heads, head_dim], got 4: (2, 4, 10, 64)"),
    (
        "int64", {"cu_seqlens_q": CU.long()}, TypeError,
        "cu_seqlens_q: expected dtype int32, got torch.int64; convert it, with x.int()",
    ),
    ("no tensor", {"cu_seqlens_k": [0, 10]}, TypeError, "cu_seqlens_k: expected a torch.Tensor, got list"),
    (
        "cu rank", {"cu_seqlens_k": CU[None]}, ValueError,
        "cu_seqlens_k: expected one dimension [sequences + 1], got shape (1, 3)",
    ),
    ("cu length", {"cu_seqlens_k": CU[:2]}, ValueError, "cu_seqlens_k: expected the length of cu_seqlens_q, 3, got 2"),
    (
        "cu device", {"cu_seqlens_q": CU.to("meta")}, ValueError,
        "cu_seqlens_q: expected device cpu as q, got meta; move it, with x.to(q.device)",
    ),
    ("max", {"max_seqlen_q": 5.5}, TypeError, "max_seqlen_q: expected an int, got 5.5"),
    ("negative", {"max_seqlen_k": -1}, ValueError, "max_seqlen_k: expected 0 or more, got -1"),
    (
        "max on a GPU", {"max_seqlen_k": torch.ones((), device="meta")}, TypeError,
        "max_seqlen_k: expected an int, got a tensor of shape (), torch.float32",
    ),
    ("unknown", {"cu_seqlens_kv": CU}, TypeError, "sageattn_varlen() has no argument 'cu_seqlens_kv': did you mean 'cu_seqlens_k'?"),
]  # fmt: skip


def call(arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A case's whole call, on a device."""
    whole = {"q": Q, "k": K, "v": V, **arguments}
    return {
        name: _moved(x, device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" and device != "cpu" else x
        for name, x in whole.items()
    }


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """With its strides, which `x.to` keeps only of a tensor that is whole."""
    if x.is_nested or x.layout != torch.strided:
        return x.to(device)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
