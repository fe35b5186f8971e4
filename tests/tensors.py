"""Tensors that tests start from."""

from __future__ import annotations

import math

import torch


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    """Standard normal, the same each time; of a GPU's generator other numbers than of the CPU's."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def qkv(*shape: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """Three of one shape."""
    return [randn(*shape, dtype=dtype, seed=seed) for seed in range(3)]


def poison() -> None:
    """Fill the free memory of the GPU's allocator with NaN, so that what a kernel fails to write or wrongly reads shows."""
    torch.cuda.synchronize()
    for size in (2**12, 2**16, 2**20, 2**22, 2**24):
        torch.full((size,), math.nan, device="cuda")
