"""The host's short way for calls that are as before: sageattention/recent.py."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
import wrong_arguments
from surroundings import SURROUNDINGS, outcome

from sageattention import _call, _ops, core, dispatch, in_place, recent, sageattn, scaled_dot_product_attention, validation
from sageattention.recent import KINDS, again


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    yield
    dispatch.forget()


def usual() -> dict[str, Any]:
    return {
        "q": torch.randn(1, 2, 100, 64).bfloat16(),
        **{name: torch.randn(1, 2, 300, 64).bfloat16() for name in "kv"},
        "tensor_layout": "HND",
        "is_causal": False,
        "sm_scale": None,
        "smooth_k": True,
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
    {name: torch.randn(1, 2, 96, 64).bfloat16() for name in "qkv"},
    {"q": torch.randn(1, 2, 32, 64).bfloat16()},
    {"is_causal": True},
    {"q": torch.randn(1, 100, 2, 64).bfloat16().transpose(1, 2)},
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


GUARDS = pytest.mark.skipif(recent._TensorGuards is None, reason="this PyTorch has no guards")


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What serves a call that is not remembered, as often as it is called."""
    called: list[str] = []
    attend: Any = vars(core)["attend"]

    def spied(*arguments: Any, **named: Any) -> Any:
        called.append("attend")
        return attend(*arguments, **named)

    monkeypatch.setattr(core, "attend", spied)
    return called


