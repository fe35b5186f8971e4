"""The FP4 kernels' own source, compiled for the CPU with FP4 emulated, against the reference: what can be seen of them without a GPU.

tests/on_cpu/ stands in for what they use of CUDA. tests/test_emulated_fp4.py holds the emulated instructions to an independent source;
tests/gpu/test_fp4.py runs the same kernels, emulated or not, on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from model_inputs import sink

from sageattention import reference

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent
KERNEL = "sm120_qk_fp4_pv_fp4"
SOURCES = {
    "quant/quant_k_fp4": "QuantKFp4",
    "quant/quant_v_fp4": "QuantVFp4",
    "quant/mean_q": "MeanQ",
    "quant/mean_scores": "MeanScores",
    "attention/sm120_qk_fp4_pv_fp4": "Sm120QkFp4PvFp4",
}
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


class Arguments(ctypes.Structure):
    """tests/on_cpu/fp4.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "mask", "cu_seqlens_q", "cu_seqlens_k")),
        *((name, ctypes.c_int32) for name in ("batch", "q_heads", "kv_heads", "qo_len", "kv_len", "head_dim", "v_head_dim")),
        *((name, ctypes.c_int32) for name in ("causal", "smooth_k", "smooth_v", "per_block_mean")),
        ("sm_scale", ctypes.c_float),
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, torch.dtype], ctypes.CDLL]:
    """The libraries that have been asked for."""
    return {}


def library(built: dict[tuple[int, torch.dtype], ctypes.CDLL], folder: Path, head_dim: int, dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for one head_dim and dtype, compiled when they are first asked for."""
    if (head_dim, dtype) in built:
        return built[head_dim, dtype]
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here: install it")
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-DSAGE_EMULATE_FP4", f"-DSAGE_HEAD_DIM={head_dim}",
               f"-DSAGE_DTYPE={TYPES[dtype]}", f"-I{TESTS / 'on_cpu'}", f"-I{TESTS.parent / 'csrc'}"]  # fmt: skip
    objects = []
    for source, parameters in SOURCES.items():
        name = Path(source).name
        objects.append(str(folder / f"{name}.o"))
        shared = "-D__shared__=" if name == KERNEL else "-D__shared__=static"
        given = [
            shared,
            f"-Dsage=sage_{name}",
            f"-DKERNEL={name}",
            f"-DPARAMETERS={parameters}",
            f'-DKERNEL_SOURCE="kernels/{source}.cu"',
        ]
        compiled = [compiler, *options, *given, "-c", str(TESTS / "on_cpu" / "launch.cpp"), "-o", objects[-1]]
        done = subprocess.run(compiled, capture_output=True, text=True, check=False)
        if "_Float16" in done.stderr:
            pytest.skip("this g++ has no _Float16: install version 13 or later")
        assert done.returncode == 0, done.stderr
    path = folder / "fp4.so"
    command = [
        compiler,
        *options,
        "-fvisibility=default",
        "-shared",
        str(TESTS / "on_cpu" / "fp4.cpp"),
        *objects,
        "-o",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built.setdefault((head_dim, dtype), ctypes.CDLL(str(path)))


class Case:
    """Inputs of a call, and its options."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
        self.tensors = [x.contiguous() for x in (q, k, v)]
        self.options = {
            "is_causal": False,
            "sm_scale": q.shape[-1] ** -0.5,
            "smooth_k": True,
            "smooth_v": True,
            "per_block_mean": True,
            "attn_mask": None,
            "cu_seqlens": None,
            **options,
        }

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's answer."""
        options = dict(self.options)
        cu_seqlens = options.pop("cu_seqlens")
        if cu_seqlens is None:
            return reference.attention(*self.tensors, kernel=KERNEL, **options)
        del options["attn_mask"], options["per_block_mean"]
        return reference.attention_varlen(*self.tensors, *cu_seqlens, kernel=KERNEL, **options)

    def run(self, kernels: ctypes.CDLL) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernels' answer."""
        (q, k, v), o = self.tensors, self.options
        packed = o["cu_seqlens"] is not None
        batch = len(o["cu_seqlens"][0]) - 1 if packed else q.shape[0]
        heads, tokens = (1, 0) if packed else (1, 2)
        out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype)
        lse = torch.full((q.shape[heads], q.shape[tokens]) if packed else q.shape[:3], math.nan)
        mask = o["attn_mask"]
        if mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2]).contiguous()
        pointers = [x if x is None else x.data_ptr() for x in (q, k, v, out, lse, mask, *(o["cu_seqlens"] or (None, None)))]
        sizes = (batch, q.shape[heads], k.shape[heads], q.shape[tokens], k.shape[tokens], q.shape[-1], v.shape[-1])
        flags = (int(o[name]) for name in ("is_causal", "smooth_k", "smooth_v", "per_block_mean"))
        kernels.fp4_attention(ctypes.byref(Arguments(*pointers, *sizes, *flags, o["sm_scale"])))
        return out, lse


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(
    batch: int, q_heads: int, kv_heads: int, qo_len: int, kv_len: int, head_dim: int, v_head_dim: int
) -> list[torch.Tensor]:
    """With offsets that smoothing takes off."""
    return [
        randn(batch, q_heads, qo_len, head_dim) + randn(1, q_heads, 1, head_dim, seed=3),
        randn(batch, kv_heads, kv_len, head_dim, seed=1) + 2 * randn(1, kv_heads, 1, head_dim, seed=4),
        randn(batch, kv_heads, kv_len, v_head_dim, seed=2) + randn(1, kv_heads, 1, v_head_dim, seed=5),
    ]


