"""Which kernel serves a call: the table, row by row, and what is said where none does."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accuracy import TOLERANCES
from torch._subclasses.fake_tensor import FakeTensorMode

import sageattention
from sageattention import _library, _ops, core, dispatch, explain, reference, sageattn

F16, F8, HOPPER = "sm80_qk_int8_pv_f16", "sm89_qk_int8_pv_f8", "sm90_qk_int8_pv_f16"
TOKENS = dispatch.FEW_QUERIES + 1
Q, K, V = (torch.randn(1, 4, TOKENS, 64, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    yield
    dispatch.forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that the operator is called with, which computes nothing."""
    kernels: list[str] = []

    def operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kernels.append(arguments[-1])
        return Q, Q

    monkeypatch.setattr(_ops, "attention", operator)
    return kernels


@pytest.fixture
def every_ability(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every kernel could do everything, which leaves the rows of the table."""
    for name, kernel in dispatch.KERNELS.items():
        able = kernel._replace(largest_head_dim=256, uneven=True, v_head_dim=True, masks=True, packed=True)
        monkeypatch.setitem(dispatch.ABILITIES, name, able)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("8.0", F16), ("8.6", F16), ("8.7", F16), ("8.9", F8), ("9.0", HOPPER), ("10.0", F16), ("10.3", F16), ("11.0", F16),
        ("12.0", F8), ("12.1", F8), ("13.0", F16),
    ],
)  # fmt: skip
def test_sageattn(architecture: str, expected: str) -> None:
    assert explain(Q, K, V, architecture=architecture).kernel == expected


@pytest.mark.parametrize(
    ("function", "accumulators", "architecture", "expected"),
    [
        ("sageattn_qk_int8_pv_fp16_cuda", None, "8.6", F16),
        ("sageattn_qk_int8_pv_fp16_cuda", None, "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "9.0", F16 + "_accum_f16"),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16", "12.0", F16 + "_accum_f16"),
        ("sageattn_qk_int8_pv_fp16_triton", None, "8.9", F16),
        ("sageattn_qk_int8_pv_fp8_cuda", None, "8.9", F8),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32", "12.0", F8),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "12.1", F8 + "_accum_f16"),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", None, "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "8.9", F8),
    ],
)
def test_other_functions(function: str, accumulators: str | None, architecture: str, expected: str) -> None:
    choice = explain(Q, K, V, function=function, pv_accum_dtype=accumulators, architecture=architecture)
    assert choice.kernel == expected
    assert choice.gpu == architecture


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulators", ["fp16", "fp16+fp32"])
def test_float16_sums_are_of_float16(dtype: torch.dtype, accumulators: str) -> None:
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    for architecture in (None, "8.6", "9.0"):
        choice = explain(
            q, k, v, function="sageattn_qk_int8_pv_fp16_cuda", pv_accum_dtype=accumulators, architecture=architecture
        )
        assert choice.kernel == F16
        assert choice.passed_over == (f"{F16}_accum_f16: float16 only",)


@pytest.mark.usefixtures("every_ability")
def test_every_function_serves_every_gpu_that_it_can() -> None:
    """Of each function on each GPU, every option is served or every option is refused for the GPU's age."""
    for function, allowed in dispatch.ACCUMULATORS.items():
        oldest = (8, 9) if "fp8" in function else (8, 0)
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), dispatch.CPU]:
            for accumulators in allowed or (None,):
                request = dispatch.Request(function, accumulators, True, 256, v_differs=True, masked=True, packed=True)
                if capability >= oldest:
                    assert dispatch.choose(request, capability).kernel in dispatch.KERNELS
                else:
                    with pytest.raises(ValueError, match=r"runs on compute capability 8\.9 and later; what can: sageattn"):
                        dispatch.choose(request, capability)


def test_the_cpu_computes_everything() -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    wide = torch.zeros(1, 4, TOKENS, 256, dtype=torch.float16)
    choice = explain(wide, wide, V, attn_mask=mask)
    assert (choice.kernel, choice.gpu) == (F16, "CPU")
    assert explain(Q, K, V, function="sageattn_qk_int8_pv_fp8_cuda").kernel == F8
    assert explain(Q[0].transpose(0, 1), K[0].transpose(0, 1), V[0].transpose(0, 1)).kernel == F16


