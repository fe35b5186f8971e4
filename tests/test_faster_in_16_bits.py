"""Which short calls Hopper's kernel in 16 bits serves, beside times that were measured: csrc/torch/plan/faster_in_16_bits.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from sageattention import _library

HOPPER = "sm90_qk_int8_pv_f16"
RESULTS = Path(__file__).parents[1] / "bench" / "results"
AT_MOST = 0.004  # that choosing may cost, in the mean


class Call(NamedTuple):
    """A call of bench/short.py, in whose order these are, and its microseconds."""

    heads: int
    kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int
    causal: bool
    mask: str
    quantised: float
    in_16_bits: float
    pytorch: float

    @property
    def taken(self) -> float:
        """As the operator decides it on a GPU of 132 multiprocessors."""
        sizes = (1, self.heads, self.kv_heads, self.qo_len, self.kv_len, self.head_dim, self.head_dim)
        faster = _library.library.faster_in_16_bits(HOPPER, 132, sizes, self.causal, self.mask)
        return self.in_16_bits if faster else self.quantised

    @property
    def least(self) -> float:
        """Of the faster one."""
        return min(self.quantised, self.in_16_bits)


@pytest.fixture(scope="module", params=["h200-short.json", "h100-short.json"])
def measured(request: pytest.FixtureRequest) -> list[Call]:
    results = json.loads((RESULTS / request.param).read_text(encoding="utf-8"))
    assert results["columns"] == list(Call._fields)
    assert results["multiprocessors"] == 132
    return [Call(*row) for row in results["microseconds"]]


def test_the_faster_one_is_taken(measured: list[Call]) -> None:
    """In the mean; and where it is not, little is lost."""
    assert len(measured) > 300
    losses = {call: call.taken / call.least - 1 for call in measured}
    assert sum(losses.values()) / len(losses) < AT_MOST
    assert max(losses.values()) < 0.25, {call: loss for call, loss in losses.items() if loss > 0.1}


def test_what_is_taken_is_faster_than_pytorch(measured: list[Call]) -> None:
    """In the median by a fifth, and nearly always."""
    ratios = {call: call.pytorch / call.taken for call in measured}
    assert sorted(ratios.values())[len(ratios) // 2] > 1.15
    slower = {call: ratio for call, ratio in ratios.items() if ratio < 0.95}
    assert len(slower) < 0.03 * len(measured), slower
    assert min(ratios.values()) > 0.75, slower


def test_measured_times_tell_a_bad_choice_from_a_good_one(measured: list[Call]) -> None:
    always, never = (
        sum(one / call.least - 1 for one, call in some)
        for some in (
            [(call.in_16_bits, call) for call in measured],
            [(call.quantised, call) for call in measured],
        )
    )
    assert min(always, never) / len(measured) > 9 * AT_MOST


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_long_calls_quantise(head_dim: int, causal: bool) -> None:
    def faster(heads: int, qo_len: int, kv_len: int, mask: str = "none") -> bool:
        return _library.library.faster_in_16_bits(
            HOPPER, 132, (1, heads, heads, qo_len, kv_len, head_dim, head_dim), causal, mask
        )

    for heads in (8, 24, 64, 1024):
        for tokens in (8192, 20000, 131072):
            for mask in _library.MASKS:
                assert faster(heads, tokens, tokens, mask) == (mask == "numbers of each head")
            assert faster(heads, tokens, 77)
        for tokens in (64, 128):
            for mask in _library.MASKS:
                assert faster(heads, tokens, tokens, mask)


def test_other_kernels_calls_are_their_own() -> None:
    for kernel in _library.library.kernels:
        assert _library.library.faster_in_16_bits(kernel, 132, (1, 8, 8, 200, 200, 128, 128), False) == (kernel == HOPPER)


def test_sizes_beyond_all_measure() -> None:
    """No product of them goes round."""
    most = 2**31 - 1
    too_large = pytest.raises(RuntimeError, match="batch x heads x tokens is too large")
    with too_large:
        _library.library.faster_in_16_bits(HOPPER, 1, (most, most, most, most, most, 256, 256), False)
    for batch, heads in ((256, 2**24), (2**16, 2**16), (2**12, 2**20 - 1)):  # whose products go round to 0, and to less than 0
        with too_large:
            _library.library.faster_in_16_bits(HOPPER, 132, (batch, heads, 1, 1, 129, 8, 8), False)
    assert _library.library.faster_in_16_bits(HOPPER, 1, (1, 1, 1, 1, 1, 128, 128), False)
    _library.library.faster_in_16_bits(
        HOPPER, 1, (1, 8, 8, 384, 512, 128, 128), False, "numbers"
    )  # by pairs of blocks, of which there is no room for one
    with pytest.raises(RuntimeError, match=r"q_heads: expected a multiple of kv_heads \(2\), got 1"):
        _library.library.faster_in_16_bits(HOPPER, 132, (1, 1, 2, 512, 512, 128, 128), False)
    for sizes, said in (((1, 8, 0, 9, 9, 64, 64), "at least 1, got 0"), ((1, 8, 8, 9, 9, 512, 64), "at most 256, got 512")):
        with pytest.raises(RuntimeError, match=said):
            _library.library.faster_in_16_bits(HOPPER, 132, sizes, False)
