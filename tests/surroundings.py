"""What may surround a call of `sageattn`, or make a tensor of it another kind: each returns what comes of the call there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from sageattention import sageattn


def outcome(call: dict[str, Any]) -> Any:
    """The output, or the error."""
    try:
        return sageattn(**call)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return type(error), str(error)


class _Mode(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen = True
        return function(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):  # type: ignore[misc, unused-ignore]
    pass


def autocast(call: dict[str, Any]) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        return outcome(call)


def inference_mode(call: dict[str, Any]) -> Any:
    with torch.inference_mode():
        out = outcome(call), outcome({**call, "q": call["q"].clone()})
    return out[0].is_inference(), out[0].clone(), out[1].clone()


def no_grad(call: dict[str, Any]) -> Any:
    with torch.no_grad():
        return outcome(call), outcome({**call, "q": call["q"].clone().requires_grad_()})


def requires_grad(call: dict[str, Any]) -> Any:
    out = outcome({**call, "v": call["v"].clone().requires_grad_()})
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()
    return out


def parameter(call: dict[str, Any]) -> Any:
    return outcome({**call, "k": torch.nn.Parameter(call["k"], requires_grad=False)})


def subclass(call: dict[str, Any]) -> Any:
    return outcome({**call, "q": call["q"].as_subclass(_Subclass)})


def dispatch_mode(call: dict[str, Any]) -> Any:
    with _Mode() as mode:
        out = outcome(call)
    return out, mode.seen


def fake(call: dict[str, Any]) -> Any:
    with FakeTensorMode() as mode:
        out = outcome({**call, **{name: mode.from_tensor(call[name]) for name in "qkv"}})
    return type(out), out.shape


def forward_derivative(call: dict[str, Any]) -> Any:
    """In words, or PyTorch's own: never a constant."""
    with forward_ad.dual_level():
        out = outcome({**call, "q": forward_ad.make_dual(call["q"], call["q"])})
        return out if isinstance(out, tuple) else forward_ad.unpack_dual(out).tangent is not None


def jvp(call: dict[str, Any]) -> Any:
    try:
        return torch.func.jvp(lambda q: sageattn(**{**call, "q": q}), (call["q"],), (call["q"],))[1]
    except RuntimeError as error:
        return str(error)


def closed_over(call: dict[str, Any]) -> Any:
    return torch.func.jvp(lambda x: x + sageattn(**call), (call["q"],), (call["q"],))[0]


def vmap(call: dict[str, Any], name: str = "q", many: torch.Tensor | None = None) -> Any:
    try:
        return torch.vmap(lambda x: sageattn(**{**call, name: x}))(torch.stack([call[name]] * 2) if many is None else many)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)


def vmap_of_nested(call: dict[str, Any]) -> Any:
    nested = torch.nested.nested_tensor([torch.randn(1, 2, 100, 64).bfloat16(), torch.randn(1, 2, 50, 64).bfloat16()])
    return [vmap(call, name, nested) for name in "qkv"]


def gradient(call: dict[str, Any]) -> Any:
    """Of what is outside a transform of torch.func, which hides that it wants one."""
    outer = call["q"].clone().requires_grad_()
    try:
        torch.func.grad(lambda x: (sageattn(**{**call, "q": outer}) * x).sum())(torch.ones_like(outer)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return outer.grad


def negative(call: dict[str, Any]) -> Any:
    return outcome({**call, "v": torch._neg_view(call["v"])})


def same_tensor(call: dict[str, Any]) -> Any:
    return outcome({**call, "v": call["k"]})


def of_three(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return sageattn(q, k, v)


def traced(call: dict[str, Any]) -> Any:
    q, k, v = (call[name] for name in "qkv")
    return torch.jit.trace(of_three, (q, k, v), check_trace=False)(q * 2, k, v)


def made_fx(call: dict[str, Any]) -> Any:
    q, k, v = (call[name] for name in "qkv")
    graphs = [make_fx(of_three, tracing_mode=mode)(q, k, v) for mode in ("real", "fake", "symbolic")]
    return [graph(q * 2, k, v) for graph in graphs]


def compiled(call: dict[str, Any]) -> Any:
    torch.compiler.reset()
    targets: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    out = torch.compile(lambda x: sageattn(x, call["k"], call["v"]), fullgraph=True, backend=keep)(call["q"] * 2)
    return targets, out


def exported(call: dict[str, Any]) -> Any:
    class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return of_three(q, k, v)

    q, k, v = (call[name] for name in "qkv")
    graphs = [torch.export.export(Layer(), (q, k, v), strict=strict) for strict in (True, False)]
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    return targets, [graph.module()(q * 2, k, v) for graph in graphs]


SURROUNDINGS = [
    autocast,
    inference_mode,
    no_grad,
    requires_grad,
    parameter,
    subclass,
    dispatch_mode,
    fake,
    forward_derivative,
    jvp,
    closed_over,
    vmap,
    vmap_of_nested,
    gradient,
    negative,
    same_tensor,
    traced,
    made_fx,
    compiled,
    exported,
]
