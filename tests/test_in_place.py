"""`sageattention.scaled_dot_product_attention`: `sageattn` for what that serves, PyTorch's own attention, to the last bit, for all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import relative_l1
from torch.autograd import forward_ad
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import sageattention
from sageattention import in_place, sageattn

exact = torch.nn.functional.scaled_dot_product_attention
since_2_8 = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.8"), reason="before, torch.compile knows neither such classes nor what is within vmap"
)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.Tensor]]:
    """Put in PyTorch's place, and as if there were kernels for a CPU."""
    monkeypatch.setattr(in_place, "has_kernels", lambda device, index: device == "cpu")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sageattention.scaled_dot_product_attention)
    yield torch.nn.functional.scaled_dot_product_attention
    torch._dynamo.reset()


def _of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for _ in range(3))


Q, K, V = _of(2, 4, 70, 64)
HIDDEN = torch.ones(70, 70, dtype=torch.bool).tril(9)


def test_a_cpu_is_pytorchs() -> None:
    assert torch.equal(sageattention.scaled_dot_product_attention(Q, K, V, HIDDEN), exact(Q, K, V, HIDDEN))
    assert not in_place.has_kernels("cpu", None)


@pytest.mark.parametrize(
    ("arguments", "options", "here"),
    [
        ((Q, K, V), {}, {}),
        ((Q, K, V, None, 0.0, True), {}, {"is_causal": True}),
        ((Q, K, V, None, 0.0), {"is_causal": False, "scale": None}, {}),  # RF-DETR's call
        ((Q, K, V, HIDDEN), {"scale": 0.3}, {"attn_mask": HIDDEN, "sm_scale": 0.3}),
        ((), {"query": Q, "key": K, "value": V, "attn_mask": HIDDEN.float()}, {"attn_mask": HIDDEN.float()}),
        ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True}, {"k": K[:, :2], "v": V[:, :2]}),
        ((Q, K[:1], V[:1]), {}, {"k": K[:1], "v": V[:1]}),
        ((Q.float(), K.float(), V.float()), {}, {"q": Q.float(), "k": K.float(), "v": V.float()}),
        ((torch.nn.Parameter(Q, requires_grad=False), K, V), {}, {}),
        ((Q, K, V, bias.causal_upper_left(70, 70)), {}, {"is_causal": True}),
    ],
)
def test_what_sageattn_serves(
    attention: Callable[..., torch.Tensor], arguments: tuple[Any, ...], options: dict[str, Any], here: dict[str, Any]
) -> None:
    expected = sageattn(**{"q": Q, "k": K, "v": V, **here})
    assert torch.equal(attention(*arguments, **options), expected)


class Subclass(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A class of tensors as programs define them."""


def _nested(layout: torch.layout) -> torch.Tensor:
    """Two sequences, in the form that PyTorch's attention takes of this layout."""
    parts = [Q[0, :, :5], Q[1, :, :9]]
    if layout == torch.strided:
        return torch.nested.nested_tensor(parts)
    return torch.nested.nested_tensor([x.transpose(0, 1) for x in parts], layout=layout).transpose(1, 2)


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (_of(4, 70, 64), {}),
        (_of(2, 2, 4, 70, 64), {}),
        (_of(1, 1, 5, 512), {"is_causal": True}),
        (_of(1, 2, 5, 64, dtype=torch.float64), {}),
        ((Q[:, :1].expand(2, 4, 70, 64)[:, :1], K, V), {}),
        ((Q, K, V[:, :1]), {}),
        (tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (Q, K, V)), {}),
        (tuple(x.as_subclass(Subclass) for x in (Q, K, V)), {}),
        ((Q, K[:, :, :0], V[:, :, :0]), {}),
        ((Q, K, V), {"dropout_p": 0.5}),
        ((Q, K, V), {"dropout_p": 0.5, "attn_mask": HIDDEN}),
    ],
)
def test_what_pytorch_computes(
    attention: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    expected = exact(*tensors, **options)
    torch.manual_seed(1)
    out = attention(*tensors, **options)
    assert type(out) is type(expected)
    assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))


