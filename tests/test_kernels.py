"""Every kernel for every architecture, as it lies in the installed package: present, without spills, with the tensor
instructions meant, and in agreement with the host about its parameter. No GPU takes part.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cards import cubin
from cards.model import OURS, shared_bytes
from kernels_on_cpu import FIRST

from sage_factory.inspect import content, elf

pytestmark = pytest.mark.usefixtures("listed_once")

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
ENTRIES: list[dict[str, Any]] = json.loads((CSRC / "kernels" / "kernels.json").read_text(encoding="utf-8"))


class Installed(NamedTuple):
    """A package that is installed here."""

    name: str
    version: str
    cuda: str  # that its kernels were compiled with
    cubins: Path


def installed(name: str) -> Installed:
    """What a package says of itself."""
    library = importlib.import_module(f"{name}._library")
    return Installed(name, library.build.version, library.build.cuda, library.kernel_set(library.KERNEL_DIRECTORIES))


PACKAGES = [installed(name) for name in ("sageattention", "sageattn3") if importlib.util.find_spec(name)]
CUBINS = PACKAGES[0].cubins


class Expected(NamedTuple):
    """What is promised of a kernel. Instructions are patterns; {bf16} is ".BF16" or nothing."""

    blocks_per_sm: Callable[
        [int, int], int
    ]  # of head_dim and capability: for how many registers and shared memory must leave room
    tensor: tuple[str, ...]  # all tensor instructions there are
    others: tuple[str, ...]  # instructions that must be there too
    since_90: tuple[str, ...] = ()
    shared: str = ""  # host function of head_dim that says the dynamic shared memory; none: 0


F4 = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"  # two numbers to e2m1

# What all mma.sync attention kernels have in common.
MMA_SYNC = ("LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "MUFU.EX2")

# Hopper's.
WGMMA = Expected(
    lambda *_: 1,
    ("IGMMA.64x64x32.S8.S8", "HGMMA.64x{head_dim}x16.F32{bf16}"),
    (
        "UBLKCP.S.G.MULTICAST",
        "UTMALDG.4D.MULTICAST",
        "STG.E.128",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "USETMAXREG.DEALLOC",
        "MUFU.EX2",
        "ACQBULK",
    ),
    shared="shared_bytes",
)
WGMMA_IN_16_BITS = WGMMA._replace(
    tensor=("HGMMA.64x64x16.F32{bf16}", "HGMMA.64x{head_dim}x16.F32{bf16}"),
    others=(
        "UTMALDG.4D",
        *(name for name in WGMMA.others if "MULTICAST" not in name),
        "STSM.16.M88.4",
    ),
)

# A new kernel gets its line here.
EXPECTED = {
    "means": Expected(lambda *_: 1, (), ("LDG.E.{row_bits}", "STG.E.U16"), since_90=("PREEXIT", "ACQBULK")),
    "quant_kv_fp4": Expected(
        lambda d, _: 512 // (2 * d),
        ("HMMA.16816.F32{bf16}",),
        ("LDG.E.128", "STG.E", "STG.E.64", F4),
        since_90=("PREEXIT", "ACQBULK"),
    ),
    "sm120_qk_fp4_pv_fp4": Expected(
        lambda d, _: 3 if d <= 64 else 2 if d <= 128 else 1,
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",),
        ("LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "MUFU.EX2", F4),
        since_90=("ACQBULK",),
        shared="shared_bytes",
    ),
    # A row of head_dim elements is read by 16 threads: head_dim bits each, in loads of 16 bytes at most. Products are the rotation.
    "quant_k_int8": Expected(
        lambda d, _: 1 if d > 128 else 3,
        ("HMMA.16816.F32{bf16}",),
        ("LDG.E.{row_bits}", "STG.E"),
        since_90=("PREEXIT", "ACQBULK"),
    ),
    # 768 threads, or as many as one block has: 2 * head_dim.
    "quant_v_f16": Expected(
        lambda d, _: 768 // (2 * d), (), ("LDG.E.128", "STG.E.128", "F2FP"), since_90=("PREEXIT", "ACQBULK")
    ),
    "quant_v_f8": Expected(
        lambda d, _: 768 // (2 * d), (), ("LDG.E.128", "STG.E.128", "F2FP"), since_90=("PREEXIT", "ACQBULK")
    ),
    "mask_tiles": Expected(
        lambda _, c: 4 if c == 90 else 3,
        (),
        ("LDG.E.EF.128", "LDG.E.U8", "LDG.E.U16", "LDG.E", "STG.E"),
        since_90=("PREEXIT", "ACQBULK"),
    ),
    "seen_keys": Expected(lambda _, __: 6, (), ("LDG.E.128", "STG.E"), since_90=("PREEXIT", "ACQBULK")),
    # A warp by itself: no shared memory but for Q at head_dim 256, where registers are short.
    "sm80_qk_f16_pv_f16": Expected(
        lambda d, _: 4 if d <= 64 else 2 if d <= 128 else 1,
        ("HMMA.16816.F32{bf16}",),
        ("LDG.E.128", "STG.E.128", "MOVM.16.MT88", "MUFU.EX2"),
        since_90=("ACQBULK",),
        shared="shared_bytes",
    ),
    "sm80_qk_f16_pv_f16_split_kv": Expected(
        lambda d, _: 1 if 64 < d <= 128 else 2,
        ("HMMA.16816.F32{bf16}",),
        ("LDG.E.128", "STG.E.128", "MOVM.16.MT88", "MUFU.EX2"),
        since_90=("PREEXIT", "ACQBULK"),
        shared="shared_bytes",
    ),
    # K and V by way of shared memory.
    "sm80_qk_f16_pv_f16_split_kv_staged": Expected(
        lambda d, _: 1 if d > 64 else 2,
        ("HMMA.16816.F32{bf16}",),
        ("LDG.E.128", "LDGSTS.E.BYPASS.128", "LDS.128", "STG.E.128", "MOVM.16.MT88", "MUFU.EX2"),
        since_90=("PREEXIT", "ACQBULK"),
        shared="shared_bytes",
    ),
    "sm80_combine_split_kv": Expected(
        lambda *_: 8, (), ("LDG.E.128", "STG.E.64", "MUFU.EX2", "MUFU.LG2"), since_90=("ACQBULK",)
    ),
    "sm80_qk_int8_pv_f16": Expected(
        lambda d, _: 2 if d <= 128 else 1,
        ("IMMA.16832.S8.S8", "HMMA.16816.F32{bf16}"),
        (*MMA_SYNC, "LDSM.16.MT88.4"),
        since_90=("ACQBULK",),
        shared="shared_bytes",
    ),
    "sm80_qk_int8_pv_f16_accum_f16": Expected(
        lambda d, _: 2 if d <= 128 else 1,
        ("IMMA.16832.S8.S8", "HMMA.16816.F16"),
        (*MMA_SYNC, "LDSM.16.MT88.4"),
        since_90=("ACQBULK",),
        shared="shared_bytes",
    ),
    "sm89_qk_int8_pv_f8": Expected(
        lambda d, _: 2 if d <= 128 else 1,
        ("IMMA.16832.S8.S8", "{e4m3}.F32{e4m3_types}"),
        (*MMA_SYNC, "F2FP"),
        since_90=("ACQBULK",),
        shared="shared_bytes",
    ),
    "sm89_qk_int8_pv_f8_accum_f16": Expected(
        lambda d, _: 2 if d <= 128 else 1,
        ("IMMA.16832.S8.S8", "QMMA.16832.F16.E4M3.E4M3"),
        (*MMA_SYNC, "F2FP"),
        since_90=("ACQBULK",),
        shared="shared_bytes",
    ),
    "sm90_qk_f16_pv_f16": WGMMA_IN_16_BITS,
    "sm90_qk_f16_pv_f16_masked": WGMMA_IN_16_BITS._replace(
        others=(*WGMMA_IN_16_BITS.others, "LDSM.16.M88.4", "LDGSTS.E", "LDGSTS.E.BYPASS.128")
    ),
    "sm90_qk_int8_pv_f16": WGMMA,
    "sm90_qk_int8_pv_f16_masked": WGMMA._replace(others=(*WGMMA.others, "LDSM.16.M88.4")),
    "sm90_qk_int8_pv_f16_packed": WGMMA,
}

# Where registers are short, by architecture: bytes that a thread puts aside, and reads outside the loop over keys.
STACK = {
    "sm_90a": {
        # And in the loop, both rows' scales among them: 0 to 2% of a call (bench/notes-short.md).
        "sm90_qk_f16_pv_f16_masked-d64-bf16": 24,
        "sm90_qk_f16_pv_f16_masked-d64-fp16": 24,
        # By CUDA 12.8, not by 13.0: a number, for 32 blocks of 16 keys.
        "sm80_qk_f16_pv_f16_split_kv-d64-bf16": 8,
        "sm80_qk_f16_pv_f16_split_kv-d64-fp16": 8,
    },
    # By CUDA 12.8, not by 13.0, and in the loop: two numbers for 16 keys.
    "sm_120": {
        "sm80_qk_f16_pv_f16_split_kv-d64-bf16": 8,
        "sm80_qk_f16_pv_f16_split_kv-d64-fp16": 8,
    },
}


class Kernel(NamedTuple):
    """One file of the set."""

    stem: str
    head_dim: int  # 0 where the kernel depends on neither it nor the dtype
    dtype: str
    architecture: str
    package: Installed = PACKAGES[0]

    @property
    def instance(self) -> str:
        return f"{self.stem}-d{self.head_dim}-{self.dtype}" if self.head_dim else self.stem

    @property
    def path(self) -> Path:
        return self.package.cubins / self.architecture / f"{self.instance}.{'ptx' if self.architecture[0] == 'c' else 'cubin'}"

    @property
    def stack(self) -> int:
        """Bytes that a thread may put aside."""
        return STACK.get(self.architecture, {}).get(self.instance, 0)

    @property
    def capability(self) -> int:
        return int(re.sub(r"\D", "", self.architecture))

    def __str__(self) -> str:
        return f"{self.architecture}/{self.instance}"


def kernel_of(instance: str, architecture: str, package: Installed) -> Kernel:
    """Take an instance's name apart."""
    stem, *rest = instance.split("-")
    return Kernel(stem, int(rest[0][1:]) if rest else 0, rest[1] if rest else "", architecture, package)


