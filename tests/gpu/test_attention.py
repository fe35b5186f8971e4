"""The attention kernels on a GPU: against float64, against the CPU reference, and under everything PyTorch does to them."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest
import tensors
import torch
from accuracy import QK_INT8_PV_F16, exact, relative_l1
from tensors import poison

import sageattention
from sageattention import _call, dispatch, recent, sageattn, sageattn_qk_int8_pv_fp16_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = [torch.float16, torch.bfloat16]
# Of an operator that is called without the functions in front of it. LibTorch's stable ABI has one kind of error.
STABLE = sageattention._library.build.stable_abi
REFUSED_VALUE, REFUSED_TYPE = (RuntimeError, RuntimeError) if STABLE else (ValueError, TypeError)


@pytest.fixture(autouse=True, params=["sm80_qk_int8_pv_f16", "sm90_qk_int8_pv_f16"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on a kernel of either kind, whichever one `sageattn` would take: the other formats of P and V differ in what
    test_model_inputs.py, test_options.py and the fuzzer ask of all that this GPU has.
    """
    name: str = request.param
    if name.startswith("sm90") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")
    monkeypatch.setattr(dispatch, "kernel_for", lambda *_: (name, False))
    monkeypatch.setattr(_call, "SERVED", {})
    monkeypatch.setattr(recent, "KINDS", recent._Kinds())
    return name


randn = partial(tensors.randn, device="cuda")


def qkv(
    batch: int,
    heads: int,
    qo_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv = (batch, kv_heads or heads, kv_len or qo_len, head_dim)
    return (
        randn(batch, heads, qo_len, head_dim, dtype=dtype, seed=3 * seed),
        randn(*kv, dtype=dtype, seed=3 * seed + 1),
        randn(*kv, dtype=dtype, seed=3 * seed + 2),
    )


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    limit: float = QK_INT8_PV_F16.relative_l1,
    is_causal: bool = False,
    sm_scale: float | None = None,
) -> None:
    """Compare `sageattn` with exact attention, output and log-sum-exp."""
    poison()
    out, lse = sageattn(q, k, v, is_causal=is_causal, sm_scale=sm_scale, return_lse=True)
    expected, expected_lse = exact(q, k, v, is_causal=is_causal, sm_scale=sm_scale)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert relative_l1(out, expected) <= limit
    assert (lse - expected_lse).abs().max() <= QK_INT8_PV_F16.lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy(dtype: torch.dtype, causal: bool, head_dim: int) -> None:
    check(*qkv(2, 4, 4096, head_dim, dtype=dtype), is_causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "smooth"), [(64, True), (128, True), (128, False), (80, True)])
def test_matches_reference(dtype: torch.dtype, causal: bool, head_dim: int, smooth: bool) -> None:
    q, k, v = qkv(1, 4, 333, head_dim, kv_heads=2, kv_len=517, dtype=dtype)
    k = k + 3 * randn(head_dim, dtype=dtype, seed=9)
    attend = sageattn if smooth else partial(sageattn_qk_int8_pv_fp16_cuda, smooth_k=False)
    out, lse = attend(q, k, v, is_causal=causal, return_lse=True)
    expected, expected_lse = attend(q.cpu(), k.cpu(), v.cpu(), is_causal=causal, return_lse=True)
    # Sums in another order and the GPU's exp2, each of which rounds to the other neighbour now and then; P and the output
    # have 8 bits in bf16, 11 in fp16.
    assert relative_l1(out.cpu(), expected.double()) <= (1e-3 if dtype == torch.float16 else 4e-3)
    # K's mean is summed in another order, which now and then rounds one of its elements to the other neighbour.
    difference = (lse.cpu() - expected_lse).abs()
    assert difference.mean() <= 1e-3
    assert difference.max() <= 0.02


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_tail_length(causal: bool, head_dim: int) -> None:
    for length in range(1, 258):
        q, k, v = qkv(1, 2, length, head_dim, dtype=DTYPES[length % 2], seed=length)
        check(q, k, v, is_causal=causal, limit=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("qo_len", "kv_len"),
    [(1, 1), (1, 257), (257, 1), (113, 203), (203, 113), (128, 64), (64, 128), (1023, 1024), (1024, 1023), (1, 4096)],
)
def test_lengths_that_differ(qo_len: int, kv_len: int, causal: bool) -> None:
    check(*qkv(2, 2, qo_len, 128, kv_len=kv_len), is_causal=causal, limit=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 8, 16, 24, 31, 33, 40, 63, 65, 72, 80, 96, 100, 120, 127])
