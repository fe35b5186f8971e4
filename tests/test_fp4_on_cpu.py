"""The FP4 kernels' own source, compiled for the CPU with FP4 emulated, against the reference: what can be seen of them without a GPU.

tests/kernels_on_cpu.py runs them. tests/test_emulated_fp4.py holds the emulated instructions to an independent source;
tests/gpu/test_fp4.py runs the same kernels, emulated or not, on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import fuzz
import pytest
import torch
from calls_on_cpu import (
    FORMS,
    MANY,
    Case,
    check_unseen,
    check_wrong_starts,
    inputs,
    packed,
    randn,
    stand_in,
    tokens_behind,
    unseen_keys,
)
from fuzz_bounds import Exact
from fuzz_inputs import Problem
from kernels_on_cpu import WAIT, WAIT_AT_END, Kernels
from model_inputs import sink

from sageattention import reference

pytestmark = pytest.mark.slow

KERNEL = "sm120_qk_fp4_pv_fp4"
FIRST, PROBLEMS = 2_000_000, 25  # seeds
LENGTHS = [5, 0, 150, 33], [70, 9, 0, 133]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("on_cpu"), "sm_120")


def exact_numbers(*, first_hidden: bool) -> Case:
    """No rounding changes them before the probabilities, and none of these lies halfway between two of e2m1; of Q's rows the mean is 0.

    All is exact then but the probability of the first key that is seen, which is not rounded; with `first_hidden` only the first row sees it, and nothing else.
    """
    generator = torch.Generator().manual_seed(0)

    def choose(*numbers: float, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=generator)].half()

    half = choose(-1.0, 1.0, shape=(1, 1, 64, 64))
    k = choose(0.0, -0.5, 0.5, 1.0, -1.0, 2.0, -2.0, shape=(1, 1, 192, 64))
    v = 1.75 * choose(0.0, 0.5, 1.0, -1.0, 2.0, -2.0, 4.0, shape=(1, 1, 192, 64))  # 7 is a power of two in the unit of a block
    mask = None
    if first_hidden:
        v[:, :, 0] = 60000.0  # in none of the units
        mask = (torch.arange(192) > 0) ^ (torch.arange(128)[:, None] == 0)
    q = torch.cat([half, -half], dim=2)
    return Case(q, k, v, attn_mask=mask, sm_scale=0.45 / math.log2(math.e), smooth_k=False, smooth_v=False)


def masked() -> Case:
    seen = torch.rand(1, 1, 70, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[..., 7, :] = False  # a row that sees nothing
    return Case(*(x.half() for x in inputs(1, 2, 1, 70, 150, 64, 64)), attn_mask=seen)


def near() -> Case:
    """More tiles of rows than a product has means, of which few see a key."""
    rows, keys = torch.arange(2180)[:, None], torch.arange(2100)
    q, k, v = (randn(1, 1, tokens, 64, seed=seed).half() for seed, tokens in enumerate((2180, 2100, 2100)))
    return Case(q, k, v, is_causal=True, attn_mask=((rows - keys).abs() < 150)[None, None])


def not_numbers() -> Case:
    q, k, v = (x.half() for x in inputs(1, 2, 2, 70, 130, 64, 64))
    q[0, 0, 3, 5] = k[0, 1, 7, 9] = math.nan
    return Case(q, k, v, smooth_k=False)


def infinite_rows() -> Case:
    q, k, v = (x.half() for x in inputs(1, 1, 1, 70, 200, 64, 64))
    q[0, 0, 7, 3], q[0, 0, 9, 40] = math.inf, -math.inf
    return Case(q, k, v)


def infinite_key() -> Case:
    """Of a block whose other keys are seen by rows that do not see it."""
    q, k, v = (x.half() for x in inputs(1, 1, 1, 70, 130, 64, 64))
    k[0, 0, 60, 5] = math.inf
    return Case(q, k, v, is_causal=True, smooth_k=False)


def unlike_blocks(v: torch.Tensor) -> torch.Tensor:
    """V with a block of keys that its mean does not make smaller, where it does others."""
    v = v + 4.0
    v[:, :, 64:128] -= 8.0
    return v


def smoothed_in_part() -> Case:
    q, k, v = inputs(1, 1, 1, 70, 200, 64, 64)
    return Case(q.half(), k.half(), unlike_blocks(v).half())


def small_sink() -> Case:
    """A first key that most of every row falls on, whose values are a hundredth of the others'."""
    q, k, v = sink(200, 0.9, queries=70)
    v[:, :, 0] = 0.01 * randn(128, seed=9)
    return Case(q.half(), k.half(), v.half())


