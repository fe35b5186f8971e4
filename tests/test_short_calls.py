"""Calls that PyTorch's own attention serves: which they are, beside times that were measured, and the short way to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sageattention
from sageattention import _library, dispatch, short_calls
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
    ours: float
    pytorch: float

    @property
    def is_pytorchs(self) -> bool:
        """As the operator decides it on a GPU of 132 multiprocessors."""
        return is_pytorchs(self.heads, self.qo_len, self.kv_len, self.head_dim, self.causal, kv_heads=self.kv_heads)

    @property
    def loss(self) -> float:
        """Of what is taken beside the faster one."""
        return (self.pytorch if self.is_pytorchs else self.ours) / min(self.pytorch, self.ours) - 1


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
    return _library.library.pytorch_is_faster(kernel, multiprocessors, sizes, causal)


@pytest.fixture(scope="module")
def measured() -> list[Call]:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results["columns"] == list(Call._fields)
    assert results["multiprocessors"] == 132
    return [Call(*row) for row in results["microseconds"]]


def test_the_faster_one_is_taken(measured: list[Call]) -> None:
    """In the mean, and nearly never one that is slower than PyTorch's."""
    assert len(measured) > 300
    losses = [call.loss for call in measured]
    assert sum(losses) / len(losses) < 0.003
    slower = {call: call.loss for call in measured if not call.is_pytorchs and call.loss > 0.05}
    assert len(slower) < 0.01 * len(measured), slower
    assert max(slower.values(), default=0) < 0.1, slower


def test_measured_times_tell_a_bad_choice_from_a_good_one(measured: list[Call]) -> None:
    always, never = (
        sum(one / min(c.ours, c.pytorch) - 1 for one, c in some)
        for some in (
            [(c.pytorch, c) for c in measured],
            [(c.ours, c) for c in measured],
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
    faster = _library.library.pytorch_is_faster
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
    monkeypatch.setitem(SHORT_CALLS, -1, ShortCalls(HOPPER, 128, dispatch.FEW_TOKENS, 132))
    monkeypatch.setattr(short_calls, "_is_cudnn_enabled", lambda: True)


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


@pytest.mark.usefixtures("cpu_has_short_calls")
@pytest.mark.parametrize(
    "change",
    [
        {"tensor_layout": "BHSD"},
        {"tensor_layout": ["HND"]},
        {"is_causal": torch.ones(2)},
        {"q": torch.nested.nested_tensor([torch.randn(2, 100, 64).bfloat16()])},
        {"is_causal": 1},
        {"smooth_k": None},
        {"sm_scale": 0.0},
        {"sm_scale": "1"},
        {"q": torch.randn(1, 2, 100, 64)},
        {"q": torch.randn(1, 100, 64).bfloat16()},
        {"q": torch.randn(2, 2, 100, 64).bfloat16()},
        {"q": torch.randn(1, 3, 100, 64).bfloat16()},
        {"q": torch.randn(1, 2, 0, 64).bfloat16()},
        {name: torch.randn(1, 2, 9000, 64).bfloat16() for name in "qkv"},
        {name: torch.randn(1, 2, 96, 64).bfloat16() for name in "qkv"},  # another kernel's
        {"q": torch.randn(1, 2, 32, 64).bfloat16()},
        {"is_causal": True},  # of 100 tokens
        {"q": torch.randn(1, 100, 2, 64).bfloat16().transpose(1, 2)},
        {"q": torch.randn(12864).bfloat16()[1:12801].view(1, 2, 100, 64)},
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
    ],
)
def test_what_is_unusual_about_a_short_call_is_looked_at(change: dict[str, Any]) -> None:
    usual: dict[str, Any] = {
        "q": torch.randn(1, 2, 100, 64).bfloat16(),
        **{name: torch.randn(1, 2, 300, 64).bfloat16() for name in "kv"},
        **SHORT,
    }
    assert short_call(**usual) is not None
    assert short_call(**{**usual, **change}) is None


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
    library = _library.library.pytorch_is_faster

    def spy(kernel: str, multiprocessors: int, sizes: tuple[int, ...], is_causal: bool) -> bool:
        asked.append((*sizes, is_causal))
        return library(kernel, multiprocessors, sizes, is_causal)

    monkeypatch.setattr(_library.library, "pytorch_is_faster", spy)
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
