"""sageattn3: its functions on CPU tensors, what it says elsewhere, and its clients' calls. What it shares with sageattention is
tested there; here it is that the same holds."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import log_sum_exp
import pytest
import torch
import wrong_arguments
from accuracy import FP4, error_by_size, exact, relative_l1
from model_inputs import Inputs, sink
from tensors import qkv, randn
from wrong_arguments import CU, PACKED, PACKED_CASES, K, Q, V

sageattn3 = pytest.importorskip(
    "sageattn3", reason="not installed here: `python3 scripts/run.py test` builds it and installs it"
)

from sageattn3 import _library, _ops, api, dispatch, explain, sageattn3_blackwell, sageattn3_varlen  # noqa: E402

KERNEL = "sm120_qk_fp4_pv_fp4"
README = Path(__file__).resolve().parent.parent / "sageattention3_blackwell" / "README.md"


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert error_by_size(out, q, k, v, **options) <= FP4.any_shape


# ── Signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_arguments_are_the_originals() -> None:
    parameters = [
        str(p.replace(annotation=p.empty))
        for p in inspect.signature(sageattn3_blackwell).parameters.values()
        if p.kind in {p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL}
    ]
    # The sixth is per_block_mean too, unless scaled_dot_product_attention's order says is_causal.
    assert parameters == ["q", "k", "v", "attn_mask=None", "is_causal=False", "*sixth"]
    q, k, v = qkv(1, 2, 200, 64)
    function: Any = sageattn3_blackwell
    assert torch.equal(function(q, k, v, None, False, False), function(q, k, v, per_block_mean=False))
    assert torch.equal(sageattn3_blackwell(q, k, v), sageattn3_blackwell(q, k, v, per_block_mean=True))
    assert not torch.equal(sageattn3_blackwell(q, k, v), sageattn3_blackwell(q, k, v, per_block_mean=False))


def test_what_is_exported() -> None:
    assert sageattn3.__version__ == _library.build.version == "1.0.0"
    assert api.sageattn3_blackwell is sageattn3_blackwell  # as SageAttention3 has it, and ComfyUI-SageAttention3 imports it
    assert set(sageattn3.__all__) == {"__version__", "explain", "sageattn3_blackwell", "sageattn3_varlen"}
    assert _library.build.package == _library.build.namespace == "sageattn3"
    assert all(callable(getattr(sageattn3, name)) for name in sageattn3.__all__ if name != "__version__")


@pytest.mark.skipif(sys.version_info < (3, 10), reason="annotations are of Python 3.10")
@pytest.mark.parametrize(
    "function", [sageattn3.explain, sageattn3_blackwell, sageattn3.sageattn3_varlen], ids=lambda f: f.__name__
)
def test_annotations_are_there_for_programs_that_ask(function: Callable[..., Any]) -> None:
    assert typing.get_type_hints(function)["q"] is torch.Tensor


def test_nothing_is_swallowed() -> None:
    function: Any = sageattn3_blackwell
    with pytest.raises(
        TypeError, match=r"sageattn3_blackwell\(\) has no argument 'per_block': did you mean 'per_block_mean'\?"
    ):
        function(Q, K, V, per_block=True)
    with pytest.raises(ValueError, match=r"dropout_p: expected 0, got 0\.1; there is no dropout here"):
        function(Q, K, V, dropout_p=0.1)
    for by_name in (0.0, 0.3):
        with pytest.raises(ValueError, match=r"dropout_p: expected 0, got 0\.3"):
            function(Q, K, V, None, 0.3 - by_name, False, dropout_p=by_name)
    with pytest.raises(TypeError, match=r"it takes q, k, v, attn_mask, is_causal, per_block_mean, tensor_layout, sm_scale"):
        function(Q, K, V, unheard=1)
    with pytest.raises(ValueError, match=r"pv_accum_dtype: expected 'fp32' or .*, got 'fp16'; sums are in float32 here"):
        function(Q, K, V, pv_accum_dtype="fp16")
    options = {"pv_accum_dtype": "fp32", "qk_quant_gran": "per_warp"}  # of sageattention's functions
    assert torch.equal(function(Q, K, V, **options), function(Q, K, V))
    with pytest.raises(TypeError, match="per_block_mean: given twice, sixth and by name"):
        function(Q, K, V, None, False, True, per_block_mean=True)
    with pytest.raises(TypeError, match=r"sageattn3_blackwell\(\) takes up to 6 arguments by position, got 7"):
        function(Q, K, V, None, False, True, True)


def test_options_that_a_length_decides() -> None:
    """In a compiled program a length is kept open; for each graph the one at hand decides."""
    function: Any = sageattn3_blackwell

    def layer(x: torch.Tensor) -> Any:
        tokens = x.shape[2]
        return function(x, x, x, None, tokens > 150, tokens > 100, smooth_v=tokens > 70, smooth_k=tokens > 40)

    def packed(x: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        few = x.shape[0] < 100
        return sageattn3_varlen(x, x, x, cu_seqlens, cu_seqlens, 200, 200, few, smooth_v=few, smooth_k=not few, return_lse=few)

    torch._dynamo.reset()
    one, other = (torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager") for f in (layer, packed))
    for tokens in (30, 60, 90, 120, 180):
        x = randn(1, 2, tokens, 64)
        assert torch.equal(one(x), layer(x))
        packing = randn(tokens, 2, 64), torch.tensor([0, 10, tokens], dtype=torch.int32)
        for mine, plain in zip(other(*packing), packed(*packing), strict=True):
            assert torch.equal(mine, plain)


# ── Against exact attention ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("per_block_mean", [True, False])
def test_error(dtype: torch.dtype, per_block_mean: bool) -> None:
    q, k, v = qkv(1, 2, 1024, 128, dtype=dtype)
    out = sageattn3_blackwell(q, k, v, per_block_mean=per_block_mean)
    error = relative_l1(out, exact(q, k, v)[0])
    assert 0.05 < error <= FP4.relative_l1, "an error of FP4: neither exact attention nor worse"


@pytest.mark.parametrize("head_dim", [1, 24, 63, 64, 65, 96, 128, 160, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_any_head_dim(head_dim: int, causal: bool) -> None:
    q, k, v = qkv(1, 2, 70, head_dim)
    check(sageattn3_blackwell(q, k, v, is_causal=causal), q, k, v, is_causal=causal)


@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 1), (1, 300), (7, 64), (129, 65), (200, 3)])
def test_any_lengths(qo_len: int, kv_len: int) -> None:
    q, (k, v) = randn(2, 4, qo_len, 64), (randn(2, 2, kv_len, 64, seed=seed) for seed in (1, 2))
    check(sageattn3_blackwell(q, k, v), q, k, v)


@pytest.mark.parametrize("mask_shape", [(50, 50), (1, 1, 50, 50), (2, 1, 1, 50), (2, 4, 50, 50)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float16])
def test_masks(mask_shape: tuple[int, ...], kind: torch.dtype) -> None:
    mask = randn(*mask_shape, seed=7)
    mask = mask > -1 if kind == torch.bool else mask
    q, k, v = qkv(2, 4, 50, 64)
    check(sageattn3_blackwell(q, k, v, mask), q, k, v, attn_mask=mask)


def test_a_mask_counts() -> None:
    """The original ignores it."""
    q, k, v = qkv(1, 2, 64, 64)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    assert not torch.equal(sageattn3_blackwell(q, k, v, mask), sageattn3_blackwell(q, k, v))
    out, lse = sageattn3_blackwell(q, k, v, torch.zeros(64, 64, dtype=torch.bool), return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -math.inf).all()


def test_layouts_options_and_strides_agree() -> None:
    q, k, v = qkv(2, 4, 40, 64, dtype=torch.bfloat16)
    expected, lse = sageattn3_blackwell(q, k, v, sm_scale=0.1, return_lse=True)
    assert lse.shape == (2, 4, 40)
    assert (lse - exact(q, k, v, sm_scale=0.1)[1]).abs().max() <= FP4.lse
    nhd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert torch.equal(sageattn3_blackwell(*nhd, tensor_layout="NHD", sm_scale=0.1).transpose(1, 2), expected)
    assert torch.equal(sageattn3_blackwell(*(x.transpose(1, 2) for x in nhd), sm_scale=0.1), expected)
    wide = [torch.cat([x, x], -1)[..., 3:67].copy_(x) for x in (q, k, v)]
    assert torch.equal(sageattn3_blackwell(*wide, sm_scale=0.1), expected)
    assert torch.equal(sageattn3_blackwell(q, k, v, scale=0.1), expected)  # type: ignore[call-overload]


def test_grouped_heads() -> None:
    q, k, v = qkv(1, 8, 60, 64)
    few, expanded = (k[:, :2], v[:, :2]), (x[:, :2].repeat_interleave(4, 1) for x in (k, v))
    assert torch.equal(sageattn3_blackwell(q, *few), sageattn3_blackwell(q, *expanded))


def test_float32_is_computed_as_bfloat16() -> None:
    q, k, v = qkv(1, 2, 40, 64, dtype=torch.float32)
    out = sageattn3_blackwell(q, k, v)
    assert out.dtype == torch.float32
    assert torch.equal(out, sageattn3_blackwell(*(x.bfloat16() for x in (q, k, v))).float())


def test_smoothing_is_an_option_and_helps() -> None:
    q, k, v = qkv(1, 2, 300, 64)
    k, v = (x + 8 * randn(1, 2, 1, 64, seed=9) for x in (k, v))
    errors = [
        relative_l1(sageattn3_blackwell(q, k, v, smooth_k=smooth_k, smooth_v=smooth_v), exact(q, k, v)[0])
        for smooth_k, smooth_v in ((True, True), (False, True), (True, False))
    ]
    assert errors[0] < errors[1]
    assert errors[0] < errors[2]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_further_apart(head_dim: int) -> None:
    """By their standard deviation, which is 1 for `randn`."""
    for deviation, limit in ((0.5, 0.16), (1.0, 0.2), (2.0, 0.26), (4.0, 0.3), (8.0, 0.33)):
        q, k, v = qkv(1, 2, 1024, head_dim, dtype=torch.bfloat16)
        q, k = (x * deviation**0.5 for x in (q, k))
        assert relative_l1(sageattn3_blackwell(q, k, v), exact(q, k, v)[0]) <= limit


@pytest.mark.parametrize(
    ("tokens", "mass", "value", "limit"),
    [(1024, 0.5, 0.1, 0.12), (1024, 0.9, 0.01, 0.12), (1024, 0.9, 1.0, 0.02), (1024, 0.99, 0.01, 0.02), (1024, 0.99, 0.0, 0.27), (16384, 0.99, 0.0, 0.3)],
)  # fmt: skip
def test_a_first_key_with_most_of_the_mass(tokens: int, mass: float, value: float, limit: float) -> None:
    """Its value counts as it is: rounded among 15 larger ones, the errors would be 0.54, 0.86, 0.09 and 0.99. So does its probability: with a base
    that it had raised the others of 16384 tokens would be below all that is left, and the last error 0.71."""
    q, k, v = sink(tokens, mass)
    v[:, :, 0] = value * randn(128, seed=9, dtype=torch.float32)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert relative_l1(sageattn3_blackwell(q, k, v), exact(q, k, v)[0]) <= limit


@pytest.mark.parametrize("padding", [1, 100])
def test_a_first_key_behind_padding(padding: int) -> None:
    """As decoders' prompts of one batch have it; were it any key, the errors would be 0.8 to 0.9."""
    tokens = 512
    q, k, v = sink(tokens, 0.95, seats=(padding,), queries=tokens)
    v[:, :, padding] = 0.05 * randn(128, seed=9)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    mask = (torch.arange(tokens) >= padding)[None, None, None]
    out = sageattn3_blackwell(q, k, v, attn_mask=mask, is_causal=True)
    both = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    assert relative_l1(out, exact(q, k, v, attn_mask=both)[0]) <= 0.05


