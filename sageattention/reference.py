"""The kernels' arithmetic in plain PyTorch, block by block: what they should give, on CPU tensors.

Each step rounds where the kernels round, so that a kernel differs from this by the order of its sums only. The
constants are those of csrc/kernels/quant/ and of config.cuh in csrc/kernels/attention/mma_sync/ and wgmma/.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

BLOCK_N = 64  # keys that share scales of K and of V
SAMPLED_TOKENS = 64  # from which a mean is estimated: csrc/kernels/quant/kv_span.cuh
GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio
SMALLEST_MAGNITUDE = 1e-14  # of Q and K: keeps scales of zeros positive, and the product of two
SMALLEST_V = 1e-24
SCALE_UNIT = 2.0**40  # what scales of V count: sums of products times scales fit float32 whatever bfloat16 holds
LARGEST_SCALE = 2.0**50  # of Q and K: products of two of them and a score are numbers
SAMPLED_ROWS = 16  # of Q, of all heads that share one of K
ROW_STEP = 7  # from a row's token to the next one's, in such
LARGE_IN_K, LARGE_IN_Q = 4.0, 8.0  # channels so many times what is typical: csrc/kernels/quant/channel_factors.cuh
MOST_POWERS, MOST_LIFT = 4, 8
FAR, NEAR = -8192.0, -1024.0  # a mask of keys hides those that are far where others are near
HIDES = -5e5  # what a mask adds that is no more than this hides; of float16 its least number does
NEVER = -1e30  # a maximum below any score: relative to it, whatever is seen is infinite
LARGEST_SCORE = 2.0**20  # in log2 units: beyond, Hopper's kernel makes a row's scores smaller
WORTH_IT = 0.5  # V's mean is subtracted where it is so many times as large as what differs from it
GROWTH = 1.2  # and from blocks in which no key's values become so many times what they were


class Precision(NamedTuple):
    """How a kernel rounds P and V."""

    dtype: torch.dtype | None = None  # of P and V; None: the caller's
    level: float = 2.0  # what P is at its row's maximum, as a power of two
    limit: float = 65504.0  # what a thread may add up of a row's P in a chunk of keys; more renews the row's maximum
    bfloat16_level: float = -60.0  # the same two for bfloat16 where P has the caller's dtype
    bfloat16_limit: float = 2.0**-20
    headroom: tuple[float, float] | None = None  # instead: growth of that maximum, in powers of two, that renews it; bfloat16's
    tile: int | None = None  # keys of a chunk, where it is the same for every head_dim
    bfloat16_sums: bool = False  # the rows' sums are of P as rounded, of bfloat16
    largest_v: float | None = None  # V's largest magnitude after its division by a scale for each block and channel
    sums: torch.dtype = torch.float32  # what products of the keys that are gathered are added in
    twice: bool = False  # blocks in which one key outweighs others are taken a second time
    smooths: bool = False  # V's mean can be subtracted
    first_apart: bool = False  # the value of the first key that is seen is left out: it is multiplied as it is


class Twice(NamedTuple):
    """When e4m3 takes a block a second time, and how: csrc/kernels/attention/mma_sync/config.cuh."""

    rest: float = 14.0
    below: float = 2.0**-6  # e4m3's least number that is not subnormal
    least: float = 2.0**-9
    jump: float = 10.0
    near: float = 1.0
    few: float = 2.0
    settled: float = 2.0**7
    enough: float = 2.0**24
    largest: float = 2.0**20
    recent: int = 2
    between: int = 2
    tail: int = 4
    quorum: int = 4
    in_vain: int = 4
    pardon: int = 32


_F8 = Precision(torch.float8_e4m3fn, level=2.0, limit=448.0, largest_v=4.5, twice=True, smooths=True)
PRECISION = {
    "sm80_qk_int8_pv_f16": Precision(),
    "sm80_qk_int8_pv_f16_accum_f16": Precision(torch.float16, level=4.0, limit=2.0**14, largest_v=0.140625, sums=torch.float16),
    "sm89_qk_int8_pv_f8": _F8,
    "sm89_qk_int8_pv_f8_accum_f16": _F8._replace(sums=torch.float16),
    "sm90_qk_int8_pv_f16": Precision(level=3.0, bfloat16_level=-87.0, headroom=(12.0, 80.0), tile=64, bfloat16_sums=True),
}
TWICE = Twice()


def chunk_n(head_dim: int, precision: Precision) -> int:
    """Keys whose scores are turned into probabilities together."""
    if precision.tile is not None:
        return precision.tile
    return 64 if head_dim <= 64 else 32


def kernel_head_dim(head_dim: int) -> int:
    """That of the kernel which serves it: 64, 128 or 256."""
    return max(64, 1 << (head_dim - 1).bit_length())


def gather_n(head_dim: int, precision: Precision) -> int:
    """Keys whose probabilities are gathered before they meet V: all that share V's scales, where it has any."""
    return chunk_n(head_dim, precision) if precision.largest_v is None else BLOCK_N


