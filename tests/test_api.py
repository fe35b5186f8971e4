"""What users see: signatures, errors in words, `torch.compile`, a broken installation. Call forms: test_clients.py."""

from __future__ import annotations

import fractions
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import wrong_arguments
from functions import FUNCTIONS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import sageattention
from sageattention import (
    _library,
    _ops,
    dispatch,
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

OPERATOR = torch.ops.sageattention.attention.default
VARLEN = torch.ops.sageattention.attention_varlen.default
KERNEL = "sm80_qk_int8_pv_f16"
BUILD = _library.Build("2.2.0", "2.8.0", "12.8")


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(*shape: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [randn(*shape, dtype=dtype, seed=seed) for seed in range(3)]


# ── Signatures and the ways they are called ──────────────────────────────────────────────────────────────────────────


# Names, order and defaults, since some callers pass them by position. pv_accum_dtype of FP8 differs from SageAttention's
# "fp32+fp16" on purpose: no default may overflow.
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (sageattn, "tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False, smooth_k=True, attn_mask=None"),
    (
        sageattn_qk_int8_pv_fp16_cuda,
        "tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32', "
        "smooth_k=True, smooth_v=False, return_lse=False, attn_mask=None",
    ),
    (
        sageattn_qk_int8_pv_fp16_triton,
        "tensor_layout='HND', quantization_backend='triton', is_causal=False, attn_mask=None, sm_scale=None, smooth_k=True, "
        "return_lse=False",
    ),
    (
        sageattn_qk_int8_pv_fp8_cuda,
        "tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32+fp32', "
        "smooth_k=True, smooth_v=False, return_lse=False, attn_mask=None",
    ),
    (
        sageattn_qk_int8_pv_fp8_cuda_sm90,
        "tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32+fp32', "
        "smooth_k=True, return_lse=False, attn_mask=None",
    ),
    (
        sageattn_varlen,
        "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=False, sm_scale=None, smooth_k=True, "
        "return_lse=False",
    ),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda x: getattr(x, "__name__", ""))
def test_signatures_are_sageattentions(function: Callable[..., Any], expected: str) -> None:
    parameters = [
        p.replace(annotation=p.empty)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(map(str, parameters)) == f"q, k, v, {expected}"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_swallowed(function: Callable[..., Any]) -> None:
    tensors = qkv(1, 2, 8, 64)
    name = function.__name__
    with pytest.raises(TypeError) as caught:
        function(*tensors, atn_mask=None)
    assert str(caught.value) == f"{name}() has no argument 'atn_mask': did you mean 'attn_mask'?"
    with pytest.raises(TypeError, match=rf"{name}\(\) has no argument 'window': it takes q, k, v, tensor_layout, .*attn_mask"):
        function(*tensors, window=None)
    # ComfyUI passes a mask only where the signature has it.
    assert "attn_mask" in inspect.signature(function).parameters


def test_what_is_exported() -> None:
    assert sageattention.__version__ == _library.build.version
    functions = {f.__name__ for f in FUNCTIONS} | {"sageattn_varlen", "scaled_dot_product_attention", "explain"}
    assert set(sageattention.__all__) == {"__version__", *functions}
    assert all(callable(getattr(sageattention, name)) for name in functions)
    assert (_library.PACKAGE / "py.typed").is_file(), "type checkers look at no package without"


@pytest.mark.skipif(sys.version_info < (3, 10), reason="annotations are of Python 3.10")
@pytest.mark.parametrize("function", [*FUNCTIONS, sageattn_varlen, sageattention.explain], ids=lambda f: f.__name__)
def test_annotations_are_there_for_programs_that_ask(function: Callable[..., Any]) -> None:
    hints = typing.get_type_hints(function)
    assert hints["q"] is torch.Tensor
    assert set(hints) == {*inspect.signature(function).parameters, "return"}


@pytest.mark.parametrize("sixth", [1, 0, numpy.True_, torch.tensor(True)], ids=repr)
def test_in_pytorchs_order_is_causal_is_a_bool(sixth: Any) -> None:
    """It would be taken for a factor on the scores."""
    q, k, v = qkv(1, 2, 20, 64)
    in_pytorchs_place: Any = sageattn
    with pytest.raises(TypeError, match="is_causal: expected True or False, sixth as scaled_dot_product_attention has it"):
        in_pytorchs_place(q, k, v, None, 0.0, sixth)
    expected = sageattn(q, k, v, sm_scale=0.2)
    for scale in (0.2, numpy.float64(0.2), fractions.Fraction(1, 5), torch.tensor(0.2, dtype=torch.float64)):
        assert torch.equal(in_pytorchs_place(q, k, v, None, 0.0, sm_scale=scale), expected)


def test_functions_and_options_agree() -> None:
    q, k, v = qkv(1, 4, 50, 64)
    expected = sageattn(q, k, v, is_causal=True)
    for options in ({}, {"qk_quant_gran": "per_warp"}, {"smooth_v": True}, {"sm_scale": 64**-0.5}):
        out = sageattn_qk_int8_pv_fp16_cuda(q, k, v, is_causal=True, **options)
        assert torch.equal(out, expected)
    scalar = sageattn(q, k, v, is_causal=True, sm_scale=torch.tensor(0.125))  # type: ignore[arg-type,unused-ignore]
    assert torch.equal(scalar, expected)


def test_gradients_are_not_pretended() -> None:
    """Forward only. Inputs that want gradients are accepted; going back is an error, not zeros."""
    tensors = [x.requires_grad_() for x in qkv(1, 2, 20, 64)]
    out: Any = sageattn(*tensors)
    with pytest.raises(RuntimeError, match="derivative for sageattention::attention is not implemented"):
        out.float().sum().backward()
    with torch.inference_mode():
        assert torch.equal(out, sageattn(*tensors))
    written: Any = sageattn(*tensors)
    assert torch.equal(written.mul_(2), 2 * out)


def test_forward_derivatives_are_not_pretended() -> None:
    """PyTorch would take the output for a constant."""
    q, k, v = qkv(1, 2, 20, 64)
    lengths = torch.tensor([0, 20], dtype=torch.int32)
    refused = pytest.raises(RuntimeError, match=r"forward derivative for sageattention::attention(_varlen)? is not implemented")
    for call in (lambda x: sageattn(x, k, v), lambda x: sageattn(q, k, x)):
        with refused:
            torch.func.jvp(call, (q,), (v,))
    with refused:
        torch.func.jvp(lambda x: sageattn_varlen(x, k[0], v[0], lengths, lengths, 20, 20), (q[0],), (v[0],))
    for backend in ("eager", "aot_eager"):  # to which tangents cannot be seen
        torch._dynamo.reset()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, v)
            for fullgraph in (False, True):
                with pytest.raises(RuntimeError, match="forward derivative"):
                    torch.compile(sageattn, backend=backend, fullgraph=fullgraph)(dual, k, v)
    torch._dynamo.reset()
    out, tangent = torch.func.jvp(lambda x: x * sageattn(q, k, v), (q,), (v,))  # which does not depend on x
    assert torch.equal(out, q * sageattn(q, k, v))
    assert torch.equal(tangent, v * sageattn(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_neither_autocast_nor_the_default_dtype_changes_the_reference(function: Callable[..., Any], dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 2, 70, 64, dtype=torch.bfloat16)
    mask = randn(70, 70) < 0.5
    expected = function(q, k, v, attn_mask=mask, return_lse=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float64):
        results = [function(q, k, v, attn_mask=mask, return_lse=True)]
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    torch.set_default_dtype(dtype)
    try:
        results.append(function(q, k, v, attn_mask=mask, return_lse=True))
        packed = sageattn_varlen(q[0], k[0], v[0], lengths, lengths, 2, 2, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for result in results:
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(result, expected, strict=True))
    assert packed[1].dtype == torch.float32


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast_decides_where_dtypes_differ(function: Callable[..., Any]) -> None:
    """As a rotation in float32 leaves them."""
    q, k, v = qkv(1, 2, 70, 64, dtype=torch.bfloat16)
    expected = function(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (function, torch.compile(function, backend="eager", fullgraph=True)):
            out = call(q.float(), k.float(), v)
            assert out.dtype == torch.bfloat16
            assert torch.equal(out, expected)
        assert torch.equal(function(q.float(), k.float(), v, causal=True), function(q, k, v, is_causal=True))
        lengths = torch.tensor([0, 70], dtype=torch.int32)
        packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        whole: Any = (*packed, lengths, lengths, 70, 70)
        out = sageattn_varlen(packed[0].float(), *whole[1:])
        assert torch.equal(out, sageattn_varlen(*whole))
    with pytest.raises(TypeError, match=r"v: expected dtype torch\.float32 as q, got torch\.bfloat16"):
        function(q.float(), k.float(), v)
    with pytest.raises(TypeError, match=r"v: expected dtype torch\.float16 as q, got torch\.bfloat16"):
        function(*(x.to("meta") for x in (q.half(), k.half(), v)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_batch_of_one_is_everybodys(function: Callable[..., Any]) -> None:
    """A learned query beside many windows, one prompt beside many images."""
    q, k, v = qkv(3, 2, 70, 64)
    mask = randn(3, 1, 70, 70) < 0.5
    for one in ("q", "kv", "v"):
        some = [x[:1] if name in one else x for name, x in zip("qkv", (q, k, v), strict=True)]
        whole = [x.expand(3, -1, -1, -1) for x in some]
        assert torch.equal(function(*some, attn_mask=mask), function(*whole, attn_mask=mask))
        assert torch.equal(function(*some, causal=True), function(*whole, is_causal=True))


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Q, K, V = qkv(2, 4, 10, 64)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("arguments", "error", "message"), [pytest.param(*e[1:], id=e[0]) for e in wrong_arguments.CASES])
def test_argument_errors(function: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        function(**wrong_arguments.call(arguments))
    assert str(caught.value) == message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("function", "name", "value", "allowed"),
    [
        (sageattn_qk_int8_pv_fp16_cuda, "qk_quant_gran", "per_block", "'per_thread', 'per_warp'"),
        (sageattn_qk_int8_pv_fp16_cuda, "pv_accum_dtype", "fp32+fp32", "'fp32', 'fp16+fp32', 'fp16'"),
        (sageattn_qk_int8_pv_fp16_cuda, "pv_accum_dtype", None, "'fp32', 'fp16+fp32', 'fp16'"),
        (sageattn_qk_int8_pv_fp8_cuda, "pv_accum_dtype", "fp16", "'fp32+fp32', 'fp32', 'fp32+fp16'"),
        (sageattn_qk_int8_pv_fp8_cuda_sm90, "pv_accum_dtype", "fp32+fp16", "'fp32+fp32', 'fp32'"),
        (sageattn_qk_int8_pv_fp16_triton, "quantization_backend", "cpu", "'triton', 'cuda'"),
    ],
)
def test_option_errors(function: Callable[..., Any], name: str, value: str | None, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        function(Q, K, V, **{name: value})
    assert str(caught.value) == f"{name}: expected one of {allowed}, got {value!r}"


CU = torch.tensor([0, 4, 10], dtype=torch.int32)
PACKED = {"q": Q[0].transpose(0, 1), "k": K[0].transpose(0, 1), "v": V[0].transpose(0, 1)}
VARLEN_ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
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
        "max_seqlen_k: expected an int, got a tensor on meta; reading it would wait for the GPU",
    ),
    ("unknown", {"cu_seqlens_kv": CU}, TypeError, "sageattn_varlen() has no argument 'cu_seqlens_kv': did you mean 'cu_seqlens_k'?"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), [pytest.param(*e[1:], id=e[0]) for e in VARLEN_ERRORS])
def test_varlen_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {**PACKED, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 6, "max_seqlen_k": 6}
    with pytest.raises(error) as caught:
        sageattn_varlen(**{**good, **arguments})
    assert str(caught.value) == message


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("missing", ["q", "k", "v"])
def test_missing_tensors(function: Callable[..., Any], missing: str) -> None:
    """q, k and v have defaults, so that they may come under other names; they are required all the same."""
    with pytest.raises(TypeError, match=f"{missing}: expected a torch.Tensor, got nothing"):
        function(**{name: x for name, x in {"q": Q, "k": K, "v": V}.items() if name != missing})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "other", "value"),
    [
        ("q", "query", Q), ("k", "key", K), ("v", "value", V), ("is_causal", "causal", True),
        ("sm_scale", "scale", 0.2), ("sm_scale", "softmax_scale", 0.2),
    ],
)  # fmt: skip
def test_other_names(function: Callable[..., Any], name: str, other: str, value: Any) -> None:
    """Of `scaled_dot_product_attention` and flash-attn; one name at a time. How clients use them: test_clients.py."""
    given = {"q": Q, "k": K, "v": V, name: value}
    expected = function(**given)
    with pytest.raises(TypeError) as caught:
        function(**given, **{other: value})
    assert str(caught.value) == f"{other}: {name} is given already, and means the same"
    del given[name]
    assert torch.equal(function(**given, **{other: value}), expected)


def test_errors_come_through_compile() -> None:
    with pytest.raises(ValueError, match="k: expected head_dim 64 as q, got 32"):
        torch.compile(sageattn, backend="eager")(Q, K[..., :32], V[..., :32])


# ── PyTorch's machinery ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", _ops.LAYOUTS)
@pytest.mark.parametrize("lse", [False, True])
def test_opcheck(layout: str, lse: bool) -> None:
    q, k, v = qkv(1, 4, 9, 40)
    heads_first, turned = _ops.LAYOUTS[layout]
    k, v = (x[:, :2] if heads_first else x[:, :, :3] for x in (k, v))
    options = _ops.number_of(KERNEL, heads_first, False, True, False, lse, out_turned=turned)
    torch.library.opcheck(OPERATOR, (q, k, v, None, 0.125, options))


def test_opcheck_with_other_strides() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 9, 4, 40, dtype=torch.bfloat16))
    torch.library.opcheck(OPERATOR, (q, k, v, None, 0.125, _ops.number_of(KERNEL, True, True, False, False, True)))