def lse_inputs() -> dict[str, Inputs]:
    """By what docs/sageattn3.md calls them."""
    normal = {keys: log_sum_exp.normal(200, keys) for keys in (256, 1024)}
    q, k, v = normal[1024]
    return {
        "256 keys": normal[256],
        "1024 keys": normal[1024],
        "scores 4 times as far apart": Inputs(2 * q, 2 * k, v),
        "a sink of 0.99": sink(1024, 0.99, queries=200),
        "all scores alike": Inputs(0 * q, k, v),
    }


# Of the largest error, its standard deviation and mean: docs/sageattn3.md has what was measured.
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("256 keys", (0.15, 0.03, 0.015)),
        ("1024 keys", (0.1, 0.025, 0.015)),
        ("scores 4 times as far apart", (2.5, 0.4, 0.05)),
        ("a sink of 0.99", (1.0, 0.25, 0.08)),
        ("all scores alike", (1e-3, 1e-3, 1e-3)),
    ],
)
def test_log_sum_exp(name: str, limits: tuple[float, float, float]) -> None:
    inputs = lse_inputs()[name].to("cpu", torch.bfloat16)
    _, lse = sageattn3_blackwell(*inputs, return_lse=True)
    off = lse - log_sum_exp.exact_lse(inputs, None, False)
    found = off.abs().max(), off.std(), off.mean()
    print(f"{name}: largest {found[0]:.3f}, deviation {found[1]:.3f}, mean {found[2]:+.3f}")
    assert all(abs(one) <= limit for one, limit in zip(found, limits, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_callers_tensors_stay_as_they_are(is_causal: bool) -> None:
    """The original subtracts K's mean in place."""
    q, k, v = (x + 3 for x in qkv(1, 2, 200, 128))
    before = [x.clone() for x in (q, k, v)]
    sageattn3_blackwell(q, k, v, is_causal=is_causal)
    assert all(torch.equal(*pair) for pair in zip((q, k, v), before, strict=True))


def test_packed_sequences() -> None:
    q, k, v = qkv(70, 4, 64, dtype=torch.bfloat16)
    lengths = [10, 0, 33, 27]
    cu = torch.tensor([0, 10, 10, 43, 70], dtype=torch.int32)
    out, lse = sageattn3_varlen(q, k, v, cu, cu, 33, 33, is_causal=True, return_lse=True)
    assert lse.shape == (4, 70)
    for some in zip(*(x.split(lengths) for x in (out, q, k, v)), strict=True):
        if len(some[0]):
            one, a, b, c = (x.transpose(0, 1)[None] for x in some)
            assert torch.equal(one, sageattn3_blackwell(a, b, c, is_causal=True, per_block_mean=False))


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("arguments", "error", "message"), [pytest.param(*e[1:], id=e[0]) for e in wrong_arguments.CASES])
def test_argument_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        sageattn3_blackwell(**wrong_arguments.call(arguments))
    assert str(caught.value) == message.replace("sageattn_varlen", "sageattn3_varlen")


@pytest.mark.parametrize(("arguments", "error", "message"), [pytest.param(*e[1:], id=e[0]) for e in PACKED_CASES])
def test_varlen_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {**PACKED, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 6, "max_seqlen_k": 6}
    with pytest.raises(error) as caught:
        sageattn3_varlen(**{**good, **arguments})
    assert str(caught.value) == message.replace("sageattn_varlen", "sageattn3_varlen")


def test_other_errors() -> None:
    function: Any = sageattn3_blackwell
    with pytest.raises(TypeError, match="per_block_mean: expected True or False, got 'yes'"):
        function(Q, K, V, per_block_mean="yes")
    with pytest.raises(TypeError, match=r"k: expected a torch\.Tensor, got nothing"):
        function(Q)
    tensors = [x.clone().requires_grad_() for x in (Q, K, V)]
    with pytest.raises(RuntimeError, match="derivative for sageattn3::attention is not implemented"):
        sageattn3_blackwell(*tensors).float().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_neither_autocast_nor_the_default_dtype_changes_the_reference(dtype: torch.dtype) -> None:
    expected = sageattn3_blackwell(Q, K, V, return_lse=True)
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            result = sageattn3_blackwell(Q, K, V, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(result, expected, strict=True))


# ── Which GPUs ───────────────────────────────────────────────────────────────────────────────────────────────────────

OTHERS = (
    "use sageattention.sageattn instead, which serves compute capability 8.0 and later: its package is where this one came from"
)


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    yield
    dispatch.forget()


def test_explain() -> None:
    assert explain(Q, K, V).gpu == "CPU"
    assert explain(Q, K, V, per_block_mean=False, smooth_v=True).gpu == "CPU"
    with pytest.raises(TypeError, match="per_block_mean: expected True or False, got 1"):
        explain(Q, K, V, per_block_mean=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"sageattn3_varlen\(\) has no argument 'per_block_mean'"):
        explain(*(PACKED[name] for name in "qkv"), per_block_mean=True)
    assert explain(Q, K, V, pv_accum_dtype="fp32+fp16") == explain(Q, K, V)
    with pytest.raises(ValueError, match=r"pv_accum_dtype: expected 'fp32' or .*, got 'fp16'; sums are in float32 here"):
        explain(Q, K, V, pv_accum_dtype="fp16")
    for architecture in ("12.0", "12.1"):
        choice = explain(Q, K, V, architecture=architecture)
        assert (choice.kernel, choice.gpu) == (KERNEL, architecture)
    assert explain(PACKED["q"], PACKED["k"], PACKED["v"], architecture="12.0").kernel == KERNEL
    with pytest.raises(ValueError, match="function: expected one of 'sageattn3_blackwell', 'sageattn3_varlen', got 'sageattn'"):
        explain(Q, K, V, function="sageattn")


@pytest.mark.parametrize("architecture", ["7.5", "8.9", "9.0", "10.0", "10.3", "13.0"])
def test_other_gpus_are_told_what_serves_them(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as asked:
        explain(Q, K, V, architecture=architecture)
    assert str(asked.value) == (
        f"sageattn3_blackwell cannot be served on compute capability {architecture}: {KERNEL}: runs on compute capability "
        f"12.0 and 12.1; no other function can either; {OTHERS}"
    )
    major, minor = map(int, architecture.split("."))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (major, minor))
    with pytest.raises(RuntimeError) as called:
        dispatch.kernel_for("sageattn3_blackwell", None, False, False, False, "cuda", None)
    assert str(called.value) == (
        f"sageattn3: no kernel runs on compute capability {architecture} (device 0, NVIDIA X), they are for 12.0 and 12.1; {OTHERS}"
    )


def test_its_own_kernels_and_no_others() -> None:
    assert set(dispatch.KERNELS) == {KERNEL}
    assert dispatch.KERNELS[KERNEL].error == FP4.relative_l1
    (installed,) = {frozenset(name.partition(".")[0] for name in names) for names in _library.kernels.values()}
    assert installed == {KERNEL, "mask_tiles", "seen_keys", "means", "quant_kv_fp4"}


# ── PyTorch's machinery ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("lse", [False, True])
def test_opcheck(layout: str, lse: bool) -> None:
    q, k, v = qkv(1, 4, 9, 40)
    operator = torch.ops.sageattn3.attention.default
    options = _ops.number_of(KERNEL, layout == "HND", False, True, True, lse, per_block_mean=False)
    torch.library.opcheck(operator, (q, k, v, None, 0.125, options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        out, lse = sageattn3_blackwell(q, k, v, return_lse=True)
        a, b, c = (x[0].transpose(0, 1) for x in (q, k, v))
        cu = torch.tensor([0, 4, q.shape[2]], dtype=torch.int32)
        more: Any = sageattn3_varlen(a, b, c, cu, cu, q.shape[2], q.shape[2])
        return [out, lse, sageattn3_blackwell(q, k, v, mask, per_block_mean=False), more]

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)(Q, K, V)
    assert all(torch.equal(*pair) for pair in zip(compiled, program(Q, K, V), strict=True))


def test_shapes_without_computing() -> None:
    q, k, v = (x.to("meta") for x in (Q, K, V))
    out, lse = _ops.attention(q, k, v, None, "HND", False, 0.1, True, True, True, KERNEL, True)
    assert (out.shape, lse.shape) == (Q.shape, Q.shape[:3])


# ── Both packages ────────────────────────────────────────────────────────────────────────────────────────────────────


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["sageattention, sageattn3", "sageattn3, sageattention"])
def test_both_in_one_process_in_either_order(order: str) -> None:
    said = run(f"""
import {order}
import torch
q, k, v = (torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))
eight, four = sageattention.sageattn(q, k, v), sageattn3.sageattn3_blackwell(q, k, v)
print(eight.double().sum().item(), four.double().sum().item())
assert sageattention._library.operators is torch.ops.sageattention and sageattn3._library.operators is torch.ops.sageattn3
assert set(sageattention.dispatch.KERNELS).isdisjoint(sageattn3.dispatch.KERNELS)
assert sageattention._library.KERNEL_DIRECTORIES[0] != sageattn3._library.KERNEL_DIRECTORIES[0]
""")
    q, k, v = qkv(1, 2, 40, 64)
    import sageattention

    expected = [sageattention.sageattn(q, k, v), sageattn3_blackwell(q, k, v)]
    assert said.split() == [str(x.double().sum().item()) for x in expected]


@pytest.mark.parametrize(("alone", "without"), [("sageattn3", "sageattention"), ("sageattention", "sageattn3")])
def test_neither_needs_the_other(alone: str, without: str) -> None:
    function = {"sageattn3": "sageattn3_blackwell", "sageattention": "sageattn"}[alone]
    run(f"""
import sys
sys.modules["{without}"] = None
import torch, {alone}
q = torch.ones(1, 1, 3, 64).half()
assert torch.equal({alone}.{function}(q, q, q), q)
""")


def test_no_module_names_the_other_package() -> None:
    for path in Path(sageattn3.__file__).parent.glob("*.py"):
        assert "import sageattention" not in path.read_text(encoding="utf-8"), path.name
        assert "from sageattention" not in path.read_text(encoding="utf-8"), path.name


def test_the_doctor() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "sageattn3"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    build = _library.build
    assert lines[0] == f"sageattn3       1.0.0, built for PyTorch {build.torch} and CUDA {build.cuda}"
    if not torch.cuda.is_available():
        assert done.returncode == 0, done.stdout
        assert any(line.startswith(KERNEL) for line in lines), "it has run the kernel's reference"
        assert lines[-1] == "No problem found."


def test_what_its_page_says_of_mixed_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own code: FP4 in the middle, 8 bits at both ends, the function taken out of a model's hands."""
    import sageattention

    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    chooses, replaces = (next(block for block in blocks if sought in block) for sought in ("def attention_of", "cycle("))
    functional = torch.nn.functional
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention
    )  # given back at the end
    page: dict[str, Any] = {}
    exec(chooses, page)
    eight, four = sageattention.sageattn, sageattn3_blackwell
    assert [page["attention_of"](layer, 4) for layer in range(4)] == [eight, four, four, eight]
    assert [page["attention_of"](2, 4, step, 4) for step in range(4)] == [eight, four, four, eight]
    exec(replaces, page)
    for _ in range(2):  # forward passes
        for layer in range(page["LAYERS"]):
            expected = (eight if layer in {0, page["LAYERS"] - 1} else four)(Q, K, V, is_causal=True)
            assert torch.equal(functional.scaled_dot_product_attention(Q, K, V, None, 0.0, True), expected)


# ── Clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_comfyui() -> None:
    q, k, v = qkv(2, 6, 50, 128)
    check(sageattn3_blackwell(q, k, v, is_causal=False), q, k, v)


@pytest.mark.parametrize("per_block_mean", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_kjnodes(per_block_mean: bool, masked: bool) -> None:
    """On transposed views."""
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 30, 2, 128, dtype=torch.bfloat16))
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril(3) if masked else None
    check(sageattn3_blackwell(q, k, v, is_causal=False, attn_mask=mask, per_block_mean=per_block_mean), q, k, v, attn_mask=mask)


def test_wanvideowrapper() -> None:
    q, k, v = qkv(1, 30, 2, 128, dtype=torch.bfloat16)
    out = sageattn3_blackwell(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), per_block_mean=False)
    check(out.transpose(1, 2).contiguous().transpose(1, 2), *(x.transpose(1, 2) for x in (q, k, v)))


def test_wan2gp_and_lightx2v() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 30, 2, 128, dtype=torch.bfloat16))
    check(sageattn3_blackwell(q, k, v), q, k, v)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_sglang_and_vllm_omni(head_dim: int, causal: bool) -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 30, 2, head_dim, dtype=torch.bfloat16))
    check(sageattn3_blackwell(q, k, v, is_causal=causal), q, k, v, is_causal=causal)
    assert sageattn3_blackwell(q, k, v).is_contiguous(), "what vLLM-Omni's stand-in for torch.compile says"


