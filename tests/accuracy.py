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
# The three bits of e4m3's mantissa, of P and of V, dominate.
QK_INT8_PV_F8 = Tolerance(relative_l1=0.0385, lse=0.06, any_shape=0.05, offsets=0.01)

# Of e2m1 one bit of mantissa remains. Of no kernel of `TOLERANCES`: those are sageattention's.
FP4 = Tolerance(relative_l1=0.19, lse=0.6, any_shape=0.25, offsets=0.01)

TOLERANCES = {
    "sm80_qk_int8_pv_f16": QK_INT8_PV_F16,
    "sm80_qk_int8_pv_f16_accum_f16": QK_INT8_PV_F16,
    "sm89_qk_int8_pv_f8": QK_INT8_PV_F8,
    "sm89_qk_int8_pv_f8_accum_f16": QK_INT8_PV_F8,
    "sm90_qk_int8_pv_f16": QK_INT8_PV_F16,
}


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    sm_scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T) v and log-sum-exp in float64 for [batch, heads, tokens, head_dim] with grouped heads.

    A row that sees no key has 0 and -infinity.
    """
    scores = exact_scores(q, k, is_causal=is_causal, sm_scale=sm_scale, attn_mask=attn_mask)
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return _softmax(scores) @ v, torch.logsumexp(scores, dim=-1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1).masked_fill((scores == -math.inf).all(dim=-1, keepdim=True), 0.0)


def exact_scores(
    q: torch.Tensor, k: torch.Tensor, *, is_causal: bool, sm_scale: float | None, attn_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """q k^T in float64, scaled and masked: [batch, q_heads, qo_len, kv_len]."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask.double()


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
    attn_mask: torch.Tensor | None = None,
) -> float:
    """sum |out - expected| / sum sqrt(P^2 V^2): what `relative_l1` is in large tensors, without its chance zeros in small.

    The denominator is the size that the output has where V's signs are random.
    """
    p = _softmax(exact_scores(q, k, is_causal=is_causal, sm_scale=sm_scale, attn_mask=attn_mask))
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return float((out.double() - p @ v).abs().sum() / (p.square() @ v.square()).sqrt().sum())
