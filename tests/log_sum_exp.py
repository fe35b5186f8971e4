"""Log-sum-exp against float64, and ring attention, which is built on it.

The checks of tests/test_log_sum_exp.py (the reference, on CPU tensors) and of tests/gpu/test_log_sum_exp.py (the kernels).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import model_inputs
import torch
from accuracy import exact, exact_scores, relative_l1
from model_inputs import Inputs, attend, randn

QUERIES = 600  # of each head
HEADS = 6
# A single draw's mean error varies by 5e-5; of six heads the mean is that of the formula: half the variance of a score's error, since
# the exponential is convex. Measured: 0.0039 to 0.0061, 5e-5 to 1.0e-4.
LARGEST = 0.007
MEAN = 1.5e-4


class Error(NamedTuple):
    """Of log-sum-exp, over all rows that see a key: natural units."""

    largest: float
    mean: float
    deviation: float


def normal(queries: int, keys: int) -> Inputs:
    """Standard normal inputs of several heads; V is short, since log-sum-exp does not see it."""
    return Inputs(randn(1, HEADS, queries, 128, seed=7), randn(1, HEADS, keys, 128, seed=8), randn(1, HEADS, keys, 16, seed=9))


def exact_lse(inputs: Inputs, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """In float64, a head at a time."""
    found = []
    for head in range(inputs.q.shape[1]):
        q, k = (x[:, head : head + 1] for x in (inputs.q, inputs.k))
        found.append(torch.logsumexp(exact_scores(q, k, is_causal=causal, sm_scale=None, attn_mask=mask), dim=-1))
    return torch.cat(found, dim=1)


def error(kernel: str, inputs: Inputs, mask: torch.Tensor | None = None, *, causal: bool = False) -> Error:
    """What a kernel's differs by; where a query sees no key it must be -infinity, and nowhere else."""
    _, lse = attend(kernel, inputs, mask, is_causal=causal)
    expected = exact_lse(inputs, mask, causal)
    blind = expected == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    off = (lse - expected)[~blind]
    assert off.isfinite().all()
    return Error(float(off.abs().max()), float(off.mean()), float(off.std()) if off.numel() > 1 else 0.0)


class Kind(NamedTuple):
    """Inputs that are not standard normal."""

    name: str
    inputs: Inputs
    largest: float  # error that is allowed; the measured ones are a half to three quarters of it
    deviation: float  # and its standard deviation
    mask: torch.Tensor | None = None
    causal: bool = False


def kinds(queries: int, keys: int) -> Iterator[Kind]:
    """With each what may be: a few deviations of a score's error, whose terms are in tests/fuzz_bounds.py, where one key has all weight."""
    q, k, v = normal(queries, keys)
    yield Kind("a sink of 0.9", model_inputs.sink(keys, 0.9, queries=queries), 0.06, 0.016)
    yield Kind("a sink of 0.99", model_inputs.sink(keys, 0.99, queries=queries), 0.09, 0.024)
    yield Kind("offsets of K", Inputs(q, k + 8 * randn(1, HEADS, 1, 128, seed=10), v), 0.007, 0.0016)
    channels = torch.ones(128)
    channels[::16] = 30.0
    yield Kind("outlier channels, scores of several hundred", Inputs(q * channels, k * channels, v), 14.0, 2.8)
    yield Kind("outlier channels of K", Inputs(q, k * channels, v), 1.3, 0.25)
    # All of P is rounded alike, to bfloat16 by up to 2^-9.
    yield Kind("small scores", Inputs(0.01 * q, k, v), 0.0025, 0.0012)
    yield Kind("large scores", Inputs(8 * q, k, v), 0.45, 0.1)
    yield Kind("causal: few keys in the first rows", normal(300, 300), 0.05, 0.0035, causal=True)
    yield Kind("one key", normal(300, 1), 1e-5, 1e-6)
    for few in (2, 3, 7, 17, 64):
        yield Kind(f"{few} keys", normal(300, few), 0.035, 0.0065)
    some = torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 0.05
    some[7:19] = False
    yield Kind("a mask that leaves one key in twenty, and some rows none", normal(300, 300), 0.04, 0.0065, some)
    bias = torch.randn(300, 300, generator=torch.Generator().manual_seed(1)).masked_fill(~some, -math.inf)
    yield Kind("the same, added", normal(300, 300), 0.04, 0.0065, bias)
    # Of some kernels in another unit.
    yield Kind("scores of millions", Inputs(2000 * q, 2000 * k, v), 2.3e5, 5e4)
    q, k, v = normal(300, 300)
    yield Kind("the same, under a mask that adds", Inputs(2000 * q, 2000 * k, v), 2.3e5, 5e4, bias)


