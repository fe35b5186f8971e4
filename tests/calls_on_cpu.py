"""Calls of the kernels on the CPU (kernels_on_cpu.py), and what their answers are held to."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fuzz
import pytest
import tensors
import torch
from fuzz_bounds import Exact
from fuzz_inputs import Problem
from kernels_on_cpu import Kernels, Result

from sageattention import _ops, reference

# Of queries and keys, so many packed sequences that a block of threads takes several spans, some of them past a sequence's end.
MANY = [3, *[0] * 400, 2, 70], [700, *[0] * 400, 130, 333]

randn = partial(tensors.randn, dtype=torch.float32)  # the same on every device


def inputs(
    batch: int, q_heads: int, kv_heads: int, qo_len: int, kv_len: int, head_dim: int, v_head_dim: int
) -> list[torch.Tensor]:
    """q, k and v in float32, with offsets that smoothing takes off."""
    return [
        randn(batch, q_heads, qo_len, head_dim) + randn(1, q_heads, 1, head_dim, seed=3),
        randn(batch, kv_heads, kv_len, head_dim, seed=1) + 2 * randn(1, kv_heads, 1, head_dim, seed=4),
        randn(batch, kv_heads, kv_len, v_head_dim, seed=2) + randn(1, kv_heads, 1, v_head_dim, seed=5),
    ]


def at_the_end_of_memory(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy. Whoever reads what is behind it ends the process."""
    page, size = mmap.PAGESIZE, x.numel() * x.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=x.dtype, offset=pages * page - size, count=x.numel()).view(x.shape)
    return copy.copy_(x)


def attend(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    kernel: str,
    or_16_bit: bool = False,
    is_causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "HND",
    seed: int = 0,
) -> Result:
    """By the operator, where no other kernel has been compiled: with `or_16_bit` by the one in 16 bits that is taken in `kernel`'s place."""
    heads_first, turned = _ops.LAYOUTS[layout]
    options = _ops.number_of(kernel, heads_first, is_causal, True, False, True, or_16_bit=or_16_bit, out_turned=turned)
    return kernels.attention(q, k, v, attn_mask, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, options, seed=seed)


class Case:
    """Inputs of a call, [batch, heads, tokens, head_dim] or packed [tokens, heads, head_dim], and its options."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
        self.tensors = (q, k, v)
        self.options = {
            "is_causal": False,
            "sm_scale": q.shape[-1] ** -0.5,
            "smooth_k": True,
            "smooth_v": True,
            "per_block_mean": True,
            "attn_mask": None,
            "cu_seqlens": None,
            "out_turned": False,
            "return_lse": True,
            **options,
        }

    def expected(self, kernel: str) -> Result:
        """The reference's answer."""
        options = dict(self.options)
        cu_seqlens = options.pop("cu_seqlens")
        del options["out_turned"], options["return_lse"]
        if cu_seqlens is None:
            return reference.attention(*self.tensors, kernel=kernel, **options)
        del options["attn_mask"], options["per_block_mean"]
        return reference.attention_varlen(*self.tensors, *cu_seqlens, kernel=kernel, **options)

    def run(self, kernels: Kernels, kernel: str, *, seed: int = 0) -> Result:
        """The kernel's answer."""
        o = self.options
        mean, turned, lse = o["per_block_mean"], o["out_turned"], o["return_lse"]
        options = _ops.number_of(
            kernel, o["cu_seqlens"] is None, o["is_causal"], o["smooth_k"], o["smooth_v"], lse, mean, out_turned=turned
        )
        if o["cu_seqlens"] is not None:
            return kernels.attention_varlen(*self.tensors, *o["cu_seqlens"], o["sm_scale"], options, seed=seed)
        out, lse = kernels.attention(*self.tensors, o["attn_mask"], o["sm_scale"], options, seed=seed)
        assert (out.transpose(1, 2) if turned else out).is_contiguous()
        return out, lse

    def at_the_end_of_memory(self) -> Case:
        """The same call of tensors that each have nothing behind them."""
        mask = self.options["attn_mask"]
        ends = {"attn_mask": None if mask is None else at_the_end_of_memory(mask)}
        return Case(*(at_the_end_of_memory(x) for x in self.tensors), **self.options | ends)

    def check(
        self, kernels: Kernels, kernel: str, largest: float = 1e-3, *, largest_lse: float = 0.02, seed: int = 0
    ) -> Result:
        """The kernel's answer, held to the reference's: a relative L1 distance, and a largest difference in log-sum-exp.

        Sums in another order now and then make a mean's element its neighbour, and with it a number's code.
        """
        (out, lse), (expected, expected_lse) = self.run(kernels, kernel, seed=seed), self.expected(kernel)
        seen, finite = expected.isfinite(), expected_lse.isfinite()
        assert torch.equal(out.isfinite(), seen)
        if not self.options["return_lse"]:
            assert lse.numel() == 0
            lse = expected_lse
        assert torch.equal(lse.isfinite(), finite)
        assert torch.equal(lse == -math.inf, expected_lse == -math.inf)  # and not what memory held before
        x, y = out[seen].double(), expected[seen].double()
        assert (x - y).abs().sum() <= largest * y.abs().sum(), f"differs by {float((x - y).abs().sum() / y.abs().sum()):.5f}"
        assert not finite.any() or (lse - expected_lse)[finite].abs().max() <= largest_lse
        return out, lse

    def check_orders(self, kernels: Kernels, kernel: str, *seeds: int) -> None:
        """Hold the kernel to the same bits in each of these orders of threads."""
        in_order = self.run(kernels, kernel)
        for seed in seeds:
            for one, other in zip(self.run(kernels, kernel, seed=seed), in_order, strict=True):
                assert torch.equal(fuzz.bits(one), fuzz.bits(other)), seed


