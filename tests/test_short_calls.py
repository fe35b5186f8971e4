"""Calls that PyTorch's own attention serves: which they are, beside times that were measured. And the short ways for the host."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import wrong_arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import sageattention
from sageattention import _call, _library, _ops, core, dispatch, recent, sageattn, short_calls, validation
from sageattention.recent import KINDS, again
from sageattention.short_calls import SHORT_CALLS, ShortCalls, short_call

HOPPER = "sm90_qk_int8_pv_f16"
RESULTS = Path(__file__).parents[1] / "bench" / "results" / "h200-short.json"


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    yield
    dispatch.forget()


class Call(NamedTuple):
    """A call of bench/short.py, in whose order these are, and its microseconds."""

    heads: int
    kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int
    causal: bool
    quantised: float
    in_16_bits: float | None  # head_dims to 128
    pytorch: float

    def taken(self, *, or_16_bit: bool) -> float:
        """As the operator decides it on a GPU of 132 multiprocessors."""
        sizes = (1, self.heads, self.kv_heads, self.qo_len, self.kv_len, self.head_dim)
        which = _library.library.fastest(HOPPER, 132, sizes, self.causal, or_16_bit=or_16_bit)
        time = {HOPPER: self.quantised, "16 bits": self.in_16_bits, "PyTorch": self.pytorch}[which]
        assert time is not None
        return time

    def least(self, *, or_16_bit: bool) -> float:
        """Of the fastest."""
        times = [self.quantised, self.pytorch]
        return min(times if self.in_16_bits is None or not or_16_bit else [*times, self.in_16_bits])


def is_pytorchs(
    heads: int,
    qo_len: int,
    kv_len: int,
    head_dim: int = 128,
    causal: bool = False,
    *,
    kv_heads: int | None = None,
    kernel: str = HOPPER,
    multiprocessors: int = 132,
) -> bool:
    sizes = (1, heads, kv_heads or heads, qo_len, kv_len, head_dim)
    return _library.library.fastest(kernel, multiprocessors, sizes, causal) == "PyTorch"


@pytest.fixture(scope="module")
def measured() -> list[Call]:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results["columns"] == list(Call._fields)
    assert results["multiprocessors"] == 132
    return [Call(*row) for row in results["microseconds"]]


@pytest.mark.parametrize("or_16_bit", [True, False])
def test_the_fastest_one_is_taken(measured: list[Call], *, or_16_bit: bool) -> None:
    """In the mean, and nearly never one that is slower than PyTorch's. Without the kernel in 16 bits: what is installed lacks it."""
    assert len(measured) > 300
    losses = [call.taken(or_16_bit=or_16_bit) / call.least(or_16_bit=or_16_bit) - 1 for call in measured]
    assert sum(losses) / len(losses) < 0.004
    slower = {call: slow for call in measured if (slow := call.taken(or_16_bit=or_16_bit) / call.pytorch - 1) > 0.05}
    assert len(slower) < 0.01 * len(measured), slower
    assert max(slower.values(), default=0) < 0.12, slower


def test_the_kernel_in_16_bits_is_faster_than_pytorch(measured: list[Call]) -> None:
    """Where it is taken, in the mean by a tenth."""
    ratios = [call.pytorch / call.in_16_bits for call in measured if call.in_16_bits == call.taken(or_16_bit=True)]
    assert len(ratios) > 0.4 * len(measured)
    assert sum(ratios) / len(ratios) > 1.1


def test_measured_times_tell_a_bad_choice_from_a_good_one(measured: list[Call]) -> None:
    always, never = (
        sum(one / c.least(or_16_bit=True) - 1 for one, c in some)
        for some in (
            [(c.pytorch, c) for c in measured],
            [(c.quantised, c) for c in measured],
        )
    )
    assert min(always, never) / len(measured) > 0.05


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_long_calls_are_never_pytorchs(head_dim: int, causal: bool) -> None:
    for heads in (1, 2, 8, 24, 64, 1024):
        for tokens in (8192, 20000, 131072):
            assert not is_pytorchs(heads, tokens, tokens, head_dim, causal)
            assert is_pytorchs(heads, tokens, 77, head_dim)
        for tokens in (64, 128):
            assert is_pytorchs(heads, tokens, tokens, head_dim, causal)