class Negative(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """One with an attention of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return torch.neg(found) if func is exact else found


def test_a_class_of_tensors_is_asked(attention: Callable[..., torch.Tensor]) -> None:
    assert torch.equal(attention(Q.as_subclass(Negative), K, V), -exact(Q, K, V))


@since_2_8
def test_a_class_of_tensors_is_pytorchs_in_compiled_programs(attention: Callable[..., torch.Tensor]) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    assert torch.equal(compiled(Q.as_subclass(Subclass), K, V), exact(Q, K, V))
    assert torch.equal(compiled(Q, K, V), sageattn(Q, K, V))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(attention: Callable[..., torch.Tensor], layout: torch.layout) -> None:
    x = _nested(layout)
    assert all(torch.equal(*pair) for pair in zip(attention(x, x, x).unbind(), exact(x, x, x).unbind(), strict=True))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=since_2_8)])
def test_gradients_within_vmap(attention: Callable[..., torch.Tensor], compiled: bool) -> None:
    """Where tensors deny that they want any: as of an ensemble of models, whose parameters are stacked."""
    many = [torch.stack([x, 2 * x]).float() for x in (Q, K, V)]

    def loss(function: Callable[..., torch.Tensor], q: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(function)(q, *many[1:]).square().sum()

    wanted = many[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(exact, wanted), wanted)
    here = torch.compile(loss, backend="aot_eager") if compiled else loss
    (grad,) = torch.autograd.grad(here(attention, wanted), wanted)
    assert torch.allclose(grad, expected, rtol=1e-4, atol=1e-6)
    transformed = torch.func.grad(lambda q: loss(attention, q))
    found = (torch.compile(transformed, backend="aot_eager") if compiled else transformed)(many[0])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        served = (torch.compile(torch.func.vmap(attention), backend="aot_eager") if compiled else torch.func.vmap(attention))(
            *many
        )
    assert torch.equal(served, torch.stack([sageattn(*each) for each in zip(*many, strict=True)]))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=since_2_8)])
def test_gradients_within_a_gradient(attention: Callable[..., torch.Tensor], compiled: bool) -> None:
    """Of what is outside a transform: within it tensors deny that they want any."""
    k, v = K.float(), V.float()

    def loss(function: Callable[..., torch.Tensor], q: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (function(q * 1, k, v) * x).sum())(torch.ones_like(q)).square().sum()

    wanted = Q.float().requires_grad_()
    (expected,) = torch.autograd.grad(loss(exact, wanted), wanted)
    (grad,) = torch.autograd.grad((torch.compile(loss, backend="aot_eager") if compiled else loss)(attention, wanted), wanted)
    assert torch.allclose(grad, expected, rtol=1e-4, atol=1e-6)
    twice = [torch.func.grad(lambda q, f=f: loss(f, q))(wanted.detach()) for f in (attention, exact)]
    assert torch.allclose(*twice, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_gradients(attention: Callable[..., torch.Tensor]) -> None:
    """Of q, k and v, or of a bias alone, which is learned beside weights that are not."""
    added = torch.zeros(70, 70, dtype=Q.dtype, requires_grad=True)
    for tensors in (tuple(x.clone().requires_grad_() for x in (Q, K, V)), (Q, K, V)):
        inputs = [x for x in (*tensors, added) if x.requires_grad]
        grads, expected = (torch.autograd.grad(f(*tensors, added).sum(), inputs) for f in (attention, exact))
        assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(attention(Q.clone().requires_grad_(), K, V), sageattn(Q, K, V))


def test_a_learned_scale(attention: Callable[..., torch.Tensor]) -> None:
    """PyTorch's takes none: its gradient would be lost."""
    scale: Any = torch.nn.Parameter(torch.tensor(0.3))
    for function in (attention, exact):
        with pytest.raises(TypeError, match="argument 'scale' must be"):
            function(Q, K, V, scale=scale)
    assert torch.equal(attention(Q, K, V, scale=scale.detach()), sageattn(Q, K, V, sm_scale=0.3))


def test_forward_mode(attention: Callable[..., torch.Tensor]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = tuple(x.float() for x in (Q, K, V))
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = (torch.func.jvp(f, inputs, inputs) for f in (attention, exact))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        torch._dynamo.reset()
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x) for x in inputs]
            try:
                out = torch.compile(attention, backend="eager", fullgraph=True)(*duals)
            except torch._dynamo.exc.Unsupported as error:
                assert "forward-mode" in str(error)  # noqa: PT017  which is PyTorch's word from 2.15 on
            else:
                assert torch.equal(forward_ad.unpack_dual(out).tangent, expected[1])
    torch._dynamo.reset()


def test_dropout_where_no_gradient_is_recorded(attention: Callable[..., torch.Tensor]) -> None:
    """Reentrant checkpoints compute a layer so, and whoever samples from a model that trains."""
    module = torch.nn.MultiheadAttention(128, 4, dropout=0.1, batch_first=True).train()
    x = torch.randn(2, 70, 128, requires_grad=True)
    y = checkpoint(lambda x: module(x, x, x, need_weights=False)[0], x, use_reentrant=True)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (50, 70), (70, 50)])
