"""What NVIDIA's compiler makes of the kernels for 8.x and 12.x, assembly included as it is written: their PTX, run on the CPU as C++ (ptx_to_cpp.py).

A few calls; with SAGEATTENTION_FROM_PTX=1 the other tests on the CPU, but Hopper's, are made of PTX too.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import NamedTuple

import ptx_to_cpp
import pytest
from calls_on_cpu import Case, inputs
from kernels_on_cpu import CSRC, Kernels, compile_ptx
from test_few_tokens_on_cpu import check as check_few_tokens
from test_fp4_on_cpu import CASES as IN_4_BITS
from test_fp4_on_cpu import KERNEL as FP4
from test_int8_on_cpu import CASES as IN_8_BITS

pytestmark = pytest.mark.slow


class Call(NamedTuple):
    architecture: str
    kernel: str
    case: Case
    largest: float = 1e-3  # distance from the reference


CALLS = {
    "fp4": Call("sm_120", FP4, IN_4_BITS["grouped heads"]),
    "fp4, 128": Call("sm_120", FP4, IN_4_BITS["bfloat16"]),
    "fp4, packed": Call("sm_120", FP4, IN_4_BITS["packed"]),
    "f8": Call("sm_89", "sm89_qk_int8_pv_f8", IN_8_BITS["causal"]),
    "f8, sums in float16": Call("sm_89", "sm89_qk_int8_pv_f8_accum_f16", IN_8_BITS["128"]),
    "f16": Call("sm_80", "sm80_qk_int8_pv_f16", IN_8_BITS["bool mask"]),
    "f16, sums in float16": Call("sm_86", "sm80_qk_int8_pv_f16_accum_f16", IN_8_BITS["uneven"]),
    # Keys are taken 16 at a time there.
    "f16 on 12.0": Call(
        "sm_120", "sm80_qk_int8_pv_f16", Case(*(x.bfloat16() for x in inputs(1, 2, 1, 140, 200, 128, 128))), 3e-3
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_cpu")


@pytest.mark.parametrize("name", CALLS)
def test_ptx_agrees_with_the_reference(name: str, folder: Path) -> None:
    call = CALLS[name]
    call.case.check(Kernels(folder, call.architecture, from_ptx=True), call.kernel, call.largest)


@pytest.mark.parametrize("sizes", [(2, 4, 2, 1, 5, 8, 8), (1, 6, 2, 9, 400, 64, 64)])
def test_ptx_of_few_tokens(sizes: tuple[int, ...], folder: Path) -> None:
    check_few_tokens(Kernels(folder, "sm_80", from_ptx=True), *(x.half() for x in inputs(*sizes)))


# Of assembly in csrc/kernels/ptx/: which calls must see it, the file, the text, and what it becomes.
FAULTS = {
    "scales of the other operand": ("fp4", "float4.cuh", "{%14}, {%16,%16}, {%15}", "{%15}, {%16,%16}, {%14}"),
    "numbers in another order": ("fp4", "float4.cuh", "e2m1x2.f32 c, %6, %5", "e2m1x2.f32 c, %5, %6"),
    "rows in another order": (
        "f8",
        "mma_sync.cuh",
        "row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}",
        "row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%5,%4,%6,%7}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_assembly_are_seen(name: str, tmp_path: Path) -> None:
    of, file, text, other = FAULTS[name]
    call = CALLS[of]
    faulty = Kernels(tmp_path, call.architecture, shutil.copytree(CSRC, tmp_path / "csrc"), from_ptx=True)
    faulty.change(f"ptx/{file}", text, other)
    with pytest.raises(AssertionError):
        call.case.check(faulty, call.kernel)


# Instructions and what the PTX ISA says that they give, as the bits of a 32-bit register.
INSTRUCTIONS = {
    "shl.b32 %r0, 3, 33;": 0,
    "shr.s32 %r0, -8, 40;": 0xFFFFFFFF,
    "shr.u32 %r0, -8, 1;": 0x7FFFFFFC,
    "mul.hi.s32 %r0, -2, 3;": 0xFFFFFFFF,
    "mad.lo.s32 %r0, 2147483647, 2, 3;": 1,
    "div.s32 %r0, -7, 2;": 0xFFFFFFFD,
    "rem.s32 %r0, -7, 2;": 0xFFFFFFFF,
    "bfi.b32 %r0, 5, -1, 4, 3;": 0xFFFFFFDF,
    "bfind.shiftamt.u32 %r0, 1;": 31,
    "brev.b32 %r0, 1;": 0x80000000,
    "prmt.b32 %r0, 0x44332211, 0x88776655, 0x7F21;": 0x88FF3322,
    "shf.l.wrap.b32 %r0, 0x80000000, 1, 33;": 3,
    "{.reg .b16 low, high; mov.b32 {low, high}, 0x12345678; cvt.s32.s16 %r0, low;}": 0x5678,
    "{.reg .b16 low, high; mov.b32 {low, high}, 0x1234fff8; cvt.s32.s16 %r0, low;}": 0xFFFFFFF8,
    "max.f32 %f0, 0f7FC00000, 0f3F800000; mov.b32 %r0, %f0;": 0x3F800000,
    "neg.f32 %f0, 0f00000000; mov.b32 %r0, %f0;": 0x80000000,
    "cvt.rni.s32.f32 %r0, 0f40200000;": 2,
    "cvt.rzi.s32.f32 %r0, 0fC0200000;": 0xFFFFFFFE,
    "cvt.rzi.s32.f32 %r0, 0f7F800000;": 0x7FFFFFFF,
    "cvt.rn.f16x2.f32 %r0, 0f3F800000, 0f40000000;": 0x3C004000,
    "cvt.rn.bf16x2.f32 %r0, 0f3F800000, 0f40000000;": 0x3F804000,
    "setp.ltu.f32 %p0, 0f7FC00000, 0f00000000; selp.u32 %r0, 1, 0, %p0;": 1,
    "setp.ne.f32 %p0, 0f7FC00000, 0f00000000; selp.u32 %r0, 1, 0, %p0;": 0,
    "setp.lt.and.s32 %p0, -1, 0, !%p1; selp.u32 %r0, 1, 0, %p0;": 1,
    "@%p1 mov.u32 %r0, 7; @!%p1 mov.u32 %r0, 8;": 8,
    "mov.u32 %r0, %tid.x; shfl.sync.bfly.b32 %r0|%p0, %r0, 1, 31, -1;": 1,
    "setp.ne.u32 %p0, %tid.x, 0; vote.sync.ballot.b32 %r0, %p0, -1;": 0xFFFFFFFE,
}


def kernel_of(text: str) -> str:
    return (
        ".visible .entry one(.param .align 8 .b8 one_param_0[8])\n{.reg .pred %p<2>; .reg .f32 %f<2>; .reg .b32 %r<2>; .reg .b64 %rd<2>;\n"
        f"ld.param.u64 %rd0, [one_param_0];\n{text}\nret;}}"
    )


def test_instructions_give_what_the_isa_says(tmp_path: Path) -> None:
    text = "\n".join(
        f"{one}\n@%p1 bra $L{i};\nsetp.eq.u32 %p0, %tid.x, 0; @%p0 st.global.u32 [%rd0+{4 * i}], %r0; $L{i}:"
        for i, one in enumerate(INSTRUCTIONS)
    )
    library = tmp_path / "one.so"
    compile_ptx(kernel_of(text), "one", "800", library)
    found = (ctypes.c_uint32 * len(INSTRUCTIONS))()
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_char_p
    given = ctypes.c_void_p(ctypes.addressof(found))
    assert launch(ctypes.byref(given), 1, 1, 32, 0, 0, None, 0) is None
    assert dict(zip(INSTRUCTIONS, map(hex, found), strict=True)) == {one: hex(bits) for one, bits in INSTRUCTIONS.items()}


@pytest.mark.parametrize(
    "text",
    [
        "sin.approx.f32 %f0, %f1;",
        "cvt.sat.f32.f32 %f0, %f1;",
        "bar.sync 1;",
        "shf.r.wrap.b32 %r0, %r1, %r1, 3;",
        "add.f32 %f0, %x1, %f1;",
        "max.f16x2 %r0, %r1, %r1;",
    ],
)
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ptx_to_cpp.UnknownPtxError):
        ptx_to_cpp.translate(kernel_of(text), "one")
