"""Log-sum-exp of the reference of each kernel against float64; tests/gpu/test_log_sum_exp.py does the same with the kernels."""

from __future__ import annotations

import log_sum_exp
import pytest
import torch
from accuracy import TOLERANCES

DTYPES = [torch.float16, torch.bfloat16]
kernels = pytest.mark.parametrize("kernel", TOLERANCES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
@pytest.mark.parametrize("kernel", ["sm80_qk_int8_pv_f16", "sm90_qk_int8_pv_f16"])
@pytest.mark.parametrize("keys", [256, 1024])
def test_standard_normal(kernel: str, keys: int, dtype: torch.dtype) -> None:
    log_sum_exp.check_normal(kernel, keys, "cpu", dtype)


@kernels
@dtypes
def test_other_inputs(kernel: str, dtype: torch.dtype) -> None:
    for kind in log_sum_exp.kinds(100, 512):
        log_sum_exp.check(kernel, kind, "cpu", dtype)


@kernels
@dtypes
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_attention_costs_the_rounding_of_its_parts(kernel: str, dtype: torch.dtype, ranks: int) -> None:
    log_sum_exp.check_ring(kernel, log_sum_exp.ring_inputs(64, 2048, dtype, "cpu"), ranks)
