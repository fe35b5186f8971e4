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
    qo_len, kv_len = dispatch.FEW_QUERIES + 9, dispatch.FEW_KEYS + 77
    q = randn(2, 4, qo_len, head_dim, seed=0, dtype=dtype)
    k, v = (randn(2, 2, kv_len, size, seed=seed, dtype=dtype) for seed, size in ((1, head_dim), (2, v_head_dim)))
    options: dict[str, Any] = (
        {"attn_mask": torch.ones(qo_len, kv_len, device="cuda", dtype=torch.bool).tril(100)} if masked else {}
    )
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
    assert out.shape == (2, 4, qo_len, v_head_dim)
    assert out.dtype == dtype
    assert error_by_size(out, q, k, v, **options) <= TOLERANCES[choice.kernel].any_shape


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 1), (150, 2000), (600, 77)])
def test_short_sequences(qo_len: int, kv_len: int, dtype: torch.dtype, head_dim: int, causal: bool, layout: str) -> None:
    """Whoever serves them: as exact as it is said to be, contiguous, the same under torch.compile."""
    q = randn(2, 4, qo_len, head_dim, seed=0, dtype=dtype)
    k, v = (randn(2, 2, kv_len, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    qkv = [q, k, v] if layout == "HND" else [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    arguments: dict[str, Any] = {**dict(zip("qkv", qkv, strict=True)), "tensor_layout": layout, "is_causal": causal}
    kernel = explain(**arguments).kernel
    assert (kernel == dispatch.PYTORCH) == (torch.cuda.get_device_capability() == (9, 0))
    out: Any = sageattention.sageattn(**arguments)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.compiler.reset()
    compiled = torch.compile(sageattention.sageattn, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), out)
    if layout == "NHD":
        out = out.transpose(1, 2)
    limit = 0.01 if kernel == dispatch.PYTORCH else TOLERANCES[kernel].any_shape
    assert error_by_size(out, q, k, v, is_causal=causal) <= limit
