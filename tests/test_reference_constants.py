"""The CPU reference's constants are those of the kernels' sources."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from sageattention import reference, reference_fp4

CSRC = Path(__file__).resolve().parent.parent / "csrc"
F16, F16_SUMS, F8, F8_SUMS, HOPPER = reference.PRECISION.values()
NUMBER = r"(-?(?:0x[\dp-]+|\d[\d.]*(?:e-?\d+)?))f?"


def bits_of(number: float, dtype: torch.dtype) -> int:
    """Of what it is rounded to."""
    bytes_of = torch.tensor([number], dtype=dtype).view(torch.uint8).tolist()
    return int.from_bytes(bytes(bytes_of), "little")


@pytest.mark.parametrize(
    ("file", "pattern", "values"),
    [
        ("quant/quant_k_int8.h", rf"kBlockN = {NUMBER};", [reference.BLOCK_N]),
        ("quant/quant_k_int8.h", rf"kSampledKeys = {NUMBER};", [reference.SAMPLED_TOKENS]),
        (
            "quant/quant_k_int8.h",
            rf"kSampledRows = {NUMBER}, kRowStep = {NUMBER};",
            [reference.SAMPLED_ROWS, reference.ROW_STEP],
        ),
        ("element.cuh", rf"kSmallestMagnitude = {NUMBER};", [reference.SMALLEST_MAGNITUDE]),
        ("quant/quant_k_int8.cu", r"magnitude = ptx::max_nan\(kSmallestMagnitude,", []),
        ("attention/mma_sync/quantise_q.cuh", r"magnitude = kSmallestMagnitude;", []),
        ("attention/wgmma/quantise_q.cuh", r"float magnitude = kSmallestMagnitude;", []),
        ("attention/wgmma/config.cuh", rf"kHeadroom = kHalfRange \? {NUMBER} : {NUMBER};", HOPPER.headroom),
        ("attention/wgmma/config.cuh", rf"kLevel = kHalfRange \? {NUMBER} : {NUMBER};", [HOPPER.level, HOPPER.bfloat16_level]),
        ("attention/wgmma/config.cuh", rf"kLargestScore = {NUMBER};", [reference.LARGEST_SCORE]),
        (
            "attention/mma_sync/config.cuh",
            rf"kLimit = kValues == Values::kE4m3 \? {NUMBER} : kScaled \? {NUMBER} : kHalfRange \? {NUMBER} : {NUMBER};",
            [F8.limit, F16_SUMS.limit, F16.limit, F16.bfloat16_limit],
        ),
        (
            "attention/mma_sync/config.cuh",
            rf"kLevel = kValues == Values::kE4m3 \? {NUMBER} : kScaled \? {NUMBER} : kHalfRange \? {NUMBER} : {NUMBER};",
            [F8.level, F16_SUMS.level, F16.level, F16.bfloat16_level],
        ),
        ("attention/mma_sync/config.cuh", rf"kNever = {NUMBER};", [reference.NEVER]),
        ("attention/mma_sync/config.cuh", rf"kRest = {NUMBER};", [reference.TWICE.rest]),
        ("attention/mma_sync/config.cuh", rf"kRestBelow = {NUMBER};", [reference.TWICE.below]),
        ("attention/mma_sync/config.cuh", rf"kJump = {NUMBER};", [reference.TWICE.jump]),
        ("attention/mma_sync/config.cuh", rf"kNear = {NUMBER};", [reference.TWICE.near]),
        ("attention/mma_sync/config.cuh", rf"kFewKeys = {NUMBER};", [reference.TWICE.few]),
        ("attention/mma_sync/config.cuh", rf"kSettled = {NUMBER};", [reference.TWICE.settled]),
        ("attention/mma_sync/config.cuh", rf"kBetween = {NUMBER};", [reference.TWICE.between]),
        ("attention/mma_sync/config.cuh", rf"kTail = {NUMBER};", [reference.TWICE.tail]),
        ("attention/mma_sync/config.cuh", rf"kQuorum = {NUMBER};", [reference.TWICE.quorum]),
        ("attention/mma_sync/config.cuh", rf"kRecent = {NUMBER};", [reference.TWICE.recent]),
        ("attention/mma_sync/config.cuh", rf"kInVain = {NUMBER};", [reference.TWICE.in_vain]),
        ("attention/mma_sync/config.cuh", rf"kPardon = {NUMBER};", [reference.TWICE.pardon]),
        ("attention/mma_sync/config.cuh", rf"kEnough = {NUMBER};", [reference.TWICE.enough]),
        ("attention/mma_sync/config.cuh", rf"kLargestBase = {NUMBER};", [reference.TWICE.largest]),
        ("attention/mask_value.cuh", r": (0x[0-9a-f]+);  // -5e5", [bits_of(reference.HIDES, torch.float32)]),
        ("attention/mask_value.cuh", r"\? (0x[0-9a-f]+) +// -499712", [bits_of(reference.HIDES, torch.bfloat16)]),
        (
            "mask/mask_tiles.cu",
            rf"far = mask_value\({NUMBER}\), near = mask_value\({NUMBER}\);",
            [reference.FAR, reference.NEAR],
        ),
        (
            "quant/quant_k_int8.h",
            rf"kLargeInK = {NUMBER}, kLargeInQ = {NUMBER};\n(?:.*\n)?.* kMostPowers = {NUMBER};",
            [reference.LARGE_IN_K, reference.LARGE_IN_Q, reference.MOST_POWERS],
        ),
        ("quant/quant_k_int8.h", rf"kMostLift = {NUMBER};", [reference.MOST_LIFT]),
        ("quant/quant_v_f8.h", rf"kLargest = {NUMBER};", [F8.largest_v]),
        ("quant/quant_v_f16.h", rf"kLargest = {NUMBER};", [F16_SUMS.largest_v]),
        ("quant/quant_v.h", rf"kScaleUnit = {NUMBER};", [reference.SCALE_UNIT]),
        ("quant/quant_v.cuh", rf"kSmallest = {NUMBER};", [reference.SMALLEST_V]),
        ("quant/quant_v.cuh", rf"kWorthIt = {NUMBER};", [reference.WORTH_IT]),
        ("quant/quant_v.cuh", rf"kGrowth = {NUMBER};", [reference.GROWTH]),
        (
            "attention/mma_sync/config.cuh",
            rf"kChunkN = kHeadDim == 64 \? {NUMBER} : kRoomy \? {NUMBER} : {NUMBER};",
            [reference.chunk_n(64, F16), reference.chunk_n(128, F16), 16],
        ),
        ("element.cuh", rf"scale > {NUMBER} ", [reference.LARGEST_SCALE]),
        ("quant/sampled_tokens.cuh", r"\* (0x[0-9a-f]+)u /", [reference.GOLDEN]),
        ("quant/fp4.h", rf"kGroup = {NUMBER};", [reference_fp4.GROUP]),
        ("quant/fp4.h", rf"kLargest = {NUMBER} \* {NUMBER};", [reference_fp4.LARGEST / 448.0, 448.0]),
        ("quant/fp4.h", rf"kSmallestScale = {NUMBER} / {NUMBER};", [1.0, 1.0 / reference_fp4.SMALLEST_SCALE]),
        ("quant/fp4.h", rf"kSmallest = {NUMBER};", [reference_fp4.SMALLEST]),
        ("attention/fp4/config.cuh", rf"kChunkN = {NUMBER};", [reference_fp4.CHUNK_N]),
        ("attention/fp4/config.cuh", rf"kLevel = {NUMBER} \+ kLogOf6;", [reference_fp4.LEVEL - reference_fp4.LOG_OF_6]),
        ("attention/fp4/config.cuh", rf"kLogOf6 = {NUMBER};", [reference_fp4.LOG_OF_6]),
        ("attention/fp4/config.cuh", rf"kHeadroom = {NUMBER} \+ kLogOf6;", [math.log2(448.0)]),
    ],
)
def test_constants_are_the_kernels(file: str, pattern: str, values: list[float | None]) -> None:
    text = (CSRC / "kernels" / file).read_text(encoding="utf-8")
    (found,) = re.finditer(pattern, text)
    assert [float.fromhex(number) if number.startswith("0x") else float(number) for number in found.groups()] == list(values)


def test_magic_is_what_its_bits_say() -> None:
    """An int32 accumulator that starts at these bits reads as kMagic plus the sum, for every possible sum."""
    (found,) = re.finditer(rf"kMagic = {NUMBER};", (CSRC / "kernels/attention/mma_sync/config.cuh").read_text(encoding="utf-8"))
    bits = torch.tensor([0x4B400000], dtype=torch.int32)
    largest = 127 * 127 * 256
    sums = torch.tensor([0, 1, -1, largest, -largest, 12345, -54321], dtype=torch.int32)
    assert torch.equal((bits + sums).view(torch.float32), float(found[1]) + sums.float())
