"""How far a kernel may be from float64 attention, element by element: a model of the errors of rounding, for tests/fuzz.py.

Scores. Q's row i is rounded to integers of max|q_i|/127, K's row j to those of the largest number in its group of 16 keys, after
the mean of those that are seen is taken off, and both are rotated where the kernels do. An error of rounding is evenly distributed in
±half a unit, so the variance of a score's error is
sm_scale² · (h_q²/3 · |k_j|² + h_k²/3 · |q_i|²), h being half units, and some for rounding K - mean to its dtype and float32.

Output. A relative error r_ij of p_ij moves the output by p_ij · r_ij · (v_j - out). Where the errors of different keys are independent,
variances add: Σ p² r² (v - out)². Where keys are alike they are not, and Cauchy-Schwarz bounds what they do: √(Σ p r²) · √(Σ p (v - out)²).
Rounding P and V adds ρ² Σ p² v², ρ being half a unit in the last place, over √3; rounding the output half a unit of it.

Found errors are divided by these standard deviations: over a whole call, over each row, and element by element; what the
quotients may be is in `LIMITS`. An output without error of the model has a quotient of about 0.8 over a call.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from fuzz_inputs import Problem, hides, sequence_of

from sageattention import reference


class Limits(NamedTuple):
    """What a quotient may be: a + b / sqrt(number of independent errors)."""

    call: tuple[float, float] = (1.5, 7.0)
    row: tuple[float, float] = (1.5, 9.0)
    element: float = 10.0  # where one channel makes the scores, its error in a row times V's sum by it: a product of two normal numbers, 9.2 in 110,000 calls
    lse: float = 8.0


LIMITS = Limits()
MEAN_MOVES = 1.25  # K less the mean of some keys has numbers so many times as large as K less the mean of all
MEAN_MOVES_ALIKE = 2.0  # twice is what any point between the keys may do
LARGE = 0.5  # standard deviation of a score from which on its exponential's is not proportional to it
TOO_LARGE = 2.0**40  # log-sum-exp is not held to anything beyond
CLIPPED = 2.0**49  # units of Q and K beyond, and so the order of scores


class Rounding(NamedTuple):
    """Of P and V in one kernel."""

    relative: float  # standard deviation of p · v, relative
    smallest_v: float = 0.0  # of v, relative to the largest in its channel


def unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative: the largest relative error of rounding."""
    return float(torch.finfo(dtype).eps / 2)


@functools.cache
def rounding(kernel: str, dtype: torch.dtype) -> Rounding:
    """How a kernel rounds P and V of a dtype."""
    precision = reference.PRECISION[kernel]
    variance = unit(precision.dtype or dtype) ** 2 / 3 * (1 if precision.dtype is None else 2)
    if precision.sums == torch.float16:
        variance += reference.BLOCK_N * unit(torch.float16) ** 2  # each sum is rounded, as a whole, and more than once
    smallest = 0.0
    if precision.dtype == torch.float8_e4m3fn and precision.largest_v is not None:
        smallest = 2.0**-10 / precision.largest_v / math.sqrt(3)
    return Rounding(math.sqrt(variance), smallest)


