"""The operators in PyTorch's machinery: compilers, exports, tensors without data, threads."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functions import FUNCTIONS
from tensors import qkv, randn
from torch._subclasses.fake_tensor import FakeTensorMode

from sageattention import (
    _ops,
    dispatch,
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_varlen,
    scaled_dot_product_attention,
)

OPERATOR = torch.ops.sageattention.attention.default
VARLEN = torch.ops.sageattention.attention_varlen.default
KERNEL = "sm80_qk_int8_pv_f16"
Q, K, V = qkv(2, 4, 10, 64)


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


@pytest.mark.parametrize("scales", [(0.1, 0.2, 0.3), (1, 2, 3)], ids=["floats", "ints"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call", [sageattn, scaled_dot_product_attention, sageattn_varlen], ids=lambda f: f.__name__)
def test_layers_with_scales_of_their_own(call: Callable[..., Any], dynamic: bool | None, scales: tuple[float, ...]) -> None:
    """A compiler keeps open what differs from one to the next."""

    class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, q: torch.Tensor, *lengths: Any) -> Any:
            return call(q, q, q, *lengths, scale=self.scale)

    q = randn(1, 2, 8, 64)
    lengths: tuple[Any, ...] = ()
    if call is sageattn_varlen:
        cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        q, lengths = q[0].transpose(0, 1), (cu_seqlens, cu_seqlens, 5, 5)
    torch.compiler.reset()
    for scale in scales:
        layer = Layer(scale)
        out = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, *lengths)
        assert torch.equal(out, layer(q, *lengths))


def test_what_python_registers_states_its_schema() -> None:
    """Beside PyTorch 2.6, which these tests do not run with, an import ended where it was to infer one of `list[int]`."""
    tree = ast.parse(Path(_ops.__file__).read_text(encoding="utf-8"))
    made = [
        call for call in ast.walk(tree) if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.library.custom_op"
    ]
    assert made
    assert all("schema" in {keyword.arg for keyword in call.keywords} for call in made)
