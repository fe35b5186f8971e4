"""tests/fuzz.py: some of its random calls on CPU tensors, and that it sees faults which are put in."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fuzz
import fuzz_inputs
import pytest
import torch
from accuracy import relative_l1
from fuzz_bounds import Exact
from fuzz_inputs import Problem

try:
    import fuzz_fp4
except ImportError:  # sageattn3 is a package of its own
    fuzz_fp4 = None  # type: ignore[assignment]

FIRST = 1_000_000  # of the seeds that are tried: always the same
BLOCK = 150
CHANGES = 0.2  # relative L1 by which a fault must change the right answer to be one that is to be seen


@pytest.mark.parametrize("block", range(8))
def test_random_calls(block: int) -> None:
    failures = [
        failure
        for seed in range(FIRST + BLOCK * block, FIRST + BLOCK * (block + 1))
        for failure in fuzz.solve(seed, "cpu").failures
    ]
    assert not failures, "\n".join(fuzz.report(failure, "cpu") for failure in failures)


def found(
    fault: Callable[[Problem], Problem | None], seeds: range, sees: Callable[[int, Problem, Problem, Exact], bool]
) -> tuple[int, int]:
    """To how many problems a fault can be done that changes the right answer, and how often what is then computed is seen to be wrong."""
    seen = of = 0
    for seed in seeds:
        problem = fuzz_inputs.problem(seed, "cpu")
        changed = fault(problem)
        if changed is None:
            continue
        exact = Exact(problem)
        out = Exact(changed).out
        if torch.equal(out, exact.out) or relative_l1(out, exact.out) <= CHANGES:  # of zeros there is no relative distance
            continue
        of += 1
        seen += sees(seed, problem, changed, exact)
    print(f"{fault.__name__}: {seen} of {of}")
    return seen, of


def model_sees(seed: int, _: Problem, changed: Problem, exact: Exact) -> bool:
    """Whether what is computed of the changed problem is too far from the right answer."""
    call = next(iter(fuzz.calls(seed, "cpu", changed)))
    *figures, _differs = fuzz.one(call, changed, exact).tolist()
    return any(not figure <= 1.0 for figure in figures)


def reference_sees(seed: int, problem: Problem, changed: Problem, exact: Exact) -> bool:
    """Whether FP4's reference is too far from the right answer of the changed problem, beside that of the right one."""
    call, wrong = (next(iter(fuzz_fp4.calls(seed, "cpu", some))) for some in (problem, changed))
    result, expected = fuzz_fp4.reference(wrong, changed), fuzz_fp4.reference(call, problem)
    return any(not figure <= 1.0 for figure in fuzz_fp4.figures(exact, call.smooth_k, result, expected).tolist())


def another_column(problem: Problem) -> Problem | None:
    """The mask is read one key further on."""
    mask = problem.mask
    if mask is None or mask.shape[-1] < 2:
        return None
    hidden = fuzz_inputs.hides(mask.roll(1, -1))
    if problem.is_causal:
        hidden = hidden | torch.ones(problem.q.shape[2], problem.k.shape[2], dtype=torch.bool).triu(1)
    return problem._replace(mask=mask.roll(1, -1), hidden=hidden)


def another_head(problem: Problem) -> Problem | None:
    """The key heads change places."""
    if problem.k.shape[1] < 2 or problem.k.stride(1) == 0 or problem.k.shape[2] < 2:
        return None
    return problem._replace(k=problem.k.flip(1))


def beyond_the_last_key(problem: Problem) -> Problem | None:
    """K and V are read one token further on."""
    k, v = problem.k, problem.v
    if problem.packed is not None or k.stride(2) < k.shape[3]:
        return None
    further = [x.as_strided(x.shape, x.stride(), x.storage_offset() + x.stride(2)) for x in (k, v)]
    if not further[0][:, :, -1].isnan().all():
        return None
    return problem._replace(k=further[0], v=further[1])


