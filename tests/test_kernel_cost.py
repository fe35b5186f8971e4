"""What kernels cost: compiling is most of a build, and takes as long as there is code. No GPU takes part."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import samples
from elftools.elf.elffile import ELFFile
from kernels_on_cpu import ptx_of

from sage_factory import ROOT
from sage_factory.inspect import cost
from sage_factory.what import matrix
from sage_factory.with_what import venvs
from sageattention import _library

KERNELS = ROOT / "csrc" / "kernels"
CMAKE = (KERNELS / "CMakeLists.txt").read_text(encoding="utf-8")
ENTRIES: list[dict[str, Any]] = [
    entry
    for entry in json.loads((KERNELS / "kernels.json").read_text(encoding="utf-8"))
    if "sageattention" in entry.get("packages", ["sageattention"])
]
CUBINS = _library.kernel_set(_library.KERNEL_DIRECTORIES)
CUDA = matrix.load().development_cuda
# Instances × architectures that are compiled, and kB of instructions of all, in the set of the CUDA version that tests take. What a kernel may grow by
# without a word is a tenth; what is more is worth a line here, and a look at what `build` says that it took.
BUDGET = {
    "mask_tiles": (5, 272),
    "quant_k_int8": (30, 1770),
    "quant_v_f16": (12, 509),
    "quant_v_f8": (12, 498),
    "seen_keys": (5, 14),
    "sm80_combine_split_kv": (5, 56),
    "sm80_qk_f16_pv_f16": (30, 782),
    "sm80_qk_f16_pv_f16_split_kv": (30, 1521),
    "sm80_qk_f16_pv_f16_split_kv_staged": (30, 1729),
    "sm80_qk_int8_pv_f16": (30, 3453),
    "sm80_qk_int8_pv_f16_accum_f16": (12, 1729),
    "sm89_qk_int8_pv_f8": (12, 2245),
    "sm89_qk_int8_pv_f8_accum_f16": (12, 2265),
    "sm90_qk_f16_pv_f16": (8, 269),
    "sm90_qk_f16_pv_f16_masked": (8, 737),
    "sm90_qk_int8_pv_f16": (6, 571),
    "sm90_qk_int8_pv_f16_masked": (6, 688),
    "sm90_qk_int8_pv_f16_packed": (6, 516),
}


@pytest.mark.parametrize("kernel", [Path(entry["source"]).stem for entry in ENTRIES])
def test_a_kernel_takes_no_more_than_it_is_known_to(kernel: str) -> None:
    manifest = CUBINS / "manifest.json"
    if not manifest.is_file() or json.loads(manifest.read_text(encoding="utf-8"))["cuda"] != CUDA:
        pytest.skip(f"no kernels of CUDA {CUDA} are installed")
    files = {path.relative_to(CUBINS).as_posix(): path.read_bytes() for path in CUBINS.rglob("*.cubin")}
    found = cost.of_set(files)[kernel].values()
    instances, kilobytes = sum(one.instances for one in found), sum(one.code for one in found) / 1e3
    assert instances == BUDGET[kernel][0]
    assert kilobytes < 1.1 * BUDGET[kernel][1], f"{kilobytes:.0f} kB of instructions"


def test_code_that_two_architectures_have_was_compiled_once() -> None:
    files = {"sm_86/k-d64-fp16.cubin": samples.cubin(86), "sm_89/k-d64-fp16.cubin": samples.cubin(86)}
    assert cost.of_set(files) == {"k": {"sm_86": cost.Cost(1, 16)}}
    files["sm_89/k-d64-fp16.cubin"] = samples.cubin(89)
    assert cost.total(*cost.of_set(files).values()) == cost.Cost(2, 32)


def families() -> list[list[str]]:
    """The architectures of variants.yaml that share PTX, as CMakeLists.txt has it."""
    said = re.search(r"^set\(families (.*)\)$", CMAKE, re.M)
    assert said
    there = [name.removeprefix("sm_") for name in matrix.targets(matrix.load().architectures)]
    found = [[name for name in family.split(",") if name in there] for family in re.findall(r'"([^"]*)"', said[1])]
    # Code for one architecture alone (120a) shares with none.
    shared = [name for name in there if name.isdigit() or name == "90a"]
    assert sorted(name for family in found for name in family) == sorted(shared), (
        "an architecture of variants.yaml is in no family, or in two"
    )
    return found


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: Path(entry["source"]).stem)
def test_architectures_share_what_would_be_their_own(entry: dict[str, Any], tmp_path: Path) -> None:
    """What an architecture would be compiled to by itself is what it shares: PTX, and of some the instructions too."""
    built = [name.removeprefix("sm_") for name in matrix.targets(matrix.load().cuda[CUDA].architectures)]
    only = [name.removeprefix("sm_") for name in entry.get("architectures", [f"sm_{name}" for name in built])]
    same = dict(re.findall(r"^set\(same_as_(\d+) (\d+)\)$", CMAKE, re.M))
    assert same == {"89": "86"}
    for family in families():
        texts = {}
        for number in [name for name in family if name in built and name in only]:
            target = tmp_path / f"{number}.ptx"
            defined = ["-DSAGE_HEAD_DIM=64", "-DSAGE_DTYPE=__nv_bfloat16"] if "head_dim" in entry else []
            ptx = ptx_of(entry["source"], f"compute_{number}", defined, KERNELS.parent, target)
            texts[number] = re.sub(r"^\.target .*$", "", ptx, flags=re.M)
        differ = [f"{number} from {next(iter(texts))}" for number in texts if texts[number] != next(iter(texts.values()))]
        assert not differ, f"PTX differs: {', '.join(differ)}"
        for later, earlier in same.items():
            if later in texts and earlier in texts:
                assert _assembled(tmp_path, texts, later) == _assembled(tmp_path, texts, earlier)


def _assembled(folder: Path, texts: dict[str, str], number: str) -> bytes:
    """The instructions that ptxas makes of a family's PTX for one of its architectures."""
    output, ptxas = folder / f"{number}.cubin", venvs.site_packages(f"cuda-{CUDA}") / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    command = [str(ptxas), f"-arch=sm_{number}", "-o", str(output), str(folder / f"{next(iter(texts))}.ptx")]
    subprocess.run(command, check=True)
    (code,) = (s.data() for s in ELFFile(io.BytesIO(output.read_bytes())).iter_sections() if s.name.startswith(".text."))
    return bytes(code)