def test_prompts_of_any_length_are_not_pytorchs() -> None:
    """cuDNN makes a plan for each: 30 ms."""
    for tokens in range(100, 1025):
        assert tokens % 64 == 0 or not is_pytorchs(32, tokens, tokens, causal=True)
    assert is_pytorchs(32, 512, 512, causal=True)
    assert is_pytorchs(512, 197, 197, 64)  # which vision models always have


def test_few_queries_are_never_pytorchs() -> None:
    """Keys are some more each time; 48 and 71 heads that share them are the kernels' that quantise."""
    for heads, queries, head_dim in ((48, 1, 128), (71, 1, 64), (8, 16, 256)):
        for keys in (100, 128, 256, 1024, 16384):
            assert not is_pytorchs(heads, queries, keys, head_dim, kv_heads=1)
    assert is_pytorchs(8, 17, 256)


@pytest.mark.parametrize(
    ("heads", "tokens", "ratio"),
    [(512, 197, 0.62), (512, 577, 0.94), (48, 1100, 1.08), (192, 1370, 1.11), (72, 1200, 1.19), (160, 1500, 1.20)],
)
def test_keys_that_are_no_multiple_of_a_tile(heads: int, tokens: int, ratio: float) -> None:
    """PyTorch's time over ours, measured, of vision and audio models' lengths: cuDNN takes a tenth longer there."""
    assert is_pytorchs(heads, tokens, tokens, 64) == (ratio < 1)


def test_biases_of_texts() -> None:
    """T5's, and one that is long; those of other lengths, of wide heads, and under a causal mask are never PyTorch's."""
    sizes, bias = (1, 64, 64, 512, 512, 64), 64 * 512 * 512

    def faster(*arguments: Any) -> bool:
        return _library.library.fastest(*arguments) == "PyTorch"

    assert faster(HOPPER, 132, sizes, False, bias)
    assert not faster(HOPPER, 132, sizes, True, bias)
    assert not faster(HOPPER, 132, (1, 64, 64, 500, 500, 64), False, 64 * 500 * 500)
    assert not faster(HOPPER, 132, (1, 64, 64, 512, 512, 160), False, bias)
    assert not faster(HOPPER, 132, (8, 16, 16, 1536, 1536, 128), False, 16 * 1536**2)  # 434 µs instead of 544


def test_other_kernels_calls_are_never_pytorchs() -> None:
    for kernel in _library.library.kernels:
        assert is_pytorchs(8, 200, 200, kernel=kernel) == (kernel == HOPPER)
    assert [name for name, kernel in dispatch.KERNELS.items() if kernel.or_pytorch] == [HOPPER]


def test_sizes_beyond_all_measure() -> None:
    """What is wrong with them the operator says."""
    most = 2**31 - 1
    assert is_pytorchs(most, most, most, 256) in (True, False)
    assert is_pytorchs(1, 1, 1, multiprocessors=1) in (True, False)