def another_block(problem: Problem) -> Problem | None:
    """V's second 64 tokens are its first again."""
    if problem.packed is not None or problem.v.shape[2] < 128 or problem.v.stride(2) == 0:
        return None
    return problem._replace(v=torch.cat([problem.v[:, :, :64], problem.v[:, :, :64], problem.v[:, :, 128:]], dim=2))


def one_key_fewer(problem: Problem) -> Problem | None:
    """The last key is left out."""
    if problem.packed is not None or problem.hidden is not None or problem.k.shape[2] < 2:
        return None
    return problem._replace(k=problem.k[:, :, :-1], v=problem.v[:, :, :-1])


FAULTS = [another_column, another_head, another_block, beyond_the_last_key, one_key_fewer]


# All but where a score is so large that its rounding decides.
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: Callable[[Problem], Problem | None]) -> None:
    seen, of = found(fault, range(FIRST, FIRST + 400), model_sees)
    assert of >= 10
    assert seen >= 0.85 * of


@pytest.mark.skipif(fuzz_fp4 is None, reason="sageattn3 is not installed here")
def test_random_fp4_calls() -> None:
    subject = fuzz_fp4.SAGEATTN3
    failures = [failure for seed in range(FIRST, FIRST + 30) for failure in fuzz.solve(seed, "cpu", subject).failures]
    assert not failures, "\n".join(fuzz.report(failure, "cpu", subject) for failure in failures)


@pytest.mark.skipif(fuzz_fp4 is None, reason="sageattn3 is not installed here")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_fp4_are_seen(fault: Callable[[Problem], Problem | None]) -> None:
    seen, of = found(fault, range(FIRST, FIRST + 400), reference_sees)
    assert of >= 10
    assert seen >= 0.8 * of


def test_written_inputs_are_seen() -> None:
    def writes(call: fuzz.Call, problem: Problem, exact: Exact) -> torch.Tensor:
        problem.buffer[-1] = 0
        return fuzz.one(call, problem, exact)

    failures = fuzz.solve(FIRST, "cpu", fuzz.SAGEATTENTION._replace(judge=writes)).failures
    assert [failure.wrong for failure in failures] == ["a byte of the inputs' buffer changed"]


def test_a_difference_between_two_runs_is_seen() -> None:
    count = iter(range(1000))

    def once(seed: int, device: str, problem: Problem) -> list[fuzz.Call]:
        def differs(call: fuzz.Call) -> torch.Tensor:
            out = call.run()
            out = out[0] if isinstance(out, tuple) else out
            return torch.nextafter(out, out + 1) if next(count) % 2 else out

        return [call._replace(run=functools.partial(differs, call)) for call in fuzz.calls(seed, device, problem)]

    failures = fuzz.solve(FIRST, "cpu", fuzz.SAGEATTENTION._replace(calls=once)).failures
    assert failures
    assert all("two runs differ" in failure.wrong for failure in failures)


def test_seeds_of_what_failed_are_said_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def solve(seed: int, device: str, subject: fuzz.Subject) -> fuzz.Outcome:
        failures = [fuzz.Failure(seed, "a problem", "a call", "wrong")] * 2 if seed % 3 == 0 else []
        return fuzz.Outcome(2, failures, [])

    monkeypatch.setattr(fuzz, "solve", solve)
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--device", "cpu", "--seed", "5", "--calls", "10"])
    assert fuzz.main() == 1
    assert capsys.readouterr().out.endswith("\n10 calls, 4 failures\n  seed 6\n  seed 9\n")


def test_everything_lies_in_nan() -> None:
    for seed in range(FIRST, FIRST + 30):
        problem = fuzz_inputs.problem(seed, "cpu")
        q = problem.q
        around = q.new_empty(0).set_(q.untyped_storage(), q.storage_offset() - 32, (32,))
        assert around.isnan().all()
        assert math.isfinite(q.double().sum())


def test_the_command_repeats_a_seed() -> None:
    command = [sys.executable, str(Path(fuzz.__file__)), "--device", "cpu", "--seed", str(FIRST), "--calls", "1"]
    done = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2)]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert fuzz_inputs.problem(FIRST, "cpu").words in done[0].stdout