KERNELS = [
    kernel_of(instance, architecture, package)
    for package in PACKAGES
    for instance, only in content.instances(package.cuda, package.name).items()
    for architecture in content.folders_of(package.name, package.cuda)
    if architecture in (only or [architecture])
]
every_cubin = pytest.mark.parametrize("kernel", [k for k in KERNELS if k.architecture.startswith("sm_")], ids=str)
every_ptx = pytest.mark.parametrize("kernel", [k for k in KERNELS if k.architecture.startswith("compute_")], ids=str)


@cache
def resources(kernel: Kernel) -> cubin.Resources:
    """What the cubin says its kernel uses."""
    return cubin.resources(kernel.path, kernel.stem)


@cache
def instructions(kernel: Kernel) -> tuple[str, ...]:
    """Of a cubin, in the order in which they lie, with their modifiers."""
    return tuple(instruction.name for instruction in cubin.disassemble(kernel.path).instructions)


class HostView(NamedTuple):
    """What the host's headers say of a kernel."""

    parameter_bytes: int
    threads: dict[int, int]  # by head_dim
    shared: dict[int, int]  # bytes by head_dim


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HostView]:
    """Asks the headers, compiled as the host compiles them: warnings are errors, nothing of CUDA is in sight."""
    lines = []
    for entry in ENTRIES:
        stem = Path(entry["source"]).stem
        name = "".join(part.capitalize() for part in stem.split("_"))
        lines.append(f'show("{stem}", sizeof(sage::{name}::Params)')
        function = EXPECTED[stem].shared
        for d in entry.get("head_dim", [0]):
            lines.append(f", {d}, threads<sage::{name}>({d}, 0), " + (f"sage::{name}::{function}({d})" if function else "0"))
        lines.append(");\n")
    includes = "".join(f'#include "kernels/{Path(e["source"]).with_suffix(".h").as_posix()}"\n' for e in ENTRIES)
    folder = tmp_path_factory.mktemp("host")
    source, program = folder / "view.cpp", folder / "view"
    source.write_text(
        f"{includes}#include <cstdio>\n"
        "template <typename... Numbers> void show(const char* stem, Numbers... numbers) {\n"
        '  std::printf("%s", stem);\n  (std::printf(" %d", static_cast<int>(numbers)), ...);\n  std::puts("");\n}\n'
        # A number, or a function of head_dim.
        "template <typename Kernel> auto threads(int head_dim, int) -> decltype(Kernel::threads(head_dim)) {\n"
        "  return Kernel::threads(head_dim);\n}\n"
        "template <typename Kernel> int threads(int, long) { return Kernel::kThreads; }\n"
        f"int main() {{\n{''.join(lines)}}}\n",
        encoding="utf-8",
    )
    compiler = os.environ.get("CXX", "c++")
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O0", f"-I{CSRC}"]
    done = subprocess.run([compiler, *options, str(source), "-o", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    views = {}
    for line in subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines():
        stem, *words = line.split()
        size, *rest = map(int, words)
        dims = rest[::3]
        views[stem] = HostView(size, dict(zip(dims, rest[1::3], strict=True)), dict(zip(dims, rest[2::3], strict=True)))
    return views


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_set_is_what_was_promised(package: Installed) -> None:
    manifest = json.loads((package.cubins / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["version"] == package.version
    assert manifest["cuda"] == package.cuda
    assert manifest["architectures"] == content.folders_of(package.name, package.cuda)
    kernels = [kernel for kernel in KERNELS if kernel.package == package]
    assert set(manifest["kernels"]) >= {kernel.instance for kernel in kernels}
    expected = {kernel.path.relative_to(package.cubins).as_posix() for kernel in kernels}
    assert set(manifest["files"]) == expected
    present = {path.relative_to(package.cubins).as_posix(): path for path in package.cubins.rglob("*") if path.is_file()}
    del present["manifest.json"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in present.items()} == manifest["files"]


@every_cubin
def test_code_is_for_its_architecture(kernel: Kernel) -> None:
    """That of 8.6 serves 8.9 too, where there is one: ptxas makes the same instructions."""
    earlier = kernel._replace(architecture="sm_86")
    shared = kernel.architecture == "sm_89" and earlier in KERNELS
    data = kernel.path.read_bytes()
    assert list(elf.gpu_faults(kernel.instance, data, "sm_86" if shared else kernel.architecture)) == []
    assert not shared or data == earlier.path.read_bytes()


@every_cubin
def test_nothing_spills_and_blocks_fit(kernel: Kernel, host: dict[str, HostView]) -> None:
    expected, used, view = EXPECTED[kernel.stem], resources(kernel), host[kernel.stem]
    assert used.stack <= kernel.stack, f"{kernel}: {used.stack} bytes of stack"
    assert used.local == 0, f"{kernel}: {used.local} bytes of local memory"
    blocks = expected.blocks_per_sm(kernel.head_dim, kernel.capability)
    fit = cubin.blocks_per_sm(used, used.threads, view.shared[kernel.head_dim], kernel.capability)
    shared = used.static_shared + view.shared[kernel.head_dim]
    assert fit >= blocks, f"{kernel}: {fit} blocks fit with {used.registers} registers a thread and {shared} bytes a block"


@every_cubin
def test_the_instructions_are_those_meant(kernel: Kernel) -> None:
    expected, found = EXPECTED[kernel.stem], Counter(instructions(kernel))
    # Of compute capability 9.0 only wgmma multiplies e4m3: for mma.sync it is converted to FP16.
    emulated = kernel.capability == 90
    words = {
        "head_dim": kernel.head_dim,
        "row_bits": min(kernel.head_dim, 128),
        "bf16": ".BF16" if kernel.dtype == "bf16" else "",
        "e4m3": "HMMA.16816" if emulated else "QMMA.16832",
        "e4m3_types": "" if emulated else ".E4M3.E4M3",
    }
    tensor = {name for name in found if re.match(r"[A-Z]*MMA(\.|$)", name)}
    patterns = [pattern.format(**words) for pattern in expected.tensor]
    for pattern in patterns:
        assert fnmatch.filter(tensor, pattern), f"{kernel}: expected {pattern}, got {sorted(tensor)}"
    if kernel.stem == "sm120_qk_fp4_pv_fp4":
        # For 64 keys and 16 rows: a product for each 8 keys and 64 channels, for each 8 channels, and one for the rows' sums.
        rows = 16 if kernel.head_dim == 256 else 32
        wanted_products = (8 * kernel.head_dim // 64 + kernel.head_dim // 8 + 1) * rows // 16
        assert sum(found[name] for name in tensor) == wanted_products, f"{kernel}: {found}"
    stray = [name for name in tensor if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    assert not stray, f"{kernel}: tensor instructions that were not meant: {stray}"
    for wanted in expected.others + (expected.since_90 if kernel.capability >= 90 else ()):
        name = wanted.format(**words)
        assert any(f == name or f.startswith(f"{name}.") for f in found), f"{kernel}: no {name}"
    assert any("E4M3" in name for name in found) == ("f8" in kernel.stem or "fp4" in kernel.stem), (
        f"{kernel}: whether numbers become e4m3"
    )
    # Where ptxas cannot tell a wgmma's registers apart it waits for each one by itself. Under a mask float16's probabilities are looked at, at three
    # places, when the output is there.
    asynchronous = sum(count for name, count in found.items() if re.match("[A-Z]GMMA", name))
    waits = sum(count for name, count in found.items() if name.startswith("WARPGROUP.DEPBAR"))
    early = 3 if asynchronous and kernel.dtype == "fp16" and kernel.stem.endswith("_masked") else 0
    assert waits <= asynchronous * 2 // 3 + early, f"{kernel}: {waits} waits for {asynchronous} wgmma"
    local = {name for name in found if name.split(".")[0] in {"LDL", "STL"}}
    assert kernel.stack or not local, f"{kernel}: reads or writes local memory: {local}"


@every_cubin
def test_a_calls_first_kernel_waits_for_the_callers(kernel: Kernel) -> None:
    """Before it does anything that they, or those that start when it lets them, could see."""
    if kernel.stem not in FIRST or kernel.capability < 90:
        return
    found = instructions(kernel)
    assert "ACQBULK" in found, f"{kernel}: does not wait"
    before = found[: found.index("ACQBULK")]
    # Global memory, read and written by whatever means; the end; others' start.
    seen = re.compile(r"(LDG|STG|LD|ST|ATOMG?|REDG?|LDGSTS|UTMALDG|UTMASTG|UBLKCP|CCTL|EXIT|PREEXIT)(\.|$)")
    assert [name for name in before if seen.match(name)] == [], f"{kernel}: does more before it waits"


@every_cubin
def test_only_the_end_of_a_cluster_waits_for_the_whole_gpu(kernel: Kernel) -> None:
    """An arrival in another block of the cluster, released in its scope, is a fence for the GPU: in the loop it cost a fifth of the speed."""
    found = instructions(kernel)
    fences = [at for at, name in enumerate(found) if re.fullmatch(r"MEMBAR\.(?!.*\.CTA).*", name)]
    if (
        kernel.stem.startswith("sm80_qk_f16_pv_f16_split_kv") and kernel.architecture == "sm_90a"
    ):  # two blocks meet when they have seen their keys
        assert fences
        assert fences[0] > max(at for at, name in enumerate(found) if name.startswith("HMMA")), f"{kernel}: a fence in the loop"
        return
    if not kernel.stem.startswith("sm90_qk_int8"):  # which have clusters
        assert not fences, f"{kernel}: fences for the whole GPU"
        return
    # Parts of a tile, which other clusters leave in memory, are added up behind the loop: where neither a mask nor packed sequences are.
    of_parts = 1 if kernel.stem == "sm90_qk_int8_pv_f16" else 0
    assert [found[at] for at in fences] == ["MEMBAR.ALL.GPU"] * (of_parts + 1), (
        f"{kernel}: one fence where the cluster ends, one where a part has been left"
    )
    products = [at for at, name in enumerate(found) if re.match(r"[IH]GMMA", name)]
    assert fences[0] > products[-1], f"{kernel}: a fence in the loop"
    end = fences[-1]
    work = [at for at, name in enumerate(found) if re.match(r"(ST|RED|ATOM|SYNCS\.ARRIVE|[IH]GMMA)", name)]
    assert end > work[-1], f"{kernel}: {found[work[-1]]} behind the fence"
    assert {"UCGABAR_ARV", "UCGABAR_WAIT", "EXIT"} <= {*found[end:]}, f"{kernel}: a fence that is not the cluster's"


@every_cubin
def test_host_and_device_agree(kernel: Kernel, host: dict[str, HostView]) -> None:
    used, view = resources(kernel), host[kernel.stem]
    # The compiler counts from where parameters may start (0x210 from 9.0 on) to the end of the last one; a tensor map makes
    # the one parameter start on 64 bytes.
    padding = -0x210 % 64 if kernel.stem[:4] == "sm90" else 0
    assert used.parameter_bytes == view.parameter_bytes + padding
    assert used.threads == view.threads[kernel.head_dim]


def test_the_model_knows_how_much_shared_memory_a_block_has(host: dict[str, HostView]) -> None:
    asked = {(name, d): size for name in OURS if name[:4] != "sm90" for d, size in host[name].shared.items()}
    assert {(name, d): shared_bytes(name, d) for name, d in asked} == asked


@every_ptx
def test_ptx_is_for_its_architecture(kernel: Kernel, host: dict[str, HostView]) -> None:
    text = kernel.path.read_text(encoding="utf-8")
    assert re.findall(r"^\.target (\S+)$", text, re.MULTILINE) == [kernel.architecture.replace("compute_", "sm_")]
    assert re.findall(r"^\.visible \.entry (\w+)\(", text, re.MULTILINE) == [kernel.stem]
    parameter = re.findall(r"^\s*\.param \.align \d+ \.b8 \w+\[(\d+)\]", text, re.MULTILINE)
    assert parameter == [str(host[kernel.stem].parameter_bytes)]
    assert ".local" not in text
    if kernel.stem.startswith("sm80_qk_int8_pv_f16"):
        sums = "f16" if kernel.stem.endswith("accum_f16") else "f32"
        dtype = {"fp16": "f16", "bf16": "bf16"}[kernel.dtype] if sums == "f32" else "f16"  # quant_v_f16 has made it that
        assert "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32" in text
        assert f"mma.sync.aligned.m16n8k16.row.col.{sums}.{dtype}.{dtype}.{sums}" in text


# What a folder's files may include besides the C++ standard library, whose headers have no dot and no slash.
INCLUDES = {
    "kernels/**/*.cu": r"kernels/.*|cuda_(bf16|fp16)\.h|cuda/.*",
    "kernels/**/*.cuh": r"kernels/.*\.(h|cuh)|cuda_(bf16|fp16)\.h|cuda/.*",
    "kernels/**/*.h": r"kernels/.*\.h|cuda/std/cstdint",
    "runtime/*": r"(runtime/.*|kernels/tensor_view|windows|dlfcn)\.h",
    "torch/abi/aten.h": r"(ATen|c10|torch)/(?!cuda).*\.h",
    "torch/abi/stable.h": r"torch/csrc/inductor/aoti_torch/(c/shim|generated/c_shim_cuda)\.h|torch/torch_cuda\.h",
    "torch/*.h": r"(torch|torch/abi|torch/plan|runtime)/[^./]*\.h|kernels/.*\.h",
    "torch/*.cpp": r"(torch|torch/plan|runtime|kernels|kernels/\w+)/[^./]*\.h",
    "torch/plan/*": r"(torch|torch/plan|kernels|kernels/attention)/[^./]*\.h",
}


@pytest.mark.parametrize("files", INCLUDES)
def test_include_rules(files: str) -> None:
    """csrc/README.md: device code apart from host code, the runtime without PyTorch, nothing of CUDA in the host's."""
    paths = [path for path in CSRC.glob(files) if path.is_file()]
    assert paths
    for path in paths:
        for header in re.findall(r'^\s*#\s*include\s*[<"](.*?)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE):
            standard = re.fullmatch(r"[a-z_]+", header)
            assert standard or re.fullmatch(INCLUDES[files], header), f"{path.relative_to(ROOT)} includes {header}"


def test_shared_headers_have_fixed_width_types() -> None:
    """A cubin built on Linux serves Windows, whose `long` is another."""
    for path in (CSRC / "kernels").rglob("*.h"):
        code = re.sub(r"//.*|template <.*>", "", path.read_text(encoding="utf-8"))  # a template's arguments lie nowhere
        assert not re.search(r"\b(long|short|unsigned|size_t|ptrdiff_t|bool(?! \w+\())\b", code), path.relative_to(ROOT)
