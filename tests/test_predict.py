"""bench/predict.py: that it finds each kernel's main loop, that docs/kernels.md has what it prints, and how it adds up."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cards import cubin, model, tables
from cards.cubin import Code, Instruction
from cards.gpus import BY_NAME, CARDS, card_of
from cards.hot import hot_path, product
from cards.shape import Shape
from predict import BETWEEN, PAGE
from test_kernels import CUBINS, KERNELS, Kernel

from sage_factory import ROOT
from sage_factory.make import kernels
from sageattention import _library, dispatch

pytestmark = pytest.mark.usefixtures("listed_once")

# The compiler whose kernels the page is about.
CUDA = "12.8"
# Numbers of the page and of the package under test may differ by so much: other builds of that compiler order instructions otherwise.
TOLERANCE = 0.03


@pytest.fixture(autouse=True, scope="module")
def _disassembler() -> None:
    try:
        cubin.disassembler()
    except cubin.CubinError as error:
        pytest.skip(str(error))


ATTENTION = [
    k
    for k in KERNELS
    if re.search("_qk_(int8|fp4)", k.stem) and k.dtype == "fp16" and k.architecture in {card.architecture for card in CARDS}
]


@pytest.mark.parametrize("kernel", ATTENTION, ids=str)
def test_the_main_loop_computes_every_score_once(kernel: Kernel) -> None:
    found = model.read_kernel(kernel.path, kernel.head_dim)
    scores = sum(p.multiply_adds for i in found.path if (p := product(i)) and p.kind == "int8") // kernel.head_dim
    assert scores == found.scores
    # An exponential for each score of 32 lanes, and nothing that is done for a new maximum alone.
    exponentials = sum(i.name.startswith("MUFU.EX2") for i in found.path)
    assert exponentials == scores // 32
    assert not any(i.opcode == "SHFL" for i in found.path)
    # K and V arrive once: in 8 bits both, or V in 16; and V's scales.
    if not found.asynchronous:
        size = 2 if "f8" in kernel.stem else 3
        expected = model.TILE / 128 * kernel.head_dim * size
        assert expected <= found.copied <= expected * 1.6


def numbers(text: str) -> tuple[list[float], str]:
    """A text's numbers, and the rest of it. Which unit is the limit may change sides where two are near."""
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)], re.sub(r"\d+(?:\.\d+)?", "#", text.replace("**", ""))


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The installed kernels, and on the H200 those that are not installed for it."""
    if _library.build.cuda != CUDA:
        pytest.skip(f"docs/kernels.md is about the kernels of CUDA {CUDA}, these are of {_library.build.cuda}")
    proof = tmp_path_factory.mktemp("proof")
    (proof / "sm_90a").mkdir()
    try:
        nvcc, environment = kernels.compiler(CUDA)
    except kernels.KernelsError as error:
        pytest.skip(str(error))
    installed = {path.name.split("-")[0] for path in (CUBINS / "sm_90a").glob("*.cubin")}
    for name in set(dispatch.KERNELS) - installed:
        for head_dim in (64, 128):
            output = proof / "sm_90a" / f"{name}-d{head_dim}-fp16.cubin"
            options = ["-cubin", "-arch=sm_90a", "-std=c++17", "-I..", f"-DSAGE_HEAD_DIM={head_dim}", "-DSAGE_DTYPE=__half"]
            command = [nvcc, *options, "-o", str(output), f"attention/{name}.cu"]
            subprocess.run(command, cwd=ROOT / "csrc" / "kernels", env=environment, check=True)
    return [CUBINS, proof]


@pytest.mark.slow
def test_the_page_has_what_the_script_prints(cubins: list[Path]) -> None:
    between = BETWEEN.findall(PAGE.read_text(encoding="utf-8"))
    assert len(between) == 1
    there, printed = numbers(between[0].strip()), numbers(tables.generated(cubins).strip())
    remedy = "run `python3 scripts/run.py predict --write`"
    assert there[1] == printed[1], remedy
    assert there[0] == pytest.approx(printed[0], rel=TOLERANCE, abs=1.0), remedy


@pytest.mark.slow
def test_the_h200_is_predicted(cubins: list[Path]) -> None:
    """Within 15% of what was measured there, every kernel."""
    card = BY_NAME["H200"]
    shape = Shape(2, 32, 4096, 128)
    found = [kernel for kernel in tables.kernels_of(cubins, card, 128) if kernel.name.split("-")[0] in model.MEASURED]
    assert len(found) == 4
    for kernel in found:
        predicted = 1e6 * model.attention_seconds(kernel, card, shape)
        assert predicted == pytest.approx(model.MEASURED[kernel.name.split("-")[0]], rel=0.15), kernel.name


def instruction(text: str) -> Instruction:
    return Instruction(text.split(maxsplit=1)[0] if text[0] != "@" else text.split()[1], text, 1, 7, 7, 0)


def test_the_hot_path_leaves_out_what_is_rare() -> None:
    """A loop of one IMMA, exponentials, one HMMA pair and a copy, with branches: to the scores alone, to the scores again, and round a copy."""
    lines = [
        "IADD3 R0, R0, 1, RZ",  # .L_head
        "@P0 BRA `(.L_next)",
        "LDGSTS.E.BYPASS.128 [R1], [R2]",
        "@P4 BRA `(.L_maxima)",  # .L_next
        "IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4",
        *["MUFU.EX2 R4, R4"] * 4,
        "@!P1 BRA `(.L_values)",
        "IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4",
        "SHFL.BFLY PT, R3, R4, 0x1, 0x1f",
        "HMMA.16816.F32 R4, R8, R12, R4",  # .L_values
        "HMMA.16816.F32 R4, R8, R12, R4",
        "@P2 BRA `(.L_head)",
        "STG.E [R2], R4",
        "@P3 BRA `(.L_head)",
        "EXIT",
        "IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4",  # .L_maxima
        "BRA `(.L_values)",
    ]
    code = Code([instruction(line) for line in lines], {".L_head": 0, ".L_next": 3, ".L_values": 12, ".L_maxima": 18})
    path, keys = hot_path(code, head_dim=32, rows=2)
    assert keys == 64
    assert [i.text for i in path] == [*lines[:10], *lines[12:15]]
    with pytest.raises(ValueError, match="no way round a loop with the products of 2 rows"):
        hot_path(code, head_dim=33, rows=2)


def test_the_hot_path_fetches_once() -> None:
    """A loop that goes round twice for the products: fetching both times would be the shorter way."""
    lines = [
        "IADD3 R0, R0, 1, RZ",  # .L_head
        "@P0 BRA `(.L_fetched)",
        "LDGSTS.E.BYPASS.128 [R1], [R2]",
        "BRA `(.L_products)",
        "IADD3 R1, R1, 1, RZ",  # .L_fetched
        "IADD3 R2, R2, 1, RZ",
        "IADD3 R3, R3, 1, RZ",
        "IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4",  # .L_products
        *["MUFU.EX2 R4, R4"] * 4,
        "HMMA.16816.F32 R4, R8, R12, R4",
        "HMMA.16816.F32 R4, R8, R12, R4",
        "@P2 BRA `(.L_head)",
        "EXIT",
    ]
    code = Code([instruction(line) for line in lines], {".L_head": 0, ".L_fetched": 4, ".L_products": 7})
    path, keys = hot_path(code, head_dim=32, rows=4)
    assert keys == 64
    fetching, fetched = [0, 1, 2, 3, *range(7, 15)], [0, 1, *range(4, 15)]
    ways = ([lines[i] for i in way] for way in (fetching + fetched, fetched + fetching))
    assert [i.text for i in path] in ways


def test_blocks_of_threads_are_spread_over_the_multiprocessors() -> None:
    def makespan(blocks: list[float], multiprocessors: int) -> float:
        return model._makespan(blocks, multiprocessors, (12.0, 10.0))

    assert makespan([1.0], 2) == 12.0
    assert makespan([1.0] * 4, 2) == 20.0  # two each, which share it
    assert makespan([1.0] * 5, 2) == 32.0  # and the last one alone
    assert makespan([2.0, 1.0], 1) == 32.0  # alone once the other has ended


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_a_card_is_known_by_the_drivers_name(device: str, name: str | None) -> None:
    card = card_of(device)
    assert (card and card.name) == name


def test_the_benchmark_shows_the_prediction_beside_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    import bench

    class Choice(NamedTuple):
        kernel: str

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: empty(*size, dtype=dtype))
    monkeypatch.setattr("sageattention.explain", lambda *_: Choice("sm89_qk_int8_pv_f8"))
    shape = Shape(2, 32, 4096, 128, False)
    monkeypatch.setattr(model, "call_seconds", lambda kernel, card, shape: shape.operations / 400e12)
    found = bench.predict(BY_NAME["RTX 4090"], shape)
    assert found == pytest.approx(dict.fromkeys(("sageattn", "mma.sync, FP16 PV", "mma.sync, FP8 PV"), 400))
    monkeypatch.setattr("sageattention.explain", lambda *_: Choice("sm90_qk_int8_pv_f16"))
    assert "sageattn" in bench.predict(BY_NAME["H200"], shape)
    assert "sageattn" not in bench.predict(BY_NAME["H200"], Shape(8, 16, 333, 128, False))  # which quantises nothing
    row = {"shape": shape._asdict(), "tflops": {"sageattn": 300.0, "cuDNN bf16": 150.0}, "predicted": {"sageattn": 400.0}}
    console = Console(width=160)
    with console.capture() as captured:
        console.print(bench.comparison({"speed": [row]}))
    assert "300 / 400 = 0.75" in captured.get()


@pytest.mark.parametrize("fault", [None, ValueError("no way round a loop")])
def test_the_owner_of_a_card_that_nobody_here_has_is_asked_for_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: ValueError | None
) -> None:
    """The whole command, with measurements made up: the kernels, the model and what is printed and written are real."""
    import bench

    class Choice(NamedTuple):
        kernel: str

    tflops = {"cuDNN bf16": 150.0, "sageattn": 300.0, "mma.sync, FP16 PV": 200.0, "mma.sync, FP8 PV": 250.0}
    measured = {"tflops": tflops, "ratio": {name: number / 150.0 for name, number in tflops.items()}}
    packed = {"tflops": {"sageattn_varlen": 100.0}, "ratio": {"sageattn_varlen": 1.1}}
    monkeypatch.setattr("sys.argv", ["bench.py", "--output", str(tmp_path / "here" / "bench.json")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "environment", lambda command: {"gpu": "NVIDIA GeForce RTX 4090", "command": command})
    monkeypatch.setattr(bench, "shapes", lambda quick: [Shape(2, 32, 4096, 128, False)])
    monkeypatch.setattr(bench, "methods", lambda: dict.fromkeys(tflops))
    monkeypatch.setattr(
        bench,
        "speed",
        lambda shape, dtype=None, spread=1.0: {"shape": shape._asdict(), "dtype": "bfloat16", "spread": spread, **measured},
    )
    monkeypatch.setattr(bench, "packed_speed", lambda causal: {"shape": {"causal": causal}, **packed})
    monkeypatch.setattr(
        bench,
        "error",
        lambda tokens, inputs="randn": {"tokens": tokens, "inputs": inputs, "relative_l1": dict.fromkeys(tflops, 0.01)},
    )
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: empty(*size, dtype=dtype))
    monkeypatch.setattr("sageattention.explain", lambda *_: Choice("sm89_qk_int8_pv_f8_accum_f16"))
    if fault is not None:
        monkeypatch.setattr(model, "read_kernel", lambda *_: (_ for _ in ()).throw(fault))
    bench.main()
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Nobody here has an NVIDIA GeForce RTX 4090: what was promised for it is calculated. Please open an issue with" in said
    )
    (row,) = json.loads((tmp_path / "here" / "bench.json").read_text(encoding="utf-8"))["speed"]
    assert row["tflops"] == tflops
    if fault is None:
        assert 300 < row["predicted"]["sageattn"] < 400
        assert f"300 / {row['predicted']['sageattn']:.0f} = " in said
    else:
        assert "no prediction: no way round a loop" in said


def test_what_quantisation_moves() -> None:
    card, shape = BY_NAME["RTX 3090"], Shape(1, 1, 1024, 64)
    bytes_alone = model.quantisation_seconds((model.Quantiser("x", 3),), card, shape, overlapped=True)
    assert bytes_alone == pytest.approx(3 * 1024 * 64 / 936e9)
    launched = model.quantisation_seconds((model.Quantiser("x", 3),) * 2, card, shape, overlapped=False)
    assert launched == pytest.approx(2 * (bytes_alone + model.LAUNCH))


def test_a_missing_disassembler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cubin.disassembler.cache_clear()
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cubin.CubinError, match=r"no nvdisasm: .*pip install nvidia-cuda-nvdisasm"):
        cubin.disassembler()
    cubin.disassembler.cache_clear()