def largest(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """Magnitude over a dimension; 0 of none."""
    return x.abs().amax(dim=dimension) if x.shape[dimension] else x.sum(dim=dimension)


class Exact:
    """Float64 attention of a problem, and standard deviations of errors: [batch, q_heads, qo_len, …] as scores and outputs are."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._errors: dict[bool, Errors] = {}
        self._allowed: dict[tuple[Rounding, bool, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.dtype = torch.bfloat16 if problem.q.dtype == torch.float32 else problem.q.dtype
        q, k, v = (x.to(self.dtype).double() for x in (problem.q, problem.k, problem.v))
        if problem.packed is not None:
            k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)  # beyond the last sequence
        self.heads = (k.shape[1], q.shape[1] // k.shape[1])
        self.k = k
        # [batch, kv_heads, group, ...]
        self.q = q.unflatten(1, self.heads)
        self.v = v.unsqueeze(2)
        self.scores = self.q @ k.unsqueeze(2).transpose(-1, -2) * problem.factor
        self.bias = None
        scores = self.scores
        if problem.mask is not None and problem.mask.dtype != torch.bool:
            self.bias = self.by_head(problem.mask.double())
            scores = scores + self.bias
        if problem.hidden is not None:
            scores = scores.masked_fill(self.by_head(problem.hidden), -math.inf)
        if k.shape[2] == 0:
            self.lse = scores.new_full(scores.shape[:-1], -math.inf)
        else:
            self.lse = torch.logsumexp(scores, dim=-1)
        self.blind = self.lse == -math.inf
        self.log_p = torch.log_softmax(scores, dim=-1).masked_fill(self.blind.unsqueeze(-1), -math.inf)
        self.p = torch.exp(self.log_p)
        self.p2 = self.p.square()
        self.out = self.p @ self.v
        # What V has in common is no spread.
        self.middle = self.v.sum(dim=-2, keepdim=True) / max(1, k.shape[2])
        self.centred = self.v - self.middle
        self.range = 2 * largest(self.centred, -2).unsqueeze(-2)
        self.largest_v = largest(self.v, -2).unsqueeze(-2)
        # Keys whose errors matter, of each row: as many as would all weigh alike.
        self.independent = self.p2.sum(dim=-1).square() / self.p2.square().sum(dim=-1).clamp_min(1e-300)

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Something broadcastable to the scores, with key heads apart."""
        x = x[(None,) * (4 - x.dim())]
        return x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, self.heads)

    @functools.cached_property
    def groups(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """For each key its sequence and its group, and how many there are of each."""
        packed, tokens, device = self.problem.packed, self.k.shape[2], self.k.device.type
        each = tokens // 64 * 4 + 4
        if packed is None:
            at = torch.arange(tokens, device=device)
            return torch.zeros_like(at), at // 64 * 4 + at % 8 // 2, 1, each
        count = len(packed.lengths_k)
        sequence, at = sequence_of(packed.lengths_k, tokens, count, device)
        return sequence, sequence * each + at // 64 * 4 + at % 8 // 2, count + 1, (count + 1) * each

    @functools.cached_property
    def seen(self) -> torch.Tensor:
        """Which keys of a batch element some query sees, [batch, kv_len]; where a mask is there beside a causal one, as far as each alone tells."""
        mask, hidden = self.problem.mask, self.problem.hidden
        if mask is not None:
            hidden = hides(reference.without_far_keys(mask, is_causal=self.problem.is_causal))
        if hidden is None:
            return self.k.new_ones(self.k.shape[0], self.k.shape[2], dtype=torch.bool)
        hidden = hidden[(None,) * (4 - hidden.dim())]
        seen = (~hidden).any(dim=2).any(dim=1).expand(self.k.shape[0], self.k.shape[2])
        if mask is not None and self.problem.is_causal:
            seen = seen & (torch.arange(self.k.shape[2], device=self.k.device) < self.q.shape[-2])
        return seen

    @functools.cached_property
    def head_dim(self) -> int:
        """The kernels'."""
        return reference.kernel_head_dim(max(self.q.shape[-1], self.v.shape[-1]))

    def rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and K less its mean as the kernels rotate them, of their head_dim; no product changes."""
        wide = self.head_dim
        root = math.sqrt(reference.Rotation.unit(wide))
        new_q, new_k = (torch.nn.functional.pad(x, (0, wide - x.shape[-1])) for x in (q, k))
        for of_q, of_k, rotation in self.rotations:
            applies, factor = rotation.applies.to(q.device), rotation.factor.double().to(q.device)
            turned_q = rotation.of(q[..., of_q, :], factor.unsqueeze(2), wide) * root
            turned_k = rotation.of(k[..., of_k, :], 1.0 / factor, wide) * root
            new_q[..., of_q, :] = torch.where(applies.unsqueeze(2), turned_q, new_q[..., of_q, :])
            new_k[..., of_k, :] = torch.where(applies, turned_k, new_k[..., of_k, :])
        return new_q, new_k

    def repeated(self, x: torch.Tensor) -> float:
        """How many of a row's numbers are rounded alike after the rotation: signed sums of m numbers have 2^(m-1) magnitudes."""
        if not any(rotation.applies.any() for _, _, rotation in self.rotations):
            return 1.0
        together = self.head_dim // 4
        given = (x != 0).flatten(0, -2).any(dim=0).nonzero().flatten()
        least = min([together, *(count for count in torch.bincount(given % 16 // 4).tolist() if count)])
        return float(together / min(together, 2 ** (least - 1)))

    @functools.cached_property
    def rotations(self) -> list[tuple[slice, slice, reference.Rotation]]:
        """Of which queries and keys, as the kernels' samples tell."""
        q, k = self.q.flatten(1, 2).float(), self.k.float()
        if self.problem.packed is None:
            if self.problem.is_causal:
                k = k[:, :, : q.shape[2]]
            if 0 in (q.numel(), k.numel()):
                return []
            seen = None if self.problem.mask is None else self.seen[:, : k.shape[2]].to("cpu")
            return [(slice(None), slice(None), reference.find_rotation(q, reference.sampled_mean(k, seen=seen)[1]))]
        found = []
        first_q = first_k = 0
        for queries, keys in zip(self.problem.packed.lengths_q, self.problem.packed.lengths_k, strict=True):
            seen_keys = min(keys, queries) if self.problem.is_causal else keys
            some_q, some_k = q[:, :, first_q : first_q + queries], k[:, :, first_k : first_k + seen_keys]
            if 0 not in (some_q.numel(), some_k.numel()):
                rotation = reference.find_rotation(some_q, reference.sampled_mean(some_k)[1])
                found.append((slice(first_q, first_q + queries), slice(first_k, first_k + keys), rotation))
            first_q, first_k = first_q + queries, first_k + keys
        return found

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """|q| |k| and the factor: no score is larger."""
        return self.q.norm(dim=-1, keepdim=True) * self.k.norm(dim=-1)[:, :, None, None] * abs(self.problem.factor)

    @functools.cached_property
    def beyond(self) -> torch.Tensor:
        """Rows whose scores may be clipped, or larger than float32 holds, before the factor as after it."""
        products = self.q.norm(dim=-1, keepdim=True) * self.k.norm(dim=-1)[:, :, None, None]
        return (largest(self.norms, -1) > TOO_LARGE) | (largest(products, -1) > 1e37)

    @functools.cached_property
    def weighed(self) -> torch.Tensor:
        """What relative errors of p · v are multiplied by."""
        return ((self.p if self.problem.alike else self.p2) @ self.v.square()).sqrt()

    def errors(self, smooth_k: bool) -> Errors:
        """Of scores, with or without K's mean."""
        if smooth_k not in self._errors:
            self._errors[smooth_k] = Errors(self, smooth_k)
        return self._errors[smooth_k]

    @functools.cached_property
    def weighed_mean(self) -> torch.Tensor:
        """The same of V's typical size, which V less its mean may have where V is small."""
        keys = 1.0 if self.problem.alike else self.p2.sum(dim=-1, keepdim=True).sqrt()
        return keys * (self.v.square().sum(dim=-2, keepdim=True) / max(1, self.v.shape[-2])).sqrt()

    def deviation(self, rounded: Rounding, smooth_k: bool, smooth_v: bool) -> torch.Tensor:
        """Standard deviation of each element of the output; next to nothing where a query sees no key and gets zeros."""
        variance = self.errors(smooth_k).of_output.square() + (rounded.relative * self.weighed).square()
        if rounded.smallest_v:
            if smooth_v:
                variance = variance + (rounded.relative * self.weighed_mean).square()
            elif self.problem.v_alike:  # numbers that are rounded alike
                variance = variance + rounded.relative**2 * (self.p @ self.v.square())
            keys = 1.0 if self.problem.alike else self.p2.sum(dim=-1, keepdim=True).sqrt()
            variance = variance + (rounded.smallest_v * self.largest_v * keys).square()
        smallest = float(torch.finfo(self.dtype).smallest_normal) * unit(self.dtype) + 1e-24
        deviation = variance.sqrt() + unit(self.dtype) * self.out.abs() + (2.0**-24 * self.largest_v + smallest)
        return deviation.masked_fill(self.blind.unsqueeze(-1), 1e-300)

    def allowed(self, rounded: Rounding, smooth_k: bool, smooth_v: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What errors may add up to: over the call, over each row, and each element's."""
        key = (rounded, smooth_k, smooth_v and rounded.smallest_v > 0.0)
        if key not in self._allowed:
            deviation = self.deviation(*key)
            rows = int((~self.blind).sum())  # packed tensors have such as are of no sequence
            keys = self.k.numel()
            if self.problem.rows_alike:
                rows //= max(1, self.blind.shape[-1])
            together = 1.0 if self.problem.v_alike else self.v.shape[-1]
            by_row = deviation.sum(dim=-1)
            (a, b), (c, d) = LIMITS.call, LIMITS.row
            call = by_row.sum() * (a + b / math.sqrt(max(1, min(rows, keys))))
            row = by_row * (c + d / self.independent.clamp(1.0, together).sqrt())
            self._allowed[key] = (call, row, deviation * LIMITS.element)
        return self._allowed[key]

    def figures(self, kernel: str, smooth_k: bool, smooth_v: bool, out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
        """Errors over what is allowed, on the device: of the call, and the largest of a row, an element, a log-sum-exp. They are no more
        than 1 if all is well; NaN and infinity are what they are made of."""
        call, row, element = self.allowed(rounding(kernel, self.dtype), smooth_k, smooth_v)
        error = (out.double().unflatten(1, self.heads) - self.out).abs()
        by_row = error.sum(dim=-1)
        found = [by_row.sum() / call, (by_row / row).max(), (error / element).max()]
        if lse is None:
            found.append(torch.zeros_like(found[0]))
        else:
            got = lse.double().unflatten(1, self.heads)
            # -infinity is right where it is expected; what is beyond float32 is not looked at.
            right = (got == self.lse) | self.beyond
            found.append(((got - self.lse).masked_fill(right, 0.0).abs() / self.errors(smooth_k).of_lse).max() / LIMITS.lse)
        return torch.stack(found)


class Errors:
    """Standard deviations for the errors of the scores."""

    def __init__(self, exact: Exact, smooth_k: bool) -> None:
        self.exact, self.problem, self.smooth_k = exact, exact.problem, smooth_k

    @functools.cached_property
    def variance(self) -> torch.Tensor:
        """Of each score."""
        exact, factor = self.exact, self.problem.factor
        q, k = exact.q, exact.k
        sequence, group, sequences, groups = exact.groups
        moves = repeated = 1.0
        seen = exact.seen[:, None, :, None].to(k.dtype)
        if self.smooth_k:
            total = k.new_zeros(*k.shape[:2], sequences, k.shape[3]).index_add_(2, sequence, k * seen)
            count = k.new_zeros(k.shape[0], 1, sequences, 1).index_add_(2, sequence, seen)
            k = k - (total / count.clamp_min(1.0))[:, :, sequence]
            repeated = max(exact.repeated(q), exact.repeated(k))  # where one is zero, the other is made small
            q, k = exact.rotated(q, k)
            moves = MEAN_MOVES_ALIKE if self.problem.alike else MEAN_MOVES
        k = k * seen
        size = largest(k, -1)
        index = group.expand_as(size)
        size = k.new_zeros(*k.shape[:2], groups).scatter_reduce_(2, index, size, "amax").gather(2, index)
        half_k = (size * (moves / 254))[:, :, None, None]
        half_q = q.abs().amax(dim=-1, keepdim=True) / 254
        k2, q2 = k.square() * moves**2, q.square()
        variance = half_q.square() * k2.sum(dim=-1)[:, :, None, None] + half_k.square() * q2.sum(dim=-1, keepdim=True)
        variance = variance * repeated
        if self.smooth_k:
            variance = variance + unit(exact.dtype) ** 2 * (q2 @ k2.unsqueeze(2).transpose(-1, -2))
        # Kernels round halves of K, which near the smallest numbers of its dtype lose their last bit.
        smallest = float(torch.finfo(exact.dtype).smallest_normal * torch.finfo(exact.dtype).eps)
        variance = variance + smallest**2 * q2.sum(dim=-1, keepdim=True)
        small = 4 * half_q * half_k * abs(factor) + 2.0**-22 * exact.norms
        if exact.bias is not None:
            small = small + 2.0**-22 * exact.bias.abs().clamp_max(1e6)
        variance = variance * (factor**2 / 3) + small.square()
        return variance.masked_fill((2 * half_q * abs(factor) > CLIPPED) | (2 * half_k > CLIPPED), math.inf)

    @functools.cached_property
    def log_gained(self) -> torch.Tensor:
        """Large errors make much of keys of which there was nothing: logarithms of what five deviations more, of a key's score and
        of the others', make of p; -infinity where errors are small."""
        variance = self.variance.clamp_max(1e300)
        together = variance + (self.exact.p * variance).sum(dim=-1, keepdim=True)
        gained = (self.exact.log_p + 5 * together.sqrt()).nan_to_num(nan=-math.inf, neginf=-math.inf)
        return gained.masked_fill((together <= LARGE**2) | (self.exact.log_p == -math.inf), -math.inf)

    @functools.cached_property
    def of_output(self) -> torch.Tensor:
        """Of each element of the output."""
        exact, variance = self.exact, self.variance.clamp_max(1e300)
        small = variance.clamp_max(LARGE**2)
        moved = torch.exp(2 * small) - 2 * torch.exp(small / 2) + 1  # mean square of exp(error) - 1
        gained = torch.exp(self.log_gained.clamp_max(0.0))
        o = exact.out - exact.middle

        def spread(weight: torch.Tensor) -> torch.Tensor:
            square = weight @ exact.centred.square() - 2 * o * (weight @ exact.centred)
            return (square + o.square() * weight.sum(dim=-1, keepdim=True)).clamp_min(0.0).sqrt()

        if self.problem.alike:
            found = (exact.p * moved).sum(dim=-1, keepdim=True).sqrt() * spread(exact.p) + spread(gained)
        else:
            found = spread(torch.maximum(exact.p2 * moved, gained.square()))
        # Rows of which all scores are below that lowest number may count as seeing no key.
        lowest = (largest(exact.norms, -1) > -reference.NEVER / 2).unsqueeze(-1)
        return torch.where(lowest, exact.largest_v, torch.minimum(found, exact.range))

    @functools.cached_property
    def of_lse(self) -> torch.Tensor:
        """Of each log-sum-exp: errors of all keys alike at worst, and what their spread adds."""
        exact = self.exact
        lse = exact.lse.masked_fill(exact.blind, 0.0).abs()
        # The sum is that of P as rounded, relative to anything: where scores are nearly equal all of P is rounded alike, once.
        spread = 1.0 if self.problem.alike else exact.p2.sum(dim=-1).sqrt() + 1.0 / LIMITS.lse
        summed = unit(exact.dtype) * spread
        variance = self.variance.clamp_max(1e300)
        gained = torch.exp(self.log_gained.clamp_max(0.0)).sum(dim=-1) + self.log_gained.clamp(0.0, 1e300).sum(dim=-1)
        # exp is convex; but however large errors are, a sum's logarithm has none that is larger than the keys'.
        std = variance.sqrt()
        return gained + (exact.p * (std + torch.minimum(variance, 6 * std))).sum(dim=-1) + summed + 2.0**-21 * (lse + 16)
