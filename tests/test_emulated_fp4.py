"""The emulated FP4 instructions against CUTLASS's tables of who holds what of m16n8k64 (its SM120 atoms), which are facts of their own.

The emulation follows the PTX ISA's. That both say the same is what lets kernels that ran emulated be believed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sageattention import reference_fp4

ROOT = Path(__file__).resolve().parent.parent

# (extents, strides) of the lane and of the value in it, the first ones fastest, as offsets into A's 16 x 64 matrix and into B's and
# C's columns: m + 16 k, n + 8 k, m + 16 n. Of scales the value is a place along k, 16 of which are one scale's.
Layout = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
A: Layout = (((4, 128), (8, 1)), ((8, 16), (2, 8), (2, 512)))
B: Layout = (((4, 64), (8, 1)), ((8, 8), (2, 256)))
C: Layout = (((4, 32), (8, 1)), ((2, 16), (2, 8)))
SCALES_OF_A: Layout = (((2, 8), (2, 0), (8, 1)), ((64, 16),))
SCALES_OF_B: Layout = (((4, 0), (8, 1)), ((64, 8),))


def offsets(layout: Layout) -> NDArray[np.int64]:
    """[lanes, values]."""

    def of(modes: tuple[tuple[int, int], ...]) -> list[int]:
        places = itertools.product(*(range(extent) for extent, _ in reversed(modes)))
        return [sum(i * stride for i, (_, stride) in zip(reversed(place), modes, strict=True)) for place in places]

    both: NDArray[np.int64] = np.array(of(layout[0]))[:, None] + np.array(of(layout[1]))
    return both


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here: install g++")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "cuda_fp16.h").write_text("", encoding="utf-8")
    command = [compiler, "-std=c++17", "-O1", "-pthread", f"-I{folder}", f"-I{ROOT / 'csrc'}", str(ROOT / "tests" / "emulated_fp4.cpp"),
               "-o", str(folder / "emulated")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "emulated"


def run(program: Path, numbers: NDArray[np.float32], lanes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = np.array([numbers.size], np.uint32).tobytes() + numbers.tobytes() + lanes.tobytes()
    return np.frombuffer(subprocess.run([program], input=words, capture_output=True, check=True).stdout, np.uint32)


def packed(codes: NDArray[np.int64], bits: int) -> NDArray[np.uint32]:
    """The last dimension, several to a word, the first in the lowest bits."""
    each = 32 // bits
    words = codes.reshape(*codes.shape[:-1], -1, each) << (bits * np.arange(each))
    sums: NDArray[np.uint32] = words.sum(axis=-1).astype(np.uint32)
    return sums


VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def number(codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """What codes of e2m1 stand for."""
    values: NDArray[np.float64] = np.where(codes & 8, -1.0, 1.0) * VALUES[codes & 7]
    return values


def scale(codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """What codes of e4m3 stand for."""
    values: NDArray[np.float64] = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    return values


def test_products(program: Path) -> None:
    rng = np.random.default_rng(0)
    inputs, expected = [], []
    for case in range(6):
        a, b = rng.integers(0, 16, 16 * 64), rng.integers(0, 16, 8 * 64)
        # Scales from 2^-6 to 2^5, of which sums are exact in float64; the last case has all there are.
        low, high = (8, 96) if case < 5 else (0, 127)
        of_a, of_b = rng.integers(low, high, 16 * 4), rng.integers(low, high, 8 * 4)
        c = rng.integers(-64, 64, 16 * 8).astype(np.float32)
        lanes = np.zeros((32, 12), np.uint32)
        lanes[:, 0:4] = packed(a[offsets(A)], 4)
        lanes[:, 4:6] = packed(b[offsets(B)], 4)
        lanes[:, 6:10] = c[offsets(C)].view(np.uint32)
        # Of 16 places that share a scale the first says which: its row and a quarter of k.
        for column, scales, layout, rows in ((10, of_a, SCALES_OF_A, 16), (11, of_b, SCALES_OF_B, 8)):
            places = offsets(layout)[:, ::16]
            lanes[:, column] = packed(scales[places % rows + rows * (places // rows // 16)], 8)[:, 0]
        # What the instruction does not look at may be anything.
        lanes[np.arange(32) % 4 >= 2, 10] = 0xFFFFFFFF
        lanes[np.arange(32) % 4 >= 1, 11] = 0xFFFFFFFF
        inputs.append(lanes)

        left = number(a).reshape(64, 16).T * scale(of_a).reshape(4, 16).repeat(16, axis=0).T
        right = number(b).reshape(64, 8) * scale(of_b).reshape(4, 8).repeat(16, axis=0)
        expected.append((left @ right + c.reshape(8, 16).T).T.reshape(-1)[offsets(C)].astype(np.float32))
    answer = run(program, np.zeros(0, np.float32), np.stack(inputs)).view(np.float32).reshape(-1, 32, 4)
    for case in range(5):
        np.testing.assert_array_equal(answer[case], expected[case])
    np.testing.assert_allclose(answer[5], expected[5], rtol=1e-6, atol=1e-3)


def test_numbers_round_as_the_reference_says(program: Path) -> None:
    rng = np.random.default_rng(0)
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    numbers = np.concatenate([VALUES, middles, np.nextafter(middles.astype(np.float32), 9), [7.0, 1e30, np.inf, 0.0],
                              rng.uniform(0, 8, 998)]).astype(np.float32)  # fmt: skip
    numbers = np.concatenate([numbers, -numbers])
    answer = run(program, numbers, np.zeros((0, 32, 12), np.uint32)).reshape(-1, 5)
    rounded = number((answer[:, :1] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(-1).astype(np.int64))
    np.testing.assert_array_equal(rounded, reference_fp4.round_to_e2m1(torch.from_numpy(numbers)).numpy())
    np.testing.assert_array_equal(answer[:, 1:].copy().view(np.float16).reshape(-1), rounded)