def padded_sinks() -> Case:
    """Two sequences, each with such a key behind padding of its own."""
    padding = 70, 5
    pairs = [sink(330, 0.9, seats=(seat,), queries=70) for seat in padding]
    q, k, v = (torch.cat(x) for x in zip(*pairs, strict=True))
    for i, seat in enumerate(padding):
        v[i, :, seat] = 0.01 * randn(128, seed=9)
    mask = torch.arange(330) >= torch.tensor(padding)[:, None]
    return Case(q.half(), k.half(), v.half(), attn_mask=mask[:, None, None])


def sink_behind_many() -> Case:
    """One behind more padding than a warp looks at at once."""
    q, k, v = sink(2250, 0.9, seats=(2100,), queries=20)
    v[:, :, 2100] = 0.01 * randn(128, seed=9)
    return Case(q.half(), k.half(), v.half(), attn_mask=(torch.arange(2250) >= 2100)[None])


def far_sink() -> Case:
    """One that is all there is of the rows that see it, which every other one does not."""
    q, k, v = sink(200, 1 - 1e-12, queries=70)
    v[:, :, 0] = 0.01 * randn(128, seed=9)
    mask = torch.ones(70, 200, dtype=torch.bool)
    mask[::2, 0] = False
    return Case(q.half(), k.half(), v.half(), attn_mask=mask)


CASES = {
    "exact": exact_numbers(first_hidden=True),
    "exact but for the first key": exact_numbers(first_hidden=False),
    "plain": Case(*(x.half() for x in inputs(1, 1, 1, 128, 64, 64, 64)), smooth_k=False, smooth_v=False),
    "grouped heads": Case(*(x.half() for x in inputs(1, 2, 1, 150, 200, 64, 64))),
    "more means than a product has rows": Case(*(x.half() for x in inputs(2, 4, 2, 1030, 70, 64, 64))),
    "so many that a span sees none of some": near(),
    "causal": Case(*(x.half() for x in inputs(2, 1, 1, 100, 140, 64, 64)), is_causal=True),
    "one mean": Case(*(x.half() for x in inputs(1, 1, 1, 200, 90, 64, 64)), per_block_mean=False),
    "uneven": Case(*(x.half() for x in inputs(1, 1, 1, 70, 90, 33, 31))),
    "128": Case(*(x.half() for x in inputs(1, 1, 1, 140, 200, 128, 128))),
    "bfloat16": Case(*(x.bfloat16() for x in inputs(1, 1, 1, 70, 130, 128, 100)), is_causal=True),
    "256": Case(*(x.half() for x in inputs(1, 1, 1, 70, 130, 256, 200))),
    "sink": small_sink(),
    "a sink beyond the others' range": far_sink(),
    "sinks behind padding": padded_sinks(),
    "a sink behind much padding": sink_behind_many(),
    "an unsmoothed block": smoothed_in_part(),
    "infinite Q": infinite_rows(),
    "infinite key": infinite_key(),
    "packed": packed(*LENGTHS, 64, 48, torch.float16),
    "packed, causal": packed(*LENGTHS, 64, 48, torch.float16, is_causal=True),
    "packed, causal, keys that nobody sees": unseen_keys(packed(*LENGTHS, 64, 48, torch.float16, is_causal=True)),
    "packed, no queries at the end": packed([5, 0], [70, 9], 64, 48, torch.float16),
    "packed, tokens behind": tokens_behind(packed(*LENGTHS, 64, 48, torch.float16)),
    "packed, two key heads": packed(*LENGTHS, 64, 64, torch.bfloat16, kv_heads=2, smooth_k=False),
    "packed, many": packed(*MANY, 64, 48, torch.float16, kv_heads=4),
    "mask": masked(),
    "NaN": not_numbers(),
    "large V": Case(randn(1, 1, 40, 64).half(), randn(1, 1, 70, 64, seed=1).half(), torch.full((1, 1, 70, 64), 60000.0).half()),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str, kernels: Kernels) -> None:
    case = CASES[name]
    if not name.startswith("exact"):
        # Of the first key's score, whose probability is not rounded, all of another code is in the log-sum-exp: of 8240 rows one has such.
        many = name == "more means than a product has rows"
        case.check(kernels, KERNEL, largest_lse=0.025 if many else 0.02)
        return
    (out, lse), (expected, expected_lse) = case.run(kernels, KERNEL), case.expected(KERNEL)
    if name == "exact":
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=2**-10, atol=0)
    assert (out == expected).double().mean() > 0.999
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["grouped heads", "uneven", "bfloat16", "packed", "packed, no queries at the end", "mask"])
def test_nothing_behind_the_callers_tensors_is_read(name: str, kernels: Kernels) -> None:
    CASES[name].at_the_end_of_memory().check(kernels, KERNEL)