def sampled_tokens(length: int, most: int = SAMPLED_TOKENS) -> torch.Tensor:
    """Which tokens stand for all: one in each of equal stretches, at places that the golden ratio spreads."""
    index = torch.arange(min(length, most))
    if length <= most:
        return index
    return ((index * 2**32 + (index * GOLDEN) % 2**32) // most * length) >> 32


def seen_tokens(seen: torch.Tensor, most: int) -> torch.Tensor:
    """Those of `sampled_tokens` that are seen; where these are few, a sample of all that are. seen: [keys] bool."""
    index = sampled_tokens(len(seen), most)
    if seen[index].sum() < min(len(seen), most) // 4:
        index = seen.nonzero()[:, 0]
        index = index[sampled_tokens(len(index), most)]
    return index[seen[index]]


def sampled_mean(
    x: torch.Tensor, most: int = SAMPLED_TOKENS, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of `most` tokens, each weighing less the further it lies from the others, and the mean distance from it.

    x: [batch, heads, tokens, head_dim] float32, seen: [batch, tokens] bool, None: all → two of [batch, heads, 1, head_dim].
    """
    if seen is None:
        return mean_of_all(x[:, :, sampled_tokens(x.shape[2], most)])
    each = [mean_of_all(element[:, :, seen_tokens(keys, most)]) for element, keys in zip(x.split(1), seen)]
    mean, spread = zip(*each)
    return torch.cat(mean), torch.cat(spread)


def mean_of_all(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sampled_mean` of these tokens."""
    mean = (some * (1.0 / max(some.shape[2], 1))).sum(dim=2, keepdim=True)
    difference = some - mean
    distance = difference.abs().sum(dim=3, keepdim=True)
    weight = torch.where(distance < 1e18, distance.clamp_min(1e-18).reciprocal().square(), 0.0)
    total = weight.sum(dim=2, keepdim=True)
    any_vote, difference = total > 0.0, difference.masked_fill(weight == 0.0, 0.0)
    moved = torch.where(any_vote, (weight * difference).sum(dim=2, keepdim=True) / total, 0.0)
    spread = torch.where(any_vote, (weight * difference.abs()).sum(dim=2, keepdim=True) / total, math.inf)
    return mean + moved, spread


def round_to_int8(x: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """x / magnitude * 127, rounded to nearest even; float32 that holds integers."""
    return torch.round(x.double() * (127.0 / magnitude).double()).float()  # one fused multiply-add


def scale_of(magnitude: torch.Tensor, by: float | torch.Tensor) -> torch.Tensor:
    """The unit in which numbers up to `magnitude` become integers; NaN where that is infinite."""
    return torch.where(magnitude < math.inf, (magnitude * by).clamp_max(LARGEST_SCALE), math.nan)


def without_far_keys(attn_mask: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """A mask that is added to the scores of all queries alike, and alone; those keys hidden that no query gives weight beside others."""
    of_keys = attn_mask.dim() < 2 or attn_mask.shape[-2] == 1 or attn_mask.stride(-2) == 0
    if is_causal or not of_keys or attn_mask.dtype == torch.bool:
        return attn_mask
    return attn_mask.masked_fill((attn_mask <= FAR) & (attn_mask > NEAR).any(dim=-1, keepdim=True), -math.inf)


def seen_keys(attn_mask: torch.Tensor | None, batch: int, kv_len: int) -> torch.Tensor | None:
    """Which keys some query sees, of any head: [batch, kv_len] bool; None: all. Others have no part in means and scales."""
    if attn_mask is None:
        return None
    seen = mask_log2(attn_mask) != -math.inf
    return seen[(None,) * (4 - seen.dim())].flatten(1, 2).any(dim=1).expand(batch, kv_len)


def only_seen(x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Zeros for keys that are not seen. x: [batch, heads, kv_len, head_dim]."""
    return x if seen is None else x.masked_fill(~seen[:, None, :, None], 0.0)


def first_seen(seen: torch.Tensor | None, batch: int) -> torch.Tensor:
    """The first key of each batch element that is seen, 0 if none is: [batch] int64."""
    return torch.zeros(batch, dtype=torch.int64) if seen is None else seen.int().argmax(dim=1)


def typical(x: torch.Tensor) -> torch.Tensor:
    """Size of most channels, which a few large ones hardly move; times head_dim squared. x: [..., head_dim], not negative."""
    return x.sqrt().sum(dim=-1, keepdim=True).square()


class Rotation(NamedTuple):
    """What Q and K undergo alike, so that no score changes, where some channels are much larger: csrc/kernels/quant/channel_factors.cuh."""

    applies: torch.Tensor  # [batch, kv_heads, 1, 1] bool
    factor: torch.Tensor  # [batch, kv_heads, 1, head_dim]: Q's channels are multiplied by it first, K's divided

    def of(self, x: torch.Tensor, by: torch.Tensor, head_dim: int) -> torch.Tensor:
        """x * by, rotated, over `unit`'s root; [..., head_dim] float32, of the kernel's head_dim."""
        channel = torch.arange(head_dim, device=x.device)
        bits = channel & (channel >> 4) & 3
        sign = 1.0 - 2.0 * ((bits == 1) | (bits == 2)).to(x.dtype)
        x = torch.nn.functional.pad(x * by, (0, head_dim - x.shape[-1])) * (sign / (2**MOST_POWERS * (head_dim // 4)))
        for distance in (1, 2, *(1 << bit for bit in range(4, head_dim.bit_length() - 1))):
            one, other = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
            x = torch.stack([one + other, one - other], dim=-2).flatten(-3)
        return x

    @staticmethod
    def unit(head_dim: int) -> float:
        """What products of Q and K are to be multiplied by: neither may overflow."""
        return 4.0**MOST_POWERS * (head_dim // 4)


def find_rotation(q: torch.Tensor, spread: torch.Tensor) -> Rotation:
    """Whether and how heads are rotated, as a sample of Q tells.

    q: [batch, q_heads, qo_len, head_dim], spread: of K, as `sampled_mean` has it, [batch, kv_heads, 1, head_dim].
    """
    heads, group = spread.shape[1], q.shape[1] // spread.shape[1]
    tokens, row = sampled_tokens(q.shape[2], SAMPLED_ROWS), torch.arange(SAMPLED_ROWS)
    token = tokens[(row * ROW_STEP % SAMPLED_ROWS).clamp_max(len(tokens) - 1)]
    rows = q.float().unflatten(1, (heads, group))[:, :, row * group // SAMPLED_ROWS, token].abs()
    large_in_q = (rows * q.shape[3] > LARGE_IN_Q * rows.sum(dim=3, keepdim=True)).any(dim=(2, 3), keepdim=True)
    large_in_k = (spread * q.shape[3] ** 2 > LARGE_IN_K * typical(spread)).any(dim=3, keepdim=True)
    size = (rows * typical(rows).clamp_min(1e-30).reciprocal()).nan_to_num(0.0).amax(dim=2, keepdim=True)
    ratio = spread * typical(size) / (typical(spread) * size)
    most = 4.0**MOST_POWERS
    exponent = torch.frexp(ratio.nan_to_num(0.0).clamp(1.0 / most, most))[1] - 1
    applies = large_in_q | large_in_k
    power = (exponent + 1) >> 1
    if q.dtype == torch.float16:
        power = power - (1 - MOST_LIFT - torch.frexp(typical(spread) / q.shape[3] ** 2)[1]).clamp(0, MOST_LIFT)
    return Rotation(applies, torch.exp2(power.float()).masked_fill(~applies, 1.0))


def quantise_k(
    k: torch.Tensor,
    mean: torch.Tensor,
    seen: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    head_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K to INT8 with one scale for the 16 keys of a block of 64 that have the same (key % 8) // 2.

    k: [batch, heads, kv_len, head_dim], mean: [batch, heads, 1, head_dim] of the same dtype, which is subtracted, seen: as `seen_keys`
    has it → integers as float32, [batch, heads, kv_len, the kernel's head_dim where it may rotate], scales [batch, heads, kv_len].
    """
    kv_len = k.shape[2]
    centred = (k.double() * 0.5 - (mean.float() * 0.5).to(k.dtype).double()).to(k.dtype).float()
    if rotation is not None and head_dim is not None:
        difference = k.double() - mean.double()
        rotated = rotation.of(difference.float(), 0.5 / rotation.factor, head_dim).to(k.dtype).float()
        centred = torch.where(rotation.applies, rotated, torch.nn.functional.pad(centred, (0, head_dim - k.shape[3])))
    centred = only_seen(centred, seen)
    padded = torch.nn.functional.pad(centred, (0, 0, 0, -kv_len % BLOCK_N))
    # [batch, heads, block, key // 8, group, key % 2, head_dim]
    magnitude = padded.abs().unflatten(2, (-1, BLOCK_N // 8, 4, 2)).amax(dim=(3, 5, 6), keepdim=True)
    magnitude = magnitude.clamp_min(SMALLEST_MAGNITUDE).expand(-1, -1, -1, BLOCK_N // 8, -1, 2, 1)
    magnitude = magnitude.flatten(2, 5)[:, :, :kv_len]
    return round_to_int8(centred, magnitude), scale_of(magnitude.squeeze(-1), 2.0 / 127.0)


def next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is no less than x, which is positive; infinity and NaN stay what they are."""
    fraction, exponent = torch.frexp(x)  # of a power of two: one half
    return torch.where(x.isfinite(), torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).int()), x)


class Values(NamedTuple):
    """V as a kernel multiplies it: (V - mean, where it is subtracted) / scale, rounded."""

    data: torch.Tensor  # [batch, heads, kv_len, head_dim] float32
    scale: torch.Tensor  # [batch, heads, blocks of 64 keys, head_dim], in SCALE_UNIT where V is scaled
    mean: torch.Tensor  # [batch, heads, 1, head_dim]
    smoothed: torch.Tensor  # [batch, heads, kv_len] bool: the mean was subtracted


def quantise_v(v: torch.Tensor, precision: Precision, *, smooth_v: bool, seen: torch.Tensor | None = None) -> Values:
    """V: [batch, heads, kv_len, head_dim], as the kernel multiplies it."""
    values = v.float()
    blocks = -(-v.shape[2] // BLOCK_N)
    mean = torch.zeros_like(values[:, :, :1])
    smoothed = torch.zeros(v.shape[:3], dtype=torch.bool)
    if precision.dtype is None or precision.largest_v is None:
        return Values(values, values.new_ones(*v.shape[:2], blocks, v.shape[3]), mean, smoothed)
    kept = seen
    if precision.first_apart:
        every = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool) if seen is None else seen
        kept = every.scatter(1, first_seen(seen, v.shape[0])[:, None], False)
    if smooth_v and precision.smooths:
        mean, spread = sampled_mean(values, seen=seen)
        mean = mean.masked_fill(~(mean.abs() > WORTH_IT * spread), 0.0)  # also of NaN and infinity
        # Of 64 channels each.
        parts = [
            torch.nn.functional.pad(x.abs() / 1024, (0, -v.shape[3] % 64)).unflatten(3, (-1, 64))
            for x in (only_seen(values, kept), only_seen(values - mean, kept))
        ]
        before, after = (x.sum(dim=4) for x in parts)
        grown = torch.nn.functional.pad((after > GROWTH * before).any(dim=3), (0, blocks * BLOCK_N - v.shape[2]))
        smoothed = ~grown.unflatten(2, (blocks, BLOCK_N)).any(dim=3).repeat_interleave(BLOCK_N, 2)[:, :, : v.shape[2]]
        values = torch.where(smoothed.unsqueeze(3), values - mean, values)
    values = only_seen(values, kept)
    padded = torch.nn.functional.pad(values, (0, 0, 0, -v.shape[2] % BLOCK_N)).unflatten(2, (blocks, BLOCK_N))
    magnitude = padded.abs().amax(dim=3).clamp_min(SMALLEST_V)
    if precision.dtype == torch.float16:  # powers of two, of which nothing is rounded
        more = 32.0  # times as large the scale itself need not be a float32
        scale = next_power_of_two(magnitude * (1.0 / (more * precision.largest_v)))
        factor, scale = scale.reciprocal() / more, scale / SCALE_UNIT * more
    else:
        factor, scale = precision.largest_v / magnitude, magnitude * (1.0 / precision.largest_v / SCALE_UNIT)
    factor = factor.repeat_interleave(BLOCK_N, 2)[:, :, : v.shape[2]]
    return Values((values * factor).to(precision.dtype).float(), scale, mean, smoothed)


def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p @ v, in which a weight of zero takes nothing from a NaN or an infinity: a hidden key must not show."""
    finite = v.isfinite()
    if finite.all():
        return p @ v
    seen = (p > 0).float() @ (~finite).float() > 0
    return (p @ v.masked_fill(~finite, 0.0)).masked_fill(seen, math.nan)


def added_by_thread(p: torch.Tensor) -> torch.Tensor:
    """Sums of the probabilities that one thread of an mma.sync kernel holds: [..., keys] → [..., 4]."""
    return torch.nn.functional.pad(p, (0, -p.shape[-1] % 8)).unflatten(-1, (-1, 4, 2)).sum(dim=(-3, -1))


def small_fours(p: torch.Tensor, chunk: int) -> torch.Tensor:
    """Which threads' fours, of each 16 of a chunk's keys, are all below e4m3's normal numbers: [..., keys] → [..., chunk / 4] bool."""
    fours = torch.nn.functional.pad(p, (0, chunk - p.shape[-1])).unflatten(-1, (-1, 2, 4, 2))
    return (fours.amax(dim=(-3, -1)) < TWICE.below).flatten(-2)


def rows_of_warp(x: torch.Tensor, warp_m: int) -> torch.Tensor:
    """For each row, of how many of its warp's rows x holds: [..., rows, 1] bool → the same shape, float32."""
    rows = x.shape[-2]
    warps = torch.nn.functional.pad(x.float(), (0, 0, 0, -rows % warp_m)).unflatten(-2, (-1, warp_m))
    return warps.sum(dim=-2, keepdim=True).expand_as(warps).flatten(-3, -2)[..., :rows, :]


def mask_log2(attn_mask: torch.Tensor) -> torch.Tensor:
    """What a mask adds to the scores, in log2 units. Numbers that are meant as -infinity are."""
    if attn_mask.dtype == torch.bool:
        return torch.zeros(attn_mask.shape, dtype=torch.float32).masked_fill(~attn_mask, -math.inf)
    hides = torch.finfo(torch.float16).min if attn_mask.dtype == torch.float16 else HIDES
    return (attn_mask.float() * math.log2(math.e)).masked_fill(attn_mask <= hides, -math.inf)


class _Rows:
    """What a kernel keeps of its rows while it goes through their keys: [..., rows, 1] each, but `out` [..., rows, v_head_dim]."""

    def __init__(self, q_scale: torch.Tensor, v_head_dim: int) -> None:
        self.q_scale = q_scale
        self.unit = torch.ones_like(q_scale)  # what scores are multiplied by: less than 1 once beyond LARGEST_SCORE
        self.base = torch.full_like(q_scale, NEVER)  # what probabilities are relative to, in log2 units
        self.last = torch.full_like(q_scale, -1e3)  # block that their warp took in two
        self.in_vain = torch.zeros_like(q_scale)  # how many of those the next ones made needless, or were for few of its rows
        # Whose bases have been raised, from nothing, or by so much that what counted before may have become small: until a chunk tells.
        self.raised, self.first, self.leapt = torch.zeros(3, *q_scale.shape, dtype=torch.bool)
        self.sum = torch.zeros_like(q_scale)
        self.unsmoothed = torch.zeros_like(q_scale)  # of the sum, what fell on keys whose V kept its mean
        self.out = q_scale.new_zeros(*q_scale.shape[:-1], v_head_dim)

    def move_base(self, to: torch.Tensor) -> torch.Tensor:
        """Keep what was added up relative to another base; returns the factor."""
        factor = torch.exp2(self.base - to)
        self.base = to
        self.sum, self.unsmoothed, self.out = self.sum * factor, self.unsmoothed * factor, self.out * factor
        return factor

    def take_in_two(
        self,
        jumped: torch.Tensor,
        few: torch.Tensor,
        returned: torch.Tensor,
        between: torch.Tensor,
        subnormal: torch.Tensor,
        block: int,
        warp_m: int,
    ) -> torch.Tensor:
        """Rows of which another pass over the block takes what rounding left. Keeps account for the warps.

        `between`, `subnormal`: of rows that jumped or left few, how many keys are neither small nor near the largest; small, not nothing.
        """
        quorum = rows_of_warp(torch.ones_like(few), warp_m) / TWICE.quorum
        candidates, between, subnormal = (rows_of_warp(x, warp_m) for x in (jumped | few, between, subnormal))
        no_gap = (TWICE.quorum * between >= candidates) & (subnormal <= TWICE.tail * between)
        far_apart = no_gap & (between >= TWICE.between * candidates) & (subnormal >= between)
        in_vain = (rows_of_warp(returned, warp_m) >= quorum) & no_gap
        self.in_vain = self.in_vain + in_vain.float()
        many = candidates >= quorum
        credit = self.in_vain < TWICE.in_vain + block // TWICE.pardon
        in_two = ((jumped & (many | credit)) | (few & many & credit)) & ~far_apart
        in_two &= (self.sum <= TWICE.enough) & (self.base.abs() <= TWICE.largest)
        some = rows_of_warp(in_two, warp_m) > 0
        self.in_vain = self.in_vain + (some & ~many).float()
        self.last = torch.where(some, float(block), self.last)
        return in_two


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
    per_block_mean: bool = True,
    kernel: str = "sm80_qk_int8_pv_f16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 scores, P and V as the kernel rounds them.

    Args:
        q: [batch, q_heads, qo_len, head_dim] float16 or bfloat16.
        k: [batch, kv_heads, kv_len, head_dim].
        v: [batch, kv_heads, kv_len, v_head_dim].
        attn_mask: broadcastable to [batch, q_heads, qo_len, kv_len]; bool, or added to the scores.
        is_causal, sm_scale, smooth_k, smooth_v: as in `sageattn`.
        per_block_mean: FP4 kernels subtract a mean of Q for each 128 rows; else one of all.
        kernel: whose rounding of P and V.

    Returns:
        Output [batch, q_heads, qo_len, v_head_dim] in q's dtype and log-sum-exp [batch, q_heads, qo_len] float32; 0 and -inf
        where a query sees no key.
    """
    if q.numel() == 0:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    if is_causal:  # no query sees those further on
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    if attn_mask is not None and attn_mask.dim() > 0:
        attn_mask = without_far_keys(attn_mask[..., : k.shape[2]], is_causal=is_causal)
    if "fp4" in kernel:
        from . import reference_fp4  # which is made of parts of this module

        return reference_fp4.attention(
            q,
            k,
            v,
            attn_mask,
            is_causal=is_causal,
            sm_scale=sm_scale,
            smooth_k=smooth_k,
            smooth_v=smooth_v,
            per_block_mean=per_block_mean,
            kernel=kernel,
        )
    (q_heads, qo_len), (kv_heads, kv_len) = q.shape[1:3], k.shape[1:3]
    heads = (kv_heads, q_heads // kv_heads)  # those that share a key head stand beside each other: [batch, *heads, ...]
    precision = PRECISION[kernel]
    bfloat16 = precision.dtype is None and q.dtype == torch.bfloat16
    level = precision.bfloat16_level if bfloat16 else precision.level
    limit = precision.bfloat16_limit if bfloat16 else precision.limit
    seen = seen_keys(attn_mask, k.shape[0], kv_len)
    head_dim = kernel_head_dim(max(q.shape[-1], v.shape[-1]))
    mean, rotation = torch.zeros_like(k[:, :, :1]), None
    if smooth_k:
        mean, spread = sampled_mean(k.float(), seen=seen)
        mean, rotation = mean.to(k.dtype), find_rotation(q, spread)
    k_int, k_scale = quantise_k(k, mean, seen, rotation, head_dim)
    values = Values(*(x.unsqueeze(2) for x in quantise_v(v, precision, smooth_v=smooth_v, seen=seen)))

    queries = q.float().unflatten(1, heads) * torch.tensor(sm_scale * math.log2(math.e), dtype=torch.float32)
    rotated, q_unit = queries, queries.new_ones(())
    if rotation is not None:
        applies, factor = (x.unsqueeze(2) for x in rotation)
        as_they_are = torch.nn.functional.pad(queries, (0, head_dim - q.shape[-1]))
        rotated = torch.where(applies, rotation.of(queries, factor, head_dim), as_they_are)
        q_unit = torch.where(applies, q_unit * rotation.unit(head_dim), q_unit)
    magnitude = rotated.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_MAGNITUDE)
    q_int = round_to_int8(rotated, magnitude)
    k_int, k_scale = k_int.unsqueeze(2), k_scale[:, :, None, None]
    bias = None
    if attn_mask is not None:
        bias = mask_log2(attn_mask).expand(q.shape[0], q_heads, qo_len, kv_len).unflatten(1, heads)

    rows = _Rows(scale_of(magnitude, q_unit / 127.0), v.shape[-1])
    dtype = precision.dtype or q.dtype
    chunk, gather = chunk_n(head_dim, precision), gather_n(head_dim, precision)
    warp_m = 32 if head_dim <= 128 else 16  # rows of a warp

    def log_scores(keys: slice) -> torch.Tensor:
        """In log2 units; -infinity: hidden."""
        products = q_int @ k_int[..., keys, :].transpose(-1, -2)  # integers below 2**22
        scores = products * (rows.q_scale * rows.unit * k_scale[..., keys])
        if bias is not None:
            scores = scores + bias[..., keys] * rows.unit
        if is_causal:
            hidden = torch.arange(keys.start, keys.stop) > torch.arange(qo_len)[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def accumulate(p: torch.Tensor, first: int) -> None:
        keys = p.shape[-1]
        step = keys if precision.sums == torch.float32 else 32 // dtype.itemsize  # of one mma, after which sums are rounded
        product = torch.zeros_like(rows.out)
        for weights, data in zip(p.split(step, -1), values.data[..., first : first + keys, :].split(step, -2)):
            product = (product + weigh(weights, data)).to(precision.sums).float()
        block = first // BLOCK_N
        # A block's scale may be infinite, which is nothing to rows that see none of its keys.
        rows.out = rows.out + (product * values.scale[..., block : block + 1, :]).masked_fill(
            (p == 0.0).all(dim=-1, keepdim=True), 0.0
        )

    for first_key in range(0, kv_len, gather):
        gathered = queries.new_zeros(*queries.shape[:-1], 0)
        block = first_key // BLOCK_N
        jumped, few, returned = torch.zeros(3, *rows.base.shape, dtype=torch.bool)
        between, subnormal = torch.zeros(2, *rows.base.shape)
        recent = block - rows.last <= TWICE.recent
        for start in range(first_key, min(first_key + gather, kv_len), chunk):
            keys = slice(start, min(start + chunk, kv_len))
            scores = log_scores(keys)
            largest = scores.amax(dim=-1, keepdim=True) - level
            if precision.headroom is None:
                grown = (added_by_thread(torch.exp2(scores - rows.base)) > limit).any(dim=-1, keepdim=True)
            else:
                grown = largest > rows.base + precision.headroom[q.dtype == torch.bfloat16]
                excess = torch.where(grown & (largest.abs() > LARGEST_SCORE), LARGEST_SCORE / largest.abs(), 1.0)
                if (excess < 1.0).any():
                    rows.unit, scores = rows.unit * excess, scores * excess
                    rows.base, largest = ((x + level) * excess - level for x in (rows.base, largest))
            base = torch.where(grown, largest, rows.base)
            if precision.headroom is None:  # where a row's base is renewed the others of its warp take whole powers of two
                risen = rows.base + (largest - rows.base).clamp_min(0.0).floor()
                base = torch.where(~grown & (rows_of_warp(grown, warp_m) > 0), risen, base)
            first = grown & (rows.base == NEVER)  # base of the row: that is no jump
            rise = base - rows.base
            rows.raised |= grown
            rows.first |= first
            rows.leapt |= grown & ~first & (rise >= TWICE.jump + TWICE.rest * recent)
            gathered = gathered * rows.move_base(base)
            p = torch.exp2(scores - rows.base)
            added = p.to(q.dtype).float() if bfloat16 and precision.bfloat16_sums else p
            rows.sum = rows.sum + added.sum(dim=-1, keepdim=True)
            if precision.twice:
                visible = scores > -math.inf
                small = ((p < TWICE.below) & visible).any(dim=-1, keepdim=True)
                rounded = p.to(dtype).float()
                fours = small_fours(rounded, chunk)
                look = rows.raised | (block & (block - 1) == 0)
                jumps = small & (rows.leapt | (rows.first & fours.any(dim=-1, keepdim=True)))
                leaves_few = small & look & (2 * fours.sum(dim=-1, keepdim=True) >= fours.shape[-1])
                jumped, few = jumped | jumps, few | leaves_few
                large, normal, some = (
                    (jumps | leaves_few) * (rounded >= least).sum(dim=-1, keepdim=True)
                    for least in (1.0, TWICE.below, TWICE.least)
                )
                between, subnormal = between + normal - large, subnormal + some - normal
                returned |= grown & ~first & recent
                near = added_by_thread(p) >= TWICE.near * (added_by_thread(visible.float()) - TWICE.few)
                waits = ~small & near.all(dim=-1, keepdim=True) & (rows.base != NEVER) & (rows.sum < 4 * TWICE.settled)
                # The first bases of a first block that is seen whole are looked at once: a kernel finds them beforehand.
                waits &= ~rows.first | (block > 0) | (visible.sum(dim=-1, keepdim=True) < chunk)
                rows.raised &= waits
                rows.first &= waits
                rows.leapt &= waits
            unsmoothed = (added * ~values.smoothed[..., None, keys]).sum(dim=-1, keepdim=True)
            rows.unsmoothed = rows.unsmoothed + unsmoothed
            gathered = torch.cat([gathered, p], dim=-1).to(dtype).float()
        in_two = rows.take_in_two(jumped, few, returned, between, subnormal, block, warp_m) if precision.twice else None
        if in_two is None or not in_two.any():
            accumulate(gathered, first_key)
            continue
        scores = log_scores(slice(first_key, keys.stop))
        accumulate(torch.exp2(scores - rows.base).to(dtype).float(), first_key)
        rows.move_base(torch.where(in_two, rows.base - TWICE.rest, rows.base))
        p = torch.exp2(scores - rows.base)
        rounded = (p * 2.0**-TWICE.rest).to(dtype).float() * 2.0**TWICE.rest
        rest = in_two & (p < TWICE.below * 2.0**TWICE.rest)
        accumulate(torch.where(rest, p - rounded, 0.0).to(dtype).float(), first_key)

    # No product of matrices, for which PyTorch may be told that half the bits of float32 will do.
    shift = (queries * mean.float().unsqueeze(2)).sum(dim=-1, keepdim=True)
    empty = rows.sum == 0.0
    lse = (((rows.base + torch.log2(rows.sum)) / rows.unit + shift) * math.log(2.0)).masked_fill(empty, -math.inf)
    smoothed = (rows.sum - rows.unsmoothed) / rows.sum
    unit = 1.0 if precision.largest_v is None else SCALE_UNIT
    out = (rows.out * (unit / rows.sum) + values.mean * smoothed).masked_fill(empty, 0.0)
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
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for queries, keys in zip(map(slice, ends_q, ends_q[1:]), map(slice, ends_k, ends_k[1:])):
        sequence = [x.transpose(0, 1).unsqueeze(0) for x in (q[queries], k[keys], v[keys])]
        if sequence[0].numel() == 0 or sequence[1].numel() == 0:
            continue
        some_out, some_lse = attention(
            *sequence,
            is_causal=is_causal,
            sm_scale=sm_scale,
            smooth_k=smooth_k,
            smooth_v=smooth_v,
            per_block_mean=False,
            kernel=kernel,
        )
        out[queries], lse[:, queries] = some_out[0].transpose(0, 1), some_lse[0]
    return out, lse
