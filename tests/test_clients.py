"""The programs that use this package, unchanged: each test calls as one of them does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import clients
import pytest
import torch
from accuracy import QK_INT8_PV_F8, QK_INT8_PV_F16, error_by_size, exact
from functions import FUNCTIONS

import sageattention
from sageattention import (
    _ops,
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)


def qkv(*shape: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "HND", **options: Any) -> None:
    """Against exact attention, at the tolerance of the least exact kernel."""
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    if layout == "NHD":
        out, q, k, v = (x.transpose(1, 2) for x in (out, q, k, v))
    assert error_by_size(out, q, k, v, **options) <= QK_INT8_PV_F8.any_shape


# ── diffusers ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def transformer() -> clients.Transformer:
    return clients.Transformer("cpu")


@pytest.fixture
def kernels_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel of each call of an operator, as it happens."""
    called: list[str] = []
    for name in ("attention", "attention_varlen"):
        operator = getattr(_ops, name)

        def spy(*arguments: Any, operator: Callable[..., Any] = operator) -> Any:
            called.append(arguments[-1])
            return operator(*arguments)

        monkeypatch.setattr(_ops, name, spy)
    return called


@pytest.mark.parametrize("backend", clients.BACKENDS)
def test_diffusers_backends(transformer: clients.Transformer, kernels_called: list[str], backend: str) -> None:
    assert transformer.error(backend) <= clients.TOLERANCE
    assert kernels_called == [clients.BACKENDS[backend]] * 2


def test_diffusers_tolerance_can_fail(transformer: clients.Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = _ops.attention
    monkeypatch.setattr(_ops, "attention", lambda *a: operator(*a[:6], a[6] / 2, *a[7:]))  # half the scale
    assert transformer.error("sage") > 3 * clients.TOLERANCE


def test_diffusers_compiled(transformer: clients.Transformer) -> None:
    """As diffusers compiles its layers, each whole: no call of this package breaks a graph."""
    torch._dynamo.reset()
    compiled = clients.Transformer("cpu")
    compiled.model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled("sage"), transformer("sage"))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_diffusers_call(function: Callable[..., Any]) -> None:
    q, k, v = qkv(2, 40, 3, 64, dtype=torch.bfloat16)
    out, lse, *_ = function(q=q, k=k, v=v, tensor_layout="NHD", is_causal=False, sm_scale=0.1, return_lse=True)
    check(out, q, k, v, "NHD", sm_scale=0.1)
    assert lse.shape == (2, 3, 40)
    assert lse.dtype == torch.float32
    expected = exact(*(x.transpose(1, 2) for x in (q, k, v)), sm_scale=0.1)[1]
    assert (lse - expected).abs().max() <= QK_INT8_PV_F16.lse
    alone = function(q=q, k=k, v=v, tensor_layout="NHD", is_causal=True, sm_scale=None, return_lse=False)
    check(alone, q, k, v, "NHD", is_causal=True)


def check_packed(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> None:
    """Each of the packed sequences for itself."""
    for a, b, c, d in zip(*(x.split(lengths) for x in (out, q, k, v)), strict=True):
        check(a[None], b[None], c[None], d[None], "NHD")


def test_diffusers_varlen_call() -> None:
    q, k, v = qkv(30, 3, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 10, 30], dtype=torch.int32)
    out = sageattn_varlen(
        q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=20, max_seqlen_k=20, is_causal=False, sm_scale=None
    )
    assert isinstance(out, torch.Tensor)
    check_packed(out, q, k, v, [10, 20])


# ── ComfyUI and KJNodes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("mask_shape", [None, (6, 6), (1, 6, 6), (2, 1, 6, 6), (2, 1, 1, 6)])
def test_comfyui(layout: str, mask_shape: tuple[int, ...] | None) -> None:
    """It makes a mask 4-dimensional, and passes one only to a function whose signature has it."""
    assert "attn_mask" in inspect.signature(sageattn).parameters
    q, k, v = qkv(2, 6, 6, 64)
    options: dict[str, Any] = {}
    if mask_shape is not None:
        mask = torch.randn(mask_shape, generator=torch.Generator().manual_seed(7)).to(q.dtype)
        while mask.ndim < 4:
            mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
        options["attn_mask"] = mask
    out: Any = sageattn(q, k, v, is_causal=False, tensor_layout=layout, sm_scale=None, smooth_k=False, **options)
    check(out, q, k, v, layout, attn_mask=options.get("attn_mask"))


@pytest.mark.parametrize(
    "function",
    [
        sageattn,
        partial(sageattn_qk_int8_pv_fp16_cuda, pv_accum_dtype="fp32"),
        sageattn_qk_int8_pv_fp16_triton,
        partial(sageattn_qk_int8_pv_fp8_cuda, pv_accum_dtype="fp32+fp32"),
        partial(sageattn_qk_int8_pv_fp8_cuda, pv_accum_dtype="fp32+fp16"),
        partial(sageattn_qk_int8_pv_fp8_cuda_sm90, pv_accum_dtype="fp32+fp32"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_kjnodes(function: Callable[..., Any], masked: bool) -> None:
    q, k, v = qkv(1, 30, 2, 128, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril(3) if masked else None
    out = function(q, k, v, is_causal=False, attn_mask=mask, tensor_layout="NHD")
    check(out, q, k, v, "NHD", attn_mask=mask)


# ── Others ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_xdit(layout: str) -> None:
    q, k, v = qkv(1, 50, 50, 64)
    out, lse = sageattn(q, k, v, is_causal=True, tensor_layout=layout, return_lse=True)
    check(out, q, k, v, layout, is_causal=True)
    assert lse.shape == (1, 50, 50)


def test_sglang() -> None:
    q, k, v = qkv(1, 50, 4, 64, dtype=torch.bfloat16)
    out: Any = sageattn(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=0.125, return_lse=False)
    check(out, q, k, v, "NHD")


def test_vllm_omni() -> None:
    q, k, v = qkv(1, 50, 4, 64, dtype=torch.bfloat16)
    out: Any = sageattn(q, k, v, tensor_layout="NHD", is_causal=True, sm_scale=0.125)
    check(out, q, k, v, "NHD", is_causal=True)


def test_musubi_tuner_and_wan2gp() -> None:
    q, k, v = qkv(30, 3, 128, dtype=torch.bfloat16)
    cu = torch.tensor([0, 30], dtype=torch.int32)
    out: Any = sageattn_varlen(q, k, v, cu, cu, 30, 30)
    check_packed(out, q, k, v, [30])


def test_in_the_place_of_scaled_dot_product_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = torch.nn.functional
    q, k, v = qkv(1, 4, 50, 64)
    mask = torch.ones(50, 50, dtype=torch.bool).tril(5)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sageattention.sageattn)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
    assert not torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
