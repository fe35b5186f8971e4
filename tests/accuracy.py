"""Exact attention, error measures and the tolerance of each kernel: the one place that states them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """What a kernel may differ from exact attention by."""

    relative_l1: float  # against float64, standard normal inputs
    lse: float  # absolute, natural log units
    any_shape: float = 0.015  # `error_by_size`, standard normal inputs of any shape
    offsets: float = 0.003  # relative_l1 where K and V have per-channel offsets of 8 * randn
    outliers: float = 0.2  # relative_l1 where every 16th channel of Q and K is 30 times larger


# INT8 scores dominate: measured 0.0108 (bf16) and 0.0106 (fp16) at N=4096, D=128. Few keys average less of it away.
QK_INT8_PV_F16 = Tolerance(relative_l1=0.0115, lse=0.06)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T) v and log-sum-exp in float64 for [batch, heads, tokens, head_dim] with grouped heads."""
    scores = exact_scores(q, k, is_causal=is_causal, sm_scale=sm_scale)
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)


def exact_scores(q: torch.Tensor, k: torch.Tensor, *, is_causal: bool, sm_scale: float | None) -> torch.Tensor:
    """q k^T in float64, scaled and masked: [batch, q_heads, qo_len, kv_len]."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def relative_l1(out: torch.Tensor, expected: torch.Tensor) -> float:
    """sum |out - expected| / sum |expected|; NaN where either is."""
    return float((out.double() - expected).abs().sum() / expected.abs().sum())


def error_by_size(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    sm_scale: float | None = None,
) -> float:
    """sum |out - expected| / sum sqrt(P^2 V^2): what `relative_l1` is in large tensors, without its chance zeros in small.

    The denominator is the size that the output has where V's signs are random.
    """
    p = torch.softmax(exact_scores(q, k, is_causal=is_causal, sm_scale=sm_scale), dim=-1)
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return float((out.double() - p @ v).abs().sum() / (p.square() @ v.square()).sqrt().sum())
