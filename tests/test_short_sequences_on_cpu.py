"""Hopper's kernel in 16 bits: its own source, compiled for the CPU, against float64, and a judge of how threads wait for each other (tests/kernels_on_cpu.py).

The stand-in has five multiprocessors: most calls here have more tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random

import calls_on_cpu
import fuzz
import pytest
import torch
from accuracy import exact, relative_l1
from calls_on_cpu import at_the_end_of_memory, inputs, randn
from kernels_on_cpu import Kernels

from sageattention import _library, validation

pytestmark = pytest.mark.slow

KERNEL, QUANTISES = "sm90_qk_f16_pv_f16", "sm90_qk_int8_pv_f16"
TYPES = {64: torch.float16, 128: torch.bfloat16, 192: torch.float16, 256: torch.bfloat16}  # that are compiled, by head_dim
LIMITS = {torch.float16: 0.0006, torch.bfloat16: 0.004}  # P and the output are rounded once each


attend = partial(calls_on_cpu.attend, kernel=KERNEL)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("on_cpu"), "sm_90a")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The same, whose unordered accesses are errors."""
    return Kernels(tmp_path_factory.mktemp("races"), "sm_90a", races=True)


# batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim; causal
CALLS = [
    ((1, 1, 1, 3, 1, 64, 64), False),
    ((1, 3, 1, 130, 77, 40, 64), False),
    ((2, 4, 2, 250, 333, 64, 56), False),
    ((1, 7, 7, 70, 128, 64, 64), False),
    ((3, 2, 1, 300, 200, 64, 64), True),
    ((2, 1, 1, 100, 450, 64, 8), True),
    ((1, 1, 1, 150, 200, 128, 128), False),
    ((2, 4, 2, 70, 200, 80, 128), False),
    ((1, 2, 1, 600, 140, 128, 128), False),
    ((1, 2, 1, 500, 600, 128, 72), True),
    ((1, 3, 3, 65, 64, 128, 128), True),
    ((1, 4, 2, 250, 333, 160, 160), False),
    ((2, 4, 2, 300, 200, 192, 136), True),
    ((1, 4, 2, 250, 333, 256, 256), False),
    ((2, 4, 2, 300, 200, 200, 256), True),
    ((1, 7, 1, 580, 70, 64, 64), False),  # tiles of five heads in turn, and of the two that are left
]