@pytest.fixture
def cpu_has_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Hopper GPU has: PyTorch's attention is the CPU's own then."""
    fastest = _library.library.fastest

    def without_16_bits(*arguments: Any, or_16_bit: bool) -> str:  # which would be faster at these sizes
        del or_16_bit
        return fastest(*arguments)

    monkeypatch.setattr(_library.library, "fastest", without_16_bits)
    monkeypatch.setitem(SHORT_CALLS, -1, ShortCalls(HOPPER, 128, dispatch.FEW_TOKENS, 132))
    for module in (short_calls, recent):
        monkeypatch.setattr(module, "_is_cudnn_enabled", lambda: True)
    monkeypatch.setattr(
        short_calls, "_is_autocast_enabled", lambda: torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
    )


SHORT: dict[str, Any] = {"tensor_layout": "HND", "is_causal": False, "sm_scale": None, "smooth_k": True}


@pytest.mark.usefixtures("cpu_has_short_calls")
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_short_calls_are_pytorchs_own(layout: str, is_causal: bool, kv_heads: int) -> None:
    q, k, v = (torch.randn(2, heads, tokens, 64).bfloat16() for heads, tokens in ((4, 128), (kv_heads, 192), (kv_heads, 192)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.2, enable_gqa=True)
    if layout == "NHD":
        q, k, v, expected = (x.transpose(1, 2).contiguous() for x in (q, k, v, expected))
    out = short_call(q, k, v, layout, is_causal, 0.2, True)
    assert out is not None
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected)
    assert torch.equal(sageattention.sageattn(q, k, v, layout, is_causal, 0.2), out)


def usual() -> dict[str, Any]:
    return {
        "q": torch.randn(1, 2, 100, 64).bfloat16(),
        **{name: torch.randn(1, 2, 300, 64).bfloat16() for name in "kv"},
        **SHORT,
    }


LONG: dict[str, Any] = {name: torch.randn(1, 2, 9000, 64).bfloat16() for name in "qkv"}
UNUSUAL: list[dict[str, Any]] = [
    {"tensor_layout": "BHSD"},
    {"tensor_layout": ["HND"]},
    {"is_causal": torch.ones(2)},
    {"q": torch.nested.nested_tensor([torch.randn(2, 100, 64).bfloat16()])},
    {"k": torch.nested.nested_tensor([torch.randn(2, 300, 64).bfloat16()])},
    {"v": torch.nested.nested_tensor([torch.randn(2, 300, 64).bfloat16()])},
    {"q": torch.nested.nested_tensor([torch.randn(2, 100, 64).bfloat16()], layout=torch.jagged)},
    {"is_causal": 1},
    {"is_causal": 0},
    {"smooth_k": 1},
    {"smooth_k": None},
    {"sm_scale": 0.0},
    {"sm_scale": "1"},
    {"q": torch.randn(1, 2, 100, 64)},
    {"q": torch.randn(1, 100, 64).bfloat16()},
    {"q": torch.randn(2, 2, 100, 64).bfloat16()},
    {"q": torch.randn(1, 3, 100, 64).bfloat16()},
    {"q": torch.randn(1, 2, 0, 64).bfloat16()},
    LONG,
    {name: torch.randn(1, 2, 96, 64).bfloat16() for name in "qkv"},  # another kernel's
    {"q": torch.randn(1, 2, 32, 64).bfloat16()},
    {"is_causal": True},  # of 100 tokens
    {"q": torch.randn(1, 100, 2, 64).bfloat16().transpose(1, 2)},
    {"q": torch.randn(12864).bfloat16()[1:12801].view(1, 2, 100, 64)},
    {"k": torch.randn(38528).bfloat16()[2:38402].view(1, 2, 300, 64)},
    {"v": torch.randn(38528).bfloat16()[4:38404].view(1, 2, 300, 64)},
    {"q": torch.randn(1, 2, 100, 64).bfloat16().requires_grad_()},
    {"q": torch.randn(1, 2, 100, 64).bfloat16().to_sparse()},
    {"q": torch.randn(1, 2, 100, 64).half()},
    {name: torch.randn(1, 2, 300, 64).double() for name in "qkv"},
    {"sm_scale": 1},
    {"sm_scale": float("nan")},
    {"sm_scale": float("inf")},
    {"q": torch.nn.Parameter(torch.randn(1, 2, 100, 64).bfloat16())},
    {"q": None},
    {"k": torch.randn(1, 2, 300, 128).bfloat16()},
    {"v": torch.randn(1, 2, 299, 64).bfloat16()},
    {"v": torch.randn(1, 1, 300, 64).bfloat16()},
    {
        "q": torch.randn(1, 2, 100, 60).bfloat16(),
        "k": torch.randn(1, 2, 300, 60).bfloat16(),
        "v": torch.randn(1, 2, 300, 60).bfloat16(),
    },
]


@pytest.mark.usefixtures("cpu_has_short_calls")
@pytest.mark.parametrize("change", UNUSUAL)
def test_what_is_unusual_about_a_short_call_is_looked_at(change: dict[str, Any]) -> None:
    assert short_call(**usual()) is not None
    assert short_call(**{**usual(), **change}) is None


@pytest.mark.usefixtures("cpu_has_short_calls")
def test_short_calls_of_programs_that_put_us_in_pytorchs_place(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 300, 64).bfloat16() for _ in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    calls: list[int] = []

    def ours(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return sageattention.sageattn(*arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ours)
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v), expected)
    assert len(calls) == 1


@pytest.mark.usefixtures("cpu_has_short_calls")
def test_sizes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    library = _library.library.fastest

    def spy(kernel: str, multiprocessors: int, sizes: tuple[int, ...], is_causal: bool, *, or_16_bit: bool) -> str:
        asked.append((*sizes, is_causal))
        return library(kernel, multiprocessors, sizes, is_causal, or_16_bit=or_16_bit)

    monkeypatch.setattr(_library.library, "fastest", spy)
    for _ in range(3):
        for tokens, heads in ((320, 2), (448, 2), (320, 4)):
            for is_causal in (False, True):
                q, k, v = (torch.randn(1, heads, tokens, 64).bfloat16() for _ in "qkv")
                out = sageattention.sageattn(q, k, v, is_causal=is_causal)
                torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    assert sorted(asked) == sorted({(1, h, h, n, n, 64, c) for n, h in ((320, 2), (448, 2), (320, 4)) for c in (False, True)})


@pytest.mark.usefixtures("cpu_has_short_calls")
def test_what_surrounds_a_short_call(monkeypatch: pytest.MonkeyPatch) -> None:
    usual: dict[str, Any] = {name: torch.randn(1, 2, 100, 64).bfloat16() for name in "qkv"}
    assert short_call(**usual, **SHORT) is not None
    torch.set_autocast_enabled(True)  # the CUDA device's
    try:
        assert short_call(**usual, **SHORT) is None
    finally:
        torch.set_autocast_enabled(False)
    monkeypatch.setattr(short_calls, "_is_cudnn_enabled", lambda: False)
    assert short_call(**usual, **SHORT) is None
    monkeypatch.undo()
    assert short_call(**usual, **SHORT) is None  # the CPU has none


def test_what_was_put_in_its_place_before_the_import_is_not_called() -> None:
    """Programs do so that import this package when they first need it: the two would call each other until Python's stack ends."""
    code = (
        "import torch; ours = torch.nn.functional.scaled_dot_product_attention\n"
        "torch.nn.functional.scaled_dot_product_attention = lambda *a, **b: 1 / 0\n"
        "from sageattention import short_calls; assert short_calls._pytorch_attention is ours"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=dict(os.environ))