def test_every_head_dim(kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    if head_dim % 8 and not dispatch.KERNELS[kernel].uneven:
        pytest.skip("takes multiples of 8")
    check(*qkv(1, 3, 129, head_dim, kv_len=195, dtype=dtype), limit=0.02)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 2), (6, 3), (5, 5)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    check(*qkv(2, heads, 200, 128, kv_heads=kv_heads), limit=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_strides(causal: bool) -> None:
    q, k, v = qkv(2, 4, 150, 128, kv_len=170)

    def attend(*tensors: torch.Tensor, layout: str = "HND") -> torch.Tensor:
        return sageattn(tensors[0], tensors[1], tensors[2], tensor_layout=layout, is_causal=causal)

    expected = attend(q, k, v)
    nhd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = attend(*nhd, layout="NHD")
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=0)
    torch.testing.assert_close(attend(*(x.transpose(1, 2) for x in nhd)), expected, rtol=0, atol=0)
    # Rows of a wider buffer: aligned to 16 bytes, then not; and a buffer that starts at an odd element.
    for width, start in ((136, 0), (131, 0), (136, 1), (130, 2)):
        wide = []
        for x in (q, k, v):
            buffer = torch.full((*x.shape[:3], width), float("nan"), device="cuda", dtype=x.dtype)
            buffer[..., start : start + 128] = x
            wide.append(buffer[..., start : start + 128])
        torch.testing.assert_close(attend(*wide), expected, rtol=0, atol=0)
    packed = torch.stack([q[:, :, :150], k[:, :, :150], v[:, :, :150]], dim=3)
    torch.testing.assert_close(attend(*packed.unbind(3)), attend(*(x[:, :, :150].contiguous() for x in (q, k, v))))
    one = k[:, :1].expand(-1, 4, -1, -1)
    torch.testing.assert_close(attend(q, one, one), attend(q, one.contiguous(), one.contiguous()))


def test_inputs_are_not_changed() -> None:
    tensors = qkv(1, 2, 200, 128)
    before = [x.clone() for x in tensors]
    sageattn(*tensors)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)


def test_past_two_to_the_31_elements() -> None:
    row_stride = 2**25 + 8
    buffer = torch.empty(row_stride * 80, device="cuda", dtype=torch.float16)
    q, k, v = qkv(1, 1, 80, 64)
    far = []
    for i, x in enumerate((q, k, v)):
        rows = buffer.as_strided((1, 1, 80, 64), (0, 0, row_stride, 1), i * 1024)
        rows.copy_(x)
        far.append(rows)
    torch.testing.assert_close(sageattn(*far), sageattn(q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("sm_scale", [0.0, 1.0, -0.2, 0.01])
def test_sm_scale(sm_scale: float) -> None:
    q, k, v = qkv(1, 2, 300, 64)
    q = q * (0.1 if sm_scale == 1.0 else 1.0)
    check(q, k, v, sm_scale=sm_scale, limit=0.03)


def test_offsets_do_not_hurt() -> None:
    """Per-channel offsets of K and V, which smoothing removes: the original's error is 0.003."""
    q, k, v = qkv(2, 4, 4096, 128, dtype=torch.bfloat16)
    k = k + 8 * randn(1, 4, 1, 128, dtype=torch.bfloat16, seed=7)
    v = v + 8 * randn(1, 4, 1, 128, dtype=torch.bfloat16, seed=8)
    check(q, k, v, limit=0.003)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outlier_channels_give_no_nan(dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 4, 2048, 128, dtype=dtype)
    q[..., ::16] *= 30
    k[..., ::16] *= 30
    out, lse = sageattn(q, k, v, return_lse=True)
    expected, _ = exact(q, k, v)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert relative_l1(out, expected) < 0.2


def test_large_values_do_not_overflow() -> None:
    q, k, v = qkv(1, 2, 2048, 128, dtype=torch.float16)
    v = v.abs() * 0 + 60000
    out = sageattn(q, k, v)
    torch.testing.assert_close(out, v, rtol=1e-3, atol=0)


def test_nan_is_not_hidden() -> None:
    q, k, v = qkv(1, 2, 100, 64)
    q[0, 0, 3, 5] = float("nan")
    k[0, 1, 7, 9] = float("nan")
    out = sageattn_qk_int8_pv_fp16_cuda(q, k, v, smooth_k=False)
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, :3].isfinite().all()
    assert out[0, 1].isnan().all()


def test_runs_are_bit_identical() -> None:
    tensors = qkv(2, 4, 1000, 128)
    first = sageattn(*tensors, is_causal=True)
    for _ in range(5):
        assert torch.equal(sageattn(*tensors, is_causal=True), first)


def test_current_stream() -> None:
    q, k, v = qkv(2, 8, 2048, 128)
    expected = sageattn(q, k, v)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = q + 0
        out = sageattn(late, k, v)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, expected)