def exact_numbers() -> Case:
    """No rounding changes them before the probabilities, which are powers of two; of Q's rows the mean is 0."""
    generator = torch.Generator().manual_seed(0)

    def choose(*numbers: float, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=generator)].half()

    half = choose(-1.0, 1.0, shape=(1, 1, 64, 64))
    k = choose(0.0, -0.5, 0.5, 1.0, -1.0, 2.0, -2.0, shape=(1, 1, 192, 64))
    v = choose(0.0, 0.5, 1.0, -1.0, 2.0, -2.0, 4.0, shape=(1, 1, 192, 64))
    return Case(torch.cat([half, -half], dim=2), k, v, sm_scale=0.5 / math.log2(math.e), smooth_k=False, smooth_v=False)


def packed_sequences(is_causal: bool) -> Case:
    lengths = ([5, 0, 150, 33], [70, 9, 0, 133])
    cu_seqlens = tuple(torch.tensor([0, *some]).cumsum(0).int() for some in lengths)
    q, k, v = (x[0].transpose(0, 1).half() for x in inputs(1, 2, 1, sum(lengths[0]), sum(lengths[1]), 64, 48))
    return Case(q, k, v, cu_seqlens=cu_seqlens, is_causal=is_causal)


def masked() -> Case:
    seen = torch.rand(1, 1, 70, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[..., 7, :] = False  # a row that sees nothing
    return Case(*(x.half() for x in inputs(1, 2, 1, 70, 150, 64, 64)), attn_mask=seen)


def not_numbers() -> Case:
    q, k, v = (x.half() for x in inputs(1, 2, 2, 70, 130, 64, 64))
    q[0, 0, 3, 5] = k[0, 1, 7, 9] = math.nan
    return Case(q, k, v, smooth_k=False)


def small_sink() -> Case:
    """A first key that most of every row falls on, whose values are a hundredth of the others'."""
    q, k, v = sink(200, 0.9, queries=70)
    v[:, :, 0] = 0.01 * randn(128, seed=9)
    return Case(q.half(), k.half(), v.half())


CASES = {
    "exact": exact_numbers(),
    "plain": Case(*(x.half() for x in inputs(1, 1, 1, 128, 64, 64, 64)), smooth_k=False, smooth_v=False),
    "grouped heads": Case(*(x.half() for x in inputs(1, 2, 1, 150, 200, 64, 64))),
    "causal": Case(*(x.half() for x in inputs(2, 1, 1, 100, 140, 64, 64)), is_causal=True),
    "one mean": Case(*(x.half() for x in inputs(1, 1, 1, 200, 90, 64, 64)), per_block_mean=False),
    "uneven": Case(*(x.half() for x in inputs(1, 1, 1, 70, 90, 33, 31))),
    "128": Case(*(x.half() for x in inputs(1, 1, 1, 140, 200, 128, 128))),
    "bfloat16": Case(*(x.bfloat16() for x in inputs(1, 1, 1, 70, 130, 128, 100)), is_causal=True),
    "256": Case(*(x.half() for x in inputs(1, 1, 1, 70, 130, 256, 200))),
    "sink": small_sink(),
    "packed": packed_sequences(False),
    "packed, causal": packed_sequences(True),
    "mask": masked(),
    "NaN": not_numbers(),
    "large V": Case(randn(1, 1, 40, 64).half(), randn(1, 1, 70, 64, seed=1).half(), torch.full((1, 1, 70, 64), 60000.0).half()),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str, built: dict[tuple[int, torch.dtype], ctypes.CDLL], tmp_path: Path) -> None:
    case = CASES[name]
    q, _, v = case.tensors
    largest = max(q.shape[-1], v.shape[-1])
    head_dim = 64 if largest <= 64 else 128 if largest <= 128 else 256
    out, lse = case.run(library(built, tmp_path, head_dim, q.dtype))
    expected, expected_lse = case.expected()
    if name == "exact":
        assert torch.equal(out, expected)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)
        return
    # Sums in another order now and then make a mean's element its neighbour, and with it a number's code.
    seen = expected.isfinite()
    assert torch.equal(out.isfinite(), seen)
    difference = (out[seen].double() - expected[seen].double()).abs().sum() / expected[seen].double().abs().sum()
    assert difference <= 1e-3, f"differs by {float(difference):.5f}"
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse - expected_lse)[finite].abs().max() <= 0.02
