"""The kernels' arithmetic in plain PyTorch, block by block: what they should give, on CPU tensors.

Each step rounds where the kernels round, so that a kernel differs from this by the order of its sums only. The
constants are those of csrc/kernels/quant/quant_k_int8.h and csrc/kernels/attention/sm80_qk_int8_pv_f16.cu.
"""

from __future__ import annotations

import math

import torch

BLOCK_N = 64  # keys that share K's scales
SAMPLED_KEYS = 64  # keys from which K's mean is estimated
RESCALE_THRESHOLD = 8.0  # growth of a row's maximum, in powers of two, that rescales the output
MAGIC = 12582912.0  # 1.5 * 2**23: the accumulators' start, so that they read as a float
SMALLEST_MAGNITUDE = 1e-30  # keeps the scale of zeros positive


def chunk_n(head_dim: int) -> int:
    """Keys between two looks at the running maximum."""
    return 64 if head_dim <= 64 else 16


def sampled_mean(k: torch.Tensor) -> torch.Tensor:
    """Mean of evenly spread keys. k: [batch, heads, kv_len, head_dim] float32 → [batch, heads, 1, head_dim]."""
    kv_len = k.shape[2]
    samples = min(kv_len, SAMPLED_KEYS)
    return k[:, :, torch.arange(samples) * kv_len // samples].mean(dim=2, keepdim=True)


def round_to_int8(x: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """x / magnitude * 127, rounded to nearest even; float32 that holds integers."""
    return torch.round(x * (127.0 / magnitude))


def quantise_k(k: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K to INT8 with one scale for the 16 keys of a block of 64 that have the same (key % 8) // 2.

    k: [batch, heads, kv_len, head_dim] float32 → integers of that shape, and scales [batch, heads, kv_len].
    """
    kv_len = k.shape[2]
    centred = k - mean
    padded = torch.nn.functional.pad(centred, (0, 0, 0, -kv_len % BLOCK_N))
    # [batch, heads, block, key // 8, group, key % 2, head_dim]
    magnitude = padded.abs().unflatten(2, (-1, BLOCK_N // 8, 4, 2)).amax(dim=(3, 5, 6), keepdim=True)
    magnitude = magnitude.clamp_min(SMALLEST_MAGNITUDE).expand(-1, -1, -1, BLOCK_N // 8, -1, 2, 1)
    magnitude = magnitude.flatten(2, 5)[:, :, :kv_len]
    return round_to_int8(centred, magnitude), magnitude.squeeze(-1) / 127.0


def qk_int8_pv_f16(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    sm_scale: float,
    smooth_k: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 scores, 16-bit P and V, float32 sums.

    q: [batch, q_heads, qo_len, head_dim], k and v: [batch, kv_heads, kv_len, head_dim], all float16 or bfloat16 →
    output in q's shape and dtype, log-sum-exp [batch, q_heads, qo_len] float32.
    """
    (q_heads, qo_len), (kv_heads, kv_len) = q.shape[1:3], k.shape[1:3]
    k = k.float()
    mean = sampled_mean(k) if smooth_k else torch.zeros_like(k[:, :, :1])
    k_int, k_scale = quantise_k(k, mean)

    # Heads that share a key head stand beside each other: [batch, kv_heads, group, ...].
    queries = q.float().unflatten(1, (kv_heads, q_heads // kv_heads)) * torch.tensor(sm_scale * math.log2(math.e))
    magnitude = queries.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_MAGNITUDE)
    q_int, q_scale = round_to_int8(queries, magnitude), magnitude / 127.0
    k_int, k_scale, values = k_int.unsqueeze(2), k_scale[:, :, None, None], v.float().unsqueeze(2)

    row_max = torch.full_like(q_scale, -math.inf)
    row_sum = torch.zeros_like(q_scale)
    out = torch.zeros_like(queries)
    chunk = chunk_n(q.shape[-1])
    for start in range(0, kv_len, chunk):
        keys = slice(start, min(start + chunk, kv_len))
        scale = q_scale * k_scale[..., keys]
        scores = MAGIC + q_int @ k_int[..., keys, :].transpose(-1, -2)  # exact: integers below 2**22
        if is_causal:
            hidden = torch.arange(keys.start, keys.stop) > torch.arange(qo_len)[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        largest = ((scores - MAGIC) * scale).amax(dim=-1, keepdim=True)
        grown = largest > row_max + RESCALE_THRESHOLD
        factor = torch.where(grown, torch.exp2(row_max - largest), 1.0)
        row_max = torch.where(grown, largest, row_max)
        # One fused multiply-add: float64 holds the product exactly, and rounds once.
        offset = -MAGIC * scale - row_max
        p = torch.exp2((scores.double() * scale.double() + offset.double()).float())
        row_sum = row_sum * factor + p.sum(dim=-1, keepdim=True)
        out = out * factor + p.to(q.dtype).float() @ values[..., keys, :]

    shift = queries @ mean.unsqueeze(2).transpose(-1, -2)
    lse = (row_max + torch.log2(row_sum) + shift) * math.log(2.0)
    return (out / row_sum).to(q.dtype).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)
