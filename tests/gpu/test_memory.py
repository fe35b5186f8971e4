"""What a call takes of the GPU's memory beside its inputs and its output: the 8-bit copies of K and V, and their scales."""

from __future__ import annotations

import pytest
import torch

from sageattention import _ops, explain, sageattn, sageattn_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROUNDING = 512  # for a counter
HOPPER = "sm90_qk_int8_pv_f16"
# What is asked of PyTorch's allocator: what it gives is more by up to a megabyte that it does not split off.
BYTES = "requested_bytes.all"


def workspace(kernel: str, keys: int, heads: int, sequences: int, head_dim: int) -> int:
    """Bytes, as docs/api.md states them: `keys` counts those of all sequences, each rounded up to 128."""
    v_bytes = 1 if "f8" in kernel else 2 if "accum_f16" in kernel else 0  # of V as the kernel takes it; 0: as it is
    copies = keys * heads * head_dim * (1 + v_bytes)
    means = 4 * sequences * heads * head_dim * (2 + (v_bytes == 1))  # of K also factors
    k_scales = keys * heads // 2
    v_scales = keys // 64 * heads * (head_dim * (4 if v_bytes == 1 else 1) + 16) if v_bytes else 0
    return copies + means + k_scales + v_scales + ROUNDING


def parts(head_dim: int) -> int:
    """At most, of Hopper's kernel: tiles whose keys several multiprocessors share are added up in memory, and counted."""
    multiprocessors: int = torch.cuda.get_device_properties().multi_processor_count
    rows = multiprocessors * (192 if head_dim <= 128 else 128)
    return rows * (head_dim + 12) * 4 + rows


def peak_above(before: int, *outputs: torch.Tensor) -> int:
    torch.cuda.synchronize()
    given: int = sum(x.numel() * x.element_size() for x in outputs)
    return int(torch.cuda.memory_stats()[f"{BYTES}.peak"]) - before - given


def start() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_stats()[f"{BYTES}.current"])


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_workspace_is_the_8_bit_copies_and_their_scales(kernel: str, head_dim: int, smooth: bool) -> None:
    dtype = torch.bfloat16
    q = torch.randn(2, 16, 4000, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, 4, 5000, head_dim, device="cuda", dtype=dtype) for _ in range(2))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _ops.attention(q, k, v, None, "HND", False, 0.1, smooth, smooth, True, kernel)
        return out, lse

    call()  # loading a kernel takes memory of the driver's own
    before = start()
    outputs = call()
    allowed = workspace(kernel, 2 * 5120, 4, 2, head_dim)
    assert peak_above(before, *outputs) <= allowed + (parts(head_dim) if kernel == HOPPER else 0)
    # And that this is little: about a quarter of K and V themselves, with V in FP8 half, in FP16 three quarters.
    assert allowed < (k.numel() + v.numel()) * 2 * (0.6 if "f8" in kernel else 0.85 if "accum_f16" in kernel else 0.3)


def test_workspace_of_packed_sequences() -> None:
    lengths = torch.tensor([0, 17, 1000, 1, 300, 2048])
    cu = lengths.cumsum(0).int().cuda()
    tokens, sequences = int(lengths.sum()), len(lengths) - 1
    q, k, v = (torch.randn(tokens, 4, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    sageattn_varlen(q, k, v, cu, cu, 2048, 2048)
    before = start()
    out = sageattn_varlen(q, k, v, cu, cu, 2048, 2048)
    assert isinstance(out, torch.Tensor)
    slots = tokens // 128 + sequences
    kernel = explain(q, k, v, function="sageattn_varlen").kernel
    assert peak_above(before, out) <= workspace(kernel, slots * 128, 4, sequences, 128)


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (256, 256)])
def test_short_calls_take_nothing(queries: int, keys: int) -> None:
    """Of few tokens anywhere; short ones on 9.0."""
    if queries > 16 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("short calls have kernels of their own on compute capability 9.0")
    q, k, v = (torch.randn(4, 8, tokens, 64, device="cuda", dtype=torch.float16) for tokens in (queries, keys, keys))
    sageattn(q, k, v)
    before = start()
    assert peak_above(before, sageattn(q, k, v)) == 0
