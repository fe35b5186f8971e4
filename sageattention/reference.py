"""The kernels' arithmetic in plain PyTorch, block by block: what they should give, on CPU tensors.

Each step rounds where the kernels round, so that a kernel differs from this by the order of its sums only. The
constants are those of csrc/kernels/quant/ and of config.cuh in csrc/kernels/attention/mma_sync/ and wgmma/.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

BLOCK_N = 64  # keys that share scales of K and of V
SAMPLED_KEYS = 64  # keys from which a mean is estimated
MAGIC = 12582912.0  # 1.5 * 2**23: the accumulators' start, so that they read as a float
SMALLEST_MAGNITUDE = 1e-14  # of Q and K: keeps scales of zeros positive, and the product of two
SMALLEST_V = 1e-30
LEAST_MASK = -1e30  # what a mask adds below this hides
NEVER = -1e30  # a maximum below any score: relative to it, whatever is seen is infinite


class Precision(NamedTuple):
    """How a kernel rounds P and V."""

    dtype: torch.dtype | None = None  # of P and V; None: the caller's
    limit: float = 256.0  # what a thread may add up of a row's P in a chunk of keys; more renews the row's maximum
    threshold: float | None = None  # instead: growth of that maximum, in powers of two, that renews it
    half_threshold: float | None = None  # of float16 inputs, where it is another
    tile: int | None = None  # keys of a chunk, where it is the same for every head_dim
    rounded_sums: bool = False  # the rows' sums are of P as rounded
    log_of_one: float = 0.0  # what P is at that maximum, as a power of two
    largest_v: float | None = None  # V's largest magnitude after its division by a scale for each block and channel
    sums: torch.dtype = torch.float32  # what products of `summed` keys are added in
    summed: int = 16


_F8 = Precision(torch.float8_e4m3fn, limit=448.0, log_of_one=4.5, largest_v=4.5, summed=32)
PRECISION = {
    "sm80_qk_int8_pv_f16": Precision(),
    "sm80_qk_int8_pv_f16_accum_f16": Precision(torch.float16, limit=0.25, log_of_one=-7.0, sums=torch.float16),
    "sm89_qk_int8_pv_f8": _F8,
    "sm89_qk_int8_pv_f8_accum_f16": _F8._replace(sums=torch.float16),
    "sm90_qk_int8_pv_f16": Precision(threshold=40.0, half_threshold=12.0, tile=64, rounded_sums=True),
}


def chunk_n(head_dim: int, precision: Precision) -> int:
    """Keys whose scores are turned into probabilities together."""
    if precision.tile is not None:
        return precision.tile
    return 64 if head_dim <= 64 else 32 if precision.dtype is None else 16


def gather_n(head_dim: int, precision: Precision) -> int:
    """Keys whose probabilities are gathered before they meet V: in 8 bits all that share V's scales."""
    return chunk_n(head_dim, precision) if precision.largest_v is None else BLOCK_N


