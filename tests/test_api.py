"""What users see: signatures, the ways they are called, errors in words. Call forms of clients: test_clients.py."""

from __future__ import annotations

import ast
import fractions
import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import wrong_arguments
from functions import FUNCTIONS
from tensors import qkv, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode
from wrong_arguments import CU, PACKED

import sageattention
from sageattention import (
    _library,
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

# ── Signatures and the ways they are called ──────────────────────────────────────────────────────────────────────────


# Names, order and defaults, which are SageAttention's, since some callers pass them by position.
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
        "tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32+fp16', "
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
    _, lse = sageattn(*tensors, return_lse=True)
    lse.sub_(1)  # both are the caller's own


def test_gradients_are_not_pretended_within_vmap() -> None:
    """Where tensors deny that they want any."""
    q, k, v = (torch.stack([x, 2 * x]) for x in qkv(1, 2, 20, 64))
    lengths = torch.tensor([0, 20], dtype=torch.int32)
    expected = torch.stack([sageattn(*each) for each in zip(q, k, v, strict=True)])

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return sageattn_varlen(q[0], k[0], v[0], lengths, lengths, 20, 20)

    for function in (sageattn, packed):
        many: Any = torch.func.vmap(function)
        compiled = torch.compile(lambda *qkv, many=many: many(*qkv), backend="aot_eager")
        tells = torch.__version__ >= TorchVersion("2.8")  # what is within vmap, where it compiles
        for program in (many, compiled) if function is sageattn and tells else (many,):
            out = program(q.clone().requires_grad_(), k, v)
            assert function is packed or torch.equal(out, expected)
            with pytest.raises(RuntimeError, match=r"derivative for sageattention::attention(_varlen)? is not implemented"):
                out.float().sum().backward()
            with torch.no_grad():
                assert torch.equal(program(q, k, v), out)
        with pytest.raises(RuntimeError):
            torch.func.grad(lambda q, many=many: many(q, k, v).float().sum())(q)
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_not_pretended_within_a_gradient(compiled: bool) -> None:
    """Of what is outside a transform, as the weights of an encoder: within it tensors deny that they want any."""
    if compiled and torch.__version__ < TorchVersion("2.8"):
        pytest.skip("such a call is compiled without a word: docs/api.md says so")
    q, k, v = qkv(1, 2, 20, 64)
    factors = torch.ones(q.shape)
    weights = torch.ones((), requires_grad=True)

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (sageattn(q, k * weights, v) * x).sum())(factors)

    program = torch.compile(gradient, backend="aot_eager") if compiled else gradient
    with pytest.raises(RuntimeError):  # some in other words
        program(weights).sum().backward()
    assert weights.grad is None
    assert torch.equal(program(weights.detach()), sageattn(q, k, v).float())
    torch._dynamo.reset()


