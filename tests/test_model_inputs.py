"""What models feed the kernels: tests/model_inputs.py on CPU tensors, against the reference of each kernel."""

from __future__ import annotations

import math
from typing import Any

import model_inputs
import pytest
import torch
from accuracy import TOLERANCES
from model_inputs import Inputs

from sageattention import reference

DTYPES = [torch.float16, torch.bfloat16]
kernels = pytest.mark.parametrize("kernel", TOLERANCES)


@kernels
@pytest.mark.parametrize(("place", "width", "v_offset"), [(0, 1, 0.0), (0, 1, 8.0), (1000, 1, 0.0), (0, 16, 0.0), (5, 40, 8.0)])
@pytest.mark.parametrize(
    ("tokens", "mass"), [(4096, 0.5), (4096, 0.9), (4096, 0.99), (16384, 0.5), (16384, 0.9), (16384, 0.99)]
)
def test_sinks(kernel: str, tokens: int, mass: float, place: int, width: int, v_offset: float) -> None:
    if tokens > 4096 and (place or v_offset):
        pytest.skip("takes long; a GPU's test has it")
    inputs = model_inputs.sink(tokens, mass, seats=range(place, place + width), v_offset=v_offset).to("cpu", torch.bfloat16)
    plain, smoothed = (model_inputs.error(kernel, inputs, smooth_v=smooth) for smooth in (False, True))
    limit = 0.045 if "f8" in kernel else 0.03
    assert plain <= limit
    assert smoothed <= min(limit, 1.2 * plain + 2e-4)


@kernels
def test_a_sink_of_a_long_sequence(kernel: str) -> None:
    model_inputs.check_long_sink(kernel, "cpu", torch.float16, tokens=32768, queries=16)


@kernels
@pytest.mark.parametrize(("seats", "likes", "spread"), model_inputs.SINKS)
def test_several_sinks(kernel: str, seats: tuple[int, ...], likes: int, spread: float) -> None:
    model_inputs.check_sinks(kernel, "cpu", seats, likes, spread)


@kernels
@pytest.mark.parametrize("mass", [0.9, 0.99])
def test_sinks_in_a_row(kernel: str, mass: float) -> None:
    model_inputs.check_sinks_in_a_row(kernel, "cpu", mass, 1024)


@kernels
@pytest.mark.parametrize("name", model_inputs.LONE_SINKS)
def test_lone_sinks(kernel: str, name: str) -> None:
    model_inputs.check_lone_sinks(kernel, "cpu", name, 2048)


@kernels
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spread", [1.4, 2.0, 2.8])
def test_scores_far_apart(kernel: str, spread: float, head_dim: int) -> None:
    model_inputs.check_far_apart(kernel, "cpu", spread, head_dim)


@kernels
@pytest.mark.parametrize(("bias", "share", "limit"), model_inputs.BIASES)
def test_a_bias_that_turns(kernel: str, bias: float, share: float, limit: float) -> None:
    model_inputs.check_turning_bias(kernel, "cpu", bias, share, limit)


@kernels
@pytest.mark.parametrize(("mean", "channels", "limit"), model_inputs.MEANS_OF_Q)
def test_a_mean_of_q(kernel: str, mean: float, channels: int, limit: float) -> None:
    model_inputs.check_mean_of_q(kernel, "cpu", mean, channels, limit)


@kernels
@pytest.mark.parametrize(("of", "limit"), model_inputs.LARGE_CHANNELS)
def test_channels_that_are_larger(kernel: str, of: str, limit: float) -> None:
    model_inputs.check_large_channels(kernel, "cpu", of, limit)


