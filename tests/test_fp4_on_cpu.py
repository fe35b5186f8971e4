"""The FP4 kernels' own source, compiled for the CPU with FP4 emulated, against the reference: what can be seen of them without a GPU.

tests/kernels_on_cpu.py runs them. tests/test_emulated_fp4.py holds the emulated instructions to an independent source;
tests/gpu/test_fp4.py runs the same kernels, emulated or not, on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernels_on_cpu import Case, Kernels, inputs, packed, randn
from model_inputs import sink

pytestmark = pytest.mark.slow

KERNEL = "sm120_qk_fp4_pv_fp4"
LENGTHS = [5, 0, 150, 33], [70, 9, 0, 133]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("on_cpu"), "sm_120")


def exact_numbers() -> Case:
    """No rounding changes them before the probabilities, which are powers of two; of Q's rows the mean is 0."""
    generator = torch.Generator().manual_seed(0)

    def choose(*numbers: float, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=generator)].half()

    half = choose(-1.0, 1.0, shape=(1, 1, 64, 64))
    k = choose(0.0, -0.5, 0.5, 1.0, -1.0, 2.0, -2.0, shape=(1, 1, 192, 64))
    v = choose(0.0, 0.5, 1.0, -1.0, 2.0, -2.0, 4.0, shape=(1, 1, 192, 64))
    return Case(torch.cat([half, -half], dim=2), k, v, sm_scale=0.5 / math.log2(math.e), smooth_k=False, smooth_v=False)


def masked() -> Case:
    seen = torch.rand(1, 1, 70, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[..., 7, :] = False  # a row that sees nothing
    return Case(*(x.half() for x in inputs(1, 2, 1, 70, 150, 64, 64)), attn_mask=seen)


def not_numbers() -> Case:
    q, k, v = (x.half() for x in inputs(1, 2, 2, 70, 130, 64, 64))
    q[0, 0, 3, 5] = k[0, 1, 7, 9] = math.nan
    return Case(q, k, v, smooth_k=False)


def small_sink() -> Case:
    """A first key that most of every row falls on, whose values are a hundredth of the others'."""
    q, k, v = sink(200, 0.9, queries=70)
    v[:, :, 0] = 0.01 * randn(128, seed=9)
    return Case(q.half(), k.half(), v.half())


CASES = {
    "exact": exact_numbers(),
    "plain": Case(*(x.half() for x in inputs(1, 1, 1, 128, 64, 64, 64)), smooth_k=False, smooth_v=False),
    "grouped heads": Case(*(x.half() for x in inputs(1, 2, 1, 150, 200, 64, 64))),
    "causal": Case(*(x.half() for x in inputs(2, 1, 1, 100, 140, 64, 64)), is_causal=True),
    "one mean": Case(*(x.half() for x in inputs(1, 1, 1, 200, 90, 64, 64)), per_block_mean=False),
    "uneven": Case(*(x.half() for x in inputs(1, 1, 1, 70, 90, 33, 31))),
    "128": Case(*(x.half() for x in inputs(1, 1, 1, 140, 200, 128, 128))),
    "bfloat16": Case(*(x.bfloat16() for x in inputs(1, 1, 1, 70, 130, 128, 100)), is_causal=True),
    "256": Case(*(x.half() for x in inputs(1, 1, 1, 70, 130, 256, 200))),
    "sink": small_sink(),
    "packed": packed(*LENGTHS, 64, 48, torch.float16),
    "packed, causal": packed(*LENGTHS, 64, 48, torch.float16, is_causal=True),
    "mask": masked(),
    "NaN": not_numbers(),
    "large V": Case(randn(1, 1, 40, 64).half(), randn(1, 1, 70, 64, seed=1).half(), torch.full((1, 1, 70, 64), 60000.0).half()),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str, kernels: Kernels) -> None:
    case = CASES[name]
    if name != "exact":
        case.check(kernels, KERNEL)
        return
    (out, lse), (expected, expected_lse) = case.run(kernels, KERNEL), case.expected(KERNEL)
    assert torch.equal(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)