def test_an_infinite_value(kernels: Kernels) -> None:
    """Of a key that the mean of V is sampled from: queries that see no key of its block do without both."""
    q, k, v = (x.half() for x in inputs(1, 1, 1, 320, 320, 64, 64))
    v[0, 0, int(reference.sampled_tokens(320)[-1]), 3] = math.inf
    out, _ = Case(q, k, v, is_causal=True).run(kernels, KERNEL)
    assert out[0, 0, :256].isfinite().all()
    assert not out[0, 0, -1, 3].isfinite()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_nobody_sees_changes_no_bit(form: str, kernels: Kernels) -> None:
    check_unseen(kernels, KERNEL, FORMS[form], v_hidden=math.nan)


# Blocks come in another order too, and which of them run before the kernel that they are launched to overlap.
@pytest.mark.parametrize("name", ["grouped heads", "packed", "mask"])
def test_order_of_threads_changes_nothing(name: str, kernels: Kernels) -> None:
    CASES[name].check_orders(kernels, KERNEL, 1, 2, 3)


def test_random_calls(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/fuzz_fp4.py makes and judges them."""
    fuzz_fp4 = pytest.importorskip("fuzz_fp4", reason="sageattn3 is not installed here")

    def small(seed: int, device: str, problem: Problem) -> Iterable[fuzz.Call]:
        batch, heads, queries, _ = problem.q.shape
        scores = batch * heads * queries * problem.k.shape[2]
        # A block of threads a head takes a tenth of a second.
        return [] if batch * heads > 12 or scores > 100_000 else fuzz_fp4.calls(seed, device, problem)

    def judge(call: fuzz.Call, problem: Problem, exact: Exact) -> torch.Tensor:
        expected = fuzz_fp4.reference(call, problem)
        with monkeypatch.context() as patch:
            stand_in(kernels, patch, fuzz_fp4._ops)
            found: torch.Tensor = fuzz_fp4.beside(expected, call, problem, exact)
            return found

    subject = fuzz_fp4.SAGEATTN3._replace(calls=small, judge=judge)
    outcomes = [fuzz.solve(seed, "cpu", subject) for seed in range(FIRST, FIRST + PROBLEMS)]
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    assert not failures, "\n".join(fuzz.report(failure, "cpu", subject) for failure in failures)
    assert sum(outcome.calls for outcome in outcomes) >= 8


def test_sequences_that_start_nowhere(kernels: Kernels) -> None:
    check_wrong_starts(kernels, KERNEL, torch.float16)


# Of a kernel a source, a text in it, and what it becomes.
FAULTS = {
    "K does not wait for the means": (
        "quant_kv_fp4",
        "quant/quant_k_fp4.cuh",
        "keys(p, span);\n  ptx::grid_dependency_wait();",
        "keys(p, span);",
    ),
    "attention waits at its end": (
        KERNEL,
        "attention/fp4/attend.cuh",
        WAIT,
        WAIT_AT_END,
    ),
    "no head's mean of K but the first's": ("means", "quant/means.cu", "mean_of_k(p, block - p.q_blocks", "mean_of_k(p, 0"),
    "means of other rows": ("means", "quant/means.cu", "index % p.means * Config::kRows;", "index % p.means;"),
    "products that are seen are left out": ("quant_kv_fp4", "quant/mean_scores.cuh", "p.means < seen", "p.means <= seen"),
    "products that are another part's": (
        "quant_kv_fp4",
        "quant/mean_scores.cuh",
        "first = part * Config",
        "first = 0 * Config",
    ),
    "means of another head": ("quant_kv_fp4", "quant/mean_scores.cuh", "span.mean * rows", "span.mean"),
}


def test_warps_wait_for_each_other(tmp_path: Path) -> None:
    """tests/on_cpu/races.h looks at what they share; without the barrier of the loop it says so."""
    judged = Kernels(tmp_path / "whole", "sm_120", races=True)
    for name in ("causal", "mask"):
        CASES[name].check(judged, KERNEL)
    faulty = judged.copy(tmp_path / "faulty", KERNEL)
    faulty.change(
        "attention/fp4/attend.cuh", "    ptx::cp_async_wait<0>();\n    __syncthreads();", "    ptx::cp_async_wait<0>();"
    )
    with pytest.raises(RuntimeError, match=KERNEL):
        CASES["mask"].run(faulty, KERNEL)


# Several heads of K, means of a head and products of a span.
CAUSAL = Case(*(x.half() for x in inputs(1, 18, 2, 150, 140, 64, 64)), is_causal=True)


@pytest.fixture(scope="module")
def right(kernels: Kernels) -> torch.Tensor:
    return CAUSAL.run(kernels, KERNEL)[0]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, kernels: Kernels, right: torch.Tensor, tmp_path: Path) -> None:
    kernel, *changed = FAULTS[name]
    faulty = kernels.copy(tmp_path, kernel)
    faulty.change(*changed)
    assert not torch.equal(CAUSAL.run(faulty, KERNEL)[0], right)