def tensors(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    dtype = TYPES[(max(sizes[5:]) + 63) // 64 * 64]
    return [x.to(dtype) for x in inputs(*sizes)]


def check(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    sm_scale: float | None = None,
    seed: int = 0,
) -> None:
    """Hold output and log-sum-exp to float64."""
    out, lse = attend(kernels, q, k, v, attn_mask, is_causal=is_causal, sm_scale=sm_scale, seed=seed)
    assert out.isfinite().all()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double().masked_fill(
            attn_mask <= (-65504 if attn_mask.dtype == torch.float16 else -5e5), -math.inf
        )
    expected, expected_lse = exact(q, k, v, is_causal=is_causal, sm_scale=sm_scale, attn_mask=attn_mask)
    seen = expected_lse > -math.inf
    assert not seen.any() or relative_l1(out, expected) <= LIMITS[q.dtype]
    assert torch.equal(lse > -math.inf, seen)
    assert (out[~seen] == 0).all()
    assert ((lse - expected_lse)[seen].abs() <= 0.01 + 1e-6 * expected_lse[seen].abs()).all()


@pytest.mark.parametrize(("sizes", "is_causal"), CALLS)
def test_results(hopper: Kernels, sizes: tuple[int, ...], is_causal: bool) -> None:
    check(hopper, *tensors(sizes), is_causal=is_causal)
    assert [name for name, *_ in hopper.launches()] == [KERNEL]


@pytest.mark.parametrize(("sizes", "is_causal"), CALLS)
def test_threads_wait_for_each_other(judged: Kernels, sizes: tuple[int, ...], is_causal: bool) -> None:
    check(judged, *tensors(sizes), is_causal=is_causal, seed=1)


@pytest.mark.parametrize(("sizes", "is_causal"), CALLS[2:4] + CALLS[7:10])
def test_any_order_of_threads(hopper: Kernels, sizes: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = tensors(sizes)
    first = attend(hopper, q, k, v, is_causal=is_causal)
    for seed in range(1, 6):
        for one, other in zip(attend(hopper, q, k, v, is_causal=is_causal, seed=seed), first, strict=True):
            assert torch.equal(fuzz.bits(one), fuzz.bits(other)), seed


def some_hidden(*shape: int) -> torch.Tensor:
    return randn(*shape, seed=6) < 0.3


def hidden_rows(*shape: int) -> torch.Tensor:
    """Of which each third one sees no key."""
    mask = some_hidden(*shape)
    mask[..., ::3, :] = False
    return mask


def numbers(*shape: int) -> torch.Tensor:
    """That are added: also what hides, in each way in which programs say it."""
    mask = randn(*shape, seed=7) * 3
    mask[randn(*shape, seed=8) > 1] = -1e9
    mask[randn(*shape, seed=10) > 1.5] = -5e5
    mask[randn(*shape, seed=9) > 1.5] = -math.inf
    mask[..., 5:9, :] = -1e30
    mask[..., 11, :] = -4e4
    return mask


# Sizes and causal as above; the mask, in the tensors' dtype where it is of numbers.
MASKED: dict[str, tuple[tuple[int, ...], bool, Callable[[], torch.Tensor]]] = {
    "padding": ((2, 4, 2, 130, 208, 64, 64), False, lambda: some_hidden(2, 1, 1, 208)),
    "padding, rows of 4": ((2, 2, 2, 130, 300, 80, 128), False, lambda: some_hidden(2, 1, 1, 300)),
    "padding, odd": ((2, 2, 2, 70, 77, 64, 64), False, lambda: some_hidden(2, 1, 1, 77)),
    "one for all": ((1, 3, 1, 250, 320, 128, 128), False, lambda: hidden_rows(250, 320)),
    "odd rows": ((2, 2, 1, 100, 143, 64, 56), False, lambda: hidden_rows(2, 1, 100, 143)),
    "askew": ((1, 2, 2, 70, 150, 128, 72), False, lambda: some_hidden(1, 2, 150, 70).transpose(2, 3)),
    "a key": ((1, 1, 1, 70, 200, 64, 64), False, lambda: some_hidden(70, 1)),
    "and causal": ((2, 2, 2, 300, 300, 64, 64), True, lambda: some_hidden(2, 1, 300, 300)),
    "bytes that are not 1": ((1, 1, 1, 64, 96, 64, 64), False, lambda: (some_hidden(64, 96).byte() * 130).view(torch.bool)),
    "numbers of each head": ((1, 4, 4, 190, 192, 64, 64), False, lambda: numbers(1, 4, 190, 192)),
    "numbers, rows of 4": ((2, 2, 1, 130, 226, 128, 128), False, lambda: numbers(1, 2, 130, 226)),
    "numbers, odd": ((1, 2, 2, 70, 131, 64, 64), False, lambda: numbers(2, 70, 131)),
    "numbers, few rows": ((1, 2, 2, 20, 130, 80, 80), False, lambda: numbers(1, 1, 20, 130)),
    "numbers of keys": ((2, 1, 1, 140, 250, 40, 64), False, lambda: numbers(12, 250)[3].expand(2, 1, 140, 250)),
    "numbers, askew": ((1, 2, 2, 70, 150, 128, 72), False, lambda: numbers(1, 2, 150, 70).transpose(2, 3)),
    "numbers and causal": ((1, 2, 1, 500, 600, 128, 72), True, lambda: numbers(1, 2, 500, 600)),
    "of wide heads": ((1, 4, 2, 190, 200, 160, 192), False, lambda: hidden_rows(190, 200)),
    "numbers, of the widest": ((1, 4, 2, 190, 200, 256, 256), False, lambda: numbers(1, 4, 190, 200)),
}


def masked(name: str) -> tuple[list[torch.Tensor], bool]:
    """Tensors, and whether causal."""
    sizes, is_causal, mask = MASKED[name]
    q, k, v = tensors(sizes)
    attn_mask = mask()
    return [q, k, v, attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(q.dtype)], is_causal


@pytest.mark.parametrize("name", MASKED)
def test_masks(hopper: Kernels, name: str) -> None:
    call, is_causal = masked(name)
    check(hopper, *call, is_causal=is_causal)
    assert [name for name, *_ in hopper.launches()] == [f"{KERNEL}_masked"]
    if call[3].dtype != torch.bool:
        check(hopper, *call, is_causal=is_causal, sm_scale=0.01)


@pytest.mark.parametrize("name", MASKED)
def test_threads_wait_for_each_other_under_masks(judged: Kernels, name: str) -> None:
    call, is_causal = masked(name)
    check(judged, *call, is_causal=is_causal, seed=1)


@pytest.mark.parametrize("name", MASKED)
def test_nothing_behind_the_callers_tensors_is_read(hopper: Kernels, name: str) -> None:
    call, is_causal = masked(name)
    check(hopper, *(at_the_end_of_memory(x) for x in call), is_causal=is_causal)


def random_mask(random: Random, whole: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of any form: some dimensions broadcast or expanded, others turned or part of a wider tensor."""
    sizes = [random.choice([n, n, 1]) for n in whole]
    hidden = torch.rand(sizes, generator=torch.Generator().manual_seed(random.randrange(2**31))) < random.choice(
        [0.0, 0.1, 0.5, 0.95, 1.0]
    )
    if random.random() < 0.5:
        mask = ~hidden
    else:
        scale = random.choice([0.1, 3.0, 100.0])
        least = random.choice([-math.inf, -1e9, torch.finfo(dtype).min, -1e4])
        mask = (randn(*sizes, seed=random.randrange(99)) * scale).masked_fill(hidden, least).to(dtype)
    if random.random() < 0.3:
        wide = torch.zeros(*sizes[:3], sizes[3] + random.randrange(1, 9), dtype=mask.dtype)
        start = random.randrange(wide.shape[3] - sizes[3] + 1)
        wide[..., start : start + sizes[3]] = mask
        mask = wide[..., start : start + sizes[3]]
    if random.random() < 0.2:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    return mask.expand(whole) if random.random() < 0.3 else mask


@pytest.mark.parametrize("seed", range(24))
def test_any_mask(hopper: Kernels, seed: int) -> None:
    random = Random(seed)
    head_dim = random.choice([64, 128])
    kv_heads, queries, keys = random.choice([1, 2]), random.randrange(1, 280), random.randrange(1, 280)
    q, k, v = tensors((random.choice([1, 2]), 2 * kv_heads, kv_heads, queries, keys, head_dim, head_dim))
    mask = random_mask(random, (*q.shape[:3], keys), q.dtype)
    check(hopper, q, k, v, mask, is_causal=random.random() < 0.3, seed=seed)


@pytest.mark.parametrize("name", ["padding, rows of 4", "one for all", "numbers of each head", "numbers and causal"])
def test_any_order_of_threads_under_masks(hopper: Kernels, name: str) -> None:
    call, is_causal = masked(name)
    first = attend(hopper, *call, is_causal=is_causal)
    for seed in range(1, 6):
        for one, other in zip(attend(hopper, *call, is_causal=is_causal, seed=seed), first, strict=True):
            assert torch.equal(fuzz.bits(one), fuzz.bits(other)), seed


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("blocks", [[0, 20, 40, 60], [60, 0, -300, 90], [-40, -40, 500, 1], [0, 11, 22, 33]])
def test_references_that_rise(hopper: Kernels, head_dim: int, blocks: list[float]) -> None:
    """Scores of some rows rise to so many powers of two in each block of 64 keys; others' fall."""
    q, k, v = tensors((1, 1, 1, 70, 64 * len(blocks), head_dim, head_dim))
    q[..., 0] = torch.linspace(-2, 4, q.shape[2])
    k[..., 0] = torch.tensor(blocks).repeat_interleave(64) * math.log(2.0) * math.sqrt(head_dim) / 4
    check(hopper, q, k, v)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "sm_scale"),
    [(torch.float16, 12000, None), (torch.float16, 65504, None), (torch.float16, 1, 1e30), (torch.bfloat16, 3e4, None), (torch.bfloat16, 1e17, None)],
)  # fmt: skip
def test_scores_beyond_measure(hopper: Kernels, dtype: torch.dtype, size: float, sm_scale: float | None, masked: bool) -> None:
    """Numbers yet, but ones whose last bit is many powers of two: of each row one key is all there is."""
    head_dim = next(head_dim for head_dim, its_dtype in TYPES.items() if its_dtype == dtype)
    q, k = ((randn(1, 2, tokens, head_dim, seed=tokens).clamp(-1, 1) * size).to(dtype) for tokens in (70, 200))
    v = randn(1, 2, 200, head_dim, seed=1).to(dtype)
    mask = torch.ones(70, 200, dtype=torch.bool) if masked else None
    out, lse = attend(hopper, q, k, v, mask, sm_scale=sm_scale)
    expected, expected_lse = exact(q, k, v, sm_scale=sm_scale)
    assert relative_l1(out, expected) <= LIMITS[dtype]
    assert ((lse - expected_lse).abs() <= 1e-5 * expected_lse.abs()).all()


def test_values_beyond_measure(hopper: Kernels) -> None:
    """Of a row whose largest score has risen by less than the headroom, which leaves probabilities as large as they get."""
    q, k = torch.zeros(1, 1, 70, 128), torch.zeros(1, 1, 1000, 128)
    q[..., 0] = 1.0
    k[:, :, 64:, 0] = 29.0 * math.log(2.0) * math.sqrt(128.0)
    v = torch.full_like(k, 1e38)
    out, _ = attend(hopper, *(x.bfloat16() for x in (q, k, v)))
    assert ((out.float() - 1e38).abs() <= 1e36).all()


def test_scores_beyond_float32(hopper: Kernels) -> None:
    """Of keys that are infinitely far below others nothing is left, wherever they stand."""
    q, k, v = tensors((1, 1, 1, 70, 200, 128, 128))
    q, k = q.abs() + 1, k.abs() + 1
    k[:, :, :64] = -3e38
    out, lse = attend(hopper, q, k, v)
    expected, expected_lse = attend(hopper, q, k[:, :, 64:], v[:, :, 64:])
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("row", [3, 13, 128])
def test_what_is_no_number_stays_in_its_row(hopper: Kernels, row: int) -> None:
    q, k, v = tensors((1, 2, 2, 130, 150, 64, 64))
    expected = attend(hopper, q, k, v)[0]
    q[0, 0, row, 5] = math.nan
    out = attend(hopper, q, k, v)[0]
    assert out[0, 0, row].isnan().all()
    out[0, 0, row] = expected[0, 0, row]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("width", [136, 131])
def test_layouts_and_strides(hopper: Kernels, width: int) -> None:
    """Rows that do not start on 16 bytes are copied, and so are repeated ones."""
    q, k, v = tensors((2, 4, 4, 100, 130, 128, 128))
    expected = attend(hopper, q, k, v)
    wide = []
    for x in (q, k, v):
        buffer = torch.full((*x.shape[:3], width), math.nan, dtype=x.dtype)
        buffer[..., 3:131] = x
        wide.append(buffer[..., 3:131])
    nhd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    by_tokens = attend(hopper, *nhd, layout="NHD")
    turned = attend(hopper, *(x.transpose(1, 2) for x in nhd), layout=validation.TURNED)
    assert turned[0].transpose(1, 2).is_contiguous()
    for out, lse in (attend(hopper, *wide), (by_tokens[0].transpose(1, 2), by_tokens[1]), turned):
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    one = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(attend(hopper, q, one, one)[0], attend(hopper, q, one.contiguous(), one.contiguous())[0])


@pytest.mark.parametrize("sm_scale", [0.0, -0.1, 1e-46])
def test_what_the_kernel_refuses(hopper: Kernels, sm_scale: float) -> None:
    q, k, v = tensors((1, 1, 1, 70, 70, 64, 64))
    with pytest.raises(ValueError, match=f"sm_scale: the kernel {KERNEL} wants a positive number"):
        attend(hopper, q, k, v, sm_scale=sm_scale)


def test_which_sizes_are_this_kernels() -> None:
    """Of layers that models have, on a GPU of 132 multiprocessors."""

    def faster(*sizes: int, is_causal: bool = False, mask: str = "none") -> bool:
        return _library.library.faster_in_16_bits(QUANTISES, 132, (*sizes, sizes[-1]), is_causal, mask)

    for sizes in (
        (2, 20, 20, 1024, 1024, 64),  # SDXL, 32²
        (2, 10, 10, 4096, 77, 64),
        (2, 8, 8, 1024, 1024, 80),  # Stable Diffusion 1.5
        (2, 8, 8, 256, 256, 160),
        (2, 8, 8, 4096, 77, 40),
        (32, 16, 16, 577, 577, 64),  # ViT-L/14
        (1, 8, 8, 1024, 1024, 128),
        (8, 16, 16, 256, 256, 128),
    ):
        assert faster(*sizes)
    assert faster(1, 32, 8, 512, 512, 128, is_causal=True)
    assert faster(1, 32, 8, 513, 513, 128, is_causal=True)
    for sizes in (
        (2, 10, 10, 4096, 4096, 64),
        (1, 24, 24, 4608, 4608, 128),
        (1, 40, 40, 32760, 512, 128),
        (2, 32, 32, 1024, 1024, 128),
    ):
        assert not faster(*sizes)
    assert faster(1, 64, 64, 512, 512, 64, mask="numbers of each head")  # T5-XXL
    assert faster(32, 16, 16, 512, 512, 64, mask="bool of keys")  # BERT-large
    assert not faster(2, 24, 24, 4608, 4608, 128, mask="bool of keys")
    assert not faster(1, 24, 24, 4096, 4096, 128, mask="numbers")  # which hide, as a rule
    most = 2**31 - 1
    with pytest.raises(RuntimeError, match="batch x heads x tokens is too large"):
        faster(1, most, most, most, most, 128)
    assert not faster(1, most, most, most, most, 128, is_causal=True)
    for is_causal in (False, True):
        assert faster(1, 1, 1, 17, most, 64, is_causal=is_causal) in (False, True)
        assert faster(1, 1, 1, most, 1, 64, is_causal=is_causal)


def test_the_operator_takes_it(hopper: Kernels) -> None:
    """In the place of the kernel that quantises, where lengths are short; not of a scale below 0, nor unasked."""
    q, k, v = (randn(1, 3, 200, 128, seed=seed).bfloat16() for seed in range(3))
    for masked in (False, True):
        hopper.compile(KERNEL, 128, torch.bfloat16, masked=masked)
        hopper.compile(QUANTISES, 128, torch.bfloat16, masked=masked)

    def launched(sm_scale: float, *, or_16_bit: bool, mask: torch.Tensor | None = None) -> list[str]:
        attend(hopper, q, k, v, mask, kernel=QUANTISES, or_16_bit=or_16_bit, sm_scale=sm_scale)
        return [name for name, *_ in hopper.launches()]

    assert launched(0.1, or_16_bit=True) == [KERNEL]
    assert launched(-0.1, or_16_bit=True) == ["quant_k_int8", QUANTISES]
    assert launched(0.1, or_16_bit=False) == ["quant_k_int8", QUANTISES]
    seen = some_hidden(200, 200)
    for mask in (seen, torch.zeros(200, 200).masked_fill(~seen, -math.inf).bfloat16()):
        assert launched(0.1, or_16_bit=True, mask=mask) == [f"{KERNEL}_masked"]
        assert launched(-0.1, or_16_bit=True, mask=mask) == ["mask_tiles", "seen_keys", "quant_k_int8", f"{QUANTISES}_masked"]
    with pytest.raises((TypeError, RuntimeError), match="takes dtype bool or that of q"):
        launched(0.1, or_16_bit=True, mask=torch.zeros(200, 200))
