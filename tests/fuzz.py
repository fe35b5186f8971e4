"""Random calls of every function against float64 attention: `python tests/fuzz.py --seconds 60`.

Each seed makes one problem (tests/fuzz_inputs.py): tensors of random shapes, strides and values in a buffer that is NaN everywhere else.
Several functions and kernels solve it, with options of their own. A call fails if it raises an error, if the second time
gives other bits than the first, if the output or log-sum-exp lies farther from float64 than tests/fuzz_bounds.py allows, or if a byte of
the buffer changes. A failure prints the command that repeats it. The exit status is 1 if there was one.

It needs PyTorch and an installed sageattention, nothing else. On a GPU what is computed and what it is compared with stays there;
the host waits once for each problem.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import queue
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes, small tensors

import torch
from fuzz_bounds import Exact
from fuzz_inputs import Problem, problem

import sageattention
from sageattention import _library, _ops, dispatch

FIGURES = ("call", "row", "element", "lse")
DEATHS = 20  # of processes, after which nothing is to be learnt
CALLS_OF_A_PROBLEM = {"cpu": 2, "cuda": 8}
Result = tuple[torch.Tensor, "torch.Tensor | None"]


class Call(NamedTuple):
    """One way to solve a problem."""

    words: str
    kernel: str  # that serves it
    smooth_k: bool
    smooth_v: bool
    run: Callable[[], Any]


class Subject(NamedTuple):
    """What is called, and who judges it."""

    program: str  # that does so: what a failure is repeated by
    version: str
    figures: tuple[str, ...]  # what they are of
    calls: Callable[[int, str, Problem], Iterable[Call]]
    judge: Callable[[Call, Problem, Exact], torch.Tensor]  # figures, no more than 1 if all is well, and whether two runs differ


class Failure(NamedTuple):
    """What was wrong with a call."""

    seed: int
    problem: str
    call: str
    wrong: str


def kernels(device: str, problem: Problem) -> list[str]:
    """Those that can solve a problem on a device."""
    _, present = dispatch.gpu_of(device, None)
    uneven = problem.q.shape[-1] % 8 != 0 or problem.v.shape[-1] % 8 != 0

    def can(name: str, kernel: dispatch.Kernel) -> bool:
        if present is None:
            return True
        able = (kernel.uneven or not uneven) and (kernel.other_masks or not dispatch.is_other_mask(problem.mask, problem.q))
        return able and name in present

    return [name for name, kernel in dispatch.KERNELS.items() if can(name, kernel)]


def calls(seed: int, device: str, problem: Problem) -> Iterator[Call]:
    """Public functions and single kernels, each with random options."""
    rng = random.Random(seed + 1)
    heads_last = problem.tensor_layout == "NHD"
    packed = problem.packed
    if packed is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (problem.q, problem.k, problem.v))
        lengths: tuple[Any, ...] = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.largest_q, packed.largest_k)
    else:
        q, k, v = (x.transpose(1, 2) if heads_last else x for x in (problem.q, problem.k, problem.v))
    halves = q.dtype != torch.float32
    choices = [("operator", name) for name in kernels(device, problem)] if halves else []
    if packed is not None:
        choices += [("sageattn_varlen", "")] * 2
    else:
        choices += [(function, pv) for function, some in dispatch.ACCUMULATORS.items() for pv in some or ("",)]
        choices += [("sageattn_qk_int8_pv_fp16_triton", ""), ("sageattn", "")]
    for function, which in rng.sample(choices, min(len(choices), CALLS_OF_A_PROBLEM[device])):
        smooth_k, smooth_v, lse = rng.random() < 0.75, rng.random() < 0.5, rng.random() < 0.7
        words = f"{function} {which} smooth_k={smooth_k} smooth_v={smooth_v} lse={lse}"
        if function == "operator":
            options = (problem.is_causal, problem.factor, smooth_k, smooth_v, lse)
            if packed is not None:
                run = _bound(_ops.attention_varlen, (q, k, v, *lengths[:2], *options, which), {})
            else:
                run = _bound(_ops.attention, (q, k, v, problem.mask, problem.tensor_layout, *options, which), {})
            yield Call(words, which, smooth_k, smooth_v, run)
            continue
        named: dict[str, Any] = {"is_causal": problem.is_causal, "smooth_k": smooth_k, "return_lse": lse}
        if problem.sm_scale is not None or rng.random() < 0.5:
            named["sm_scale"] = problem.sm_scale
        if packed is not None:
            kernel = sageattention.explain(q, k, v, function="sageattn_varlen").kernel
            yield Call(
                f"{words} -> {kernel}",
                kernel,
                smooth_k,
                True,
                _bound(sageattention.sageattn_varlen, (q, k, v, *lengths), named),
            )
            continue
        named["tensor_layout"] = problem.tensor_layout
        if problem.mask is not None:
            named["attn_mask"] = problem.mask
        if which:
            named["pv_accum_dtype"] = which
        if function in ("sageattn_qk_int8_pv_fp16_cuda", "sageattn_qk_int8_pv_fp8_cuda"):
            named["smooth_v"] = smooth_v
        try:
            explained = sageattention.explain(
                q, k, v, problem.tensor_layout, attn_mask=problem.mask, function=function, pv_accum_dtype=which or None
            )
        except ValueError:  # not on this GPU, and the message says so
            continue
        in_16_bit = explained.or_16_bit and (_may_be_in_16_bits(problem) or _is_faster_in_16_bits(problem, explained.kernel))
        if in_16_bit and "huge" in problem.words and problem.q.dtype != torch.float16:
            continue  # which give NaN where a product overflows, as float16's do not
        yield Call(
            f"{words} -> {'16 bits or ' if in_16_bit else ''}{explained.kernel}",
            explained.kernel,
            smooth_k or function == "sageattn",
            bool(named.get("smooth_v", True)),  # those that do not ask take V's mean off by themselves
            _bound(getattr(sageattention, function), (q, k, v), named),
        )


def _may_be_in_16_bits(problem: Problem) -> bool:
    few = dispatch.FEW_TOKENS
    (_, heads, queries, _), (_, kv_heads, keys, _) = problem.q.shape, problem.k.shape
    return bool((queries <= few.queries and keys <= few.keys) or heads * queries <= few.rows * kv_heads)


def _is_faster_in_16_bits(problem: Problem, kernel: str) -> bool:
    """As the operator expects it."""
    batch, heads, queries, head_dim = problem.q.shape
    sizes = (batch, heads, problem.k.shape[1], queries, problem.k.shape[2], head_dim, problem.v.shape[-1])
    if 0 in sizes:
        return False
    multiprocessors = torch.cuda.get_device_properties(problem.q.device).multi_processor_count
    return _library.library.faster_in_16_bits(kernel, multiprocessors, sizes, problem.is_causal, form_of(problem))


def form_of(problem: Problem) -> str:
    """Of the mask, one of `_library.MASKS`."""
    if problem.mask is None:
        return "none"
    whole = (*problem.q.shape[:3], problem.k.shape[2])
    _, of_heads, of_rows, _ = (s if n > 1 else 0 for n, s in zip(whole, problem.mask.expand(whole).stride(), strict=True))
    kind = "bool" if problem.mask.dtype == torch.bool else "numbers"
    if of_rows == 0:
        return f"{kind} of keys"
    return f"{kind} of each head" if kind == "numbers" and of_heads != 0 else kind


def _bound(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], Any]:
    return lambda: function(*arguments, **named)


def bits(x: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, of which NaN equals itself."""
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def poison(problem: Problem) -> None:
    """Leave NaN where the allocator will put the output and log-sum-exp: what is not written shows."""
    for elements, dtype in (
        (problem.q[..., 0].numel(), torch.float32),
        (problem.q[..., 0].numel() * problem.v.shape[3], problem.q.dtype),
    ):
        torch.full((elements,), math.nan, dtype=dtype, device=problem.q.device)


