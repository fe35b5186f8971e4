"""Which kernel serves a call: the table, row by row, and what is said where none does."""

from __future__ import annotations

import json
import re
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import TOLERANCES
from torch._subclasses.fake_tensor import FakeTensorMode

import sageattention
from sageattention import _library, _ops, dispatch, explain, in_place, reference, sageattn

F16, F8, HOPPER = "sm80_qk_int8_pv_f16", "sm89_qk_int8_pv_f8", "sm90_qk_int8_pv_f16"
F16_SUMS, F8_SUMS = F16 + "_accum_f16", F8 + "_accum_f16"
TOKENS = 130
Q, K, V = (torch.randn(1, 4, TOKENS, 64, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    yield
    dispatch.forget()


@pytest.fixture
def every_ability(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every kernel could do everything, which leaves the rows of the table."""
    for name, kernel in dispatch.KERNELS.items():
        monkeypatch.setitem(dispatch.KERNELS, name, kernel._replace(uneven=True, other_masks=True))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("8.0", F16), ("8.6", F16_SUMS), ("8.7", F16), ("8.9", F8_SUMS), ("9.0", HOPPER), ("10.0", F16), ("10.3", F16),
        ("11.0", F16), ("12.0", F8_SUMS), ("12.1", F8_SUMS), ("13.0", F16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sageattn(architecture: str, expected: str, dtype: torch.dtype) -> None:
    assert explain(*(x.to(dtype) for x in (Q, K, V)), architecture=architecture).kernel == expected


@pytest.mark.parametrize(
    ("capability", "geforce", "others"),
    [((8, 6), F16_SUMS, F16), ((8, 9), F8_SUMS, F8), ((12, 0), F8_SUMS, F8), ((12, 1), F8_SUMS, F8)],
)
def test_float16_sums_are_for_geforce(capability: tuple[int, int], geforce: str, others: str) -> None:
    """Workstations' and data centres' cards add in float32 as fast."""
    request = dispatch.Request("sageattn")
    assert dispatch.choose(request, dispatch.Gpu(capability, geforce=True)).kernel == geforce
    assert dispatch.choose(request, dispatch.Gpu(capability, geforce=False)).kernel == others


@pytest.mark.parametrize(
    ("function", "accumulators", "architecture", "expected"),
    [
        ("sageattn_qk_int8_pv_fp16_cuda", None, "8.6", F16),
        ("sageattn_qk_int8_pv_fp16_cuda", None, "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.6", F16_SUMS),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.7", F16),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "8.0", F16),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16+fp32", "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16", "10.0", F16),
        ("sageattn_qk_int8_pv_fp16_cuda", "fp16", "12.0", F16 + "_accum_f16"),
        ("sageattn_qk_int8_pv_fp16_triton", None, "8.9", F16),
        ("sageattn_qk_int8_pv_fp8_cuda", None, "8.9", F8 + "_accum_f16"),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32", "12.0", F8),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "12.1", F8 + "_accum_f16"),
        ("sageattn_qk_int8_pv_fp8_cuda", None, "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp8_cuda", None, "10.0", F16),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", "10.3", F16),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32", "11.0", F16),
        ("sageattn_qk_int8_pv_fp8_cuda", None, "13.0", F16),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", None, "9.0", HOPPER),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32", "8.9", F8),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", "10.0", F16),
    ],
)
def test_other_functions(function: str, accumulators: str | None, architecture: str, expected: str) -> None:
    choice = explain(Q, K, V, function=function, pv_accum_dtype=accumulators, architecture=architecture)
    assert choice.kernel == expected
    assert choice.gpu == architecture


@pytest.mark.usefixtures("every_ability")
def test_every_function_serves_every_gpu_that_it_can() -> None:
    """Of each function on each GPU, every option is served or every option is refused for the GPU's age."""
    for function, allowed in dispatch.ACCUMULATORS.items():
        oldest = (8, 9) if "fp8" in function else (8, 0)
        for gpu in [
            *(dispatch.Gpu(c) for c in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (13, 0)]),
            dispatch.CPU,
        ]:
            for accumulators in allowed or (None,):
                request = dispatch.Request(function, accumulators, other_mask=True, packed=True, uneven=True)
                if gpu.capability >= oldest:
                    assert dispatch.choose(request, gpu).kernel in dispatch.KERNELS
                else:
                    with pytest.raises(ValueError, match=r"runs on compute capability 8\.9 and 12\.x; .*what can: sageattn"):
                        dispatch.choose(request, gpu)


def test_the_cpu_computes_everything() -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    wide = torch.zeros(1, 4, TOKENS, 256, dtype=torch.float16)
    choice = explain(wide, wide, V, attn_mask=mask)
    assert (choice.kernel, choice.gpu) == (F16, "CPU")
    assert explain(Q, K, V, function="sageattn_qk_int8_pv_fp8_cuda").kernel == F8
    assert explain(Q[0].transpose(0, 1), K[0].transpose(0, 1), V[0].transpose(0, 1)).kernel == F16


def test_each_inability_leads_to_the_next_row() -> None:
    seen, added = torch.ones(TOKENS, TOKENS, dtype=torch.bool), torch.zeros(TOKENS, TOKENS)
    for mask in (seen, added.to(Q.dtype), None):
        assert explain(Q, K, V, attn_mask=mask, architecture="9.0").kernel == HOPPER
    for arguments, options, lack in (
        ((Q[..., :60], K[..., :60], V[..., :60]), {}, "head_dims that are multiples of 8"),
        ((Q, K, V), {"attn_mask": added}, "an attn_mask that is bool or of q's dtype, float16 or bfloat16"),
    ):
        choice = explain(*arguments, architecture="9.0", **options)
        assert choice.kernel == F16
        assert choice.passed_over[0] == f"{HOPPER}: {lack}"
        assert f"  not {HOPPER}: {lack}" in str(choice).splitlines()


def test_what_v_and_a_mask_are_leads_to_the_next_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `explain` and of the call: V's head_dim by itself, and float32, which is computed as bfloat16, by its mask."""
    called: list[str] = []

    def operator(q: torch.Tensor, *arguments: Any, **_named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(arguments[-1])
        return q, q

    monkeypatch.setattr(_ops, "attention", operator)
    monkeypatch.setattr(dispatch, "gpu_of", lambda *_: (dispatch.Gpu((9, 0)), frozenset(dispatch.KERNELS)))
    dispatch.forget()
    mask = torch.zeros(TOKENS, TOKENS)
    of_float32 = [x.float() for x in (Q, K, V)]
    calls: list[tuple[list[torch.Tensor], torch.Tensor | None, str]] = [
        ([Q, K, V], None, HOPPER),
        ([Q, K, V[..., :60]], None, F16),
        (of_float32, mask.bfloat16(), HOPPER),
        (of_float32, mask, F16),
        (of_float32, mask.half(), F16),
    ]
    for (q, k, v), attn_mask, kernel in calls:
        assert explain(q, k, v, attn_mask=attn_mask).kernel == kernel
        sageattn(q, k, v, attn_mask=attn_mask)
        assert called.pop() == kernel


@pytest.mark.parametrize(("function", "allowed"), [("sageattn", True), ("sageattn_qk_int8_pv_fp16_cuda", False)])
def test_the_operator_is_told(function: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def operator(*arguments: Any, per_block_mean: bool, or_16_bit: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert per_block_mean
        called.append((or_16_bit, *arguments))
        return Q, Q

    monkeypatch.setattr(_ops, "attention", operator)
    monkeypatch.setattr(
        dispatch,
        "gpu_of",
        lambda *_: (
            dispatch.Gpu((9, 0)),
            frozenset(dispatch.KERNELS) | dispatch.FEW_TOKENS.kernels(shared=True),
        ),
    )
    getattr(sageattention, function)(Q, K, V)
    assert [(arguments[0], arguments[-1]) for arguments in called] == [(allowed, HOPPER)]


def test_a_kernel_that_is_not_installed_leads_to_the_next_row() -> None:
    present = frozenset({F16, "quant_k_int8"})
    ada = dispatch.Gpu((8, 9))
    choice = dispatch.choose(dispatch.Request("sageattn"), ada, present)
    assert choice.kernel == F16
    assert f"{F8}: not among the kernels installed for this GPU" in choice.passed_over
    with pytest.raises(ValueError) as caught:
        dispatch.choose(dispatch.Request("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp32"), ada, present)
    assert str(caught.value) == (
        "sageattn_qk_int8_pv_fp8_cuda with pv_accum_dtype='fp32+fp32' cannot be served on compute capability 8.9: "
        f"{F8}: not among the kernels installed for this GPU; what can: sageattn, sageattn_qk_int8_pv_fp16_cuda"
    )


@pytest.mark.parametrize("function", ["sageattn_qk_int8_pv_fp8_cuda", "sageattn_qk_int8_pv_fp8_cuda_sm90"])
def test_blackwell_with_the_kernels_of_an_older_cuda_computes_in_16_bits(function: str) -> None:
    """It runs their PTX of 8.0, which has no FP8."""
    choice = dispatch.choose(dispatch.Request(function, "fp32+fp32"), dispatch.Gpu((12, 0)), frozenset({F16, "quant_k_int8"}))
    assert choice.kernel == F16
    assert choice.passed_over == (f"{F8}: not among the kernels installed for this GPU",)


def test_what_a_gpu_is_given_is_compiled_for_it() -> None:
    """No function leads to a kernel that csrc/kernels/kernels.json has not for that GPU."""
    entries = json.loads((Path(__file__).parents[1] / "csrc" / "kernels" / "kernels.json").read_text(encoding="utf-8"))
    only = {Path(entry["source"]).stem: entry.get("architectures") for entry in entries}
    # The folders that each runs, nearest first (csrc/runtime/kernel_store.cpp).
    folders = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (10, 3): "sm_100",
               (11, 0): "compute_80", (12, 0): "sm_120", (12, 1): "sm_120", (13, 0): "compute_80"}  # fmt: skip
    for capability, folder in folders.items():
        for row in dispatch.TABLE:
            if row.pv_accum_dtype is None or capability >= (8, 9) or "fp8" not in row.function:
                chosen = dispatch.choose(dispatch.Request(row.function, row.pv_accum_dtype), dispatch.Gpu(capability)).kernel
                assert folder in (only[chosen] or [folder]), f"{chosen} for {folder}"


def test_a_build_of_an_older_cuda_has_float32_sums_instead() -> None:
    present = frozenset(dispatch.KERNELS) - {F8 + "_accum_f16"}
    for function, accumulators in (("sageattn", None), ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16")):
        choice = dispatch.choose(dispatch.Request(function, accumulators), dispatch.Gpu((8, 9)), present)
        assert choice.kernel == F8


def test_float16_sums_are_for_geforce_in_both_functions_that_choose() -> None:
    """Other GPUs add products in float32 at the full rate."""
    for function, accumulators in (("sageattn", None), ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16")):
        request = dispatch.Request(function, accumulators)
        chosen = [dispatch.choose(request, dispatch.Gpu((8, 9), geforce)).kernel for geforce in (False, True)]
        assert chosen == [F8, F8 + "_accum_f16"]


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


def test_explain_takes_tensors_that_the_call_makes_alike() -> None:
    assert explain(Q.expand(3, -1, -1, -1), K, V, architecture="9.0").kernel == HOPPER
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(Q.float(), K, V, architecture="9.0").kernel == HOPPER
        assert explain(Q[0].float(), K[0], V[0], architecture="9.0").kernel == HOPPER  # packed
    with pytest.raises(TypeError, match="dtype"):
        explain(Q.float(), K, V)


def test_explain_refuses_what_the_call_refuses() -> None:
    with pytest.raises(ValueError, match="k: expected head_dim 64 as q, got 32"):
        explain(Q, K[..., :32], V)
    with pytest.raises(ValueError, match="attn_mask: expected a shape that broadcasts"):
        explain(Q, K, V, attn_mask=torch.ones(3, 3))
    with pytest.raises(ValueError, match="pv_accum_dtype: expected one of 'fp32', 'fp16"):
        explain(Q, K, V, function="sageattn_qk_int8_pv_fp16_cuda", pv_accum_dtype="fp8")
    with pytest.raises(ValueError, match="function: expected one of 'sageattn', 'sageattn_qk_int8_pv_fp16_cuda'"):
        explain(Q, K, V, function="sageattn4")
    with pytest.raises(ValueError, match="tensor_layout: expected one of 'HND', 'NHD', got 'BHSD'"):
        explain(Q, K, V, "BHSD")
    with pytest.raises(TypeError, match="is_causal: expected True or False, got 1"):
        explain(Q, K, V, is_causal=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sm_scale: expected a number or None, got '1'"):
        explain(Q, K, V, sm_scale="1")  # type: ignore[arg-type]
    packed = [x[0].transpose(0, 1) for x in (Q, K, V)]
    for function in ("sageattn", "sageattn_qk_int8_pv_fp16_triton", "sageattn_varlen"):
        tensors = packed if function == "sageattn_varlen" else [Q, K, V]
        assert explain(*tensors, function=function, pv_accum_dtype="fp16") == explain(*tensors, function=function)
        with pytest.raises(
            ValueError, match=r"pv_accum_dtype: expected 'fp32' or .*, got 'fp8'; the kernel's sums are of its own"
        ):
            explain(*tensors, function=function, pv_accum_dtype="fp8")
        with pytest.raises(TypeError, match=rf"{function}\(\) has no argument 'per_block_mean'"):
            explain(*tensors, function=function, per_block_mean=True)
    with pytest.raises(ValueError, match=r"q: expected 3 dimensions \[tokens, heads, head_dim\], got 4"):
        explain(Q, K, V, function="sageattn_varlen")
    with pytest.raises(ValueError, match=r"q: expected 4 dimensions \[batch, heads, tokens, head_dim\], got 3"):
        explain(*packed, function="sageattn_qk_int8_pv_fp16_cuda")
    with pytest.raises(TypeError, match=r"sageattn_varlen\(\) has no argument 'attn_mask'"):
        explain(packed[0], packed[1], packed[2], attn_mask=torch.ones(1, 1))


def test_every_kernel_has_a_row_a_reference_and_a_tolerance() -> None:
    assert {row.kernel for row in dispatch.TABLE} == set(dispatch.KERNELS)
    assert set(reference.PRECISION) == set(dispatch.KERNELS) == set(TOLERANCES)
    for name, kernel in dispatch.KERNELS.items():
        assert kernel.error == TOLERANCES[name].relative_l1
        assert kernel.gpus in dispatch.GPUS
    for row in dispatch.TABLE:
        assert row.gpus in dispatch.GPUS
        assert hasattr(sageattention, row.function)
        assert row.reason


def test_few_tokens_are_the_16_bit_kernels() -> None:
    """The operator looks at lengths; whether it may is decided here."""
    few = dispatch.FEW_TOKENS

    ada = dispatch.Gpu((8, 9))

    def asked(gpu: dispatch.Gpu = ada, present: frozenset[str] | None = None, **request: Any) -> bool:
        return dispatch.choose(dispatch.Request("sageattn")._replace(**request), gpu, present).or_16_bit

    assert asked()
    assert asked(dispatch.Gpu((9, 0)))
    assert asked(other_mask=True)
    assert asked(present=frozenset({F8, few.name, few.over_many_keys}))
    hopper = dispatch.Gpu((9, 0))
    assert asked(hopper, frozenset({HOPPER, few.name, few.over_many_keys, few.short}))
    assert not asked(hopper, frozenset({HOPPER, few.name, few.over_many_keys}))
    assert not asked(present=frozenset({F8}))
    assert not asked(dispatch.CPU)
    assert not asked(function="sageattn_qk_int8_pv_fp16_cuda", pv_accum_dtype="fp32")
    assert not asked(packed=True)
    assert not asked(uneven=True)
    assert few.name in str(explain(Q, K, V, architecture="8.9"))
    assert f"up to {few.rows} queries times heads" in str(explain(Q, K, V, architecture="8.9"))
    assert f"up to {few.rows_where_shared} queries times heads" in str(explain(Q, K, V, architecture="9.0"))
    assert f"up to {few.queries_where_shared} queries and {few.keys} keys" in str(explain(Q, K, V, architecture="9.0"))
    other = str(explain(Q, K, V, attn_mask=torch.zeros(1), architecture="9.0"))  # of another dtype: not Hopper's own kernel
    assert f"up to {few.rows} queries times heads" in other
    assert "under an attn_mask" not in other
    assert few.short in str(explain(Q, K, V, architecture="9.0"))
    assert few.short not in str(explain(Q, K, V, architecture="8.9"))
    assert few.name not in str(explain(Q, K, V))


def test_few_tokens_are_as_many_where_the_operator_says() -> None:
    few = dispatch.FEW_TOKENS
    folder = Path(__file__).parents[1] / "csrc/kernels/attention"

    def said(kernel: str, pattern: str) -> int:
        return max(int(number) for number in re.findall(pattern, (folder / f"{kernel}.h").read_text(encoding="utf-8")))

    assert said(few.name, r"kMostQueries = (\d+);") == few.queries
    assert said(few.name, r"kMostQueriesWhereShared = (\d+);") == few.queries_where_shared
    assert said(few.name, r"most_keys\(int head_dim\) { return head_dim <= 64 \? (\d+)") == few.keys
    assert said(few.over_many_keys, r"kMostRows = (\d+);") == few.rows
    assert said(few.over_many_keys, r"kMostRowsWhereShared = (\d+);") == few.rows_where_shared


@pytest.fixture
def an_ada_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of PyTorch and of the runtime about GPU 0, as an Ada GPU would answer."""
    dispatch.forget()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "kernel_folder", lambda index: "sm_89")
    monkeypatch.setattr(_library, "kernels", {"sm_89": frozenset(dispatch.KERNELS)})


@pytest.mark.usefixtures("an_ada_gpu")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", F8_SUMS),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", F8_SUMS),
        ("NVIDIA RTX 6000 Ada Generation", F8),
        ("NVIDIA L40S", F8),
    ],
)
def test_a_geforce_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    gpu, present = dispatch.gpu_of("cuda", None)
    assert dispatch.choose(dispatch.Request("sageattn"), gpu, present).kernel == expected


@pytest.mark.usefixtures("an_ada_gpu")
@pytest.mark.parametrize(("index", "asked"), [(None, 1), (0, 0), (2, 2)])
def test_a_gpu_is_that_of_the_tensors(monkeypatch: pytest.MonkeyPatch, index: int | None, asked: int) -> None:
    """Whichever is the current one, which stands for none."""
    capabilities = [(9, 0), (8, 9), (8, 0)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(dispatch, "kernel_folder", lambda index: f"of GPU {index}")
    monkeypatch.setattr(_library, "kernels", {f"of GPU {index}": frozenset({str(index)}) for index in range(3)})
    gpu, present = dispatch.gpu_of("cuda", index)
    assert (gpu.capability, present) == (capabilities[asked], frozenset({str(asked)}))


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
    asked = _ops.options_of(call.args[5])
    assert (asked.kernel, asked.return_lse) == (F8_SUMS, True)


@pytest.mark.usefixtures("an_ada_gpu")
def test_a_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("sageattn", None, False, False, False, "cuda", 0)
    assert dispatch.kernel_for(*arguments)[:2] == (F8_SUMS, False)
    monkeypatch.setattr(dispatch, "kernel_folder", None)
    assert dispatch.kernel_for(*arguments)[:2] == (F8_SUMS, False)
    dispatch.forget()
    with pytest.raises(TypeError):
        dispatch.kernel_for(*arguments)


def test_a_call_costs_little_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 15 µs on an idle machine; other programs may be running here, so the best of many, and twice that."""
    nothing = (torch.empty(0), torch.empty(0))
    monkeypatch.setattr(_ops, "attention", lambda *_, **__: nothing)
    best = min(timeit.repeat(lambda: sageattn(Q, K, V, is_causal=True, return_lse=True), number=200, repeat=50)) / 200
    assert best < 30e-6


def test_amds_gpus_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm calls them "cuda", and says a compute capability."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not in_place.has_kernels("cuda", 0)
    with pytest.raises(RuntimeError, match=r"for NVIDIA's GPUs, and this PyTorch is for AMD's \(ROCm 6\.4\)"):
        dispatch.gpu_of("cuda", 0)