@pytest.mark.parametrize("kernel", dispatch.KERNELS)
def test_opcheck_of_every_kernel(kernel: str) -> None:
    q, k, v = qkv(1, 4, 9, 40)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.library.opcheck(OPERATOR, (q, k, v[..., :24], mask, 0.125, _ops.number_of(kernel, True, False, True, True, True)))
    cu = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v[..., :24])]
    torch.library.opcheck(VARLEN, (*packed, cu, cu, 0.125, _ops.number_of(kernel, False, False, True, True, True)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_could_go_back_compiles_whole(backend: str, dynamic: bool) -> None:
    """As a model whose weights want gradients does in evaluation without `no_grad`."""

    def program(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = sageattn(q + 1, K, V, attn_mask=mask)
        cu = torch.tensor([0, 3, q.shape[2]], dtype=torch.int32)
        a, b, c = (x[0].transpose(0, 1) for x in (q, K, V))
        of_packed: Any = sageattn_varlen(a, b, c, cu, cu.clone(), q.shape[2], q.shape[2])  # a tensor once: PyTorch 2.15
        return out * 2 + of_packed.transpose(0, 1)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    q, mask = Q.clone().requires_grad_(), torch.zeros(Q.shape[2], K.shape[2], requires_grad=True)
    for some, added in ((q, None), (Q, mask), (q, mask)):
        out = compiled(some, added)
        assert torch.equal(out, program(Q, None if added is None else mask.detach()))
        with pytest.raises(RuntimeError, match=r"derivative for sageattention::attention(_varlen)? is not implemented"):
            out.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(backend: str, dynamic: bool) -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = sageattn(q * 1.5, k, v, is_causal=True, return_lse=True)
        alone: Any = sageattn(q, k, v, tensor_layout="NHD")
        return out + alone, lse

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (6, 11):
        q, k, v = qkv(1, 6, tokens, 64)
        for got, expected in zip(compiled(q, k, v), layer(q, k, v), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_everything_compiles_fullgraph(dynamic: bool) -> None:
    """Every function and option: which kernel is asked for does not break the graph."""
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> list[Any]:
        outputs: list[Any] = [f(q, k, v, attn_mask=mask) for f in FUNCTIONS]
        outputs.append(sageattn_qk_int8_pv_fp8_cuda(q, k, v, pv_accum_dtype="fp32+fp16", smooth_v=True))
        outputs.append(sageattn(q.float(), k.float(), v.float(), sm_scale=0.3, smooth_k=False))
        a, b, c = (x[0].transpose(0, 1) for x in (q, k, v))
        longest = q.shape[2]
        outputs.extend(sageattn_varlen(a, b, c, cu, cu, longest, longest, is_causal=True, return_lse=True))
        return outputs

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for head_dim in (64, 80):
        q, k, v = qkv(1, 2, 6, head_dim)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        for got, expected in zip(compiled(q, k, v, mask), layer(q, k, v, mask), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_where_a_length_decides_is_causal(dynamic: bool | None, fullgraph: bool) -> None:
    """As transformers calls it: a prompt is causal, one token is not."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sageattn(q, k, v, is_causal=q.shape[2] > 1)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager", dynamic=dynamic)
    for tokens in (5, 9, 1):
        q, k, v = qkv(1, 2, tokens, 64)
        torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


def test_compile_where_a_length_decides_other_flags() -> None:
    in_pytorchs_place: Any = sageattn

    def layer(q: torch.Tensor) -> Any:
        return in_pytorchs_place(q, q, q, None, 0.0, q.shape[2] > 1, smooth_k=q.shape[2] > 6, return_lse=q.shape[2] > 7)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9):
        (q, *_) = qkv(1, 2, tokens, 64)
        torch.testing.assert_close(compiled(q), layer(q))


@pytest.mark.parametrize("strict", [False, True])
def test_export_where_tensors_say_how_long_sequences_are(strict: bool) -> None:
    """As who leaves padding out calls it."""

    class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def forward(self, q: torch.Tensor, seen: torch.Tensor) -> Any:
            there = seen.nonzero()[:, 0]
            lengths = torch.nn.functional.pad(seen.sum().reshape(1), (1, 0)).int()
            longest = lengths.max().item()
            return sageattn_varlen(q[there], q[there], q[there], lengths, lengths, longest, longest)

    arguments = randn(70, 2, 64), torch.arange(70) < 50
    exported = torch.export.export(Layer(), arguments, strict=strict).module()
    torch.testing.assert_close(exported(*arguments), Layer()(*arguments))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_where_a_mask_comes_later_than_open_lengths(dynamic: bool | None) -> None:
    """Its own sizes are constants of that graph, which the others' are not."""

    def layer(q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return sageattn(q, q, q, attn_mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    of_keys, of_scores = torch.ones(2, 1, 1, 9, dtype=torch.bool), torch.ones(12, 12, dtype=torch.bool).tril()
    for tokens, mask in ((5, None), (7, None), (9, of_keys), (12, of_scores)):
        (q, *_) = qkv(2, 2, tokens, 64)
        torch.testing.assert_close(compiled(q, mask), layer(q, mask))


@pytest.mark.parametrize("strict", [False, True])
def test_export_where_a_length_decides_is_causal(strict: bool) -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return sageattn(q, k, v, is_causal=q.shape[2] > 1)

    tokens = torch.export.Dim("tokens", min=2, max=100)
    exported = torch.export.export(Layer(), tuple(qkv(1, 2, 9, 64)), dynamic_shapes=({2: tokens},) * 3, strict=strict)
    q, k, v = qkv(1, 2, 20, 64)
    torch.testing.assert_close(exported.module()(q, k, v), sageattn(q, k, v, is_causal=True))


def test_other_lengths_need_no_other_graph() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def packed(q: torch.Tensor, cu: torch.Tensor, longest: int) -> Any:
        return sageattn_varlen(q, q, q, cu, cu, longest, longest)

    torch._dynamo.reset()
    compiled = torch.compile(packed, fullgraph=True, backend=keep)
    for tokens in (10, 20, 33, 47):
        compiled(randn(tokens, 2, 64), torch.tensor([0, tokens], dtype=torch.int32), tokens)
    assert len(graphs) <= 2  # the first of one length alone, the second of any


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("device", ["meta", "fake cpu"])
def test_shapes_without_computing(device: str, layout: str) -> None:
    """As the real call gives them: shape, dtype, strides and device of the output and of log-sum-exp."""
    shape, kv_shape = ((2, 6, 40, 72), (2, 3, 50, 72)) if layout == "HND" else ((2, 40, 6, 72), (2, 50, 3, 72))
    arguments: dict[str, Any] = {"tensor_layout": layout, "return_lse": True}
    real = sageattn(randn(*shape), *[randn(*kv_shape)] * 2, **arguments)
    kind = device.rsplit(maxsplit=1)[-1]

    def empty(*size: int) -> torch.Tensor:
        # Not contiguous, which the output must be all the same.
        return torch.empty(*size[:2], 2 * size[2], size[3], dtype=torch.float16, device=kind)[:, :, ::2]

    if device == "meta":
        fake = sageattn(empty(*shape), empty(*kv_shape), empty(*kv_shape), **arguments)
    else:
        with FakeTensorMode():
            fake = sageattn(empty(*shape), empty(*kv_shape), empty(*kv_shape), **arguments)
    for got, expected in zip(fake, real, strict=True):
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        assert got.stride() == expected.stride()
        assert got.device.type == kind


def test_threads() -> None:
    inputs = [qkv(1, 2, 40 + 13 * i, 64) for i in range(4)]
    expected = [sageattn(*tensors) for tensors in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(5) if not torch.equal(sageattn(*inputs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ── The installation ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_right_pytorch_is_taken() -> None:
    for installed in ("2.8.0", "2.8.1+cu128", "2.8.0a0+git123"):
        _library.check_torch(BUILD, installed)


def test_the_stable_abi_is_for_every_later_pytorch() -> None:
    build = BUILD._replace(torch="2.9+")
    for installed in ("2.9.0", "2.9.1+cu130", "2.10.1+cu130", "2.15.0a0+git1", "3.0.0"):
        _library.check_torch(build, installed)
    for installed in ("2.9.0a0+git1", "2.9.0rc1"):  # pip's torch>=2.9 refuses them too
        with pytest.raises(ImportError, match=r"for PyTorch 2\.9 and later"):
            _library.check_torch(build, installed)
    with pytest.raises(ImportError, match=r"for PyTorch 2\.9 and later \(CUDA 12\.8\), but PyTorch 2\.8\.0 .*'torch>=2\.9'"):
        _library.check_torch(build, "2.8.0")


@pytest.mark.parametrize("installed", ["2.9.1+cu130", "2.7.0", "2.80.0", "3.8.0"])
def test_another_pytorch_is_refused(installed: str) -> None:
    with pytest.raises(ImportError) as caught:
        _library.check_torch(BUILD, installed)
    message, series = str(caught.value), ".".join(installed.split(".")[:2])
    assert "built for PyTorch 2.8 (CUDA 12.8)" in message
    assert f"PyTorch {installed} is installed" in message
    assert f"Install the build for PyTorch {series}: " in message
    assert "PAGES" not in message
    assert "pip install 'torch==2.8.*'" in message


INDEX = "Index, https://example.org/pages/"
CONDA = "`conda install sageattention pytorch=2.9`"


@pytest.mark.parametrize(
    ("cuda", "installer", "stated", "said"),
    [
        ("12.8", "pip", [INDEX], "`pip install --upgrade sageattention --index-url https://example.org/pages/cu12/`"),
        ("13.0", "uv", ["Homepage, https://example.org", INDEX], "`pip install --upgrade sageattention --index-url https://example.org/pages/cu13/`"),
        ("12.8", "conda", [], CONDA),
        ("12.8", "pip", [], "from the index that this one was installed from, if it was, or in a checkout by "
                            "`python3 scripts/run.py build --package sageattention --cuda 12.8 --torch 2.9.0`"),
    ],
)  # fmt: skip
def test_another_build_is_where_this_one_came_from(
    monkeypatch: pytest.MonkeyPatch, cuda: str, installer: str, stated: list[str], said: str
) -> None:
    described = Message()
    for url in stated:
        described["Project-URL"] = url
    this = SimpleNamespace(metadata=described, read_text={"INSTALLER": f"{installer}\n"}.get)
    monkeypatch.setattr(_library, "distribution", lambda _: this)
    assert _library.source_of(BUILD, "2.9", cuda) == said


def test_a_pytorch_of_another_abi_is_refused() -> None:
    _library.check_abi(BUILD, "2.8.0", cxx11_abi=True)
    with pytest.raises(
        ImportError, match=r"built for a PyTorch 2\.8\.0 with libstdc\+\+'s new C\+\+ ABI, but .* the old one.*own index"
    ):
        _library.check_abi(BUILD, "2.8.0", cxx11_abi=False)
    old = BUILD._replace(torch="2.6.0", cxx11_abi=False)
    _library.check_abi(old, "2.6.0+cu124", cxx11_abi=False)
    with pytest.raises(
        ImportError, match=r"old C\+\+ ABI, but PyTorch 2\.6\.0\+cu126 here has the new .*pip install torch==2\.6\.0"
    ):
        _library.check_abi(old, "2.6.0+cu126", cxx11_abi=True)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"version": "2.2.0"}', '{"version": "1", "torch": "2", "cuda": "3", "x": "4"}']
)
def test_a_damaged_build_record(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "_build.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(
        ImportError,
        match=r"_build\.json is missing or damaged .*run\.py build --package sageattention --cuda 12\.8.* or reinstall",
    ):
        _library.read_build(path)


def test_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"_C\.\w+ cannot be loaded .*; reinstall the package"):
        _library.Library(tmp_path)


def test_a_damaged_library(tmp_path: Path) -> None:
    for name in ("_C.so", "_C.dll"):
        (tmp_path / name).write_bytes(b"\x7fELF and no more")
    with pytest.raises(ImportError, match=r"_C\.\w+ cannot be loaded .*; reinstall the package"):
        _library.Library(tmp_path)


@pytest.fixture
def _kernels_restored() -> Iterator[None]:
    yield
    _library.name_kernels(_library.KERNEL_DIRECTORIES)


@pytest.mark.usefixtures("_kernels_restored")
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"architectures": 5}', '{"architectures": ["sm_80"], "files": ["x"]}']
)
def test_a_damaged_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(ImportError, match=r"the kernel manifest .*manifest\.json is damaged .*; reinstall"):
        _library.name_kernels((tmp_path / "none here", tmp_path))


@pytest.mark.usefixtures("_kernels_restored")
def test_without_kernels_the_cpu_works(tmp_path: Path) -> None:
    _library.name_kernels((tmp_path / "a", tmp_path / "b"))
    out: Any = sageattn(*qkv(1, 2, 8, 64))
    assert out.isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver() -> None:
    """The package is imported, as this file shows; only asking for a GPU fails, in words."""
    with pytest.raises(RuntimeError, match=r"libcuda|nvcuda"):
        _library.library.kernel_architecture(0)


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture
def kernel_copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of the kernel set to spoil, named to the runtime, which forgets what it has loaded."""
    source = next(d for d in _library.KERNEL_DIRECTORIES if (d / "manifest.json").is_file())
    _library.name_kernels((shutil.copytree(source, tmp_path / "cubins"),))
    yield tmp_path / "cubins"
    _library.name_kernels(_library.KERNEL_DIRECTORIES)


class TestKernelFilesOnAGpu:
    """What the driver makes of the set, and what is said where a file of it is spoilt."""

    pytestmark = needs_gpu

    @pytest.mark.parametrize("spoil", ["missing", "cut short", "empty", "no ELF"])
    def test_a_spoilt_kernel(self, kernel_copy: Path, spoil: str) -> None:
        q, k, v = (x.cuda() for x in qkv(1, 2, 20, 64))
        for path in kernel_copy.rglob("quant_k_int8-d64-fp16.*"):
            content = path.read_bytes()
            if spoil == "missing":
                path.unlink()
            else:
                path.write_bytes({"cut short": content[: len(content) // 2], "empty": b"", "no ELF": b"x" * 5000}[spoil])
        state = "missing" if spoil == "missing" else "damaged"
        with pytest.raises(RuntimeError, match=rf"kernel file .*quant_k_int8-d64-fp16\.\w+ is {state}; reinstall"):
            sageattn_qk_int8_pv_fp16_cuda(q, k, v)
        # Another instance is none the worse.
        assert torch.isfinite(sageattn_qk_int8_pv_fp16_cuda(q.bfloat16(), k.bfloat16(), v.bfloat16())).all()

    def test_no_kernel_for_this_gpu(self, kernel_copy: Path) -> None:
        _library.library.set_kernel_directory(str(kernel_copy), ["sm_999"])
        with pytest.raises(RuntimeError, match=r"no kernel for compute capability \d+\.\d .*this build has sm_999 in"):
            sageattn_qk_int8_pv_fp16_cuda(*(x.cuda() for x in qkv(1, 2, 20, 64)))

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_ptx_runs_where_there_is_no_cubin(self, kernel_copy: Path, head_dim: int, dtype: torch.dtype) -> None:
        q, k, v = (x.cuda() for x in qkv(1, 2, 300, head_dim, dtype=dtype))
        expected = sageattn_qk_int8_pv_fp16_cuda(q, k, v, is_causal=True)
        _library.library.set_kernel_directory(str(kernel_copy), ["compute_80"])
        assert _library.library.kernel_architecture(0) == "compute_80"
        # The folder of PTX has this kernel and not Hopper's: what is installed is asked of the manifest, not of this folder.
        scale = head_dim**-0.5
        out, _ = _ops.attention(q, k, v, None, "HND", True, scale, True, False, False, "sm80_qk_int8_pv_f16")
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_an_import_waits_for_no_compiler_and_no_device() -> None:
    """torch._dynamo takes as long to import as PyTorch, and cannot be within a device that holds nothing."""
    code = "import sys, torch\nwith torch.device('meta'): import sageattention\nassert 'torch._dynamo' not in sys.modules"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_kernels_of_the_environment_that_a_virtual_one_sees() -> None:
    done = run_python(
        "import sys; sys.base_prefix = '/base'; from sageattention import _library as l; print(*l.KERNEL_DIRECTORIES, sep=chr(10))"
    )
    assert done.returncode == 0, done.stderr
    share = Path("share") / "sageattention" / "cubins"
    assert done.stdout.splitlines()[1:] == [str(Path(prefix) / share) for prefix in dict.fromkeys((sys.prefix, "/base"))]


def test_import_beside_another_pytorch(tmp_path: Path) -> None:
    """The whole import, of a package that says it was built for a PyTorch that is not here."""
    package = tmp_path / "sageattention"
    shutil.copytree(_library.PACKAGE, package, ignore=shutil.ignore_patterns("cubins", "__pycache__"))
    record = json.loads((package / "_build.json").read_text(encoding="utf-8"))
    (package / "_build.json").write_text(json.dumps({**record, "torch": "99.0.1"}), encoding="utf-8")
    done = run_python("import sageattention", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: sageattention {record['version']} here was built for PyTorch 99.0 ")
    assert f"but PyTorch {torch.__version__} is installed" in last


# A driver of as many GPUs as one likes: device 86 has compute capability 8.6.
DRIVER = """
#define OK 0
typedef void* P;
int cuInit(unsigned f) { return OK; }
int cuGetErrorString(int e, const char** t) { *t = "no such thing"; return OK; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? d / 10 : d % 10; return d == 999 ? 101 : OK; }
int cuDevicePrimaryCtxRetain(P* c, int d) { *c = (P)1; return OK; }
int cuCtxGetCurrent(P* c) { return OK; }
int cuCtxPushCurrent_v2(P c) { return OK; }
int cuCtxPopCurrent_v2(P* c) { return OK; }
int cuThreadExchangeStreamCaptureMode(int* m) { return OK; }
int cuLibraryLoadData(P* l) { return OK; }
int cuLibraryGetKernel(P* k) { return OK; }
int cuKernelSetAttribute(int a) { return OK; }
int cuLaunchKernelEx(P c) { return OK; }
int cuTensorMapEncodeTiled(P map) { return OK; }
"""


@pytest.fixture(scope="module")
def architectures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str], list[int]], dict[int, str]]:
    """For a kernel set with these folders: which of them each device runs, or the error."""
    if sys.platform != "linux":
        pytest.skip("the driver's stand-in is made for Linux")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER, encoding="utf-8")
    compiler = os.environ.get("CC", "cc")
    done = subprocess.run(
        [compiler, "-w", "-shared", "-fPIC", str(folder / "driver.c"), "-o", str(folder / "libcuda.so.1")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def ask(architectures: list[str], devices: list[int]) -> dict[int, str]:
        done = run_python(
            "import json, torch, sageattention\n"
            "library = sageattention._library.library\n"
            f"library.set_kernel_directory('/set', {architectures!r})\n"
            "def ask(device):\n"
            "    try:\n"
            "        return library.kernel_architecture(device)\n"
            "    except RuntimeError as error:\n"
            "        return str(error).splitlines()[0]\n"
            f"print(json.dumps([ask(device) for device in {devices!r}]))",
            LD_LIBRARY_PATH=f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        )
        assert done.returncode == 0, done.stderr
        return dict(zip(devices, json.loads(done.stdout), strict=True))

    return ask


def test_which_kernels_a_gpu_runs(architectures_of: Callable[[list[str], list[int]], dict[int, str]]) -> None:
    folders = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120", "compute_80"]
    assert architectures_of(folders, [80, 86, 87, 89, 90, 100, 103, 120, 121, 130]) == {
        80: "sm_80",
        86: "sm_86",
        87: "sm_86",
        89: "sm_89",
        90: "sm_90a",
        100: "compute_80",  # newer than every cubin of its major version: the driver compiles the PTX
        103: "compute_80",
        120: "sm_120",
        121: "sm_120",
        130: "compute_80",
    }
    # A suffix means that architecture alone, and is preferred on it; nothing older than the code runs it.
    found = architectures_of(["sm_90", "sm_90a", "sm_100a", "compute_90"], [75, 86, 90, 100, 103, 999])
    assert (found[90], found[100], found[103]) == ("sm_90a", "sm_100a", "compute_90")
    for device, capability in ((75, "7.5"), (86, "8.6")):
        assert f"no kernel for compute capability {capability} (device {device})" in found[device]
        assert "this build has sm_90, sm_90a, sm_100a, compute_90 in /set" in found[device]
    assert "reading the compute capability: no such thing (CUDA driver error 101)" in found[999]
    assert "this build has none in /set" in architectures_of([], [80])[80]
