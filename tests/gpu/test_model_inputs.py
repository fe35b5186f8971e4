"""What models feed the kernels: tests/model_inputs.py on a GPU."""

from __future__ import annotations

import math

import model_inputs
import pytest
import torch
from accuracy import TOLERANCES, exact, relative_l1
from model_inputs import Inputs

import sageattention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_offset", [0.0, 8.0])
@pytest.mark.parametrize(("place", "width"), [(0, 1), (1000, 1), (0, 16), (5, 40)])
@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_sinks(kernel: str, mass: float, tokens: int, place: int, width: int, v_offset: float, dtype: torch.dtype) -> None:
    inputs = model_inputs.sink(tokens, mass, seats=range(place, place + width), v_offset=v_offset, queries=300).to(
        "cuda", dtype
    )
    plain, smoothed = (model_inputs.error(kernel, inputs, smooth_v=smooth) for smooth in (False, True))
    limit = 0.045 if "f8" in kernel else 0.03
    assert plain <= limit
    assert smoothed <= min(limit, 1.2 * plain + 2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [32768, 75600])
def test_a_sink_of_a_long_sequence(kernel: str, tokens: int, dtype: torch.dtype) -> None:
    model_inputs.check_long_sink(kernel, "cuda", dtype, tokens=tokens, queries=300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_behind_a_sink(dtype: torch.dtype) -> None:
    """Of a long text: by kernels that quantise nothing."""
    inputs = model_inputs.sink(131072, 0.99, queries=1).to("cuda", dtype)
    assert relative_l1(sageattention.sageattn(*inputs), exact(*inputs)[0]) <= 0.005


@pytest.mark.parametrize(("seats", "likes", "spread"), model_inputs.SINKS)
def test_several_sinks(kernel: str, seats: tuple[int, ...], likes: int, spread: float) -> None:
    model_inputs.check_sinks(kernel, "cuda", seats, likes, spread)


@pytest.mark.parametrize("mass", [0.9, 0.99])
@pytest.mark.parametrize("tokens", [640, 1024])
def test_sinks_in_a_row(kernel: str, mass: float, tokens: int) -> None:
    model_inputs.check_sinks_in_a_row(kernel, "cuda", mass, tokens)


@pytest.mark.parametrize("tokens", [1024, 16384])
@pytest.mark.parametrize("name", model_inputs.LONE_SINKS)
def test_lone_sinks(kernel: str, name: str, tokens: int) -> None:
    model_inputs.check_lone_sinks(kernel, "cuda", name, tokens)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spread", [1.4, 2.0, 2.8])
def test_scores_far_apart(kernel: str, spread: float, head_dim: int) -> None:
    model_inputs.check_far_apart(kernel, "cuda", spread, head_dim)


@pytest.mark.parametrize(("bias", "share", "limit"), model_inputs.BIASES)
def test_a_bias_that_turns(kernel: str, bias: float, share: float, limit: float) -> None:
    model_inputs.check_turning_bias(kernel, "cuda", bias, share, limit)


@pytest.mark.parametrize(("mean", "channels", "limit"), model_inputs.MEANS_OF_Q)
def test_a_mean_of_q(kernel: str, mean: float, channels: int, limit: float) -> None:
    model_inputs.check_mean_of_q(kernel, "cuda", mean, channels, limit)


@pytest.mark.parametrize(("of", "limit"), model_inputs.LARGE_CHANNELS)
def test_channels_that_are_larger(kernel: str, of: str, limit: float) -> None:
    model_inputs.check_large_channels(kernel, "cuda", of, limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_that_hide_with_numbers(kernel: str, dtype: torch.dtype) -> None:
    inputs = Inputs(*(model_inputs.randn(1, 2, n, 64, seed=n + i) for i, n in enumerate((150, 700, 700)))).to("cuda", dtype)
    model_inputs.check_hiding_masks(kernel, inputs, 2 * TOLERANCES[kernel].relative_l1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smooth_v", [False, True])
def test_huge_values(kernel: str, smooth_v: bool, dtype: torch.dtype) -> None:
    model_inputs.check_huge(kernel, "cuda", dtype, smooth_v=smooth_v)


def test_small_keys(kernel: str) -> None:
    model_inputs.check_small_keys(kernel, "cuda", 0.045 if "f8" in kernel else 0.013)


@pytest.mark.parametrize("smooth_v", [False, True])
def test_a_value_that_is_no_number(kernel: str, smooth_v: bool) -> None:
    model_inputs.check_bad_value(kernel, "cuda", smooth_v=smooth_v)


def test_small_values(kernel: str) -> None:
    model_inputs.check_small(kernel, "cuda", 0.045 if "f8" in kernel else 0.03)


@pytest.mark.parametrize("sides", [(32, 32), (64, 64), (128, 128), (256, 256), (13, 30, 52), (21, 45, 80), (33, 34, 60)])
def test_rasters(kernel: str, sides: tuple[int, ...]) -> None:
    ratios = []
    for seed in (0, 10, 20):
        inputs = model_inputs.raster(*sides, seed=seed, queries=256).to("cuda", torch.float16)
        with_exact = model_inputs.error_with_mean(kernel, inputs, inputs.k.float().mean(dim=2, keepdim=True))
        ratios.append(model_inputs.error(kernel, inputs) / with_exact)
    assert sum(ratios) / len(ratios) <= 1.1, ratios


def test_packed_without_keys_and_beyond_the_last_sequence(kernel: str) -> None:
    q = model_inputs.randn(300, 4, 64).to("cuda", torch.float16)
    k, v = (model_inputs.randn(200, 2, 64, seed=i).to("cuda", torch.float16) for i in (1, 2))

    def attend(ends_q: list[int], ends_k: list[int], keys: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
        for size in (2**12, 2**16, 2**20):  # what is not written shows
            torch.full((size,), math.nan, device="cuda")
        cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in (ends_q, ends_k))
        out: tuple[torch.Tensor, torch.Tensor] = sageattention._ops.attention_varlen(
            q, k[:keys], v[:keys], cu_q, cu_k, False, 0.125, True, True, True, kernel
        )
        return out

    for ends_q, ends_k, keys in (([0], [0], 200), ([0, 300], [0, 0], 0), ([0, 100, 300], [0, 0, 0], 0), ([0, 0], [0, 0], 200)):
        out, lse = attend(ends_q, ends_k, keys)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    out, lse = attend([0, 0, 130, 130, 201], [0, 0, 77, 77, 150])
    for tokens in (slice(201, 300),):
        assert (out[tokens] == 0).all()
        assert (lse[:, tokens] == -math.inf).all()
    one = (x.transpose(0, 1).unsqueeze(0) for x in (q[:130], k[:77], v[:77]))
    assert relative_l1(out[:130].transpose(0, 1).unsqueeze(0), exact(*one)[0]) <= 2 * TOLERANCES[kernel].relative_l1