@pytest.mark.parametrize("packed", [False, True])
def test_nor_are_those_of_a_scale(packed: bool) -> None:
    """It becomes a number, of which autograd knows nothing."""
    q, k, v = qkv(1, 2, 20, 64)
    lengths = torch.tensor([0, 20], dtype=torch.int32)

    def call(scale: Any) -> Any:
        if packed:
            return sageattn_varlen(q[0], k[0], v[0], lengths, lengths, 20, 20, sm_scale=scale)
        return sageattn(q, k, v, sm_scale=scale)

    learned = torch.nn.Parameter(torch.tensor(0.25))
    refused = pytest.raises(
        TypeError, match="sm_scale: expected a number, got a tensor that wants a gradient, which would be lost"
    )
    with refused:
        call(learned)
    with refused:
        torch.func.grad(lambda scale: call(scale).float().sum())(learned.detach())
    with refused:
        torch.func.grad(lambda x: (call(learned * 1) * x).sum())(torch.ones(20, 64))
    with refused:
        torch.func.jvp(call, (learned.detach(),), (torch.ones(()),))
    with torch.no_grad():
        assert torch.equal(call(learned), call(0.25))
    assert torch.equal(call(learned.detach()), call(0.25))


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
    with forward_ad.dual_level(), refused:
        torch.vmap(sageattn)(*(x[None] for x in (q, k, v)))
    with refused:  # a level further in, where it could be a constant's
        torch.func.jvp(lambda x: torch.func.jvp(lambda y: y * sageattn(x, k, v), (v,), (v,))[1], (q,), (v,))
    out, tangent = torch.func.jvp(lambda x: x * sageattn(q, k, v), (q,), (v,))  # which does not depend on x
    assert torch.equal(out, q * sageattn(q, k, v))
    assert torch.equal(tangent, v * sageattn(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_neither_autocast_nor_the_default_dtype_changes_the_reference(function: Callable[..., Any], dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 2, 70, 64, dtype=torch.bfloat16)
    mask = randn(70, 70) < 0.5
    expected = function(q, k, v, attn_mask=mask, return_lse=True)
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float64):
        results = [function(q, k, v, attn_mask=mask, return_lse=True)]
        in_autocast = sageattn_varlen(q[0], k[0], v[0], lengths, lengths, 2, 2, return_lse=True)
    torch.set_default_dtype(dtype)
    try:
        results.append(function(q, k, v, attn_mask=mask, return_lse=True))
        packed = sageattn_varlen(q[0], k[0], v[0], lengths, lengths, 2, 2, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for result in results:
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(result, expected, strict=True))
    assert packed[1].dtype == torch.float32
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(in_autocast, packed, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_log_sum_exp_does_not_lean_on_what_products_of_float32_may_lose(function: Callable[..., Any]) -> None:
    """A CPU that multiplies bfloat16 does so for float32 where PyTorch is allowed to; the share of K's mean would be off by 0.5."""
    q, k, v = qkv(1, 2, 300, 64)
    k += 64
    _, expected = function(q, k, v, return_lse=True)
    torch.set_float32_matmul_precision("medium")
    try:
        _, lse = function(q, k, v, return_lse=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(lse, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast_leaves_head_dim_last_of_views_that_overlap(function: Callable[..., Any]) -> None:
    _, k, v = qkv(1, 2, 16, 64, dtype=torch.bfloat16)
    windows = randn(1, 2, 79).unfold(-1, 64, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(windows, k, v)
    assert torch.equal(out, function(windows.contiguous().bfloat16(), k, v))


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
        (sageattn_qk_int8_pv_fp8_cuda, "pv_accum_dtype", "fp16", "'fp32+fp16', 'fp32+fp32', 'fp32'"),
        (sageattn_qk_int8_pv_fp8_cuda_sm90, "pv_accum_dtype", "fp32+fp16", "'fp32+fp32', 'fp32'"),
        (sageattn_qk_int8_pv_fp16_triton, "quantization_backend", "cpu", "'triton', 'cuda'"),
    ],
)
def test_option_errors(function: Callable[..., Any], name: str, value: str | None, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        function(Q, K, V, **{name: value})
    assert str(caught.value) == f"{name}: expected one of {allowed}, got {value!r}"


@pytest.mark.parametrize(
    ("arguments", "error", "message"), [pytest.param(*e[1:], id=e[0]) for e in wrong_arguments.PACKED_CASES]
)
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


def test_flops_are_counted_as_of_pytorchs_own() -> None:
    """An operator without a formula counts as nothing, without a word."""

    def counted(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            function(*arguments, **options)
        return int(counter.get_total_flops())

    q, k, v = randn(2, 4, 30, 64), randn(2, 4, 50, 64), randn(2, 4, 50, 64)
    own = 2 * 4 * 30 * 50 * (64 + 64) * 2
    assert counted(sageattn, q, k, v) == counted(sageattn, q, k, v, is_causal=True) == own
    assert counted(sageattn, *(x.transpose(1, 2) for x in (q, k, v)), tensor_layout="NHD") == own
    assert counted(sageattn, q, k[:, :2], v[:, :2]) == own
    assert counted(sageattn, q, k, v[..., :16]) == 2 * 4 * 30 * 50 * (64 + 16) * 2
    cu_seqlens = torch.tensor([0, 10, 40], dtype=torch.int32)
    packed = randn(40, 4, 64), randn(40, 4, 64), randn(40, 4, 64), cu_seqlens, cu_seqlens, 30, 30
    assert counted(sageattn_varlen, *packed) == (10 * 10 + 30 * 30) * 4 * (64 + 64) * 2
    assert counted(sageattn_varlen, *packed[:2], packed[2][..., :16], *packed[3:]) == (10 * 10 + 30 * 30) * 4 * (64 + 16) * 2
    with FakeTensorMode():
        fake: list[Any] = [torch.empty(40, 4, 64, dtype=torch.float16) for _ in range(3)]
        fake += [torch.empty(3, dtype=torch.int32) for _ in range(2)]
        assert counted(sageattn_varlen, *fake, 30, 30) == 20 * 20 * 2 * 4 * (64 + 64) * 2


def test_python_39_has_what_is_called() -> None:
    """`zip(…, strict=…)` came with 3.10, and lint does not say so: mypy knows 3.9 no more, and ruff no signatures."""
    for path in Path(sageattention.__file__).parent.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        zips = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "zip"]
        assert not [call.lineno for call in zips if call.keywords], path