def test_graph_replay_follows_its_inputs() -> None:
    q, k, v = qkv(1, 4, 500, 128)
    sageattn(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sageattn(q, k, v, is_causal=True)
    for seed in (11, 12):
        fresh = qkv(1, 4, 500, 128, seed=seed)
        for x, y in zip((q, k, v), fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, sageattn(*fresh, is_causal=True))


def test_kernels_load_during_capture() -> None:
    """The first call of a kernel may come inside a capture."""
    package = sageattention._library
    package.name_kernels(package.KERNEL_DIRECTORIES)  # forgets what was loaded
    q, k, v = qkv(1, 2, 100, 64, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sageattn(q, k, v)
    graph.replay()
    assert torch.equal(out, sageattn(q, k, v))


@pytest.mark.parametrize(
    ("queries", "keys", "masked"), [(100, 100, False), (4096, 4096, True), (1, 4096, True), (1, 100000, False)]
)
def test_a_process_may_begin_with_a_capture(queries: int, keys: int, masked: bool) -> None:
    """The driver loads code when it is first launched, unless asked before: of kernels for masks and for few queries too."""
    code = f"""
import torch
from sageattention import sageattn
q, k, v = (torch.randn(1, 8, n, 128, device="cuda", dtype=torch.bfloat16) for n in ({queries}, {keys}, {keys}))
mask = torch.rand({queries}, {keys}, device="cuda") < 0.5 if {masked} else None
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = sageattn(q, k, v, attn_mask=mask)
graph.replay()
assert torch.equal(out, sageattn(q, k, v, attn_mask=mask))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compile_fullgraph() -> None:
    q, k, v = qkv(1, 4, 300, 128, dtype=torch.bfloat16)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = sageattn(q * 1.5, k, v, is_causal=True, return_lse=True)
        return out + 1, lse

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v))


def test_opcheck(kernel: str) -> None:
    number_of = sageattention._ops.number_of
    for layout in ("HND", "NHD"):
        for lse in (False, True):
            q, k, v = qkv(1, 2, 70, 64)
            if layout == "NHD":
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            torch.library.opcheck(
                torch.ops.sageattention.attention.default,
                (q, k, v, None, 0.125, number_of(kernel, layout == "HND", False, True, False, lse)),
            )


def test_threads() -> None:
    inputs = [qkv(1, 4, 300 + 7 * i, 128, seed=i) for i in range(8)]
    expected = [sageattn(*tensors) for tensors in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(sageattn(*inputs[i]), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fresh_thread_has_no_context_yet() -> None:
    q, k, v = qkv(1, 2, 64, 64)
    expected, results = sageattn(q, k, v), []
    thread = threading.Thread(target=lambda: results.append(sageattn(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device_than_the_current() -> None:
    tensors = qkv(1, 2, 300, 128)
    expected = sageattn(*tensors)
    assert torch.cuda.current_device() == 0
    out = sageattn(*(x.to("cuda:1") for x in tensors))
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), expected)


def test_mixed_devices_are_refused(kernel: str) -> None:
    q, k, v = qkv(1, 2, 64, 64)
    with pytest.raises(ValueError, match=r"k: expected device cuda:0 as q, got cpu"):
        sageattn(q, k.cpu(), v)
    with pytest.raises(REFUSED_VALUE, match=r"k: expected device"):
        sageattention._ops.attention(q, k.cpu(), v, None, "HND", False, 0.1, True, False, False, kernel)


def test_operator_checks_memory_safety_itself(kernel: str) -> None:
    q, k, v = qkv(1, 2, 64, 64)

    options = sageattention._ops.number_of(kernel, True, False, True, False, False)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: int = options) -> None:
        torch.ops.sageattention.attention(q, k, v, None, 0.1, options)

    with pytest.raises(REFUSED_VALUE, match="v: expected the shape of k"):
        call(q, k, v[:, :, :32])
    wide = randn(1, 2, 64, 300)
    with pytest.raises(REFUSED_VALUE, match=r"head_dim 1 to \d+, got 300"):
        call(wide, wide, wide)
    with pytest.raises(REFUSED_TYPE, match="float16 or bfloat16"):
        call(q.float(), k.float(), v.float())
    there = len(sageattention._ops.NUMBERS)
    with pytest.raises(REFUSED_VALUE, match=f"kernel: expected a number below {there}, got {there}"):
        call(q, k, v, there << len(sageattention._ops.Options._fields) - 1)


def test_backward_is_an_error() -> None:
    q, k, v = qkv(1, 2, 64, 64)
    out = sageattn(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()


def test_empty_batch() -> None:
    q, k, v = (x[:0] for x in qkv(1, 2, 64, 64))
    out, lse = sageattn(q, k, v, return_lse=True)
    assert out.shape == (0, 2, 64, 64)
    assert lse.shape == (0, 2, 64)


def test_public_kernel_name() -> None:
    q, k, v = qkv(1, 2, 200, 128)
    out = sageattn_qk_int8_pv_fp16_cuda(
        q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, qk_quant_gran="per_warp", pv_accum_dtype="fp32"
    )
    assert torch.equal(out, sageattn_qk_int8_pv_fp16_cuda(q, k, v))
