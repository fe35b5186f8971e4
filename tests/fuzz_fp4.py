"""Random calls of sageattn3's functions beside its reference: `python tests/fuzz_fp4.py --seconds 60`.

Problems, options and reports are those of tests/fuzz.py, and a call fails as there but for how near is near enough. Numbers in FP4 have one
bit of mantissa, and a code that is its neighbour moves a row by some hundredths: of that there is no model here. But there is the
reference, which does what kernels do step by step on the CPU. What lies no further from float64 than it, or little beyond, is right.

It needs PyTorch and both packages. The GPU is of compute capability 12.0 or 12.1, or any for which kernels were compiled as docs/sageattn3.md says.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import fuzz
import sageattn3
import torch
from fuzz import Call
from fuzz_bounds import Exact, largest
from fuzz_inputs import Problem
from sageattn3 import _ops

CALLS_OF_A_PROBLEM = {"cpu": 1, "cuda": 3}
KERNEL = "sm120_qk_fp4_pv_fp4"
TOO_LARGE = 2.0**12  # scores: of larger ones a code decides which key has all weight


class Limits(NamedTuple):
    """How far from float64 a call may be: so many times as far as the reference, and so much of what P makes of V's magnitudes.

    In 20,000 calls on an H200 the kernels, emulated, were beyond the first by 0.007, 0.04, 0.14 and 0.6. Rows count where K is smoothed: else offsets
    may make scores so coarse that a code is a whole row.
    """

    call: tuple[float, float] = (1.0, 0.02)
    row: tuple[float, float] = (2.0, 0.15)
    channel: tuple[float, float] = (2.0, 0.3)  # of a head
    lse: tuple[float, float, float] = (2.0, 0.1, 1.0)  # the second of log-sum-exp itself, the third of 1


LIMITS = Limits()
Run = functools.partial[Any]


class Options(NamedTuple):
    """Of a call."""

    per_block_mean: bool  # not of packed sequences
    smooth_k: bool
    smooth_v: bool
    return_lse: bool


def calls(seed: int, device: str, problem: Problem) -> Iterator[Call]:
    """Public functions, where they serve the GPU, and the operators, each with random options."""
    rng = random.Random(seed + 1)
    choices = [operator] if problem.q.dtype != torch.float32 else []
    if device == "cpu" or torch.cuda.get_device_capability(problem.q.device)[0] == 12:
        choices.append(function)
    for _ in range(CALLS_OF_A_PROBLEM[device] if choices else 0):
        options = Options(rng.random() < 0.5, rng.random() < 0.75, rng.random() < 0.5, rng.random() < 0.7)
        run = rng.choice(choices)(problem, options)
        yield Call(f"{run.func.__name__} {options}", KERNEL, options.smooth_k, options.smooth_v, run)


def tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Q, K and V as they are given."""
    qkv = (problem.q, problem.k, problem.v)
    if problem.packed is not None:
        return tuple(x[0].transpose(0, 1) for x in qkv)
    return tuple(x.transpose(1, 2) for x in qkv) if problem.tensor_layout == "NHD" else qkv


def operator(problem: Problem, options: Options) -> Run:
    """A call of what the functions call, for any GPU that has the kernel."""
    per_block_mean, *smoothing_and_lse = options
    what = (problem.is_causal, problem.factor, *smoothing_and_lse, KERNEL)
    arguments: tuple[Any, ...]
    if (packed := problem.packed) is not None:
        arguments = (*tensors(problem), packed.cu_seqlens_q, packed.cu_seqlens_k, *what)
        return functools.partial(_ops.attention_varlen, *arguments)
    arguments = (*tensors(problem), problem.mask, problem.tensor_layout, *what, per_block_mean)
    return functools.partial(_ops.attention, *arguments)


