"""Log-sum-exp of every kernel on a GPU, and ring attention: `pytest tests/gpu/test_log_sum_exp.py -s` prints the figures."""

from __future__ import annotations

import log_sum_exp
import model_inputs
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@dtypes
@pytest.mark.parametrize("keys", [1024, 4096, 16384, 65536])
def test_standard_normal(kernel: str, keys: int, dtype: torch.dtype) -> None:
    log_sum_exp.check_normal(kernel, keys, "cuda", dtype)


@dtypes
@pytest.mark.parametrize("keys", [1024, 8192])
def test_other_inputs(kernel: str, keys: int, dtype: torch.dtype) -> None:
    for kind in log_sum_exp.kinds(300, keys):
        if kind.mask is None or model_inputs.takes(kernel, kind.mask, kind.inputs.q.to(dtype)):
            log_sum_exp.check(kernel, kind, "cuda", dtype)


@dtypes
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("keys", [2048, 4096, 16384, 65536, 118784])
def test_ring_attention_costs_the_rounding_of_its_parts(kernel: str, keys: int, ranks: int, dtype: torch.dtype) -> None:
    log_sum_exp.check_ring(kernel, log_sum_exp.ring_inputs(256, keys, dtype, "cuda"), ranks)