def sampled_mean(k: torch.Tensor) -> torch.Tensor:
    """Mean of evenly spread keys. k: [batch, heads, kv_len, head_dim] float32 → [batch, heads, 1, head_dim]."""
    kv_len = k.shape[2]
    samples = min(kv_len, SAMPLED_KEYS)
    return k[:, :, torch.arange(samples) * kv_len // samples].mean(dim=2, keepdim=True)


def round_to_int8(x: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """x / magnitude * 127, rounded to nearest even; float32 that holds integers."""
    return torch.round(x.double() * (127.0 / magnitude).double()).float()  # one fused multiply-add


def quantise_k(k: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K to INT8 with one scale for the 16 keys of a block of 64 that have the same (key % 8) // 2.

    k: [batch, heads, kv_len, head_dim], mean: [batch, heads, 1, head_dim] of the same dtype, in which they are subtracted →
    integers of k's shape as float32, and scales [batch, heads, kv_len].
    """
    kv_len = k.shape[2]
    centred = (k - mean).float()
    padded = torch.nn.functional.pad(centred, (0, 0, 0, -kv_len % BLOCK_N))
    # [batch, heads, block, key // 8, group, key % 2, head_dim]
    magnitude = padded.abs().unflatten(2, (-1, BLOCK_N // 8, 4, 2)).amax(dim=(3, 5, 6), keepdim=True)
    magnitude = magnitude.clamp_min(SMALLEST_MAGNITUDE).expand(-1, -1, -1, BLOCK_N // 8, -1, 2, 1)
    magnitude = magnitude.flatten(2, 5)[:, :, :kv_len]
    return round_to_int8(centred, magnitude), magnitude.squeeze(-1) / 127.0


def quantise_v(v: torch.Tensor, precision: Precision, *, smooth_v: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """V as a kernel multiplies it: (V - mean) / scale, rounded.

    v: [batch, heads, kv_len, head_dim] → float32 of that shape, scale [batch, heads, blocks of 64 keys, head_dim], mean
    [batch, heads, 1, head_dim].
    """
    values = v.float()
    blocks = -(-v.shape[2] // BLOCK_N)
    scale = values.new_ones(*v.shape[:2], blocks, v.shape[3])
    mean = torch.zeros_like(values[:, :, :1])
    if precision.dtype is None:
        return values, scale, mean
    if precision.largest_v is not None:
        if smooth_v:
            mean = sampled_mean(values)
            values = values - mean
        padded = torch.nn.functional.pad(values, (0, 0, 0, -v.shape[2] % BLOCK_N)).unflatten(2, (blocks, BLOCK_N))
        scale = padded.abs().amax(dim=3).clamp_min(SMALLEST_V) / precision.largest_v
        values = values / scale.repeat_interleave(BLOCK_N, 2)[:, :, : v.shape[2]]
    return values.to(precision.dtype).float(), scale, mean


def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p @ v, in which a weight of zero takes nothing from a NaN or an infinity: a hidden key must not show."""
    finite = v.isfinite()
    if finite.all():
        return p @ v
    seen = (p > 0).float() @ (~finite).float() > 0
    return (p @ v.masked_fill(~finite, 0.0)).masked_fill(seen, math.nan)


def probabilities(scores: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """2 ** ((scores - MAGIC) * scale - base), with one fused multiply-add: float64 holds the product exactly, and rounds once."""
    return torch.exp2((scores.double() * scale.double() + (-MAGIC * scale - base).double()).float())


def added_by_thread(p: torch.Tensor) -> torch.Tensor:
    """Sums of the probabilities that one thread of an mma.sync kernel holds: [..., keys] → [..., 4]."""
    return torch.nn.functional.pad(p, (0, -p.shape[-1] % 8)).unflatten(-1, (-1, 4, 2)).sum(dim=(-3, -1))


def mask_log2(attn_mask: torch.Tensor) -> torch.Tensor:
    """What a mask adds to the scores, in log2 units. The least numbers of a type are meant as -infinity."""
    if attn_mask.dtype == torch.bool:
        return torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -math.inf)
    return (attn_mask.float() * math.log2(math.e)).masked_fill(attn_mask < LEAST_MASK, -math.inf)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool = False,
    kernel: str = "sm80_qk_int8_pv_f16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 scores, P and V as the kernel rounds them.

    Args:
        q: [batch, q_heads, qo_len, head_dim] float16 or bfloat16.
        k: [batch, kv_heads, kv_len, head_dim].
        v: [batch, kv_heads, kv_len, v_head_dim].
        attn_mask: broadcastable to [batch, q_heads, qo_len, kv_len]; bool, or added to the scores.
        is_causal, sm_scale, smooth_k, smooth_v: as in `sageattn`.
        kernel: whose rounding of P and V.

    Returns:
        Output [batch, q_heads, qo_len, v_head_dim] in q's dtype and log-sum-exp [batch, q_heads, qo_len] float32; 0 and -inf
        where a query sees no key.
    """
    (q_heads, qo_len), (kv_heads, kv_len) = q.shape[1:3], k.shape[1:3]
    heads = (kv_heads, q_heads // kv_heads)  # those that share a key head stand beside each other: [batch, *heads, ...]
    precision = PRECISION[kernel]
    mean = sampled_mean(k.float()).to(k.dtype) if smooth_k else torch.zeros_like(k[:, :, :1])
    k_int, k_scale = quantise_k(k, mean)
    values, v_scale, v_mean = (x.unsqueeze(2) for x in quantise_v(v, precision, smooth_v=smooth_v))

    queries = q.float().unflatten(1, heads) * torch.tensor(sm_scale * math.log2(math.e))
    magnitude = queries.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_MAGNITUDE)
    q_int, q_scale = round_to_int8(queries, magnitude), magnitude / 127.0
    k_int, k_scale = k_int.unsqueeze(2), k_scale[:, :, None, None]
    bias = None
    if attn_mask is not None:
        bias = mask_log2(attn_mask).expand(q.shape[0], q_heads, qo_len, kv_len).unflatten(1, heads)

    base = torch.full_like(q_scale, NEVER)  # what probabilities are relative to, in log2 units
    row_sum = torch.zeros_like(q_scale)
    out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
    head_dim = max(q.shape[-1], v.shape[-1])
    half = q.dtype == torch.float16 and precision.half_threshold is not None
    threshold = precision.half_threshold if half else precision.threshold
    chunk, gather = chunk_n(head_dim, precision), gather_n(head_dim, precision)
    for first in range(0, kv_len, gather):
        gathered = queries.new_zeros(*queries.shape[:-1], 0)
        for start in range(first, min(first + gather, kv_len), chunk):
            keys = slice(start, min(start + chunk, kv_len))
            scale = q_scale * k_scale[..., keys]
            scores = MAGIC + q_int @ k_int[..., keys, :].transpose(-1, -2)  # exact: integers below 2**22
            if bias is not None:
                scores = scores + bias[..., keys] * scale.reciprocal()
            if is_causal:
                hidden = torch.arange(keys.start, keys.stop) > torch.arange(qo_len)[:, None]
                scores = scores.masked_fill(hidden, -math.inf)
            largest = ((scores - MAGIC) * scale).amax(dim=-1, keepdim=True) - precision.log_of_one
            if threshold is None:
                grown = (added_by_thread(probabilities(scores, scale, base)) > precision.limit).any(dim=-1, keepdim=True)
            else:
                grown = largest > base + threshold
            factor = torch.where(grown, torch.exp2(base - largest), 1.0)
            base = torch.where(grown, largest, base)
            p = probabilities(scores, scale, base)
            added = p.to(q.dtype).float() if precision.rounded_sums else p
            row_sum = row_sum * factor + added.sum(dim=-1, keepdim=True)
            out = out * factor
            gathered = torch.cat([gathered * factor, p], dim=-1).to(precision.dtype or q.dtype).float()
        step = gather if precision.sums == torch.float32 else precision.summed
        for some, weights in enumerate(gathered.split(step, dim=-1)):
            key = first + some * step
            product = weigh(weights, values[..., key : key + step, :]).to(precision.sums).float()
            block = key // BLOCK_N
            out = out + product * v_scale[..., block : block + 1, :]

    shift = queries @ mean.float().unsqueeze(2).transpose(-1, -2)
    empty = row_sum == 0.0
    lse = ((base + torch.log2(row_sum) + shift) * math.log(2.0)).masked_fill(empty, -math.inf)
    out = (out / row_sum + v_mean).masked_fill(empty, 0.0)
    return out.to(q.dtype).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
    smooth_v: bool = False,
    kernel: str = "sm80_qk_int8_pv_f16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of packed sequences, one after the other.

    q: [tokens, q_heads, head_dim], k: [kv_tokens, kv_heads, head_dim], v: [kv_tokens, kv_heads, v_head_dim], `cu_seqlens_*`:
    [sequences + 1] → [tokens, q_heads, v_head_dim] in q's dtype, log-sum-exp [q_heads, tokens] float32.
    """
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for queries, keys in zip(map(slice, ends_q, ends_q[1:]), map(slice, ends_k, ends_k[1:])):
        sequence = [x.transpose(0, 1).unsqueeze(0) for x in (q[queries], k[keys], v[keys])]
        if sequence[0].numel() == 0 or sequence[1].numel() == 0:
            continue
        some_out, some_lse = attention(
            *sequence, is_causal=is_causal, sm_scale=sm_scale, smooth_k=smooth_k, smooth_v=smooth_v, kernel=kernel
        )
        out[queries], lse[:, queries] = some_out[0].transpose(0, 1), some_lse[0]
    return out, lse