def test_each_inability_leads_to_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    less = dispatch.Kernel("9.0 alone", 0.01, True, 128, uneven=False, v_head_dim=False, masks=False, packed=False)
    monkeypatch.setitem(dispatch.ABILITIES, HOPPER, less)
    wide = torch.zeros(1, 4, TOKENS, 136, dtype=torch.float16)
    packed = [x[0].transpose(0, 1) for x in (Q, K, V)]
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    for arguments, options, lack in (
        ((wide, wide, wide), {}, "head_dim up to 128, not 136"),
        ((Q[..., :60], K[..., :60], V[..., :60]), {}, "head_dims that are multiples of 8"),
        ((Q, K, V[..., :32]), {}, "V's head_dim must be that of Q and K"),
        ((Q, K, V), {"attn_mask": mask}, "no attn_mask"),
        (packed, {}, "no packed sequences"),
    ):
        choice = explain(*arguments, architecture="9.0", **options)
        assert choice.kernel == F16
        assert choice.passed_over[1] == f"{HOPPER}: {lack}"
        assert f"  not {HOPPER}: {lack}" in str(choice).splitlines()


def test_short_sequences_are_pytorchs_where_it_is_faster_and_more_exact() -> None:
    q, k, v = (x[..., 1:, :] for x in (Q, K, V))
    assert explain(q, k, v, architecture="9.0").kernel == dispatch.PYTORCH
    assert explain(q, k, v, architecture="8.9").kernel == F8
    assert explain(q, k, v).kernel == F16
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    nhd = [x.transpose(1, 2) for x in (Q, k, v)]
    for few in ((q, K, V), (Q, k[..., : dispatch.FEW_KEYS, :], v[..., : dispatch.FEW_KEYS, :])):
        assert explain(*few, architecture="9.0").kernel == dispatch.PYTORCH
    short = f"for at most {dispatch.FEW_QUERIES} queries or {dispatch.FEW_KEYS} keys, without gradients"
    for arguments, options, lack in (
        ((Q, k, v), {}, short),
        (nhd, {"tensor_layout": "NHD"}, short),
        ((q[:0], k[:0], v[:0]), {}, short),
        ((q, k.clone().requires_grad_(), v), {}, short),
        (packed, {}, short),
        ((q, k, v), {"return_lse": True}, "no log-sum-exp"),
        ((q, k, v), {"attn_mask": torch.ones(1, 1, dtype=torch.bool)}, "no attn_mask"),
        ((q[..., :60], k[..., :60], v[..., :60]), {}, "head_dims that are multiples of 8"),
        ((q, k, v[..., :32]), {}, "V's head_dim must be that of Q and K"),
        ((q.repeat(1, 1, 1, 3), k.repeat(1, 1, 1, 3), v.repeat(1, 1, 1, 3)), {}, "head_dim up to 128, not 192"),
    ):
        choice = explain(*arguments, architecture="9.0", **options)
        assert choice.kernel in (HOPPER, F16)
        assert choice.passed_over[0] == f"{dispatch.PYTORCH}: {lack}"


@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_attention_as_it_is_called(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any layout, grouped heads and a scale; also where `sageattn` stands in PyTorch's place."""
    q, k, v = Q[:, :, :40], K[:, :2, :30], V[:, :2, :30]
    grouped = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *grouped, is_causal=causal, scale=0.3)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    out = core._pytorch(q, k, v, "HND", causal, 0.3)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    turned = core._pytorch(q, k, v, "NHD", causal, 0.3)
    torch.testing.assert_close(turned, out.transpose(1, 2), rtol=2e-3, atol=2e-3)
    assert out.is_contiguous()
    assert turned.is_contiguous()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_short_call_on_hopper(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda *_: ((9, 0), frozenset(dispatch.KERNELS)))
    monkeypatch.setattr(_ops, "attention", None)
    q, k, v = (x[:, :, 1:].float() for x in (Q, K, V))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = sageattn(q, k, v, tensor_layout=layout)
    assert out.dtype == torch.float32
    assert out.shape == q.shape
    torch.testing.assert_close(out if layout == "HND" else out.transpose(1, 2), exact, rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    ("capability", "function", "options", "expected"),
    [
        ((9, 0), "sageattn", {"return_lse": True}, HOPPER),
        ((9, 0), "sageattn_qk_int8_pv_fp16_cuda", {}, HOPPER),
        ((8, 9), "sageattn", {}, F8),
    ],
)
def test_lengths_are_looked_at_only_where_they_decide(
    capability: tuple[int, int],
    function: str,
    options: dict[str, Any],
    expected: str,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda *_: (capability, frozenset(dispatch.KERNELS)))
    monkeypatch.setattr(dispatch, "is_short", None)
    getattr(sageattention, function)(Q[:, :, 1:], K, V, **options)
    assert launched == [expected]


def test_a_long_call_on_hopper(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda *_: ((9, 0), frozenset(dispatch.KERNELS)))
    sageattn(Q, K, V)
    assert launched == [HOPPER]