# ── Calls that are as before ─────────────────────────────────────────────────────────────────────────────────────────

GUARDS = pytest.mark.skipif(recent._TensorGuards is None, reason="this PyTorch has no guards")


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What serves a call that is not remembered, as often as it is called."""
    called: list[str] = []

    def spy(name: str) -> None:
        function = getattr(core, name)

        def spied(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            return function(*arguments, **named)

        monkeypatch.setattr(core, name, spied)

    spy("short_call")
    spy("attend")
    return called


@pytest.fixture
def cpu_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU is, by the operator, whose options are remembered. On Hopper PyTorch's attention would take some calls before it."""
    right: list[bool] = []

    def key(function: str, accumulators: None, q: Any, k: Any, v: Any, mask: Any, layout: str, *options: Any) -> Any:
        right[:] = [False]
        if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is torch.Tensor or type(options[0]) is not bool:
            return None
        try:  # which a GPU's operator does
            validation.one_of("tensor_layout", layout, ("HND", "NHD"))
            _call._check(q, k, v, mask, layout)
        except (TypeError, ValueError):
            return None
        right[:] = [True]
        return (function, accumulators, mask is None, q.dtype, q.shape[-1], v.shape[-1], layout, *options)

    monkeypatch.setattr(_call, "_key", key)
    monkeypatch.setattr(_call, "_operator_checks", lambda *_: right[0])