def test_fastvideo() -> None:
    """It has q, k and v stacked, [3 batches, tokens, heads, head_dim], and compiles the layer."""

    def layer(stacked: torch.Tensor) -> Any:
        q, k, v = stacked.permute(0, 2, 1, 3).contiguous().chunk(3)
        return sageattn3_blackwell(q, k, v, is_causal=True).permute(0, 2, 1, 3).contiguous()

    tensors = qkv(2, 30, 2, 128, dtype=torch.bfloat16)
    torch._dynamo.reset()
    out: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.cat(tensors))
    check(out.transpose(1, 2), *(x.transpose(1, 2) for x in tensors), is_causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_in_the_place_of_scaled_dot_product_attention(causal: bool) -> None:
    """By position, as `torch.nn.MultiheadAttention` passes them, and by keyword."""
    function: Any = sageattn3_blackwell
    mask = None if causal else torch.ones(10, 10, dtype=torch.bool).tril(2)
    expected = function(Q, K, V, mask, is_causal=causal)
    assert torch.equal(function(Q, K, V, mask, 0.0, causal), expected)
    assert torch.equal(function(Q, K, V, mask, 0.0), function(Q, K, V, mask)), "five by position are not causal"
    assert not torch.equal(function(Q, K, V, None, 0.0), function(Q, K, V, None, 0.0, True))
    for mean in (True, False):
        assert torch.equal(function(Q, K, V, None, 0.0, per_block_mean=mean), function(Q, K, V, per_block_mean=mean))
    assert torch.equal(function(Q, K, V, None, True, False), function(Q, K, V, is_causal=True, per_block_mean=False))
    with pytest.raises(TypeError, match="is_causal: expected True or False, got 0"):
        function(Q, K, V, None, 0, True)  # is_causal and per_block_mean, or dropout_p and is_causal
    assert torch.equal(
        function(query=Q, key=K, value=V, attn_mask=mask, dropout_p=0.0, is_causal=causal, enable_gqa=True), expected
    )
