"""The FP4 kernel's arithmetic in plain PyTorch: `reference.attention` for kernels whose numbers are e2m1.

The constants are those of csrc/kernels/quant/fp4.h and of config.cuh in csrc/kernels/attention/fp4/.
"""

from __future__ import annotations

import math

import torch

from .reference import (
    BLOCK_N,
    NEVER,
    SCALE_UNIT,
    Precision,
    first_seen,
    mask_log2,
    only_seen,
    quantise_v,
    sampled_mean,
    scale_of,
    seen_keys,
    weigh,
)

BLOCK_M = 128  # rows of Q that share a unit, and a mean unless it is the sequence's
GROUP = 16  # numbers that share a scale
LARGEST = 4.0 * 448.0  # what a number is at most, in the unit that many groups share
SMALLEST_SCALE = 2.0**-9
SMALLEST = 1e-10  # magnitude from which on units are what they are
DIVISORS = (6.0, 4.0)  # what a group's largest number becomes: that with which its error is less
CHUNK_N = 32  # keys whose probabilities are found together
LOG_OF_6 = 2.584962500721156
# A row's largest probability when its base is renewed, as a power of two: 6, times a scale that e4m3 has.
LEVEL = 5.0 + LOG_OF_6
HEADROOM = 8.807354922057604 + LOG_OF_6  # above the base: more renews it
PRECISION = {"sm120_qk_fp4_pv_fp4": Precision(torch.float32, largest_v=LARGEST, smooths=True, first_apart=True)}


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """To 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, nearest, ties to even; NaN becomes 6."""
    magnitude = x.abs().nan_to_num(6.0).clamp_max(6.0)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0)).float()
    return torch.copysign(torch.round(magnitude / step) * step, x)


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest, ties to even, at most 448; NaN stays."""
    return torch.where(x.isnan(), x, x.clamp_max(448.0).nan_to_num(448.0).to(torch.float8_e4m3fn).float())


def quantise(x: torch.Tensor) -> torch.Tensor:
    """Numbers of at most `LARGEST` in e2m1 times their scales, one for each `GROUP` of the last dimension."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    magnitude = groups.abs().amax(dim=-1, keepdim=True)
    magnitude = magnitude.masked_fill(~magnitude.isfinite(), math.nan)
    answer = least = torch.zeros(())
    for number, divisor in enumerate(DIVISORS):
        scale = round_to_e4m3((magnitude * torch.tensor(1.0 / divisor, dtype=torch.float32)).clamp_min(SMALLEST_SCALE))
        rounded = round_to_e2m1(groups * scale.reciprocal()) * scale
        error = (rounded - groups).square().sum(dim=-1, keepdim=True)
        better = error < least
        answer = rounded if number == 0 else torch.where(better, rounded, answer)
        least = error if number == 0 else torch.where(better, error, least)
    return answer.flatten(-2)[..., : x.shape[-1]]