def large_channels(case: Case) -> Case:
    """Changed to: two channels of K that turn from key to key, so that their mean is nothing, in one of which Q is small."""
    q, k, _ = case.tensors
    tokens = torch.arange(k.shape[-2] if k.dim() == 4 else k.shape[0]).float()
    turned = torch.stack([60 * torch.cos(0.7 * tokens), 25 * torch.sin(0.4 * tokens)], dim=-1)
    k[..., [5, 17]] += (turned if k.dim() == 4 else turned[:, None]).to(k.dtype)
    q[..., 5] *= 0.05
    assert rotation(case).applies.all()
    return case


def small_keys(case: Case) -> Case:
    """Changed to: K is so small that float16 would lose bits of it where the rotation makes it smaller yet. Scores stay."""
    _, k, _ = case.tensors
    k *= 2**-10
    case.options["sm_scale"] *= 2**10
    assert rotation(case).applies.all()
    return case


def large_in_q(case: Case) -> Case:
    """Changed to: a channel in which all of Q is large, and one in which all is somewhat."""
    q, _, _ = case.tensors
    q[..., 7] += 24
    q[..., 20] -= 6
    assert rotation(case).applies.all()
    return case


def infinite_in_q(case: Case) -> Case:
    """Changed to: two rows of Q hold an infinity, in a channel in which all of K has one sign."""
    q, k, _ = case.tensors
    k[..., 5] = k[..., 5].abs() + 1
    q[0, 0, 3, 5], q[0, 1, 4, 5] = math.inf, -math.inf
    return case


def rotation(case: Case) -> reference.Rotation:
    """As the reference finds it, of packed sequences for the last."""
    q, k, _ = case.tensors
    if case.options["cu_seqlens"] is not None:
        (first_q, end_q), (first_k, end_k) = (ends[-2:].tolist() for ends in case.options["cu_seqlens"])
        q, k = q[None, first_q:end_q].transpose(1, 2), k[None, first_k:end_k].transpose(1, 2)
    return reference.find_rotation(q, reference.sampled_mean(k.float())[1])


class Form(NamedTuple):
    """What hides keys of 333 from 70 queries of two batch elements and heads."""

    mask: torch.Tensor
    is_causal: bool = False

    def seen(self) -> torch.Tensor:
        """Which keys some query sees: [2, 333] bool."""
        seen = reference.seen_keys(reference.without_far_keys(self.mask, is_causal=self.is_causal), 2, 333)
        assert seen is not None
        return seen & (torch.arange(333) < 70) if self.is_causal else seen


def check_unseen(kernels: Kernels, kernel: str, form: Form, v_hidden: float) -> None:
    """Hold the kernel to the same bits whatever keys, and values, no query sees; and to the reference, in K a bias."""
    q, k, v = (x.half() for x in inputs(2, 2, 1, 70, 333, 64, 64))
    k[..., 3] += 10
    unseen = ~form.seen()[:, None, :, None]
    options = {"attn_mask": form.mask, "is_causal": form.is_causal}
    zeros = Case(q, k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0), **options)
    numbers = Case(q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, v_hidden), **options)
    for one, other in zip(zeros.check(kernels, kernel), numbers.run(kernels, kernel), strict=True):
        assert torch.equal(fuzz.bits(one), fuzz.bits(other))


def stand_in(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, operators: Any = _ops) -> None:
    """Put these in the operators' place, by default those of sageattention. Threads of each call go on in another order."""
    seeds = itertools.count()
    monkeypatch.setattr(operators, "attention_operator", lambda *arguments: kernels.attention(*arguments, seed=next(seeds)))
    monkeypatch.setattr(operators, "varlen_operator", lambda *arguments: kernels.attention_varlen(*arguments, seed=next(seeds)))