@pytest.mark.parametrize(("spread", "most"), [(1.0, 0.0), (1.4, 0.01), (2.0, 0.02), (2.8, 0.11), (4.0, 0.15)])
def test_scores_far_apart_are_seldom_gone_through_twice(spread: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a warp: where one of its rows takes a block in two the warp does, and others wait for it."""
    shares = []
    take_in_two = reference._Rows.take_in_two

    def count(self: reference._Rows, *arguments: Any) -> torch.Tensor:
        in_two: torch.Tensor = take_in_two(self, *arguments)
        shares.append((reference.rows_of_warp(in_two, 32) > 0).float().mean())
        return in_two

    monkeypatch.setattr(reference._Rows, "take_in_two", count)
    q, k, v = (model_inputs.randn(1, 1, tokens, 128, seed=tokens + i) for i, tokens in enumerate((256, 4096, 4096)))
    model_inputs.attend("sm89_qk_int8_pv_f8", Inputs(spread * q, spread * k, v).to("cpu", torch.bfloat16))
    assert torch.stack(shares).mean() <= most
    assert len(shares) == 64


@pytest.mark.parametrize("kernel", [name for name in TOLERANCES if name.endswith("_accum_f16")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mass", "v_offset"), [(None, 0.0), (None, 8.0), (0.5, 0.0), (0.9, 0.0), (0.99, 0.0), (0.9, 8.0)])
def test_float16_sums_are_as_exact_as_float32_ones(
    kernel: str, mass: float | None, v_offset: float, dtype: torch.dtype
) -> None:
    tokens = 4096
    if mass is None:
        q, k, v = (model_inputs.randn(1, 1, n, 128, seed=i) for i, n in enumerate((48, tokens, tokens)))
        inputs = Inputs(q, k, v + v_offset * model_inputs.randn(128, seed=4)).to("cpu", dtype)
    else:
        inputs = model_inputs.sink(tokens, mass, v_offset=v_offset).to("cpu", dtype)
    in_float16, in_float32 = (model_inputs.error(name, inputs) for name in (kernel, kernel.removesuffix("_accum_f16")))
    assert in_float16 <= 1.2 * in_float32


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_that_hide_with_numbers(kernel: str, dtype: torch.dtype) -> None:
    inputs = Inputs(*(model_inputs.randn(1, 1, n, 64, seed=n + i) for i, n in enumerate((30, 700, 700)))).to("cpu", dtype)
    model_inputs.check_hiding_masks(kernel, inputs, 2 * TOLERANCES[kernel].relative_l1)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smooth_v", [False, True])
def test_huge_values(kernel: str, smooth_v: bool, dtype: torch.dtype) -> None:
    model_inputs.check_huge(kernel, "cpu", dtype, smooth_v=smooth_v)


@kernels
def test_small_keys(kernel: str) -> None:
    model_inputs.check_small_keys(kernel, "cpu", 0.045 if "f8" in kernel else 0.013)


@kernels
@pytest.mark.parametrize("smooth_v", [False, True])
def test_a_value_that_is_no_number(kernel: str, smooth_v: bool) -> None:
    model_inputs.check_bad_value(kernel, "cpu", smooth_v=smooth_v)


@kernels
def test_small_values(kernel: str) -> None:
    model_inputs.check_small(kernel, "cpu", 0.045 if "f8" in kernel else 0.03)


@pytest.mark.parametrize("sides", [(32, 32), (48, 48), (64, 64), (96, 96), (13, 30, 20)])
def test_rasters(sides: tuple[int, ...]) -> None:
    kernel, ratios = "sm80_qk_int8_pv_f16", []
    for seed in (0, 10, 20):
        inputs = model_inputs.raster(*sides, seed=seed).to("cpu", torch.float16)
        with_exact = model_inputs.error_with_mean(kernel, inputs, inputs.k.float().mean(dim=2, keepdim=True))
        ratios.append(model_inputs.error(kernel, inputs) / with_exact)
    assert sum(ratios) / len(ratios) <= 1.1, ratios


def test_no_single_token_and_no_hidden_ones_move_the_mean() -> None:
    kernel = "sm80_qk_int8_pv_f16"
    q, k, v = (model_inputs.randn(1, 1, n, 128, seed=i) for i, n in enumerate((48, 4096, 4096)))
    k = k + 8 * model_inputs.randn(128, seed=3)
    plain = Inputs(q, k, v).to("cpu", torch.float16)
    at_best = model_inputs.error(kernel, plain)
    far = k.clone()
    far[:, :, 0] = 300 * model_inputs.randn(128, seed=4)
    q_far = q - 3 * far[0, 0, 0] / far[0, 0, 0].norm()  # none of P falls on it
    inputs = Inputs(q_far, far, v).to("cpu", torch.float16)
    of_others = inputs.k[:, :, 1:].float().mean(dim=2, keepdim=True)
    assert model_inputs.error(kernel, inputs) <= 1.1 * model_inputs.error_with_mean(kernel, inputs, of_others)
    half = torch.arange(4096) < 2048
    hidden = torch.where(half[:, None], k, 100 * model_inputs.randn(4096, 128, seed=5))
    inputs = Inputs(q, hidden, v).to("cpu", torch.float16)
    mask = torch.zeros(1, 4096).masked_fill(~half, -math.inf)
    model_inputs.check_mask(kernel, inputs, mask, 1.6 * at_best)  # half the keys: the same error is 1.4 times as large
