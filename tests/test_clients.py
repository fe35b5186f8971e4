"""The programs that use this package, unchanged: each test calls as one of them does."""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import clients
import pytest
import torch
from accuracy import QK_INT8_PV_F8, QK_INT8_PV_F16, error_by_size, exact, relative_l1
from functions import FUNCTIONS

import sageattention.core
import sageattention.sm90_compile
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

        def spy(*arguments: Any, operator: Callable[..., Any] = operator, **named: Any) -> Any:
            called.append(arguments[-1])
            return operator(*arguments, **named)

        monkeypatch.setattr(_ops, name, spy)
    return called


@pytest.mark.parametrize("backend", clients.BACKENDS)
def test_diffusers_backends(transformer: clients.Transformer, kernels_called: list[str], backend: str) -> None:
    assert transformer.error(backend) <= clients.TOLERANCE
    assert kernels_called == [clients.BACKENDS[backend]] * 2


def test_diffusers_tolerance_can_fail(transformer: clients.Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    operator: Any = _ops.attention
    monkeypatch.setattr(_ops, "attention", lambda *a, **named: operator(*a[:6], a[6] / 2, *a[7:], **named))  # half the scale
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


def test_what_others_hand_on() -> None:
    """ComfyUI-bleh whatever ComfyUI gave, talking heads after SoulX a dtype, MagicNodes a single kernel's option; SageAttention swallows it."""
    q, k, v = qkv(1, 2, 30, 64)
    attention: Any = sageattn
    expected = attention(q, k, v)
    for option in (
        {"low_precision_attention": False},
        {"output_dtype": q.dtype},
        {"pv_accum_dtype": "fp32+fp16"},
        {"smooth_v": False, "qk_quant_gran": "per_warp", "quantization_backend": "cuda"},
    ):
        assert torch.equal(attention(q, k, v, **option), expected)
    assert torch.equal(attention(output_dtype=q.dtype, query=q, key=k, value=v), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q.float(), k, v, output_dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"output_dtype: expected None or torch.float16, got torch.float32; .*out.to\(dtype\)"):
        attention(q, k, v, output_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got nothing"):
        attention(output_dtype=torch.float16)


@pytest.mark.parametrize("function", [sageattn, sageattn_qk_int8_pv_fp8_cuda_sm90])
def test_vs_mean_is_taken_off_unasked(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    operator, smoothed = _ops.attention, []

    def spy(*arguments: Any, **named: Any) -> Any:
        smoothed.append(arguments[8])
        return operator(*arguments, **named)

    monkeypatch.setattr(_ops, "attention", spy)
    function(*qkv(1, 2, 31, 64), smooth_v=False)
    assert smoothed == [True]


def test_installers_find_what_they_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts for rented GPUs, which put SageAttention's own package in the place of one without that."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0), (12, 0)][device])
    assert sageattention.core.get_cuda_arch_versions() == ["sm90", "sm120"]


@pytest.mark.parametrize(
    ("kernels", "enabled"),
    [
        ({}, [False, False, False]),
        ({"sm_80": {"sm80_qk_int8_pv_f16", "sm80_qk_f16_pv_f16"}}, [True, False, False]),
        ({"sm_80": {"sm80_qk_int8_pv_f16"}, "sm_89": {"sm89_qk_int8_pv_f8"}}, [True, True, False]),
        ({"sm_90a": {"sm80_qk_int8_pv_f16", "sm89_qk_int8_pv_f8", "sm90_qk_int8_pv_f16"}}, [True, True, True]),
    ],
)
def test_programs_that_ask_which_kernels_were_compiled(
    kernels: dict[str, set[str]], enabled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cosmos-Predict and nodes for ComfyUI take SageAttention where these are True, the value itself, and else another attention."""
    from sageattention.core import SM80_ENABLED, SM89_ENABLED, SM90_ENABLED

    assert {SM80_ENABLED, SM89_ENABLED, SM90_ENABLED} <= {True, False}
    monkeypatch.setattr(sageattention._library, "kernels", kernels)
    core: Any = types.ModuleType("sageattention.asked_anew")
    core.__package__ = "sageattention"
    exec(Path(sageattention.core.__file__).read_text(encoding="utf-8"), core.__dict__)  # as in a process that has these kernels
    assert enabled == [core.SM80_ENABLED, core.SM89_ENABLED, core.SM90_ENABLED]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_comfyui_gets_k_smoothed(layout: str) -> None:
    """Though it passes `smooth_k=False`, which SageAttention 2's `sageattn` ignores: K has an offset in every channel, as models have it."""
    q, k, v = qkv(1, 32, 32, 64, dtype=torch.bfloat16)
    k = k + 8 * torch.randn(64, generator=torch.Generator().manual_seed(4)).to(k.dtype)
    out: Any = sageattn(q, k, v, is_causal=False, tensor_layout=layout, sm_scale=None, smooth_k=False)
    assert torch.equal(out, sageattn(q, k, v, tensor_layout=layout))
    assert not torch.equal(out, sageattn_qk_int8_pv_fp16_cuda(q, k, v, tensor_layout=layout, smooth_k=False))


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
    # On Hopper it asks for this name first, and no more than that.
    from sageattention.sm90_compile import qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf_fake_impl as stand_in

    with pytest.raises(NotImplementedError, match=r"no such kernel; call sageattention\.sageattn"):
        stand_in()
    # KJNodes looks for the kernel itself, by the same name without "fake_impl".
    assert not hasattr(sageattention.sm90_compile, stand_in.__name__.removesuffix("_fake_impl"))
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


@pytest.mark.parametrize("function", [sageattn, sageattn_qk_int8_pv_fp16_triton])
def test_lightx2v(function: Callable[..., Any]) -> None:
    # On 8.9 it takes the second. Of what is returned it makes another shape without asking whether it is contiguous.
    q, k, v = (x.unsqueeze(0) for x in qkv(30, 2, 128, dtype=torch.bfloat16))
    check(function(q, k, v, tensor_layout="NHD").view(30, 256).view(q.shape), q, k, v, "NHD")
    out, lse = function(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=None, return_lse=True)
    check(out, q, k, v, "NHD")
    assert lse.transpose(1, 2).reshape(30, 2).shape == (30, 2)
    q, k, v = (x[0] for x in (q, k, v))
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    packed: Any = sageattn_varlen(q, k, v, cu, cu, 18, 18, is_causal=False, sm_scale=None, smooth_k=False)
    check_packed(packed, q, k, v, [12, 18])


def test_seedvr2() -> None:
    """By position beyond the lengths; SeedVR2's nodes give the longest as numbers, out of tensors."""
    q, k, v = qkv(30, 3, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 12, 30], dtype=torch.int64).int()
    out: Any = sageattn_varlen(q, k, v, cu, cu, 18, 18, False, 0.125)
    check_packed(out, q, k, v, [12, 18])


def test_operators_of_their_own() -> None:
    """WanVideoWrapper, LightX2V, cache-dit and Krea's realtime video put it into one, whose stand-in makes the output out of q."""

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Any:
        return sageattn(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, tensor_layout="NHD")

    schema = "(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False) -> Tensor"
    operator: Any = torch.library.custom_op("sageattention_clients::attention", call, mutates_args=(), schema=schema)
    operator.register_fake(lambda q, *_, **__: torch.empty_like(q))

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return operator(q, k, v, is_causal=True).view(2, 40, 256)

    q, k, v = qkv(2, 40, 4, 64, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check(compiled(q, k, v).view(q.shape), q, k, v, "NHD", is_causal=True)
    torch.library.opcheck(operator, (q, k, v), test_utils=("test_schema", "test_faketensor"))


def test_private_kernels_are_absent(caplog: pytest.LogCaptureFixture) -> None:
    """KJNodes' memory-efficient nodes look for them here, and are told what to choose; Wan2GP offers its "sage2" where it finds these."""
    with caplog.at_level("INFO"), pytest.raises(ImportError, match="cannot import name 'per_thread_int8_triton'"):
        from sageattention.core import per_thread_int8_triton  # type: ignore[attr-defined]  # noqa: F401
    assert [record.name for record in caplog.records] == ["sageattention"]
    assert "choose 'Patch Sage Attention KJ'" in caplog.text
    for kernels in ("_qattn_sm80", "_qattn_sm89", "_qattn_sm90", "sm80_compile"):
        assert getattr(sageattention.core, kernels, None) is None
    assert len(caplog.records) == 1
    assert importlib.util.find_spec("sageattention.triton") is None


# ── In the place of scaled_dot_product_attention ─────────────────────────────────────────────────────────────────────

Q, K, V = qkv(2, 4, 50, 64)
HIDDEN = torch.ones(50, 50, dtype=torch.bool).tril(5)
ADDED = torch.randn(2, 1, 1, 50, generator=torch.Generator().manual_seed(7)).to(Q.dtype)
# What its callers write, where `f` is it: by position, by keyword and mixed.
CALLS: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "plain": lambda f: f(Q, K, V),
    "a mask fourth": lambda f: f(Q, K, V, HIDDEN),
    "a bias fourth": lambda f: f(Q, K, V, ADDED, scale=0.3),
    "six by position": lambda f: f(Q, K, V, HIDDEN, 0.0, False),
    "six by position, causal": lambda f: f(Q, K, V, None, 0.0, True),
    "five by position": lambda f: f(Q, K, V, HIDDEN, 0.0),
    "four by position": lambda f: f(Q, K, V, None, is_causal=True, dropout_p=0.0),
    "keywords": lambda f: f(query=Q, key=K, value=V, attn_mask=HIDDEN, dropout_p=0.0, is_causal=False, scale=0.3),
    "keywords in another order": lambda f: f(value=V, is_causal=True, key=K, query=Q),
    "some keywords": lambda f: f(Q, key=K, value=V, attn_mask=ADDED),
    "grouped heads": lambda f: f(Q, K[:, :2], V[:, :2], attn_mask=None, dropout_p=0.0, enable_gqa=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_in_the_place_of_scaled_dot_product_attention(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    functional = torch.nn.functional
    expected = CALLS[call](functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sageattn)
    out = CALLS[call](functional.scaled_dot_product_attention)
    assert 0.001 < relative_l1(out, expected.double()) < 0.03


def test_in_its_place_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sageattn)

    def program() -> list[torch.Tensor]:
        return [call(torch.nn.functional.scaled_dot_product_attention) for call in CALLS.values()]

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")()
    assert all(torch.equal(*pair) for pair in zip(compiled, program(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((Q, K, V, None, 0.1, True), {}), ((Q, K, V, HIDDEN, 0.1), {}), ((Q,), {"key": K, "value": V, "dropout_p": 0.1})],
)
def test_what_scaled_dot_product_attention_has_and_this_has_not(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dropout_p: expected 0, got 0\.1; there is no dropout here"):
        sageattn(*arguments, **options)


def test_two_masks() -> None:
    function: Any = sageattn
    with pytest.raises(TypeError, match="attn_mask: given twice, fourth as scaled_dot_product_attention has it, and by name"):
        function(Q, K, V, HIDDEN, attn_mask=HIDDEN)


@pytest.mark.parametrize("mask", [None, HIDDEN])
def test_own_names_beside_a_mask_that_came_fourth(mask: torch.Tensor | None) -> None:
    function: Any = sageattn
    named: dict[str, Any] = {"is_causal": True, "sm_scale": 0.3}
    assert torch.equal(function(Q, K, V, mask, **named), sageattn(Q, K, V, attn_mask=mask, **named))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_functions_in_its_place(function: Callable[..., Any]) -> None:
    """By keyword; by position the others of this package have other arguments fourth to sixth, and say so."""
    out = function(query=Q, key=K, value=V, attn_mask=HIDDEN, dropout_p=0.0, is_causal=False, scale=0.3, enable_gqa=False)
    check(out, Q, K, V, attn_mask=HIDDEN, sm_scale=0.3)
    if function is not sageattn:
        with pytest.raises(ValueError, match="tensor_layout: expected one of 'HND', 'NHD', got a tensor"):
            function(Q, K, V, HIDDEN)


def test_diffusers_native_backend(
    transformer: clients.Transformer, kernels_called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diffusers calls it by keyword."""
    expected = transformer("native")
    assert not kernels_called
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sageattn)
    assert relative_l1(transformer("native"), expected.double()) <= clients.TOLERANCE
    assert kernels_called == ["sm80_qk_int8_pv_f16"] * 2


def test_multihead_attention(kernels_called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own module calls it by position."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(3, 20, 128).bfloat16()
    padding = torch.arange(20) >= torch.tensor([[20], [7], [13]])
    calls: list[dict[str, Any]] = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.bfloat16), "is_causal": True},
    ]
    expected = [module(x, x, x, need_weights=False, **options)[0] for options in calls]
    assert not kernels_called
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sageattn)
    for options, right in zip(calls, expected, strict=True):
        torch.testing.assert_close(module(x, x, x, need_weights=False, **options)[0], right, rtol=0.05, atol=0.02)
    assert len(kernels_called) == 3


# ── In the place of flash-attn ───────────────────────────────────────────────────────────────────────────────────────

# What ring attention passes on, each time.
RING: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": 0.15,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_softmax": False,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_yunchang_and_xdit_rings(function: Callable[..., Any], causal: bool) -> None:
    """Three ranks, each with its part of the sequence: parts of K and V come round, and log-sum-exp weighs what each gives."""
    q, k, v = qkv(1, 120, 4, 64, dtype=torch.bfloat16)
    attention = partial(function, tensor_layout="NHD", return_lse=True)
    parts = []
    for rank, part in enumerate(q.chunk(3, 1)):
        outputs, weights = [], []
        for other, (a, b) in enumerate(zip(k.chunk(3, 1), v.chunk(3, 1), strict=True)):
            if other <= rank or not causal:
                out, lse = attention(part, a, b, causal=causal and other == rank, **RING)
                outputs.append(out.double())
                weights.append(lse.double().transpose(1, 2)[..., None])
        weight = torch.stack(weights).softmax(0)
        parts.append((torch.stack(outputs) * weight).sum(0))
    check(torch.cat(parts, 1).bfloat16(), q, k, v, "NHD", is_causal=causal, sm_scale=0.15)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dropout_p", 0.1, "dropout_p: expected 0, got 0.1; there is no dropout here"),
        ("window_size", (128, 0), "window_size: expected (-1, -1) or [-1, -1], got (128, 0); there is no window here"),
        ("window_size", (-1, 0), "window_size: expected (-1, -1) or [-1, -1], got (-1, 0); there is no window here"),
        ("softcap", 30.0, "softcap: expected 0, got 30.0; scores are not capped here"),
        ("alibi_slopes", torch.ones(4), "alibi_slopes: expected None, got a tensor; there are no slopes here"),
        ("return_softmax", True, "return_softmax: expected False, got True; probabilities are never in memory"),
        ("return_attn_probs", True, "return_attn_probs: expected False, got True; probabilities are never in memory"),
    ],
)
@pytest.mark.parametrize("function", [*FUNCTIONS, sageattn_varlen])
def test_what_flash_attn_has_and_this_has_not(function: Callable[..., Any], option: str, value: object, message: str) -> None:
    packed = [*qkv(30, 3, 64), *[torch.tensor([0, 30], dtype=torch.int32)] * 2, 30, 30]
    with pytest.raises(ValueError) as caught:
        function(*(packed if function is sageattn_varlen else (Q, K, V)), **{**RING, option: value})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_causal_is_flash_attns(layout: str) -> None:
    """Where the lengths differ it sees other keys than `is_causal`."""
    q, k, v = Q, K, V
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    functions: list[Any] = FUNCTIONS
    for function in functions:
        assert torch.equal(function(q, k, v, layout, causal=True), function(q, k, v, layout, is_causal=True))
        shorter = q[:, :, :40] if layout == "HND" else q[:, :40]
        assert torch.equal(function(shorter, k, v, layout, causal=False), function(shorter, k, v, layout))
        with pytest.raises(ValueError, match="causal: expected as many queries as keys, got 40 and 50: flash-attn"):
            function(shorter, k, v, layout, causal=True)
        with pytest.raises(ValueError, match="causal: expected as many queries as keys, got 50 and 40: flash-attn"):
            function(q, *(x[:, :, :40] if layout == "HND" else x[:, :40] for x in (k, v)), layout, causal=True)


def test_lengths_out_of_a_table() -> None:
    q, k, v = qkv(30, 3, 128)
    table = torch.tensor([[0, 7], [12, 7], [30, 7]], dtype=torch.int32)
    cu: Any = table[:, 0]
    assert torch.equal(
        sageattn_varlen(q, k, v, cu, cu, 18, 18), sageattn_varlen(q, k, v, cu.contiguous(), cu.contiguous(), 18, 18)
    )


def test_programs_that_wait_for_memory_to_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stable ABI's operators have no such error of their own; ComfyUI then takes smaller tiles."""

    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("sageattention: PyTorch refused aoti_torch_empty_strided(1, sizes)")

    monkeypatch.setattr(_ops, "attention", refuse)
    monkeypatch.setattr(_ops, "attention_varlen", refuse)
    q, k, v = qkv(1, 2, 30, 64)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        sageattn(q, k, v)
    monkeypatch.setattr(sageattention._call, "_operator_checks", lambda *_: True)  # as of tensors on a GPU
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        sageattn(q, k, v)
    cu = torch.tensor([0, 30], dtype=torch.int32)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        sageattn_varlen(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), cu, cu, 30, 30)


def test_wanvideowrapper_varlen() -> None:
    q, k, v = qkv(30, 3, 128)
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    varlen: Any = sageattn_varlen
    check_packed(varlen(q, k, v, cu, cu, 18, 18, dropout_p=0.0, is_causal=False), q, k, v, [12, 18])
    scaled = varlen(q, k, v, cu, cu, 18, 18, softmax_scale=0.2, causal=False, dropout_p=0, deterministic=True)
    assert torch.equal(scaled, varlen(q, k, v, cu, cu, 18, 18, sm_scale=0.2))
    longest = torch.tensor(18, device="meta")  # for a GPU's, as transformers' collators leave it
    axolotls = varlen(q, k, v, cu, cu, longest, longest, tensor_layout="NHD", sm_scale=0.2)
    assert torch.equal(scaled, axolotls)
    with pytest.raises(ValueError, match="tensor_layout: expected 'NHD', got 'HND'; packed sequences have one layout"):
        varlen(q, k, v, cu, cu, 18, 18, tensor_layout="HND")
    with pytest.raises(ValueError, match="causal: expected False, got True; is_causal is not the same"):
        varlen(q, k, v, cu, cu, 18, 18, causal=True)