@pytest.mark.parametrize("corner", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(
    attention: Callable[..., torch.Tensor], corner: Callable[[int, int], bias.CausalBias], queries: int, keys: int
) -> None:
    """Its numbers are whatever memory held: who reads them answers at random. Served, and where PyTorch computes."""
    q, k, v = Q[:, :, :queries].contiguous(), K[:, :, :keys].contiguous(), V[:, :, :keys].contiguous()
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if corner is bias.causal_lower_right else 0)
    expected = exact(q.double(), k.double(), v.double(), mask).nan_to_num()
    for function in (attention, sageattn, torch.compile(sageattn, backend="eager", fullgraph=True)):
        out = function(q, k, v, attn_mask=corner(queries, keys))
        assert type(out) is torch.Tensor
        assert relative_l1(out, expected) < 0.02
    out = attention(q.double(), k.double(), v.double(), corner(queries, keys))
    assert relative_l1(out.nan_to_num(), expected) < 1e-6
    assert sageattention.explain(q, k, v, attn_mask=corner(queries, keys)).kernel


def test_autocast(attention: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts all tensors, as for PyTorch's function."""
    expected = sageattn(Q, K, V)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for some in ((Q.float(), K.float(), V.float()), (Q.float(), K.float(), V)):
            assert torch.equal(attention(*some), expected)
        # Of these PyTorch would make tensors whose head_dim is not the last.
        windows = torch.randn(1, 3, 103).unfold(-1, 64, 1)
        assert torch.equal(attention(windows, windows, windows), sageattn(*[windows.contiguous().bfloat16()] * 3))
        masks: list[torch.Tensor] = []

        def attend(*arguments: Any) -> Any:
            masks.append(arguments[4])
            return arguments[1]

        with monkeypatch.context() as patch:
            patch.setattr(in_place, "attend", attend)
            for dtype in (torch.float32, torch.float16, torch.bool):
                attention(Q, K, V, torch.ones(Q.shape[2], K.shape[2], dtype=dtype))
        assert [mask.dtype for mask in masks] == [torch.bfloat16, torch.bfloat16, torch.bool]
    assert attention(Q.float(), K.float(), V.float()).dtype == torch.float32


def test_compiled(attention: Callable[..., torch.Tensor]) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for some in ((Q, K, V), _of(1, 3, 41, 32), (Q, K, V, HIDDEN), _of(4, 70, 64), _of(1, 2, 20, 320)):
        assert torch.equal(compiled(*some), program(*some))
    wants = [x.clone().requires_grad_() for x in (Q, K, V)]
    compiled(*wants).sum().backward()
    assert all(x.grad is not None for x in wants)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_output_lies_as_pytorchs_does(attention: Callable[..., torch.Tensor], packed: bool, compiled: bool) -> None:
    """A query that is a transposed [batch, tokens, heads, head_dim] gives such an output, which callers view as [batch, tokens, channels]."""
    x = torch.randn(2, 70, 3 * 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    q, k, v = (y.unflatten(-1, (4, 64)).transpose(1, 2) for y in x.chunk(3, dim=-1))
    if not packed:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    function = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    for _ in range(4):
        for mask in (None, HIDDEN):
            out = function(q, k, v, mask)
            assert out.stride() == exact(q, k, v, mask).stride()
            assert torch.equal(out, sageattn(q, k, v, attn_mask=mask))
            assert out.transpose(1, 2).view(2, 70, 256).is_contiguous()
    assert function(Q, K, V).is_contiguous()


class Skip(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """What diffusers' perturbed-attention guidance does: V in the place of attention."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return kwargs["value"] if kwargs and "value" in kwargs else args[2]
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_call(attention: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        with Skip():
            assert attention(Q, K, V) is V
            assert attention(Q, key=K, value=V, is_causal=True) is V
        with torch.device("cpu"):
            assert torch.equal(attention(Q, K, V), sageattn(Q, K, V))
    monkeypatch.setattr(in_place, "has_kernels", lambda device, index: False)
    with Skip():
        assert attention(Q, K, V) is V


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_mode_sees_the_call_of_a_compiled_program(attention: Callable[..., torch.Tensor], backend: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q + 1, k, v) * 2

    def program_with_a_mode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with Skip():
            return program(q, k, v)

    # Of a mode PyTorch before 2.11 breaks the graph.
    compiled, with_a_mode = (torch.compile(f, backend=backend) for f in (program, program_with_a_mode))
    whole = torch.compile(program, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(Q, K, V), sageattn(Q + 1, K, V) * 2)
        with Skip():
            assert torch.equal(compiled(Q, K, V), V * 2)
        assert torch.equal(with_a_mode(Q, K, V), V * 2)
        with torch.device("cpu"):  # a mode too
            assert torch.equal(whole(Q, K, V), sageattn(Q + 1, K, V) * 2)
            with Skip():
                assert torch.equal(compiled(Q, K, V), V * 2)


def test_a_model_is_exported_to_onnx_as_pytorchs(
    attention: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        assert not torch.equal(attention(Q, K, V), exact(Q, K, V))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert torch.equal(attention(Q, K, V), exact(Q, K, V))
