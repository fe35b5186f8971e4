"""The small nvcc over NVRTC: the options in use, and real tensor instructions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sage_factory.inspect import cost
from sage_factory.what import matrix
from sage_factory.with_what import nvrtc_nvcc, venvs


def test_understands_the_options_that_are_in_use() -> None:
    """Those of csrc/kernels/CMakeLists.txt; tests/test_predict.py has a cubin made in one step."""
    given = ["-arch=compute_90a", "-std=c++17", "-I..", "-DSAGE_HEAD_DIM=64", "-DSAGE_EMULATE_FP4"]
    job = nvrtc_nvcc.parse(["-ptx", *given, "-o", "build/k.ptx", "attention/k.cu"])
    assert job == nvrtc_nvcc.Job(Path("attention/k.cu"), Path("build/k.ptx"), "compute_90a", True, given)
    job = nvrtc_nvcc.parse(["-cubin", "-arch=sm_80", "-o", "k.cubin", "k.cu"])
    assert job == nvrtc_nvcc.Job(Path("k.cu"), Path("k.cubin"), "sm_80", False, ["-arch=sm_80"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-cubin", "-arch=sm_90", "-rdc=true", "k.cu"], "unknown option -rdc=true; this nvcc .* knows .*-arch="),
        (["-ptx", "-MD", "-arch=compute_90", "-O3", "k.cu"], "unknown option -MD -O3; this nvcc"),
        (["-ptx", "-arch", "compute_90", "-D", "A", "k.cu"], "unknown option -arch -D; this nvcc .* knows .*-arch=.* -D"),
        (["-arch=sm_90", "k.cu"], "expected one of -cubin and -ptx"),
        (["-cubin", "-ptx", "-arch=sm_90", "k.cu"], "expected one of -cubin and -ptx"),
        (["-cubin", "-arch=compute_90", "-o", "k.cubin", "k.cu"], "-cubin needs -arch=sm_XX, got compute_90"),
        (["-ptx", "-arch=sm_90", "-o", "k.ptx", "k.cu"], "-ptx needs -arch=compute_XX, got sm_90"),
        (["-ptx", "-arch=compute_new", "-o", "k.ptx", "k.cu"], "-ptx needs -arch=compute_XX, got compute_new"),
        (["-ptx", "-o", "k.ptx", "k.cu"], "-ptx needs -arch=compute_XX, got none"),
        (["-cubin", "-arch=sm_90"], "expected one source file, got 0"),
        (["-cubin", "-arch=sm_90", "k.cu", "l.cu"], "expected one source file, got 2: k.cu l.cu"),
        (["-cubin", "-arch=sm_90", "k.cu"], "-o needs a file"),
        (["-cubin", "-arch=sm_90", "k.cu", "-o"], "-o needs a file"),
    ],
)
def test_refuses_what_it_does_not_know(arguments: list[str], said: str) -> None:
    with pytest.raises(nvrtc_nvcc.UsageError, match=said):
        nvrtc_nvcc.parse(arguments)


def test_says_its_release_as_nvcc_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    assert nvrtc_nvcc.run(tmp_path, "12.8.93", ["--version"]) == 0
    # make/kernels.py reads this much of either.
    assert "release 12.8, V12.8.93" in capsys.readouterr().out


WGMMA = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda/std/cstdint>
#include "beside.h"
extern "C" __global__ void kernel(__half* p, cuda::std::uint64_t a, cuda::std::uint64_t b) {
  int c[4] = {NONE};
#if __CUDA_ARCH__ == 900
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
               "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, p;}"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "l"(a), "l"(b));
#endif
  p[threadIdx.x] = __hmul(p[threadIdx.x], __float2half(c[0] + INFINITY));
}
"""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_tensor_instructions(architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toolkit = venvs.site_packages("cuda-12.8")
    if not (toolkit / "nvidia" / "cuda_nvrtc").is_dir():
        pytest.skip("no CUDA 12.8 from PyPI here: `python3 scripts/run.py build-cu128` brings it")
    source, output = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text(WGMMA)
    (tmp_path / "beside.h").write_text("constexpr int NONE = 0;\n")
    options = ["-cubin", f"-arch={architecture}", "-std=c++17", "-o", str(output), str(source)]
    release = matrix.load().cuda["12.8"].pypi["nvidia-cuda-nvrtc-cu12"]
    assert nvrtc_nvcc.run(toolkit, release, options) == 0, capsys.readouterr().err
    assert output.read_bytes()[:4] == b"\x7fELF"
    assert os.fsencode(tmp_path) not in output.read_bytes()
    # In two steps, as csrc/kernels/CMakeLists.txt has it, it is the same code.
    whole, ptx = cost.of_set({f"{architecture}/k.cubin": output.read_bytes()}), tmp_path / "k.ptx"
    virtual = architecture.replace("sm_", "compute_")
    assert nvrtc_nvcc.run(toolkit, release, ["-ptx", f"-arch={virtual}", "-std=c++17", "-o", str(ptx), str(source)]) == 0
    output.unlink()
    ptxas = toolkit / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    if not ptxas.is_file():
        pytest.skip("this CUDA 12.8 from PyPI is of an older lock and has no ptxas")
    subprocess.run([ptxas, f"-arch={architecture}", "-o", output, ptx], check=True)
    assert cost.of_set({f"{architecture}/k.cubin": output.read_bytes()}) == whole
    assert os.fsencode(tmp_path) not in output.read_bytes()
    ptx.unlink()
    source.write_text(WGMMA.replace("cuda_fp16.h", "no_such.h"))
    output.unlink()
    assert nvrtc_nvcc.run(toolkit, release, options) == 1
    said = capsys.readouterr().err
    assert "no_such.h" in said
    assert f"does not compile for {architecture}" in said
    assert {path.name for path in tmp_path.iterdir()} == {"k.cu", "beside.h"}