def function(problem: Problem, options: Options) -> Run:
    """A call of a public function."""
    named: dict[str, Any] = options._asdict() | {"is_causal": problem.is_causal, "sm_scale": problem.sm_scale}
    arguments: tuple[Any, ...]
    if (packed := problem.packed) is not None:
        del named["per_block_mean"]
        arguments = (*tensors(problem), packed.cu_seqlens_q, packed.cu_seqlens_k, packed.largest_q, packed.largest_k)
        return functools.partial(sageattn3.sageattn3_varlen, *arguments, **named)
    named["tensor_layout"] = problem.tensor_layout
    return functools.partial(sageattn3.sageattn3_blackwell, *tensors(problem), attn_mask=problem.mask, **named)


def reference(call: Call, problem: Problem) -> fuzz.Result:
    """The same call of CPU tensors."""
    assert isinstance(call.run, functools.partial)
    result = call.run.func(*(x.cpu() if torch.is_tensor(x) else x for x in call.run.args), **call.run.keywords)
    out, lse = result if isinstance(result, tuple) else (result, None)
    return fuzz.by_head(out, lse if lse is not None and lse.numel() else None, problem)


def judge(call: Call, problem: Problem, exact: Exact) -> torch.Tensor:
    """A call's figures beside the reference's, on its device, and last whether two runs differ.

    Raises:
        AssertionError: the result's shape, dtype or strides are not as documented.
    """
    return beside(reference(call, problem), call, problem, exact)


def beside(expected: fuzz.Result, call: Call, problem: Problem, exact: Exact) -> torch.Tensor:
    """The same beside what the reference has answered already."""
    out, lse, differs = fuzz.twice(call, problem)
    if out.numel() == 0:
        return torch.zeros(len(Limits._fields) + 1, dtype=torch.float64, device=out.device)
    expected_out, expected_lse = (None if x is None else x.to(out.device) for x in expected)
    assert expected_out is not None
    return torch.cat([figures(exact, call.smooth_k, (out, lse), (expected_out, expected_lse)), differs.double()[None]])


def figures(exact: Exact, smooth_k: bool, result: fuzz.Result, expected: fuzz.Result) -> torch.Tensor:
    """Errors over what is allowed: of the call, and the largest of a row, a head's channel, a log-sum-exp."""
    error, beside = ((of[0].double().unflatten(1, exact.heads) - exact.out).abs() for of in (result, expected))
    # Of larger scores nothing is promised, nor where the reference has no number.
    skipped = (largest(exact.norms, -1) > TOO_LARGE) | ~expected[0].isfinite().all(dim=-1).unflatten(1, exact.heads)
    smallest = float(torch.finfo(exact.dtype).smallest_normal)
    three = [x.masked_fill(skipped.unsqueeze(-1), 0.0) for x in (error, beside, exact.p @ exact.v.abs() + smallest)]

    def over(limit: tuple[float, float], dimensions: tuple[int, ...]) -> torch.Tensor:
        found, of_reference, size = (x.sum(dim=dimensions) for x in three)
        return (found / (limit[0] * of_reference + limit[1] * size + limit[1] * smallest)).max()

    of_rows = over(LIMITS.row, (-1,)) if smooth_k else torch.zeros_like(exact.out[0, 0, 0, 0, 0])
    found = [over(LIMITS.call, (0, 1, 2, 3, 4)), of_rows, over(LIMITS.channel, (-2,))]
    if result[1] is None or expected[1] is None:
        return torch.stack([*found, torch.zeros_like(found[0])])
    got, wanted = (of.double().unflatten(1, exact.heads) for of in (result[1], expected[1]))
    factor, relative, absolute = LIMITS.lse
    allowed = factor * (wanted - exact.lse).abs() + relative * wanted.abs() + absolute
    right = (got == wanted) | skipped  # -infinity is
    return torch.stack([*found, ((got - wanted).abs() / allowed).masked_fill(right, 0.0).max()])


SAGEATTN3 = fuzz.Subject("tests/fuzz_fp4.py", f"sageattn3 {sageattn3.__version__}", Limits._fields, calls, judge)


if __name__ == "__main__":
    sys.exit(fuzz.main(SAGEATTN3, __doc__))
