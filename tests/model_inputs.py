"""Inputs that models and their callers make, and `randn` does not: attention sinks, images in raster order, masks, huge values.

Each check takes a kernel and a device: on CPU tensors it holds the reference to float64, on a GPU the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import tensors
import torch
from accuracy import QK_INT8_PV_F8, exact, relative_l1

from sageattention import _ops, dispatch, reference


class Inputs(NamedTuple):
    """q, k, v [batch, heads, tokens, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def to(self, device: str, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(device, dtype) for x in self))


randn = partial(tensors.randn, dtype=torch.float32)  # the same on every device


def attend(
    kernel: str,
    inputs: Inputs,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    smooth_k: bool = True,
    smooth_v: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one kernel."""
    scale = inputs.q.shape[-1] ** -0.5
    out: tuple[torch.Tensor, torch.Tensor] = _ops.attention(
        *inputs, mask, "HND", is_causal, scale, smooth_k, smooth_v, True, kernel
    )
    return out


def sink(
    tokens: int,
    mass: float,
    *,
    seats: Sequence[int] = (0,),
    shares: Sequence[float] = (),
    likes: int = 1,
    spread: float = 1.0,
    v_offset: float = 0.0,
    queries: int = 48,
) -> Inputs:
    """Some keys, `seats`, that one in `likes` queries likes so much that they take `mass` of its row, and whose values are zero.

    Most language models have one, their first token, and some others at full stops; picture models have registers. The other keys'
    scores have a standard deviation of `spread` squared. `shares`: of these keys beside the first one's, else they are alike.
    """
    q, k = spread * randn(1, 1, queries, 128), spread * randn(1, 1, tokens, 128, seed=1)
    v = randn(1, 1, tokens, 128, seed=2) + v_offset * randn(128, seed=4)
    liked = torch.nn.functional.normalize(randn(128, seed=3), dim=0)
    q = q - (q @ liked)[..., None] * liked
    k = k - (k @ liked)[..., None] * liked
    rest = torch.logsumexp((q @ k.transpose(-1, -2) * 128**-0.5), dim=-1).mean()
    q[:, :, ::likes] += 8 * liked
    alike = torch.tensor(shares or [1.0] * len(seats))
    k[:, :, list(seats)] = (rest + (mass / (1 - mass) / alike.sum() * alike).log())[:, None] / (8 * 128**-0.5) * liked
    v[:, :, list(seats)] = 0.0
    return Inputs(q, k, v)


IN_A_ROW = (0, 70, 140, 210, 280)  # one in each of five blocks of keys that follow each other
# Where sinks are, and how far apart the other scores: after one block of keys was looked through twice others are to be.
SINKS = [
    ((0, 300, 600, 900, 1200, 2000, 3000), 1, 1.0),
    ((60, 70), 1, 1.0),
    ((2600, 2630), 1, 1.0),
    ((3, 70, 500, 2100), 1, 1.0),
    (IN_A_ROW, 1, 1.0),
    (IN_A_ROW, 1, 1.4),
    ((0,), 1, 1.4),
    ((1000,), 1, 1.4),
    ((1000,), 8, 1.0),
    ((1000,), 8, 1.4),
]


def check_sinks(kernel: str, device: str, seats: Sequence[int], likes: int, spread: float) -> None:
    """Whatever is among them is seen."""
    inputs = sink(4096, 0.9, seats=seats, likes=likes, spread=spread, queries=64).to(device, torch.bfloat16)
    assert error(kernel, inputs, smooth_v=False) <= (0.048 if "f8" in kernel else 0.032)


# Where nothing else of a sink's block is seen, or all of it are sinks.
LONE_SINKS = [
    "padding before", "a window", "four and a window", "unequal ones and a window", "all around is hidden", "all around three", "a block full behind padding",
    "a chunk full",
]  # fmt: skip


def check_lone_sinks(kernel: str, device: str, name: str, tokens: int) -> None:
    """What a sink leaves small shows in a later block only."""
    queries, half = 48, tokens // 2 // 128 * 128
    keys, rows = torch.arange(tokens), torch.arange(tokens - queries, tokens)[:, None]
    window = keys > rows - tokens // 4
    outside = keys[None] // 128 * 128 != half
    three = [half + 60, half + 70, half + 90]
    cases: dict[str, tuple[Sequence[int], list[float], torch.Tensor | None]] = {
        "padding before": ([half + 63], [], keys[None] >= half + 63),
        "a window": ([0], [], window | (keys == 0)),
        "four and a window": (range(4), [], window | (keys < 4)),
        "unequal ones and a window": (range(4), [1.0, 0.3, 0.1, 0.03], window | (keys < 4)),
        "all around is hidden": ([half + 60], [], outside | (keys == half + 60)),
        "all around three": (three, [1.0, 0.1, 0.1], outside | torch.isin(keys, torch.tensor(three))),
        "a block full behind padding": (range(half + 64, half + 128), [], keys[None] >= half + 64),
        "a chunk full": (range(half + 64, half + 104), [], None),
    }
    seats, shares, mask = cases[name]
    inputs = sink(tokens, 0.99, seats=seats, shares=shares, queries=queries).to(device, torch.bfloat16)
    mask = None if mask is None else mask.expand(queries, tokens).to(device)
    f8 = 0.055 if mask is None else 0.046  # bases that rise by less than kJump are not told from others
    assert error(kernel, inputs, mask, smooth_v=False) <= (f8 if "f8" in kernel else 0.03)


def check_sinks_in_a_row(kernel: str, device: str, mass: float, tokens: int) -> None:
    """A base that comes back is the next one's: the block before was not taken in two in vain."""
    inputs = sink(tokens, mass, seats=IN_A_ROW, queries=32).to(device, torch.bfloat16)
    assert error(kernel, inputs, smooth_v=False) <= (0.046 if "f8" in kernel else 0.03)


def check_long_sink(kernel: str, device: str, dtype: torch.dtype, *, tokens: int, queries: int) -> None:
    """Behind it the other keys have a ten millionth of a row each: where FP16 has next to no numbers if the sink's is 1."""
    inputs = sink(tokens, 0.99, queries=queries).to(device, dtype)
    assert error(kernel, inputs, smooth_v=False) <= (0.055 if "f8" in kernel else 0.035 if tokens <= 32768 else 0.05)


def check_far_apart(kernel: str, device: str, spread: float, head_dim: int) -> None:
    """Q and K so many times `randn`: a row's maximum keeps rising while its keys are read."""
    q, k, v = (randn(1, 1, tokens, head_dim, seed=tokens + i) for i, tokens in enumerate((128, 4096, 4096)))
    assert error(kernel, Inputs(spread * q, spread * k, v).to(device, torch.bfloat16)) <= (0.045 if "f8" in kernel else 0.032)


def rotated(x: torch.Tensor, *axes: torch.Tensor) -> torch.Tensor:
    """RoPE over several axes: each turns an equal share of the channels, with frequencies from 1 to 1/10000."""
    width = x.shape[-1] // len(axes) // 2 * 2
    turned = x.clone()
    for i, axis in enumerate(axes):
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angle = axis[:, None] * frequencies
        even, odd = (x[..., i * width + j : (i + 1) * width : 2] for j in (0, 1))
        turned[..., i * width : (i + 1) * width : 2] = even * angle.cos() - odd * angle.sin()
        turned[..., i * width + 1 : (i + 1) * width : 2] = even * angle.sin() + odd * angle.cos()
    return turned


def raster(*sides: int, queries: int = 48, seed: int = 0) -> Inputs:
    """Keys of an image or a video in raster order, rotated, with a large vector in common before."""
    tokens = math.prod(sides)
    places = torch.unravel_index(torch.arange(tokens), sides)
    k = rotated(randn(1, 1, tokens, 128, seed=seed + 1) + 8 * randn(128, seed=seed + 2), *places)
    return Inputs(randn(1, 1, queries, 128, seed=seed), k, randn(1, 1, tokens, 128, seed=seed + 3))


def turning_bias(tokens: int, bias: float, share: float) -> Inputs:
    """Q and K are rotated, and K has a bias in a channel whose pair turns fast: no mean takes it off. Q is `share` of `randn` in that pair."""
    q, k = randn(1, 2, tokens, 128), randn(1, 1, tokens, 128, seed=1)
    k[..., 6] += bias
    q[..., 6:8] *= share
    q, k = (rotated(x, torch.arange(tokens)) for x in (q, k))
    return Inputs(q[:, :, -64:], k, randn(1, 1, tokens, 128, seed=2))


# A bias of K in such a channel, how large Q is there, and the largest error of kernels that leave P and V 16 bits.
BIASES = [(10.0, 1.0, 0.016), (30.0, 1.0, 0.019), (100.0, 1.0, 0.026), (30.0, 0.05, 0.012), (100.0, 0.05, 0.013)]


def check_turning_bias(kernel: str, device: str, bias: float, share: float, limit: float) -> None:
    inputs = turning_bias(1000, bias, share)
    for dtype in (torch.float16, torch.bfloat16):
        check_error(kernel, inputs.to(device, dtype), limit)


def mean_of_q(tokens: int, mean: float, channels: int, head_dim: int) -> Inputs:
    """Q has a mean in some channels, as heads of trained language models have in those that turn slowly."""
    q, k, v = (randn(1, 1 + (i == 0), tokens, head_dim, seed=i) for i in range(3))
    q[..., 3 : 3 + 11 * channels : 11] += mean
    return Inputs(q[:, :, -64:], k, v)


# Such a mean beside a standard deviation of 1, in how many channels, and the largest error of kernels that leave P and V 16 bits; without
# rotation 0.02 to 0.06.
MEANS_OF_Q = [(10.0, 1, 0.013), (25.0, 1, 0.014), (25.0, 3, 0.014), (60.0, 1, 0.017), (60.0, 3, 0.014)]


def check_mean_of_q(kernel: str, device: str, mean: float, channels: int, limit: float) -> None:
    for head_dim in (64, 128, 256):
        inputs = mean_of_q(1000, mean, channels, head_dim).to(device, torch.bfloat16)
        check_error(kernel, inputs, limit)


def large_channels(tokens: int, of: str, head_dim: int) -> Inputs:
    """Every 16th channel of Q, of K or of both is ten times as large as the others."""
    q, k, v = (randn(1, 1 + (i == 0), tokens, head_dim, seed=i) for i in range(3))
    if "q" in of:
        q[..., ::16] *= 10
    if "k" in of:
        k[..., ::16] *= 10
    return Inputs(q[:, :, -64:], k, v)


# Of which, and the largest error of kernels that leave P and V 16 bits; without rotation 0.03 to 0.05, of both 0.014 to 0.03.
LARGE_CHANNELS = [("q", 0.0205), ("k", 0.0205), ("qk", 0.0185)]


def check_large_channels(kernel: str, device: str, of: str, limit: float) -> None:
    for head_dim in (64, 128, 256):
        inputs = large_channels(1000, of, head_dim).to(device, torch.bfloat16)
        check_error(kernel, inputs, limit)


def check_error(kernel: str, inputs: Inputs, limit: float) -> None:
    """`limit` is that of kernels that leave P and V 16 bits: FP8's own error comes on top."""
    assert error(kernel, inputs) <= (math.hypot(limit, QK_INT8_PV_F8.relative_l1) if "f8" in kernel else limit)


def error(kernel: str, inputs: Inputs, mask: torch.Tensor | None = None, **options: bool) -> float:
    """Relative L1 of the output against float64."""
    out, lse = attend(kernel, inputs, mask, **options)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    return relative_l1(out, exact(*inputs, attn_mask=mask)[0])


def error_with_mean(kernel: str, inputs: Inputs, mean: torch.Tensor) -> float:
    """The same with another vector subtracted from K, which softmax does not see."""
    shifted = Inputs(inputs.q, (inputs.k.float() - mean).to(inputs.k.dtype), inputs.v)
    return relative_l1(attend(kernel, shifted, smooth_k=False)[0], exact(*inputs)[0])


# Numbers with which masks hide, in every dtype that holds them.
HIDING: list[float | str] = [-1e4, -3e4, -1e6, -1e8, -1e9, -1e10, -1e12, -1e20, -1e29, "least", -math.inf]


def hiding_masks(rows: int, keys: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Additive masks by name: which keys each hides, and with what number in which dtype."""
    hidden = {name: torch.zeros(rows, keys, dtype=torch.bool) for name in ("left", "right", "scattered", "whole rows")}
    hidden["left"][:, :128] = True
    hidden["right"][:, -200:] = True
    hidden["scattered"] = torch.rand(rows, keys, generator=torch.Generator().manual_seed(5)) < 0.5
    hidden["whole rows"][3:20] = True
    hidden["whole rows"][:, 64:100] = True
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for number in HIDING:
            value = torch.finfo(dtype).min if number == "least" else float(number)
            if value < torch.finfo(dtype).min and value != -math.inf:
                continue
            for name, where in hidden.items():
                yield f"{name} {number} {dtype}", torch.zeros(rows, keys, dtype=dtype).masked_fill(where, value)


@contextmanager
def named(name: str) -> Iterator[None]:
    """A failure says of which."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def check_mask(kernel: str, inputs: Inputs, mask: torch.Tensor, limit: float) -> None:
    """Rows that see a key are as exact as ever; those that see none are zero where the mask says so, and finite."""
    out, lse = attend(kernel, inputs, mask)
    hides = reference.mask_log2(mask) == -math.inf
    expected, expected_lse = exact(*inputs, attn_mask=mask.masked_fill(hides, -math.inf))
    blind = expected_lse == -math.inf
    assert out.isfinite().all()
    assert torch.equal(lse == -math.inf, blind)
    assert (out[blind] == 0).all()
    sees = (mask == 0).any(dim=-1).expand_as(lse)
    assert relative_l1(out[sees], expected[sees]) <= limit
    assert (lse - expected_lse)[sees].abs().max() <= 0.1


def takes(kernel: str, mask: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether a kernel takes such a mask; a reference does as the kernel."""
    return dispatch.KERNELS[kernel].other_masks or not dispatch.is_other_mask(mask, q)


def check_hiding_masks(kernel: str, inputs: Inputs, limit: float) -> None:
    """Of every value and shape."""
    for name, mask in hiding_masks(inputs.q.shape[2], inputs.k.shape[2]):
        if not takes(kernel, mask, inputs.q):
            continue
        with named(name):
            check_mask(kernel, inputs, mask.to(inputs.q.device), limit)


def huge(dtype: torch.dtype) -> Iterator[tuple[str, Inputs]]:
    """Values near the ends of their type: float64's answer is finite in it."""
    large = 16000.0 if dtype == torch.float16 else 1e38
    signs = [torch.where(randn(1, 2, tokens, 128, seed=seed) > 0, 1.0, -1.0) for seed, tokens in enumerate((100, 700, 700))]
    q, k, v = (randn(1, 2, tokens, 128, seed=seed) for seed, tokens in enumerate((100, 700, 700)))
    yield "Q and K in every channel", Inputs(signs[0] * large, signs[1] * large, v)
    yield "Q", Inputs(signs[0] * large, k, v)
    yield "K", Inputs(q, signs[1] * large, v)
    yield "the same key again and again", Inputs(signs[0] * large, signs[1][:, :, :1].expand_as(k) * large, v)
    one_channel = k.clone()
    one_channel[..., 5] = signs[1][..., 5] * 40000
    tiny = q.clone()
    tiny[..., 5] *= 1e-4
    yield "a channel of K, tiny in Q", Inputs(tiny, one_channel, v)
    one_channel = one_channel.clone()
    one_channel[..., 5] = -40000.0
    one_channel[..., 40:, 5] = 60000.0
    yield "a channel of K beyond the range about its mean", Inputs(tiny, one_channel, v)
    top = 60000.0 if dtype == torch.float16 else 1e38
    yield "V", Inputs(q, k, signs[2] * top)
    yield "V, all alike", Inputs(q, k, torch.full_like(v, 3 * top if dtype == torch.bfloat16 else top))
    yield "Q, K and V", Inputs(signs[0] * large, signs[1] * large, signs[2] * top)


def check_finite(kernel: str, inputs: Inputs, *, smooth_v: bool) -> None:
    """Finite, and a mean of values: none beyond V's largest."""
    out, _ = attend(kernel, inputs, smooth_v=smooth_v)
    assert out.isfinite().all()
    assert out.abs().max() <= inputs.v.abs().max() * 1.01


def check_huge(kernel: str, device: str, dtype: torch.dtype, *, smooth_v: bool) -> None:
    """All of them."""
    for name, inputs in huge(dtype):
        with named(name):
            check_finite(kernel, inputs.to(device, dtype), smooth_v=smooth_v)


def check_small_keys(kernel: str, device: str, limit: float) -> None:
    """Nor is a small K, in float16, where a channel of it is large."""
    q, k, v = (randn(1, 1, tokens, 128, seed=tokens + i) for i, tokens in enumerate((100, 500, 500)))
    k[..., 5] *= 30.0
    q[..., 5] /= 30.0
    for exponent in (0, -9, -11, -13):
        inputs = Inputs(q * 2.0**-exponent, k * 2.0**exponent, v).to(device, torch.float16)
        assert error(kernel, inputs) <= limit, exponent


def check_bad_value(kernel: str, device: str, *, smooth_v: bool) -> None:
    """An infinity or NaN in V, of a key that the mean of V is sampled from: it shows in its channel, of rows that may see its block of keys."""
    tokens, channel = 320, 5
    key = int(reference.sampled_tokens(tokens)[-1])
    first = key // 64 * 64
    q, k, v = (randn(1, 1, tokens, 64, seed=seed) for seed in range(3))
    for bad in (math.inf, -math.inf, math.nan):
        v[0, 0, key, channel] = bad
        out, _ = attend(kernel, Inputs(q, k, v).to(device, torch.bfloat16), is_causal=True, smooth_v=smooth_v)
        finite = out[0, 0].isfinite()
        assert finite[:first].all(), bad
        assert finite[:, torch.arange(64) != channel].all(), bad
        assert not finite[key:, channel].any(), bad


def check_small(kernel: str, device: str, limit: float) -> None:
    """A small V is no worse than another: bfloat16, beside scores as far apart as four times `randn`'s."""
    q, k, v = Inputs(*(randn(1, 2, tokens, 128, seed=tokens + i) for i, tokens in enumerate((100, 700, 700))))
    for exponent in (0, -20, -48):
        inputs = Inputs(2 * q, 2 * k, v * 2.0**exponent).to(device, torch.bfloat16)
        assert error(kernel, inputs) <= limit, exponent