def twice(call: Call, problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A call's output and log-sum-exp, as `by_head` has them, and whether a second run gives other bits.

    Raises:
        AssertionError: the result's shape, dtype or strides are not as documented.
    """
    results: list[Result] = []
    for _ in range(2):
        poison(problem)
        result = call.run()
        out, lse = result if isinstance(result, tuple) else (result, None)
        results.append((out, lse if lse is not None and lse.numel() else None))
    (out, lse), (again, lse_again) = results
    logical = (*problem.q.shape[:3], problem.v.shape[3])
    if problem.packed is not None:
        shape = (logical[2], logical[1], logical[3])
    else:
        shape = (logical[0], logical[2], logical[1], logical[3]) if problem.tensor_layout == "NHD" else logical
    assert (tuple(out.shape), out.dtype, out.is_contiguous()) == (shape, problem.q.dtype, True), (
        out.shape,
        out.dtype,
        out.stride(),
    )
    assert lse is None or (lse.dtype, lse.is_contiguous()) == (torch.float32, True), (lse.dtype, lse.stride())
    differs = (bits(out) != bits(again)).any()
    if lse is not None and lse_again is not None:
        differs = differs | (bits(lse) != bits(lse_again)).any()
    return *by_head(out, lse, problem), differs


def by_head(out: torch.Tensor, lse: torch.Tensor | None, problem: Problem) -> Result:
    """A result as [batch, heads, tokens, …], whatever the layout."""
    if problem.packed is not None:
        return out.transpose(0, 1).unsqueeze(0), None if lse is None else lse.unsqueeze(0)
    return (out.transpose(1, 2) if problem.tensor_layout == "NHD" else out), lse


def one(call: Call, problem: Problem, exact: Exact) -> torch.Tensor:
    """A call's figures on its device, by the model of its errors, and last whether two runs differ.

    Raises:
        AssertionError: the result's shape, dtype or strides are not as documented.
    """
    out, lse, differs = twice(call, problem)
    if out.numel() == 0:
        return torch.zeros(len(FIGURES) + 1, dtype=torch.float64, device=out.device)
    return torch.cat([exact.figures(call.kernel, call.smooth_k, call.smooth_v, out, lse), differs.double()[None]])


SAGEATTENTION = Subject("tests/fuzz.py", f"sageattention {sageattention.__version__}", FIGURES, calls, one)


class Outcome(NamedTuple):
    """Of all calls of one problem."""

    calls: int
    failures: list[Failure]
    figures: list[tuple[Call, list[float]]]


def solve(seed: int, device: str, subject: Subject = SAGEATTENTION) -> Outcome:
    """Make the problem of a seed, solve it in several ways and judge each.

    Raises:
        Exception: whatever was raised beside the calls; on a GPU also what an earlier kernel did that it does not recover from.
    """
    posed = problem(seed, device)
    failures: list[Failure] = []
    found: list[tuple[Call, torch.Tensor]] = []
    exact = Exact(posed)
    for call in subject.calls(seed, device, posed):
        try:
            found.append((call, subject.judge(call, posed, exact)))
        except Exception as error:  # noqa: BLE001 whatever it is, it is what is looked for
            failures.append(Failure(seed, posed.words, call.words, f"{type(error).__name__}: {error}"))
    changed = (posed.buffer != posed.before).any().double()
    figures = torch.stack([*(some for _, some in found), changed.expand(len(subject.figures) + 1)]).tolist()
    if figures.pop()[0]:
        failures.append(
            Failure(seed, posed.words, " or ".join(call.words for call, _ in found), "a byte of the inputs' buffer changed")
        )
    for (call, _), numbers in zip(found, figures, strict=True):
        over = [f"{name} {number:.3g}" for name, number in zip(subject.figures, numbers, strict=False) if not number <= 1.0]
        if numbers[-1]:
            over.append("two runs differ")
        if over:
            failures.append(Failure(seed, posed.words, call.words, "beyond the limit, times: " + ", ".join(over)))
    return Outcome(len(found), failures, [(call, numbers) for (call, _), numbers in zip(found, figures, strict=True)])


def report(failure: Failure, device: str, subject: Subject = SAGEATTENTION) -> str:
    """What to print of a failure."""
    return "\n  ".join([again(failure.seed, device, subject), failure.problem, failure.call, failure.wrong])


def again(seed: int, device: str, subject: Subject) -> str:
    """How to repeat what failed."""
    return f"FAILED python {subject.program} --device {device} --seed {seed} --calls 1"


def work(start: int, step: int, device: str, subject: Subject, until: float, answers: Any, at: Any, rank: int) -> None:
    """One process: seeds `start`, `start + step`, … until the time is over. `at` says which seed it is at."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    seed = start
    while time.time() < until:
        at[rank] = seed
        try:
            outcome = solve(seed, device, subject)
        except Exception as error:  # noqa: BLE001 where the GPU is lost for this process the first question to it says so
            outcome = Outcome(0, [Failure(seed, "beside the calls", "", f"{type(error).__name__}: {error}")], [])
        answers.put((outcome.calls, outcome.failures))
        if device == "cuda" and outcome.failures:
            torch.cuda.synchronize()  # an error that the GPU does not recover from ends this process, and another goes on
        seed += step


def many(arguments: argparse.Namespace, subject: Subject) -> tuple[int, list[int]]:
    """Run processes until there are so many calls or so many seconds are over. Returns how many calls, and the seeds of those that failed."""
    context = multiprocessing.get_context("spawn")
    answers, at = context.Queue(), context.Array("q", arguments.processes)
    start, until, shown = time.time(), time.time() + arguments.seconds, 0.0
    done = deaths = 0
    failed: list[int] = []

    def begin(rank: int, seed: int) -> Any:
        step, at[rank] = arguments.processes, seed
        process = context.Process(
            target=work, args=(seed, step, arguments.device, subject, until, answers, at, rank), daemon=True
        )
        process.start()
        return process

    workers = [begin(rank, arguments.seed + rank) for rank in range(arguments.processes)]
    while any(worker.is_alive() for worker in workers) or not answers.empty():
        try:
            calls, failures = answers.get(timeout=0.5)
        except queue.Empty:
            calls, failures = 0, []
        done += calls
        for failure in failures:
            failed.append(failure.seed)
            print(report(failure, arguments.device, subject), flush=True)
        if arguments.calls and done >= arguments.calls:
            break
        for rank, worker in enumerate(workers):
            if not worker.is_alive() and worker.exitcode:
                deaths += 1
                failed.append(at[rank])
                print(
                    f"{again(at[rank], arguments.device, subject)}\n  the process died, exit status {worker.exitcode}",
                    flush=True,
                )
                workers[rank] = begin(rank, at[rank] + arguments.processes)
        if deaths > DEATHS:
            print(f"{deaths} processes died: given up", flush=True)
            break
        if time.time() - shown > 5:
            shown = time.time()
            print(f"{done} calls, {done / (shown - start):.0f} a second, {len(failed)} failures", file=sys.stderr, flush=True)
    for worker in workers:
        worker.terminate()
    return done, failed


def few(arguments: argparse.Namespace, subject: Subject) -> tuple[int, list[int]]:
    """The same in this process, for --calls small or a debugger."""
    done, failed, seed, until = 0, [], arguments.seed, time.time() + arguments.seconds
    while time.time() < until and (done < arguments.calls or not arguments.calls):
        outcome = solve(seed, arguments.device, subject)
        done += outcome.calls
        failed += [seed] * len(outcome.failures)
        if arguments.calls == 1:
            print(problem(seed, arguments.device).words)
            for call, numbers in outcome.figures:
                print(f"  {call.words}: " + ", ".join(f"{n} {x:.3g}" for n, x in zip(subject.figures, numbers, strict=False)))
        for failure in outcome.failures:
            print(report(failure, arguments.device, subject), flush=True)
        seed += 1
    return done, failed


def main(subject: Subject = SAGEATTENTION, description: str | None = __doc__) -> int:
    """Parse, run, say how many."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=None, help="the first; another one each time if not given")
    parser.add_argument("--calls", type=int, default=0, help="stop after about so many; 1: the calls of one seed, described")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many; 60 if neither is given")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**9) * 1000
    if arguments.seconds is None:
        arguments.seconds = 1e9 if arguments.calls else 60.0
    print(f"seed {arguments.seed} device {arguments.device}, {subject.version}, PyTorch {torch.__version__}", flush=True)
    done, failed = (few if arguments.processes == 1 else many)(arguments, subject)
    # Once more, since what was said of them may have scrolled away.
    print(f"{done} calls, {len(failed)} failures" + "".join(f"\n  seed {seed}" for seed in sorted(set(failed))))
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