def check_random_calls(first: int, problems: int, wanted: Callable[[fuzz.Call, Problem], bool]) -> int:
    """Hold calls of the fuzz's problems, from the seed `first` on, to its limits: those that are wanted, whose number is returned."""
    calls = 0

    def judge(call: fuzz.Call, problem: Problem, exact: Exact) -> torch.Tensor:
        nonlocal calls
        if not wanted(call, problem):
            return torch.zeros(len(fuzz.FIGURES) + 1, dtype=torch.float64)
        calls += 1
        return fuzz.one(call, problem, exact)

    subject = fuzz.SAGEATTENTION._replace(judge=judge)
    failures = [failure for seed in range(first, first + problems) for failure in fuzz.solve(seed, "cpu", subject).failures]
    assert not failures, "\n".join(fuzz.report(failure, "cpu") for failure in failures)
    return calls


def _forms() -> dict[str, Form]:
    """They leave a part, some keys in the middle, few or none."""
    key = torch.arange(333)
    some = key < 150
    others = (key >= 130) & (key < 300) & (randn(333, seed=8) > 0)
    scores = randn(2, 2, 70, 333, seed=9)
    return {
        "keys": Form(torch.stack([some, others])[:, None, None]),
        "keys of all": Form(others[None]),
        "all but the first keys": Form((key >= 10)[None]),
        "few keys, far apart": Form(((key - 13).abs().minimum((key - 303).abs()) < 4)[None]),
        "no key": Form(torch.stack([some, some & False])[:, None, None]),
        "scores": Form((scores[0, 0] > 0.5) & some),
        "scores of heads": Form((scores > 0.5) & torch.stack([some, others])[:, None, None]),
        "added": Form(scores[:, :1].masked_fill(~some, -math.inf).half()),
        "added to keys": Form(randn(333).half().masked_fill(~others, -65504.0)[None]),
        "far keys": Form(torch.where(others, 0.5, -1e4).half()[None]),
        "far keys, or all": Form(torch.where(torch.stack([others, others & False])[:, None, None], 0.0, -1e4).half()),
        "far keys, and others that are not near": Form(torch.where(others, -2000.0, -1e4).half()[None]),
        # Nothing is far to the first rows, which see none that is near.
        "far keys, causal": Form(torch.where(key >= 20, 0.5, -1e4).half()[None], is_causal=True),
        "keys, causal": Form((key >= 20)[None], is_causal=True),
        "added, causal": Form(scores[:, :1].half(), is_causal=True),
    }


FORMS = _forms()


def packed(
    lengths_q: list[int],
    lengths_k: list[int],
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    kv_heads: int = 1,
    sharers: int = 2,
    **options: Any,
) -> Case:
    """Sequences one after the other, so many heads to a key head."""
    cu_seqlens = tuple(torch.tensor([0, *some]).cumsum(0).int() for some in (lengths_q, lengths_k))
    tensors = inputs(1, sharers * kv_heads, kv_heads, sum(lengths_q), sum(lengths_k), head_dim, v_head_dim)
    return Case(*(x[0].transpose(0, 1).to(dtype) for x in tensors), cu_seqlens=cu_seqlens, **options)


def unseen_keys(case: Case) -> Case:
    """Changed to: of packed sequences, under a causal mask, keys and values that no query sees are no numbers."""
    _, k, v = case.tensors
    ends_q, ends_k = case.options["cu_seqlens"]
    for queries, first, end in zip(ends_q.diff().tolist(), ends_k.tolist(), ends_k[1:].tolist(), strict=False):
        k[first + queries : end] = v[first + queries : end] = math.nan
    return case


def tokens_behind(case: Case) -> Case:
    """Changed to: of packed sequences the last one's tokens are none's. Such queries see nothing; such keys and values are no numbers."""
    _, k, v = case.tensors
    ends_q, ends_k = case.options["cu_seqlens"]
    k[ends_k[-2] :] = v[ends_k[-2] :] = math.nan
    case.options["cu_seqlens"] = ends_q[:-1], ends_k[:-1]
    return case


# Where sequences of 200 tokens do not start: they do not rise from 0 to 200.
WRONG_STARTS = [[200, 200, 200], [900, 900, 900], [-5, 100, 200], [0, 900, 100], [150, 20, 170], [500, 600, 700]]


def check_wrong_starts(kernels: Kernels, kernel: str, dtype: torch.dtype, tokens: int = 200) -> None:
    """Hold the kernels to no wild access, and to waiting for each other, where cu_seqlens is wrong, which nobody looks at: results may be anything.

    tokens: a multiple of 200.
    """
    tensors = [x[0].transpose(0, 1).to(dtype) for x in inputs(1, 2, 1, tokens, tokens, 64, 64)]
    large = large_channels(packed([tokens], [tokens], 64, 64, dtype)).tensors
    for starts in WRONG_STARTS:
        cu_seqlens = torch.tensor(starts).int() * (tokens // 200)
        for some in (tensors, large):
            Case(*some, cu_seqlens=(cu_seqlens, cu_seqlens)).run(kernels, kernel)