def finite_magnitude(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """The largest finite magnitude, at least `SMALLEST`; dimensions are kept."""
    return x.abs().masked_fill(~x.isfinite(), 0.0).amax(dim=dim, keepdim=True).clamp_min(SMALLEST)


def quantise_k(k: torch.Tensor, mean: torch.Tensor, seen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """K less its mean, with a unit for each block of 64 keys.

    k: [batch, heads, kv_len, head_dim], mean: [batch, heads, 1, head_dim] of the same dtype, seen: as `seen_keys` has it → float32
    of k's shape, units [batch, heads, kv_len].
    """
    kv_len = k.shape[2]
    halves = only_seen(k.float() * 0.5 - mean.float() * 0.5, seen)
    blocks = torch.nn.functional.pad(halves, (0, 0, 0, -kv_len % BLOCK_N)).unflatten(2, (-1, BLOCK_N))
    magnitude = finite_magnitude(blocks, (3, 4))
    rounded = quantise(blocks * (LARGEST / magnitude)).flatten(2, 3)[:, :, :kv_len]
    unit = scale_of(magnitude, 2.0 / LARGEST).squeeze(-1).expand(-1, -1, -1, BLOCK_N).flatten(2)[:, :, :kv_len]
    return rounded, unit


def mean_of_q(q: torch.Tensor, *, per_block_mean: bool) -> torch.Tensor:
    """What is subtracted from each row, in q's shape and dtype."""
    step = BLOCK_M if per_block_mean else q.shape[2]
    means = [sampled_mean(rows.float(), BLOCK_M)[0].expand_as(rows) for rows in q.split(step, dim=2)]
    mean = torch.cat(means, dim=2)
    return mean.masked_fill(~mean.isfinite(), 0.0).to(q.dtype)


def quantise_q(q: torch.Tensor, mean: torch.Tensor, scale_log2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q less its mean, times scale_log2, as the kernel multiplies it.

    q: [..., qo_len, head_dim], mean: [..., qo_len, head_dim] → float32 of q's shape, and the unit of each row's block [..., qo_len, 1].
    """
    qo_len = q.shape[-2]
    centred = (q.float() - mean.float()) * scale_log2
    blocks = torch.nn.functional.pad(centred, (0, 0, 0, -qo_len % BLOCK_M)).unflatten(-2, (-1, BLOCK_M))
    magnitude = finite_magnitude(blocks, (-2, -1))
    rounded = quantise(blocks * (LARGEST / magnitude)).flatten(-3, -2)[..., :qo_len, :]
    return rounded, scale_of(magnitude, 1.0 / LARGEST).expand(*blocks.shape[:-1], 1).flatten(-3, -2)[..., :qo_len, :]


def order_of_keys(keys: int) -> torch.Tensor:
    """Of each whole 32 keys, those that share a scale of P and V beside each other: [keys], keys a multiple of 32."""
    index = torch.arange(keys)
    group, j, i = index % 32 // 16, index % 16 // 4, index % 4
    return index // 32 * 32 + j * 8 + group * 4 + i


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool,
    per_block_mean: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` in FP4.

    Args:
        q, k, v, attn_mask, is_causal, sm_scale, smooth_k, smooth_v, kernel: as there.
        per_block_mean: subtract a mean of Q for each 128 rows; else one of all.

    Returns:
        As there.
    """
    (q_heads, qo_len), (kv_heads, kv_len) = q.shape[1:3], k.shape[1:3]
    heads = (kv_heads, q_heads // kv_heads)  # those that share a key head stand beside each other: [batch, *heads, ...]
    scale_log2 = torch.tensor(sm_scale * math.log2(math.e), dtype=torch.float32)
    seen = seen_keys(attn_mask, k.shape[0], kv_len)
    k_mean = sampled_mean(k.float(), seen=seen)[0].to(k.dtype) if smooth_k else torch.zeros_like(k[:, :, :1])
    k_rounded, k_unit = (x.unsqueeze(2) for x in quantise_k(k, k_mean, seen))
    values = quantise_v(v, PRECISION[kernel], smooth_v=smooth_v, seen=seen)
    whole = -kv_len % BLOCK_N
    order = order_of_keys(kv_len + whole)
    ordered = torch.nn.functional.pad(values.data, (0, 0, 0, whole))[:, :, order].unsqueeze(2)
    v_rounded = quantise(ordered.transpose(-1, -2)).transpose(-1, -2)
    v_scale = values.scale.unsqueeze(2)
    smoothed = torch.nn.functional.pad(values.smoothed, (0, whole))[:, :, order].float()[:, :, None, None]

    mean = mean_of_q(q, per_block_mean=per_block_mean).unflatten(1, heads)
    queries = q.unflatten(1, heads)
    q_rounded, q_unit = quantise_q(queries, mean, scale_log2)
    of_mean = mean.float() @ (
        only_seen(k.float(), seen).unsqueeze(2).transpose(-1, -2)
    ) - mean.float() @ k_mean.float().unsqueeze(2).transpose(-1, -2)
    scores = (q_rounded @ k_rounded.transpose(-1, -2)) * (q_unit * k_unit.unsqueeze(-2)) + of_mean * scale_log2
    if attn_mask is not None:
        scores = scores + mask_log2(attn_mask).expand(q.shape[0], q_heads, qo_len, kv_len).unflatten(1, heads)
    if is_causal:
        scores = scores.masked_fill(torch.arange(kv_len) > torch.arange(qo_len)[:, None], -math.inf)
    scores = torch.nn.functional.pad(scores, (0, whole), value=-math.inf)[..., order]

    # The first key that is seen is apart: where it is far above the others, they would be below all that a base so high leaves.
    first_key = first_seen(seen, v.shape[0])
    apart = torch.argsort(order)[first_key].view(-1, 1, 1, 1, 1).expand(*scores.shape[:-1], 1)
    first_score, scores = scores.gather(-1, apart), scores.scatter(-1, apart, -math.inf)
    base = torch.full_like(q_unit, NEVER)  # what probabilities are relative to, in log2 units
    total, total_smoothed = torch.zeros_like(q_unit), torch.zeros_like(q_unit)
    out = q_unit.new_zeros(*queries.shape[:-1], v.shape[-1])
    for first in range(0, kv_len, BLOCK_N):
        # Of chunks: [..., rows, groups, GROUP], [..., rows, groups, 1].
        codes: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for start in range(first, first + BLOCK_N, CHUNK_N):
            groups = scores[..., start : start + CHUNK_N].unflatten(-1, (-1, GROUP))
            top = groups.amax(dim=-1, keepdim=True)
            exceeds = (~(top - base.unsqueeze(-1) <= HEADROOM)).any(dim=-2)
            if exceeds.any():
                raised = torch.where(exceeds, top.amax(dim=-2) - LEVEL, base)
                factor = torch.where(exceeds, torch.exp2(base - raised), 1.0)
                base, out, total, total_smoothed = raised, out * factor, total * factor, total_smoothed * factor
                scales = [round_to_e4m3(scale * factor.unsqueeze(-1)) for scale in scales]
            ideal = torch.exp2(top - base.unsqueeze(-1) - LOG_OF_6).clamp_min(SMALLEST_SCALE)
            scales.append(round_to_e4m3(ideal))
            codes.append(round_to_e2m1(torch.exp2(groups - (base.unsqueeze(-1) + torch.log2(scales[-1])))))
        p = torch.cat([(code * scale).flatten(-2) for code, scale in zip(codes, scales)], dim=-1)
        keys = slice(first, first + BLOCK_N)
        total = total + p.sum(dim=-1, keepdim=True)
        total_smoothed = total_smoothed + (p * smoothed[..., keys]).sum(dim=-1, keepdim=True)
        block = first // BLOCK_N
        out = out + weigh(p, v_rounded[..., keys, :]) * v_scale[..., block : block + 1, :]

    raised = torch.maximum(base, first_score)
    factor, first = torch.exp2(base - raised), torch.exp2(first_score - raised)
    value = torch.stack([of_element[:, key] for of_element, key in zip(v.float(), first_key)])
    base, out = raised, out * factor + weigh(first, value[:, :, None, None] / SCALE_UNIT)
    total, total_smoothed = total * factor + first, total_smoothed * factor

    shift = (queries.float() * scale_log2 * k_mean.float().unsqueeze(2)).sum(dim=-1, keepdim=True)  # as in reference.py
    empty = total == 0.0
    lse = ((base + torch.log2(total) + shift) * math.log(2.0)).masked_fill(empty, -math.inf)
    out = (out * (SCALE_UNIT / total) + values.mean.unsqueeze(2) * (total_smoothed / total)).masked_fill(empty, 0.0)
    return out.to(q.dtype).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)