@pytest.fixture(params=["PyTorch's", "the operator's"])
def served(request: pytest.FixtureRequest) -> str:
    """By what a call is served whose kind is remembered."""
    request.getfixturevalue("cpu_has_short_calls" if request.param == "PyTorch's" else "cpu_is_served")
    return str(request.param)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The guards that were made."""
    made: list[int] = []
    guards: Any = recent._TensorGuards

    def spy(*tensors: Any, **named: Any) -> Any:
        made.append(1)
        return guards(*tensors, **named)

    monkeypatch.setattr(recent, "_TensorGuards", spy)
    return made


def remember(call: dict[str, Any]) -> torch.Tensor:
    """A call until its kind is remembered."""
    for _ in range(4):
        out = sageattn(**call)
    assert KINDS.newest is not None
    return out


def outcome(call: dict[str, Any]) -> Any:
    try:
        return sageattn(**call)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return type(error), str(error)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        return alike and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return bool(one == other)


@GUARDS
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_what_has_been_served_is_served_again(
    served: str, long_way: list[str], layout: str, is_causal: bool, scale: float | None
) -> None:
    q, k, v = (torch.randn(2, heads, tokens, 64).bfloat16() for heads, tokens in ((4, 128), (2, 192), (2, 192)))
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    call = {"q": q, "k": k, "v": v, "tensor_layout": layout, "is_causal": is_causal, "sm_scale": scale}
    expected = remember(call)
    assert long_way.count("attend") == (0 if served == "PyTorch's" else 4)
    long_way.clear()
    others = {name: torch.randn_like(call[name]) for name in "qkv"}
    # As a program that reads its options has them: of equal value.
    options = {"tensor_layout": "".join(layout), "sm_scale": None if scale is None else float(str(scale))}
    assert same(sageattn(**call), expected)
    out = sageattn(**{**call, **others, **options})
    in_pytorchs_place: Any = sageattn
    positions = in_pytorchs_place(q, k, v, None, 0.0, is_causal, scale=scale) if layout == "HND" else expected
    assert not long_way
    KINDS.clear()
    assert same(sageattn(**{**call, **others}), out)
    assert same(positions, expected)
    assert long_way


@GUARDS
@pytest.mark.usefixtures("cpu_has_short_calls")
@pytest.mark.parametrize("change", UNUSUAL)
def test_what_is_unusual_is_looked_at_after_the_usual(change: dict[str, Any], long_way: list[str]) -> None:
    changed = {**usual(), **change}
    expected = outcome(changed) if change is not LONG else None
    remember(usual())
    assert again(**usual()) is not None
    assert again(**changed) is None
    long_way.clear()
    assert change is LONG or same(outcome(changed), expected)
    assert change is LONG or long_way


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize(
    ("change", "error", "message"), [pytest.param(*case[1:], id=case[0]) for case in wrong_arguments.CASES]
)
def test_argument_errors_after_the_usual(change: dict[str, Any], error: type[Exception], message: str) -> None:
    remember(wrong_arguments.call({}, "cpu"))
    with pytest.raises(error) as caught:
        sageattn(**wrong_arguments.call(change, "cpu"))
    assert str(caught.value) == message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


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
    negative,
    same_tensor,
    traced,
    made_fx,
    compiled,
    exported,
]


def flat(results: Any) -> list[Any]:
    return [x for result in results for x in flat(result)] if isinstance(results, (list, tuple)) else [results]


@GUARDS
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", SURROUNDINGS)
def test_what_surrounds_a_call_that_is_as_before(served: str, what: Callable[[dict[str, Any]], Any]) -> None:
    """It comes to the same as where nothing is remembered."""
    del served
    call = usual()
    expected = flat(what(call))
    KINDS.clear()
    usually = remember(call)
    for _ in range(5):  # some of these make kinds of their own
        got = flat(what(call))
        assert len(got) == len(expected)
        assert all(map(same, got, expected))
    assert same(again(**call), usually)
    assert all(type(n) is int for size in KINDS for n in size)


@GUARDS
@pytest.mark.parametrize("scale", [1, True, torch.tensor(1.0), Fraction(1)])
def test_options_of_equal_value_but_other_types(served: str, scale: Any) -> None:
    del served
    call = {**usual(), "sm_scale": 1.0}
    remember(call)
    assert again(**call) is not None
    assert again(**{**call, "sm_scale": scale}) is None


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize("more", [{"return_lse": True}, {"return_lse": True, "attn_mask": torch.ones(300, dtype=torch.bool)}])
def test_calls_of_more_than_the_usual_are_not_remembered(more: dict[str, Any], long_way: list[str]) -> None:
    call = usual()
    for _ in range(6):
        expected = sageattn(**call, **more)
    assert not KINDS
    remember(call)
    long_way.clear()
    assert all(map(same, flat(sageattn(**call, **more)), flat(expected)))
    assert long_way == ["attend"]


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize("added", [False, True])
def test_calls_with_a_mask(long_way: list[str], *, added: bool) -> None:
    """Are kinds of their own: others' masks, of other sizes, strides, dtypes or subclasses, and none, go the long way."""
    call = usual()
    without = sageattn(**call)
    masks = [torch.rand(300) < 0.5 for _ in range(2)]
    if added:
        masks = [torch.zeros(300, dtype=torch.bfloat16).masked_fill(~mask, -math.inf) for mask in masks]
    KINDS.clear()
    expected = [remember({**call, "attn_mask": mask}) for mask in masks]
    assert not same(*expected)
    long_way.clear()
    for mask, out in zip(masks, expected, strict=True):
        assert same(again(**call, attn_mask=mask), out)
        assert same(sageattn(**call, attn_mask=mask), out)
    assert not long_way
    mask = masks[0]
    others: list[Any] = [
        None,
        mask.expand(1, 2, 100, 300),
        torch.stack([mask, mask], dim=1)[:, 0],
        mask.half() if added else mask.to(torch.bfloat16),
        torch.nn.Parameter(mask, requires_grad=False),
        torch.nested.nested_tensor([mask, mask]),
        mask.to("meta"),
        mask.tolist(),
    ]
    for other in others:
        assert again(**call, attn_mask=other) is None
    assert same(sageattn(**call), without)
    assert same(sageattn(**call, attn_mask=others[1]), expected[0])
    if added:
        with torch.enable_grad():
            wanted = mask.clone().requires_grad_()
            assert again(**call, attn_mask=wanted) is None