def test_a_kernel_that_is_not_installed_leads_to_the_next_row() -> None:
    present = frozenset({F16, "quant_k_int8"})
    choice = dispatch.choose(dispatch.Request("sageattn"), (8, 9), present)
    assert choice.kernel == F16
    assert f"{F8}: not among the kernels installed for this GPU" in choice.passed_over
    with pytest.raises(ValueError) as caught:
        dispatch.choose(dispatch.Request("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32"), (8, 9), present)
    assert str(caught.value) == (
        "sageattn_qk_int8_pv_fp8_cuda with pv_accum_dtype='fp32+fp32' cannot be served on compute capability 8.9: "
        f"{F8}: not among the kernels installed for this GPU; what can: sageattn, sageattn_qk_int8_pv_fp16_cuda"
    )


def test_a_build_of_an_older_cuda_has_float32_sums_instead() -> None:
    present = frozenset(dispatch.KERNELS) - {F8 + "_accum_f16"}
    choice = dispatch.choose(dispatch.Request("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16"), (8, 9), present)
    assert choice.kernel == F8


def test_a_gpu_that_nothing_serves() -> None:
    with pytest.raises(ValueError, match=r"^sageattn cannot be served on compute capability 7\.5: .*no other function can"):
        explain(Q, K, V, architecture="7.5")


@pytest.mark.parametrize("architecture", ["sm_89", "9", "", 9.0, (8, 9)])
def test_an_architecture_that_is_none(architecture: Any) -> None:
    if architecture == 9.0:
        assert explain(Q, K, V, architecture=architecture).kernel == HOPPER
        return
    with pytest.raises(ValueError, match=r"architecture: expected a compute capability such as '8\.9', got"):
        explain(Q, K, V, architecture=architecture)


def test_explain_refuses_what_the_call_refuses() -> None:
    with pytest.raises(ValueError, match="k: expected head_dim 64 as q, got 32"):
        explain(Q, K[..., :32], V)
    with pytest.raises(ValueError, match="attn_mask: expected a shape that broadcasts"):
        explain(Q, K, V, attn_mask=torch.ones(3, 3))
    with pytest.raises(ValueError, match="pv_accum_dtype: expected one of 'fp32', 'fp16"):
        explain(Q, K, V, function="sageattn_qk_int8_pv_fp16_cuda", pv_accum_dtype="fp8")
    with pytest.raises(ValueError, match="function: expected one of 'sageattn', 'sageattn_qk_int8_pv_fp16_cuda'"):
        explain(Q, K, V, function="sageattn4")


def test_every_kernel_has_a_row_a_reference_and_a_tolerance() -> None:
    assert {row.kernel for row in dispatch.TABLE} == set(dispatch.ABILITIES) == {*dispatch.KERNELS, dispatch.PYTORCH}
    assert set(reference.PRECISION) == set(dispatch.KERNELS) == set(TOLERANCES)
    for name, kernel in dispatch.KERNELS.items():
        assert kernel.error == TOLERANCES[name].relative_l1
        assert kernel.gpus in dispatch.GPUS
    for row in dispatch.TABLE:
        assert row.gpus in dispatch.GPUS
        assert hasattr(sageattention, row.function)
        assert row.reason


@pytest.fixture
def an_ada_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of PyTorch and of the runtime about GPU 0, as an Ada GPU would answer."""
    dispatch.forget()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "kernel_folder", lambda index: "sm_89")
    monkeypatch.setattr(_library, "kernels", {"sm_89": frozenset(dispatch.KERNELS)})


@pytest.mark.usefixtures("an_ada_gpu")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """The kernel of the tensors' GPU is a constant of the graph, without a break: traced with tensors that have no memory."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: sageattn(q, k, v, return_lse=True), fullgraph=True, backend=keep, dynamic=dynamic)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, 4, 20, 64, dtype=torch.float16, device="cuda:0") for _ in range(3))
        out, lse = compiled(q, k, v)
    assert out.device == lse.device == q.device
    assert out.shape == q.shape
    (call,) = [node for node in graphs[0].graph.nodes if node.target is torch.ops.sageattention.attention.default]
    assert call.args[-1] == F8


@pytest.mark.usefixtures("an_ada_gpu")
def test_a_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("sageattn", None, True, 64, False, False, False, False, False, False, "cuda", 0)
    assert dispatch.kernel_for(*arguments) == F8
    monkeypatch.setattr(dispatch, "kernel_folder", None)
    assert dispatch.kernel_for(*arguments) == F8
    dispatch.forget()
    with pytest.raises(TypeError):
        dispatch.kernel_for(*arguments)


def test_a_call_costs_little_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 15 µs on an idle machine; other programs may be running here, so the best of many, and twice that."""
    nothing = (torch.empty(0), torch.empty(0))
    monkeypatch.setattr(_ops, "attention", lambda *_: nothing)
    best = min(timeit.repeat(lambda: sageattn(Q, K, V, is_causal=True, return_lse=True), number=200, repeat=50)) / 200
    assert best < 30e-6