def check(kernel: str, kind: Kind, device: str, dtype: torch.dtype) -> None:
    """Hold a kernel to what may be."""
    mask = None if kind.mask is None else kind.mask.to(device)
    found = error(kernel, kind.inputs.to(device, dtype), mask, causal=kind.causal)
    print(
        f"{kernel} {str(dtype)[6:]} {kind.name}: largest {found.largest:.2g}, deviation {found.deviation:.2g}, mean {found.mean:+.1g}"
    )
    assert found.largest <= kind.largest, kind.name
    assert found.deviation <= kind.deviation, kind.name


def check_normal(kernel: str, keys: int, device: str, dtype: torch.dtype) -> None:
    """Standard normal inputs."""
    found = error(kernel, normal(QUERIES, keys).to(device, dtype))
    print(
        f"{kernel} {str(dtype)[6:]} {keys} keys: largest {found.largest:.4f}, deviation {found.deviation:.5f}, mean {found.mean:+.1e}"
    )
    assert found.largest <= LARGEST
    assert abs(found.mean) <= MEAN


class Ring(NamedTuple):
    """Relative L1 errors of the output, parts of K and V merged as ring attention does, and of its log-sum-exp."""

    single: float  # all keys in one call
    ring: float  # our output and log-sum-exp of each part
    exact_lse: float  # the same, merged by exact log-sum-exp
    ours_lse: float  # exact outputs, merged by our log-sum-exp, and rounded once
    rounded: float  # exact outputs of each part rounded to the dtype, exact log-sum-exp: what no kernel does better
    bfloat16_lse: float  # as `ring`, with log-sum-exp rounded to bfloat16 on the way
    largest_lse: float  # error of the merged log-sum-exp

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.5f}" for name, value in self._asdict().items())


def merged(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps of parts of the keys to those of all, in float32, by the formula of diffusers, yunchang and xDiT."""
    out, lse = (x.float() for x in parts[0])
    for more, more_lse in parts[1:]:
        share = torch.sigmoid(more_lse.float() - lse)[..., None]
        out = out - share * (out - more.float())
        lse = lse - torch.nn.functional.logsigmoid(lse - more_lse.float())
    return out, lse


def ring(kernel: str, inputs: Inputs, ranks: int = 2) -> Ring:
    """Ring attention of so many GPUs, on one; errors of the output as a caller gets it, rounded to the inputs' dtype."""
    q, k, v = inputs
    dtype = q.dtype
    truth, truth_lse = exact(q, k, v)
    parts = [Inputs(q, some_k, some_v) for some_k, some_v in zip(k.chunk(ranks, 2), v.chunk(ranks, 2), strict=True)]
    ours = [attend(kernel, part) for part in parts]
    right = [exact(*part) for part in parts]

    def off(outputs: list[torch.Tensor], sums: list[torch.Tensor]) -> float:
        return relative_l1(merged(list(zip(outputs, sums, strict=True)))[0].to(dtype), truth)

    our_outputs, our_sums = [out for out, _ in ours], [lse for _, lse in ours]
    outputs, sums = [out for out, _ in right], [lse for _, lse in right]
    return Ring(
        single=relative_l1(attend(kernel, inputs)[0], truth),
        ring=off(our_outputs, our_sums),
        exact_lse=off(our_outputs, sums),
        ours_lse=off(outputs, our_sums),
        rounded=off([out.to(dtype) for out in outputs], sums),
        bfloat16_lse=off(our_outputs, [lse.bfloat16() for lse in our_sums]),
        largest_lse=float((merged(ours)[1] - truth_lse).abs().max()),
    )


def check_ring(kernel: str, inputs: Inputs, ranks: int = 2) -> None:
    """Two parts cost what rounding their outputs does, and log-sum-exp adds nothing to speak of."""
    found = ring(kernel, inputs, ranks)
    print(f"{kernel} {str(inputs.q.dtype)[6:]} {ranks} parts of {inputs.k.shape[2]} keys: {found}")
    assert found.ring <= 1.03 * math.hypot(found.single, found.rounded)
    assert found.ring <= 1.03 * found.exact_lse
    assert found.ours_lse <= 0.002
    assert found.largest_lse <= LARGEST


def ring_inputs(queries: int, keys: int, dtype: torch.dtype, device: str) -> Inputs:
    """Standard normal."""
    return Inputs(*(randn(1, 2, n, 128, seed=20 + i) for i, n in enumerate((queries, keys, keys)))).to(device, dtype)
