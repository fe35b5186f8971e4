"""What `explain` says is what runs, and what runs is right: the public functions on a GPU, each option of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import TOLERANCES, error_by_size

import sageattention
from sageattention import _ops, dispatch, explain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FUNCTIONS = [
    (function, accumulators) for function, allowed in dispatch.ACCUMULATORS.items() for accumulators in allowed or (None,)
]


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (128, 128), (128, 80), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("function", "accumulators"), FUNCTIONS)
def test_every_function(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    accumulators: str | None,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    masked: bool,
) -> None:
    q = randn(2, 4, 150, head_dim, seed=0, dtype=dtype)
    k, v = (randn(2, 2, 333, size, seed=seed, dtype=dtype) for seed, size in ((1, head_dim), (2, v_head_dim)))
    options: dict[str, Any] = {"attn_mask": torch.ones(150, 333, device="cuda", dtype=torch.bool).tril(100)} if masked else {}
    try:
        choice = explain(q, k, v, function=function, pv_accum_dtype=accumulators, **options)
    except ValueError as error:
        if torch.cuda.get_device_capability() < (8, 9) and "fp8" in function:
            pytest.skip(str(error))
        raise
    called: list[str] = []
    operator = _ops.attention

    def spy(*arguments: Any) -> Any:
        called.append(arguments[-1])
        return operator(*arguments)

    monkeypatch.setattr(_ops, "attention", spy)
    how = {} if accumulators is None else {"pv_accum_dtype": accumulators}
    out = getattr(sageattention, function)(q, k, v, **options, **how)
    assert called == [choice.kernel]
    assert out.shape == (2, 4, 150, v_head_dim)
    assert out.dtype == dtype
    assert error_by_size(out, q, k, v, **options) <= TOLERANCES[choice.kernel].any_shape
