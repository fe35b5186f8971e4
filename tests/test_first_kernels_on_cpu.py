"""A call's first kernel starts before the caller's kernels have ended (tests/kernels_on_cpu.py): it waits for them, and so do those that follow."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import fuzz
import pytest
import torch
from calls_on_cpu import attend, inputs
from kernels_on_cpu import FIRST, WAIT, WAIT_AT_END, Kernels

pytestmark = pytest.mark.slow

QUANTISES, LAUNCH = "sm90_qk_int8_pv_f16", "\n  ptx::grid_dependency_launch();"
TOO_EARLY = "others may start before the kernels before have been waited for"


class First(NamedTuple):
    """A kernel that is a call's first, and such a call, of head_dim 64."""

    file: str
    tokens: tuple[int, int]  # of Q and K
    kernel: str = QUANTISES
    or_16_bit: bool = True
    masked: bool = False
    architecture: str = "sm_90a"


CALLS = {
    "sm80_qk_f16_pv_f16": First("attention/sm80_qk_f16_pv_f16.cu", (40, 40)),
    "sm80_qk_f16_pv_f16_split_kv": First("attention/mma_sync_in_16_bits/split_kv.cuh", (1, 1500)),
    "sm80_qk_f16_pv_f16_split_kv_staged": First("attention/mma_sync_in_16_bits/split_kv.cuh", (1, 60000)),
    "sm90_qk_f16_pv_f16": First("attention/wgmma_in_16_bits/attend.cuh", (200, 200), "sm90_qk_f16_pv_f16", False),
    "sm90_qk_f16_pv_f16_masked": First("attention/wgmma_in_16_bits/attend.cuh", (200, 200), "sm90_qk_f16_pv_f16", False, True),
    "quant_k_int8": First("quant/quant_k_int8.cu", (200, 200), QUANTISES, False),
    "mask_tiles": First("mask/mask_tiles.cu", (200, 200), QUANTISES, False, True),
    "means": First("quant/means.cu", (200, 200), "sm120_qk_fp4_pv_fp4", False, False, "sm_90"),
}


def run(first: First, kernels: Kernels) -> list[torch.Tensor]:
    """The call's output and log-sum-exp as integers."""
    q, k, v = (x.half() for x in inputs(1, 4, 1, *first.tokens, 64, 64))
    mask = torch.ones(first.tokens, dtype=torch.bool).tril() if first.masked else None
    return [fuzz.bits(x) for x in attend(kernels, q, k, v, mask, kernel=first.kernel, or_16_bit=first.or_16_bit, seed=1)]


@pytest.mark.parametrize("kernel", sorted(FIRST))
def test_it_waits_for_the_callers(kernel: str, tmp_path: Path) -> None:
    first = CALLS[kernel]
    kernels = Kernels(tmp_path / "right", first.architecture)
    right = run(first, kernels)
    assert kernels.launches()[0][0] == kernel
    never = kernels.copy(tmp_path / "never", kernel)
    never.change(first.file, WAIT, "")
    with pytest.raises(RuntimeError, match=f"{kernel}.*({TOO_EARLY}|the end before the kernels before)"):
        run(first, never)
    # Who waits at the end has read what was there before.
    late = kernels.copy(tmp_path / "late", kernel)
    source = (late.csrc / "kernels" / first.file).read_text(encoding="utf-8")
    launches = LAUNCH if WAIT + LAUNCH in source else ""
    late.change(first.file, WAIT + launches, WAIT_AT_END.replace(WAIT.strip(), WAIT.strip() + launches))
    assert not all(torch.equal(x, y) for x, y in zip(run(first, late), right, strict=True))
    if launches:
        early = kernels.copy(tmp_path / "early", kernel)
        early.change(first.file, WAIT + LAUNCH, LAUNCH + "\n" + WAIT)
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            run(first, early)