@GUARDS
@pytest.mark.usefixtures("cpu_has_short_calls", "cpu_is_served")
def test_what_guards_do_not_look_at(monkeypatch: pytest.MonkeyPatch, long_way: list[str], made: list[int]) -> None:
    call = usual()
    remember(call)
    made.clear()
    long_way.clear()
    with monkeypatch.context() as patch:
        for module in (recent, short_calls):
            patch.setattr(module, "_is_cudnn_enabled", lambda: False)
        assert again(**call) is None
        for _ in range(6):
            sageattn(**call)
        assert long_way.count("attend") == 6
    long_way.clear()
    sageattn(**call)  # and is no kind of the operator's now
    assert not long_way
    assert not made


@GUARDS
def test_kinds_in_turn(served: str, long_way: list[str]) -> None:
    """More than a program has, of which some differ in the options alone, others in q's sizes, or in strides."""
    del served
    calls = [usual() for _ in range(6)]
    for tokens, call in zip((300, 320, 384), calls, strict=False):
        call |= {name: torch.randn(1, 2, tokens, 64).bfloat16() for name in "qkv"}
    calls[1] |= {"is_causal": True}
    calls[2] |= {"sm_scale": 0.3}
    calls[3] |= {name: calls[3][name].half() for name in "qkv"}
    calls[4] |= {"smooth_k": False, "q": torch.randn(1, 2, 200, 64).bfloat16()}
    expected = [remember(call) for call in calls]
    newest = KINDS.newest
    long_way.clear()
    for _ in range(2):
        for call, out in zip(calls, expected, strict=True):
            assert same(sageattn(**call), out)
            assert KINDS.newest is not newest
            assert KINDS.before is newest
            newest = KINDS.newest
    assert not long_way


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
def test_strides_are_kinds_too(long_way: list[str]) -> None:
    call = usual()
    other = {**call, "q": torch.randn(1, 100, 2, 64).bfloat16().transpose(1, 2)}
    expected = [remember(one) for one in (call, other)]
    long_way.clear()
    for one, out in zip((call, other), expected, strict=True):
        assert same(sageattn(**one), out)
    assert not long_way


