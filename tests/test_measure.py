"""bench/measure.py: what is made of times, which a stand-in has here."""

from __future__ import annotations

import argparse
import json
import signal
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import measure
import pytest
import torch
from cards.shape import Shape
from methods import BASELINE, KERNELS, ours
from rich.console import Console

import bench
from sageattention import sageattn_qk_int8_pv_fp8_cuda


def test_fp8_is_measured_as_it_is_served() -> None:
    """`sageattn` smooths V where an FP8 kernel serves."""
    q, k, v = (torch.randn(1, 2, 100, 64).bfloat16() + x for x in (0, 0, 8))
    expected = sageattn_qk_int8_pv_fp8_cuda(q, k, v, is_causal=True, smooth_v=True)
    assert torch.equal(ours("sm89_qk_int8_pv_f8")(q, k, v, True), expected)


def test_what_is_measured_on_a_cpu_is_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measure.environment("python bench/x.py --device cpu", "cpu")["gpu"] == "none: CPU"


def test_a_plot_does_not_take_the_place_of_its_numbers(tmp_path: Path) -> None:
    assert measure.result_file(str(tmp_path / "new" / "result.json")).parent.is_dir()
    for wrong in (tmp_path / "result.svg", tmp_path):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a file for JSON"):
            measure.result_file(str(wrong))


def run(name: str, ends: str) -> str:
    """A call of a benchmark, which returns its name or ends otherwise."""
    if ends == "out of memory":
        raise torch.OutOfMemoryError("by a stand-in")
    if ends == "interrupted":
        signal.raise_signal(signal.SIGINT)
    return name


def test_what_was_measured_is_kept() -> None:
    """Where a call finds too little memory, and where Ctrl-C is pressed: at once, but the call that runs is not cut short."""
    before = signal.getsignal(signal.SIGINT)
    calls = [partial(run, "a", ""), partial(run, "b", "out of memory"), partial(run, "c", "interrupted"), partial(run, "d", "")]
    found, missing = measure.each({"first": calls, "second": calls})
    assert found == {"first": ["a", "c"], "second": []}
    assert missing == ["first: out of memory at b, out of memory", "interrupted, with first: 2 of 4, second: 0 of 4"]
    assert measure.each({"first": calls[:1]}) == ({"first": ["a"]}, [])
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_ends_the_program() -> None:
    with measure.noted_interrupt() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("part", [(), ("speed",), ("speed", "inputs", "packed")])
def test_what_was_measured_is_shown(part: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was ended sooner."""
    whole = json.loads((Path(bench.__file__).parent / "results" / "h200.json").read_text(encoding="utf-8"))
    result = {name: rows if name == "environment" or name in part else [] for name, rows in whole.items()}
    monkeypatch.setattr(bench, "methods", lambda: dict.fromkeys(whole["speed"][0]["tflops"]))
    shown = StringIO()
    for table in bench.report(result):
        Console(width=200, file=shown).print(table)
    words = " ".join(shown.getvalue().split())  # of captions, which are broken to a table's width
    assert ("not measured" in words) == ("packed" not in part)
    pytest.importorskip("matplotlib", reason="the environment `test` has none: the environment `bench` draws")
    import plot

    plot.draw(result, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_ratios_are_of_one_round() -> None:
    """Whose clocks the methods share: the median of ratios, not the ratio of medians."""
    times = [{"theirs": 1.0, "ours": 0.5}, {"theirs": 4.0, "ours": 1.0}, {"theirs": 2.0, "ours": 2.0}]
    found = measure.summary(times, operations=4e9, baseline="theirs")
    assert found == {"tflops": {"theirs": 2.0, "ours": 4.0}, "ratio": {"theirs": 1.0, "ours": 2.0}}
    assert measure.summary([{"ours": 1.0}], operations=1e9, baseline="theirs") == {"tflops": {"ours": 1.0}, "ratio": {}}


def test_a_peer_may_fail_and_ours_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> object:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(measure, "under_load", lambda call, seconds: call() * seconds)
    rounds = measure.rounds({"a peer": fails, "another": lambda: 2.0, "sageattn": lambda: 1.0})
    assert rounds == [{"another": 2.0 * measure.SECONDS, "sageattn": measure.SECONDS}] * measure.ROUNDS
    for own in ("sageattn", "sageattn_varlen", *KERNELS):
        with pytest.raises(RuntimeError, match="no such backend"):
            measure.rounds({"another": lambda: 2.0, own: fails})


@pytest.fixture
def _a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each call takes, of tensors that have no numbers."""
    randn = torch.randn

    def without_numbers(*size: int, **options: Any) -> torch.Tensor:
        return randn(*size, **{**options, "device": "meta"})

    monkeypatch.setattr(torch, "randn", without_numbers)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(measure, "methods", lambda: dict.fromkeys([BASELINE, "sageattn"], id))
    monkeypatch.setattr(measure, "packed_methods", lambda: dict.fromkeys(["theirs", "sageattn_varlen"], id))
    monkeypatch.setattr(measure, "rounds", lambda calls: [dict.fromkeys(calls, 1.0)])


@pytest.mark.usefixtures("_a_millisecond")
@pytest.mark.parametrize("causal", [False, True])
def test_operations(causal: bool) -> None:
    """Two products of two operations for each score and channel; causal, of half the scores."""
    part = 0.5 if causal else 1.0
    row = measure.speed(Shape(2, 3, 1000, 64, causal))
    assert row["tflops"] == pytest.approx(dict.fromkeys([BASELINE, "sageattn"], part * 2 * 3 * 1000**2 * 64 * 4 / 1e9))
    assert row["shape"] == {"batch": 2, "heads": 3, "tokens": 1000, "head_dim": 64, "causal": causal}
    packed = measure.packed_speed(causal)
    lengths = torch.exp2(torch.linspace(4, 13, 256)).round()
    scores = float(lengths.double().square().sum())
    assert packed["tflops"] == pytest.approx(dict.fromkeys(["theirs", "sageattn_varlen"], part * 16 * scores * 128 * 4 / 1e9))
    assert packed["ratio"] == {"theirs": 1.0, "sageattn_varlen": 1.0}
