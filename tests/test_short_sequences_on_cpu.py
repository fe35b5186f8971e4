"""Hopper's kernel in 16 bits: its own source, compiled for the CPU, against float64, and a judge of how threads wait for each other (tests/kernels_on_cpu.py).

The stand-in has five multiprocessors: most calls here have more tiles.
"""

from __future__ import annotations

import math

import fuzz
import pytest
import torch
from accuracy import exact, relative_l1
from kernels_on_cpu import Kernels, inputs, randn

from sageattention import _library, _ops

pytestmark = pytest.mark.slow

KERNEL, QUANTISES = "sm90_qk_f16_pv_f16", "sm90_qk_int8_pv_f16"
TYPES = {64: torch.float16, 128: torch.bfloat16}  # that are compiled, by head_dim
LIMITS = {torch.float16: 0.0006, torch.bfloat16: 0.004}  # P and the output are rounded once each


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
]


def tensors(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    dtype = TYPES[64 if max(sizes[5:]) <= 64 else 128]
    return [x.to(dtype) for x in inputs(*sizes)]


def attend(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "HND",
    kernel: str = KERNEL,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _ops.number_of(kernel, layout == "HND", is_causal, True, False, True)
    return kernels.attention(q, k, v, None, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, options, seed=seed)


def check(
    kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, seed: int = 0
) -> None:
    """Hold output and log-sum-exp to float64."""
    out, lse = attend(kernels, q, k, v, is_causal=is_causal, seed=seed)
    assert out.isfinite().all()
    expected, expected_lse = exact(q, k, v, is_causal=is_causal)
    assert relative_l1(out, expected) <= LIMITS[q.dtype]
    assert ((lse - expected_lse).abs() <= 0.01 + 1e-6 * expected_lse.abs()).all()


@pytest.mark.parametrize(("sizes", "is_causal"), CALLS)
def test_results(hopper: Kernels, sizes: tuple[int, ...], is_causal: bool) -> None:
    check(hopper, *tensors(sizes), is_causal=is_causal)
    assert [name for name, *_ in hopper.launches()] == [KERNEL]


@pytest.mark.parametrize(("sizes", "is_causal"), CALLS)
def test_threads_wait_for_each_other(judged: Kernels, sizes: tuple[int, ...], is_causal: bool) -> None:
    for seed in range(2):
        check(judged, *tensors(sizes), is_causal=is_causal, seed=seed)


@pytest.mark.parametrize(("sizes", "is_causal"), CALLS[2:4] + CALLS[7:10])
def test_any_order_of_threads(hopper: Kernels, sizes: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = tensors(sizes)
    first = attend(hopper, q, k, v, is_causal=is_causal)
    for seed in range(1, 6):
        for one, other in zip(attend(hopper, q, k, v, is_causal=is_causal, seed=seed), first, strict=True):
            assert torch.equal(fuzz.bits(one), fuzz.bits(other)), seed


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("blocks", [[0, 20, 40, 60], [60, 0, -300, 90], [-40, -40, 500, 1], [0, 11, 22, 33]])
def test_references_that_rise(hopper: Kernels, head_dim: int, blocks: list[float]) -> None:
    """Scores of some rows rise to so many powers of two in each block of 64 keys; others' fall."""
    q, k, v = tensors((1, 1, 1, 70, 64 * len(blocks), head_dim, head_dim))
    q[..., 0] = torch.linspace(-2, 4, q.shape[2])
    k[..., 0] = torch.tensor(blocks).repeat_interleave(64) * math.log(2.0) * math.sqrt(head_dim) / 4
    check(hopper, q, k, v)


def test_scores_beyond_float32(hopper: Kernels) -> None:
    """Of keys that are infinitely far below others nothing is left, wherever they stand."""
    q, k, v = tensors((1, 1, 1, 70, 200, 128, 128))
    q, k = q.abs() + 1, k.abs() + 1
    k[:, :, :64] = -3e38
    out, lse = attend(hopper, q, k, v)
    expected, expected_lse = attend(hopper, q, k[:, :, 64:], v[:, :, 64:])
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-4)


def test_what_is_no_number_stays_in_its_row(hopper: Kernels) -> None:
    q, k, v = tensors((1, 2, 2, 130, 150, 64, 64))
    expected = attend(hopper, q, k, v)[0]
    q[0, 0, 3, 5] = math.nan
    out = attend(hopper, q, k, v)[0]
    assert out[0, 0, 3].isnan().all()
    out[0, 0, 3] = expected[0, 0, 3]
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
    turned = attend(hopper, *nhd, layout="NHD")
    for out, lse in (attend(hopper, *wide), (turned[0].transpose(1, 2), turned[1])):
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    one = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(attend(hopper, q, one, one)[0], attend(hopper, q, one.contiguous(), one.contiguous())[0])


@pytest.mark.parametrize("sm_scale", [0.0, -0.1])
def test_what_the_kernel_refuses(hopper: Kernels, sm_scale: float) -> None:
    q, k, v = tensors((1, 1, 1, 70, 70, 64, 64))
    with pytest.raises(ValueError, match=f"sm_scale: the kernel {KERNEL} wants a positive number"):
        attend(hopper, q, k, v, sm_scale=sm_scale)


def test_which_sizes_are_this_kernels() -> None:
    """Of layers that models have, on a GPU of 132 multiprocessors."""

    def fastest(*sizes: int, is_causal: bool = False) -> str:
        return _library.library.fastest(QUANTISES, 132, sizes, is_causal, or_16_bit=True)

    for sizes in (
        (2, 20, 20, 1024, 1024, 64),  # SDXL, 32²
        (2, 10, 10, 4096, 77, 64),
        (2, 8, 8, 1024, 1024, 80),  # Stable Diffusion 1.5
        (2, 8, 8, 4096, 77, 40),
        (32, 16, 16, 577, 577, 64),  # ViT-L/14
        (1, 8, 8, 1024, 1024, 128),
        (8, 16, 16, 256, 256, 128),
    ):
        assert fastest(*sizes) == "16 bits"
    assert fastest(1, 32, 8, 512, 512, 128, is_causal=True) == "16 bits"
    assert fastest(1, 32, 8, 513, 513, 128, is_causal=True) == "16 bits"  # no plan is made
    for sizes in (
        (2, 10, 10, 4096, 4096, 64),
        (1, 24, 24, 4608, 4608, 128),
        (1, 40, 40, 32760, 512, 128),
        (2, 32, 32, 1024, 1024, 128),
    ):
        assert fastest(*sizes) == QUANTISES
    assert fastest(1, 8, 8, 256, 256, 160) == "PyTorch"  # wider than its head_dims
    most = 2**31 - 1
    for is_causal in (False, True):
        assert fastest(1, most, most, most, most, 128, is_causal=is_causal) == QUANTISES
        assert fastest(1, 1, 1, 17, most, 64, is_causal=is_causal) in ("16 bits", QUANTISES)
        assert fastest(1, 1, 1, most, 1, 64, is_causal=is_causal) == "16 bits"


def test_the_operator_takes_it(hopper: Kernels) -> None:
    """In the place of the kernel that quantises, where lengths are short, for any strides; not under a mask, of a scale below 0, nor unasked."""
    q, k, v = (randn(1, 3, 200, 128, seed=seed).bfloat16() for seed in range(3))
    hopper.compile(KERNEL, 128, torch.bfloat16, masked=False)
    hopper.compile(QUANTISES, 128, torch.bfloat16, masked=False)

    def launched(sm_scale: float, *, or_16_bit: bool) -> list[str]:
        options = _ops.number_of(QUANTISES, True, False, True, False, True, or_16_bit=or_16_bit)
        hopper.attention(q, k, v, None, sm_scale, options)
        return [name for name, *_ in hopper.launches()]

    assert launched(0.1, or_16_bit=True) == [KERNEL]
    assert launched(-0.1, or_16_bit=True) == ["quant_k_int8", QUANTISES]
    assert launched(0.1, or_16_bit=False) == ["quant_k_int8", QUANTISES]