@GUARDS
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("growing", ["qkv", "kv", "q"])
def test_lengths_that_are_new_each_time_make_no_guards(made: list[int], growing: str) -> None:
    for tokens in range(64, 264):
        call = {**usual(), **{name: torch.randn(1, 2, tokens, 64).bfloat16() for name in growing}}
        sageattn(**call)
    assert not made
    for _ in range(20):
        sageattn(**call)
    assert len(made) == 1


@GUARDS
@pytest.mark.usefixtures("served")
def test_a_tensor_that_comes_twice_makes_no_guards(made: list[int]) -> None:
    q, k = (torch.randn(1, 2, 300, 64).bfloat16() for _ in "qk")
    for call in ((q, k, k), (k, k, q), (k, q, k), (k, k, k)):
        for _ in range(8):
            sageattn(*call)
    assert not made


@GUARDS
def test_what_is_forgotten(served: str, long_way: list[str]) -> None:
    del served
    remember(usual())
    remember({**usual(), "sm_scale": 0.3})
    assert KINDS.before is not None
    dispatch.forget()
    assert KINDS.newest is KINDS.before is None
    assert not KINDS
    assert not KINDS.once
    long_way.clear()
    sageattn(**usual())
    assert long_way


@GUARDS
def test_no_tensor_is_kept(served: str) -> None:
    del served
    call = usual()
    remember(call)
    kept = [weakref.ref(call[name]) for name in "qkv"]
    del call
    assert [x() for x in kept] == [None] * 3


@GUARDS
def test_no_more_is_kept_than_there_is_use_for() -> None:
    q, k, v = (usual()[name] for name in "qkv")
    for tokens in range(1, 1200):
        recent.remember(q, k[:, :, :1].expand(1, 2, tokens, 64), v, "HND", False, None, True, 1)
    assert len(KINDS) < 1100
    for scale in range(1500):
        for _ in range(2 if scale < 50 else 1):
            recent.remember(q, k, v, "HND", False, float(scale), True, 1)
    assert len(KINDS.once) < 1100
    assert max(map(len, KINDS.values())) == 8


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("PyTorch refused aoti_torch_empty_strided"), torch.OutOfMemoryError),
        (torch.OutOfMemoryError("none left"), torch.OutOfMemoryError),
        (RuntimeError("other"), RuntimeError),
        (KeyError("of a program's own mode"), KeyError),
    ],
)
def test_errors_of_calls_that_are_as_before(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    remember(usual())

    def operator(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(_ops, "_attention", operator)
    with pytest.raises(expected) as caught:
        sageattn(**usual())
    assert type(caught.value) is expected


@GUARDS
def test_what_two_threads_can_leave(served: str) -> None:
    """One kind as both of the last two: a call of none comes to an end all the same."""
    del served
    call = usual()
    expected = remember(call)
    KINDS.before = KINDS.newest
    looked = threading.Thread(target=again, kwargs={**call, "k": call["k"][:, :, :200]}, daemon=True)
    looked.start()
    looked.join(10)
    assert not looked.is_alive()
    assert same(again(**call), expected)


@GUARDS
def test_threads(served: str) -> None:
    """Each with kinds of its own, some of them also another's."""
    del served
    calls = [
        {**usual(), "is_causal": tokens % 128 == 0, "k": k, "v": v, "q": k + 1}
        for tokens in (192, 256, 320, 384)
        for k, v in [[torch.randn(1, 2, tokens, 64).bfloat16() for _ in "kv"]]
    ]
    expected = [sageattn(**call) for call in calls]
    wrong: list[int] = []

    def work(own: int) -> None:
        for turn in range(40):
            which = (own + turn // 5) % len(calls)
            if turn % 13 == own:
                KINDS.clear()
            if not same(sageattn(**calls[which]), expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pytorch_without_guards() -> None:
    code = (
        "import torch; del torch._C._dynamo.guards.TensorGuards\n"
        "from sageattention import recent, sageattn; assert recent._TensorGuards is None\n"
        "q, k, v = torch.randn(3, 1, 2, 64, 64).half()\n"
        "recent.remember(q, k, v, 'HND', False, None, True, 1); assert not recent.KINDS\n"
        "assert sageattn(q, k, v).shape == q.shape\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=dict(os.environ))
