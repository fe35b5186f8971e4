"""Random problems of attention, for tests/fuzz.py: a seed makes one, its tensors lying in a buffer that is NaN everywhere else."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sageattention import reference

# Bytes of which every element of a floating dtype is NaN.
NAN = 0xFF
ALIGNMENT = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Kinds of keys whose errors of rounding are alike from key to key, or go with the values: they do not average out. In the group of a loud
# token others become zero, so that each loses the same mean.
ALIKE = {"constant", "zero", "half zero", "trend", "grid", "repeated", "huge", "loud token", "overlapping"}
# Kinds of values of which one error moves a whole row: of one key, in one channel, or in all channels together.
V_ALIKE = {"loud token", "outlier channels", "offset", "constant", "trend", "huge", "overlapping"}
# Kinds of queries and keys whose errors of rounding are alike from row to row of a head: rows have the same weights, or a part in common.
ROWS_ALIKE = {"zero", "tiny", "one query", "sink", "sink, outlier channels"}
K_KINDS = {
    "randn": 8, "offset": 4, "outlier channels": 3, "loud token": 2, "sink": 3,
    "sink, outlier channels": 1, "constant": 1, "zero": 1, "half zero": 2,
    "trend": 2, "grid": 2, "repeated": 1, "tiny": 1, "huge": 1,
}  # fmt: skip
Q_KINDS = {"randn": 12, "few channels": 1, "zero": 1, "tiny": 1, "huge": 1, "one query": 1}
V_KINDS = {"randn": 10, "quiet first": 2, "offset": 3, "loud token": 1, "outlier channels": 1, "constant": 1, "zero": 1, "half zero": 1, "trend": 1,
           "tiny": 1, "huge": 1}  # fmt: skip
MASKS = {
    "random": 4,
    "left": 2,
    "right": 2,
    "scattered keys": 2,
    "window": 2,
    "rows": 2,
    "tiles": 2,
    "all": 1,
    "nothing": 1,
    "bias": 3,
}
HIDING: tuple[Any, ...] = (-8192, -1e4, -3e4, -1e5, -5e5, -1e6, -1e8, -1e9, -1e10, -1e12, -1e20, -1e29, "least", -math.inf)
# Where kernels, their tiles and their choices change.
EDGES = (8, 16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 1024, 2048, 4096)
HEAD_DIMS = (64, 128, 256, 32, 40, 72, 80, 96, 112, 160, 192, 63, 65, 127, 129, 255, 1, 2, 3, 7, 8, 16)


class Packed(NamedTuple):
    """Sequences one after the other."""

    lengths_q: list[int]
    lengths_k: list[int]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    largest_q: int  # what is given for max_seqlen_q
    largest_k: int


class Problem(NamedTuple):
    """What one seed makes; q, k, v are [batch, heads, tokens, head_dim] whatever their strides, of packed sequences with batch 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None  # as it is given
    hidden: torch.Tensor | None  # broadcastable to the scores; True: the query does not see the key
    packed: Packed | None
    tensor_layout: str
    is_causal: bool
    sm_scale: float | None
    alike: bool  # errors of rounding may not average out
    v_alike: bool  # one error may move a whole row
    rows_alike: bool  # or all rows of a head
    buffer: torch.Tensor  # bytes, in which everything lies
    before: torch.Tensor  # the same bytes, copied
    words: str  # describes it

    @property
    def factor(self) -> float:
        """On the scores."""
        return float(self.q.shape[-1] ** -0.5) if self.sm_scale is None else self.sm_scale