@pytest.fixture
def cpu_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU is, by the operator, whose options are remembered."""
    right: list[bool] = []

    def key(asked: _call.Asked, q: Any, k: Any, v: Any, mask: Any) -> Any:
        right[:] = [False]
        if (
            torch.compiler.is_compiling()
            or not type(q) is type(k) is type(v) is torch.Tensor
            or not all(type(flag) is bool for flag in (asked.is_causal, asked.return_lse, asked.smooth_k, asked.smooth_v))
            or not (asked.sm_scale is None or (type(asked.sm_scale) is float and math.isfinite(asked.sm_scale)))
        ):
            return None
        try:  # which a GPU's operator does
            validation.one_of("tensor_layout", asked.tensor_layout, ("HND", "NHD"))
            _call._check(q, k, v, mask, asked.tensor_layout)
        except (TypeError, ValueError):
            return None
        right[:] = [True]
        return (mask is None, q.dtype, q.shape[-1], v.shape[-1], *asked)

    monkeypatch.setattr(_call, "_key", key)
    monkeypatch.setattr(_call, "_operator_checks", lambda *_: right[0])


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


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        return alike and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return bool(one == other)


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_what_has_been_served_is_served_again(long_way: list[str], layout: str, is_causal: bool, scale: float | None) -> None:
    q, k, v = (torch.randn(2, heads, tokens, 64).bfloat16() for heads, tokens in ((4, 128), (2, 192), (2, 192)))
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    call = {"q": q, "k": k, "v": v, "tensor_layout": layout, "is_causal": is_causal, "sm_scale": scale}
    expected = remember(call)
    assert long_way.count("attend") == 4
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


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU say that they are on a GPU, those of one element on another."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: int(x.numel() == 1), raising=False)


def key_of(**changes: Any) -> Any:
    """What is remembered of a call by, so changed."""
    half = {name: torch.zeros(1, 2, 70, 64).half() for name in "qkv"}
    arguments = {**half, "mask": None, **{name: x for name, x in changes.items() if name in (*"qkv", "mask")}}
    options = {name: x for name, x in changes.items() if name not in arguments}
    asked = _call.Asked("sageattn", None, "HND", is_causal=False, return_lse=False, smooth_k=True)._replace(**options)
    return _call._key(asked, *arguments.values())


@pytest.mark.usefixtures("on_a_gpu")
def test_calls_of_other_kernels_or_options_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel and options are taken by the key alone."""
    wide = torch.zeros(1, 2, 70, 60).half()
    mask = torch.ones(70, 70, dtype=torch.bool)
    keys = [
        key_of(),
        key_of(function="sageattn_qk_int8_pv_fp16_cuda"),
        key_of(pv_accum_dtype="fp32"),
        key_of(tensor_layout="NHD"),
        key_of(is_causal=True),
        key_of(return_lse=True),
        key_of(smooth_k=False),
        key_of(smooth_v=True),
        key_of(per_block_mean=True),
        key_of(per_block_mean=False),
        key_of(**{name: torch.zeros(1, 2, 70, 64).bfloat16() for name in "qkv"}),
        key_of(q=wide, k=wide),
        key_of(v=wide),
        *(key_of(mask=mask.to(dtype)) for dtype in (torch.bool, torch.float16, torch.float32)),
    ]
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    keys.append(key_of())
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key_of(sm_scale=0.5) == key_of(sm_scale=2.0) == keys[-1], "a number of the call, which the operator is told"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    "change",
    [
        {"sm_scale": math.inf}, {"sm_scale": math.nan}, {"sm_scale": 1}, {"sm_scale": "1"}, {"is_causal": 1}, {"smooth_k": None},
        {"return_lse": 0}, {"per_block_mean": 1}, {"pv_accum_dtype": 32}, {"tensor_layout": ["HND"]}, {"qk_quant_gran": None},
        {"k": torch.zeros(1).half()}, {"v": torch.zeros(1, 1, 1, 1).half()}, {"k": torch.zeros(1, 1, 1, 1).half()},
        {"mask": torch.ones(1, dtype=torch.bool)}, {"mask": torch.nn.Parameter(torch.zeros(70))}, {"mask": [True] * 70},
        {"q": torch.zeros(70, 64).half()}, {"v": torch.zeros(70, 64).half()}, {"v": torch.nn.Parameter(torch.zeros(1, 2, 70, 64).half())},
        {name: torch.zeros(1, 2, 70, 64) for name in "qkv"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_unusual_has_no_key(change: dict[str, Any]) -> None:
    """The long way refuses it, or converts it."""
    assert key_of(**change) is None


def test_what_becomes_another_is_not_remembered_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, or with a batch of one: the operator would refuse what came, each time."""
    monkeypatch.setattr(_call, "_key", lambda _asked, q, *_: (q.dtype,))
    monkeypatch.setattr(_call, "_operator_checks", lambda *_: True)
    q, k, v = (torch.randn(1, 2, 70, 64) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sageattn(q.half(), k.bfloat16(), v.bfloat16())
        sageattn(q.bfloat16(), k.half(), v.half())
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    sageattn(torch.cat([q, q]), k, v)
    sageattn(q, torch.cat([k, k]), torch.cat([v, v]))
    assert not _call.SERVED
    sageattn(q, k, v)
    assert len(_call.SERVED) == 1


def test_a_batch_of_one_is_everybodys_after_a_call_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is asked at once, and refuses it as it came."""
    monkeypatch.setattr(_call, "_key", lambda _asked, q, *_: (q.dtype,))
    monkeypatch.setattr(_call, "_operator_checks", lambda *_: True)
    operator = _ops.attention_operator

    def strict(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        if not q.shape[0] == k.shape[0] == v.shape[0]:
            raise RuntimeError("the operator's own words")
        return operator(q, k, v, *others)

    monkeypatch.setattr(_ops, "attention_operator", strict)
    q, k, v = (torch.randn(3, 2, 70, 64).half() for _ in range(3))
    sageattn(q, k, v)
    assert _call.SERVED
    expected = sageattn(q, *(x[:1].expand(3, -1, -1, -1) for x in (k, v)))
    assert same(sageattn(q, k[:1], v[:1]), expected)
    with pytest.raises(ValueError, match="k: expected batch 3 as q, got 2"):
        sageattn(q, k[:2], v[:2])


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
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


def flat(results: Any) -> list[Any]:
    return [x for result in results for x in flat(result)] if isinstance(results, (list, tuple)) else [results]


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", SURROUNDINGS)
def test_what_surrounds_a_call_that_is_as_before(what: Callable[[dict[str, Any]], Any]) -> None:
    """It comes to the same as where nothing is remembered."""
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
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize("scale", [1, numpy.float64(1.0)])
@pytest.mark.parametrize("function", [sageattn, scaled_dot_product_attention], ids=lambda f: f.__name__)
def test_numbers_that_are_floats_all_but_in_type(
    function: Any, scale: Any, long_way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5's scale is 1, that of programs which divide by NumPy's square root one of NumPy's floats."""
    monkeypatch.setattr(in_place, "has_kernels", lambda *_: True)
    q, k, v = (usual()[name] for name in "qkv")
    expected = function(q, k, v, scale=1.0)
    for _ in range(4):
        function(q, k, v, scale=scale)
    assert KINDS.newest is not None
    long_way.clear()
    monkeypatch.setattr(in_place, "attend", None)
    assert torch.equal(function(q, k, v, scale=scale), expected)
    assert not long_way


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
@pytest.mark.parametrize("scale", [1, True, torch.tensor(1.0), Fraction(1)])
def test_options_of_equal_value_but_other_types(scale: Any) -> None:
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
@pytest.mark.usefixtures("cpu_is_served")
def test_kinds_in_turn(long_way: list[str]) -> None:
    """More than a program has, of which some differ in the options alone, others in q's sizes, or in strides."""
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
@pytest.mark.usefixtures("cpu_is_served")
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
@pytest.mark.usefixtures("cpu_is_served")
def test_a_tensor_that_comes_twice_makes_no_guards(made: list[int]) -> None:
    q, k = (torch.randn(1, 2, 300, 64).bfloat16() for _ in "qk")
    for call in ((q, k, k), (k, k, q), (k, q, k), (k, k, k)):
        for _ in range(8):
            sageattn(*call)
    assert not made


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
def test_what_is_forgotten(long_way: list[str]) -> None:
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
@pytest.mark.usefixtures("cpu_is_served")
def test_no_tensor_is_kept() -> None:
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

    monkeypatch.setattr(_ops, "attention_operator", operator)
    with pytest.raises(expected) as caught:
        sageattn(**usual())
    assert type(caught.value) is expected


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
def test_what_two_threads_can_leave() -> None:
    """One kind as both of the last two: a call of none comes to an end all the same."""
    call = usual()
    expected = remember(call)
    KINDS.before = KINDS.newest
    looked = threading.Thread(target=again, kwargs={**call, "k": call["k"][:, :, :200]}, daemon=True)
    looked.start()
    looked.join(10)
    assert not looked.is_alive()
    assert same(again(**call), expected)


@GUARDS
@pytest.mark.usefixtures("cpu_is_served")
def test_threads() -> None:
    """Each with kinds of its own, some of them also another's."""
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