class Place(NamedTuple):
    """Where a tensor lies in the buffer: in elements, from the beginning of its part."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    elements: int  # of its part, with what lies around it

    def bytes(self) -> int:
        return -(-self.elements * int(self.dtype.itemsize) // ALIGNMENT) * ALIGNMENT

    def view(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """The tensor, its part beginning at a byte of the buffer."""
        return buffer.view(self.dtype).as_strided(self.shape, self.stride, start // self.dtype.itemsize + self.offset)

    def __str__(self) -> str:
        return f"{list(self.shape)} strides {list(self.stride)} offset {self.offset}"


def weighted(rng: random.Random, choices: dict[str, int]) -> str:
    """One of the keys, each as often as its number says."""
    return rng.choices(list(choices), list(choices.values()))[0]


def length(rng: random.Random, largest: int) -> int:
    """A number of tokens up to `largest`: short, about an edge, or any."""
    kind = rng.random()
    if kind < 0.25:
        return rng.randint(1, min(largest, 20))
    if kind < 0.6:
        return max(1, min(largest, rng.choice([edge for edge in EDGES if edge <= 2 * largest] or [1]) + rng.randint(-1, 1)))
    return min(largest, round(math.exp(rng.uniform(0, math.log(largest + 0.5)))) or 1)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    return sum(max(0, size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def place(
    rng: random.Random, shape: Sequence[int], dtype: torch.dtype, *, heads_first: bool = True, overlaps: bool = False
) -> Place:
    """Random strides: dimensions in any order, rows with gaps, repeated dimensions, any beginning; last dimension contiguous."""
    order = [0, 1, 2] if heads_first else [0, 2, 1]
    style = rng.random()
    if style < 0.2:
        rng.shuffle(order)

    def gap() -> int:
        return 0 if style > 0.6 else rng.choice([0, 0, 8, 16, 64, rng.randint(1, 40)])

    repeated = [rng.random() < 0.04 for _ in shape[:3]]
    strides = [0, 0, 0, 1]
    step = shape[3] + gap()
    if overlaps:
        step = rng.randint(1, max(1, shape[3] - 1))
    for dimension in reversed(order):
        if repeated[dimension]:
            continue
        strides[dimension] = step
        step = shape[dimension] * step + (gap() if rng.random() < 0.5 else 0)
    around = 128 * shape[3] + 64
    first = around // ALIGNMENT * ALIGNMENT + (0 if style > 0.6 else rng.choice([0, 0, 8, 1, 3, rng.randint(0, 63)]))
    return Place(tuple(shape), tuple(strides), first, dtype, first + span(shape, strides) + around)


def mask_place(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Place:
    """Where a mask lies, none of whose strides need be 1; it may be transposed or take every other element."""
    order, strides, step = list(range(len(shape))), [0] * len(shape), rng.choice([1, 1, 1, 1, 2, 3])
    if rng.random() < 0.15:
        rng.shuffle(order)
    for dimension in reversed(order):
        strides[dimension] = step
        step = step * shape[dimension] + rng.choice([0, 0, 0, 1, 5, 8])
        if shape[dimension] == 1 and rng.random() < 0.5:
            strides[dimension] = rng.choice([0, 1, 7])
        elif rng.random() < 0.05:
            strides[dimension] = 0
    first = 256 + rng.choice([0, 0, 0, 1, 8, rng.randint(0, 31)])
    return Place(tuple(shape), tuple(strides), first, dtype, first + span(shape, strides) + 4096)


class Values:
    """Random tensors on a device, from one seed."""

    def __init__(self, rng: random.Random, device: str) -> None:
        self.rng, self.device = rng, device
        self.generator = torch.Generator(device).manual_seed(rng.getrandbits(40))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def large(self, dtype: torch.dtype) -> float:
        """A number far from one that the dtype holds."""
        return float(self.rng.uniform(1e3, 6e4)) if dtype == torch.float16 else 10 ** self.rng.uniform(3, 38)

    def make(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] float32 of a kind."""
        rng, (_, heads, tokens, head_dim) = self.rng, shape
        x = self.randn(*shape)
        if kind == "offset":
            x += rng.choice([1, 8, 30]) * self.randn(heads, 1, head_dim)
        elif kind == "quiet first":
            x[:, :, 0] *= rng.choice([0.0, 0.03])
        elif "outlier channels" in kind:
            x[..., rng.randrange(head_dim) :: rng.choice([16, 64])] *= rng.choice([5, 30])
        elif kind == "loud token":
            x[:, :, rng.randrange(tokens)] *= rng.choice([10, 300])
        elif kind in ("constant", "one query"):
            x = x[:, :, :1].expand(*shape)
        elif kind == "zero":
            x.zero_()
        elif kind == "half zero":
            x[:, :, tokens // 2 :] = 0.0
        elif kind == "trend":
            slope = torch.linspace(-1, 1, tokens, device=self.device)[:, None]
            x = rng.choice([0.03, 1.0]) * x + rng.choice([1, 8]) * slope * self.randn(heads, 1, head_dim)
        elif kind == "grid":
            side = max(1, math.isqrt(tokens))
            j, channel = torch.arange(tokens, device=self.device), torch.arange(head_dim, device=self.device)
            axis = torch.where(channel[None] * 2 < head_dim, (j // side)[:, None], (j % side)[:, None])
            angle = axis * 10000.0 ** (-((channel * 4 / head_dim) % 2) / 2)
            x += rng.choice([4, 8]) * (angle + 6.3 * self.uniform(heads, 1, head_dim)).cos()
        elif kind == "repeated":
            x = x[:, :, torch.arange(tokens, device=self.device) // rng.choice([2, 5, 64])]
        elif kind == "few channels":
            x *= torch.arange(head_dim, device=self.device) % rng.choice([7, 50]) == 0
        elif kind == "tiny":
            x *= 10 ** rng.uniform(-7, -2)
        elif kind == "huge":
            x = torch.where(x > 0, 1.0, -1.0) if rng.random() < 0.5 else x.clamp(-1, 1)
            x *= self.large(dtype)
        return x


def sequences(rng: random.Random, budget: int) -> tuple[list[int], list[int]]:
    """Lengths of packed queries and keys whose dense scores are about as many as `budget`."""
    side = math.isqrt(budget) + 1
    lengths: tuple[list[int], list[int]] = ([], [])
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8, 30, 100])):
        for some in lengths:
            some.append(0 if rng.random() < 0.15 else length(rng, max(1, side // 2)))
        if sum(lengths[0]) * sum(lengths[1]) > budget:
            break
    if rng.random() < 0.3:
        lengths = (lengths[0], list(lengths[0]))
    if rng.random() < 0.03:
        lengths = (lengths[0], [0] * len(lengths[1]))
    return lengths


def pack(rng: random.Random, lengths: tuple[list[int], list[int]], device: str) -> Packed:
    """What `sageattn_varlen` is told of them."""
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(some)], dtype=torch.int32, device=device) for some in lengths)
    largest = (max(some, default=0) + rng.choice([0, 0, 0, 1, 100]) for some in lengths)
    return Packed(*lengths, cu_q, cu_k, *largest)


def sequence_of(lengths: list[int], tokens: int, none: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the number of its sequence (`none` beyond the last) and its place in it."""
    ends = list(itertools.accumulate(lengths))
    sizes = [*lengths, tokens - (ends[-1] if ends else 0)]
    repeats = torch.tensor(sizes)
    number = torch.tensor([*range(len(lengths)), none]).repeat_interleave(repeats)
    start = torch.tensor([0, *ends]).repeat_interleave(repeats)
    return number.to(device), (torch.arange(tokens) - start).to(device)


def mask_values(values: Values, place: Place) -> tuple[torch.Tensor, str]:
    """What a mask holds, of the shape that it has, and words for it."""
    rng, shape, dtype = values.rng, (1, 1, *place.shape)[-max(2, len(place.shape)) :], place.dtype
    rows, keys = shape[-2:]
    kind = weighted(rng, MASKS)
    j = torch.arange(keys, device=values.device)
    some = values.uniform(*shape)
    if kind == "random":
        seen = some > rng.choice([0.1, 0.5, 0.9])
    elif kind in ("left", "right"):
        edge = (some.flatten(0, -3)[..., :1, :1].reshape(*some.shape[:-2], 1, 1) if some.dim() > 2 else some[:1, :1]) * (
            keys + 1
        )
        seen = (j < edge if kind == "right" else j >= edge).expand(shape)
    elif kind == "scattered keys":
        seen = (values.uniform(keys) > 0.5).expand(shape)
    elif kind == "window":
        i = torch.arange(rows, device=values.device)[:, None]
        seen = ((j - i).abs() <= rng.choice([0, 1, 10, 64, 200])).expand(shape)
    elif kind == "rows":
        seen = (some > 0.3) & (some[..., :1] > 0.5)
    elif kind == "tiles":
        tile = values.uniform(rows // 128 + 1, keys // 64 + 1) > 0.5
        seen = tile.repeat_interleave(128, 0)[:rows].repeat_interleave(64, 1)[:, :keys].expand(shape)
    else:
        seen = torch.full(shape, kind != "nothing", device=values.device)
    seen = seen.reshape(place.shape)
    if dtype == torch.bool:
        return seen, f"bool {kind}"
    number = rng.choice(HIDING)
    if number == "least" or -math.inf < number < torch.finfo(dtype).min:
        number = torch.finfo(dtype).min
    size = rng.choice([1, 30]) if kind == "bias" else rng.choice([0, 0, 1])
    bias = size * values.randn(*place.shape)
    return bias.masked_fill(~seen, number), f"{kind} {number:.3g} bias {size}"


def one_each(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Without what dimensions of `like`, or of x itself, repeat."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in (x if like is None else like).stride())]


def hides(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask hides, as docs/api.md says."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= (torch.finfo(torch.float16).min if mask.dtype == torch.float16 else reference.HIDES)


def problem(seed: int, device: str) -> Problem:
    """The problem of a seed. On the CPU, whose reference is slow, smaller ones."""
    rng = random.Random(seed)
    values = Values(rng, device)
    dtype = rng.choices(DTYPES, [5, 5, 1])[0]
    group, kv_heads, batch = (
        rng.choice(some) for some in ((1, 1, 1, 1, 2, 2, 3, 4, 8, 16, 23), (1, 1, 2, 2, 3, 5), (1, 1, 1, 1, 2, 2, 3, 9))
    )
    head_dim = rng.choice(HEAD_DIMS[: 6 if rng.random() < 0.6 else None]) if rng.random() < 0.9 else rng.randint(1, 256)
    v_head_dim = head_dim if rng.random() < 0.8 else rng.choice(HEAD_DIMS) if rng.random() < 0.7 else rng.randint(1, 256)
    is_packed = rng.random() < 0.2
    if is_packed:
        batch = 1
    low, high = (2, 5.5) if device == "cuda" else (1.5, 4.0)
    if rng.random() < 0.03:
        high += 1.3
    budget = 10 ** rng.uniform(low, high)
    per_head = max(1, int(budget / (batch * kv_heads * group)))
    longest = 600 if device == "cpu" else 40000 if rng.random() < 0.02 else 5000
    packed, lengths = None, ([0], [0])
    if is_packed:
        lengths = sequences(rng, per_head)
        packed = pack(rng, lengths, device)
        qo_len, kv_len = (sum(some) + rng.choice([0, 0, 1, 70]) for some in lengths)
    else:
        kv_len = length(rng, min(per_head, longest))
        qo_len = kv_len if rng.random() < 0.4 else length(rng, max(1, per_head // kv_len))
        qo_len = min(qo_len, max(1, per_head // kv_len), longest)
    layout = rng.choice(["HND", "NHD"])
    kinds = [weighted(rng, some) for some in (Q_KINDS, K_KINDS, V_KINDS)]
    shapes = (
        (batch, kv_heads * group, qo_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, v_head_dim),
    )
    overlapping = [rng.random() < 0.02 for _ in shapes]
    # In what is packed heads lie within tokens, as in NHD.
    heads_first = not is_packed and (rng.random() < 0.5 if rng.random() < 0.5 else layout == "HND")
    places = [place(rng, s, dtype, heads_first=heads_first, overlaps=o) for s, o in zip(shapes, overlapping, strict=True)]
    if not is_packed and rng.random() < 0.4:
        shape = [
            size if rng.random() < keep else 1
            for size, keep in zip((batch, kv_heads * group, qo_len, kv_len), (0.5, 0.4, 0.8, 0.95), strict=True)
        ]
        while len(shape) > 1 and shape[0] == 1 and rng.random() < 0.5:
            shape = shape[1:]
        places.append(mask_place(rng, shape, rng.choice([torch.bool, torch.bool, *DTYPES])))
    starts = [0, *itertools.accumulate(p.bytes() for p in places)]
    buffer = torch.full((starts[-1],), NAN, dtype=torch.uint8, device=device)
    views = [p.view(buffer, start) for p, start in zip(places, starts, strict=False)]

    for i, (view, kind, overlaps) in enumerate(zip(views[:3], kinds, overlapping, strict=True)):
        if view.numel() == 0:
            continue
        if overlaps:
            kinds[i] = "overlapping"
            elements = span(view.shape, view.stride())
            view.as_strided((elements,), (1,), view.storage_offset()).copy_(values.randn(elements))
            continue
        base = one_each(view)
        made = values.make(kind, base.shape, dtype)
        base_q = views[0]
        if i == 1 and "huge" not in kinds and not overlapping[0] and 0 not in base_q.stride() and 0 not in base_q.shape:
            if "outlier channels" in kind:  # in the same channels
                base_q.copy_(base_q * (1 + 20 * (made.abs().amax(dim=(0, 1, 2)) > 10)))
            if "sink" in kind:
                liked = torch.nn.functional.normalize(values.randn(head_dim), dim=0)
                base_q.copy_(base_q + 6 * liked)
                made[:, :, 0] = rng.choice([1, 2, 4]) * head_dim**0.5 * liked
        limit = torch.finfo(dtype).max
        base.copy_(made.clamp_(-limit, limit) if kind == "huge" else made)
    q, k, v = views[:3]
    if packed is not None and 0 not in (*k.stride(), *v.stride()) and not any(overlapping) and rng.random() < 0.5:
        for x in (k, v):  # what no sequence has
            x[:, :, sum(lengths[1]) :] = math.nan
    mask, said, hidden = None, "none", None
    if len(views) == 4:
        filled, said = mask_values(values, places[3])
        mask = views[3]
        one_each(mask).copy_(one_each(filled, mask))
        said = f"{said} {mask.dtype} {places[3]}"
    is_causal = rng.random() < (0.35 if 2 * qo_len >= kv_len else 0.05)  # else most keys are seen by none
    if mask is not None:
        settled = reference.without_far_keys(mask, is_causal=is_causal)
        # Scores, 3 being the largest `spread`, would come near what is far.
        if not q.numel() or 3 * float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()) > 1000 * head_dim**0.5:
            one_each(mask).copy_(one_each(settled, mask))
        hidden = hides(settled)
    if packed is not None:
        (number_q, at_q), (number_k, at_k) = (
            sequence_of(some, tokens, none, device)
            for some, tokens, none in ((lengths[0], qo_len, -1), (lengths[1], kv_len, -2))
        )
        hidden = number_q[:, None] != number_k
        if is_causal:
            hidden = hidden | (at_k > at_q[:, None])
    elif is_causal:
        later = torch.ones(qo_len, kv_len, dtype=torch.bool, device=device).triu(1)
        hidden = later if hidden is None else hidden | later
    spread = 1.0 if "huge" in kinds else rng.choice([0.1, 1.0, 3.0])
    sm_scale = (
        None
        if rng.random() < 0.6
        else rng.choice([0.0, spread, spread, -spread, -spread, 0.3 * spread, 1e-3, 1e-30]) * head_dim**-0.5
    )
    words = "; ".join(
        [
            f"{str(dtype)[6:]} {'packed ' + str(lengths) if is_packed else layout}",
            *(f"{name} {kind} {p}" for name, kind, p in zip("qkv", kinds, places, strict=False)),
            f"mask {said}",
            f"causal {is_causal} scale {sm_scale}",
        ]
    )
    same_q, same_k, same_v = (x.shape[2] > 1 and x.stride(2) == 0 for x in (q, k, v))
    alike = bool({kinds[0], kinds[1]} & ALIKE) or kinds[2] == "overlapping" or same_k
    rows_alike = bool({kinds[0], kinds[1]} & ROWS_ALIKE) or same_q
    return Problem(
        q,
        k,
        v,
        mask,
        hidden,
        packed,
        layout,
        is_causal,
        sm_scale,
        alike,
        kinds[2] in V_ALIKE or same_v,
        rows_alike,
        buffer,
        buffer.clone(),
        words,
    )
