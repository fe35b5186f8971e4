"""`python -m sageattention`: the report, of a sound installation and of broken ones."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sageattention import _library, dispatch, doctor

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def run(
    *paths: Path, words: tuple[str, ...] = ("-m", "sageattention"), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *words],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search_path(*paths), **(environment or {})},
        check=False, encoding="utf-8",
    )  # fmt: skip


def search_path(*first: Path) -> str:
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), *([before] if before else [])])


def facts(output: str) -> dict[str, str]:
    return {line[:16].strip(): line[16:] for line in output.splitlines()}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package, to break."""
    ignore = shutil.ignore_patterns("cubins", "__pycache__")
    return Path(shutil.copytree(_library.PACKAGE, tmp_path / "sageattention", ignore=ignore))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernel set, to break, where the report looks."""
    source = _library.kernel_set(_library.KERNEL_DIRECTORIES)
    copy = Path(shutil.copytree(source, tmp_path / "cubins"))
    monkeypatch.setattr(_library, "KERNEL_DIRECTORIES", (copy,))
    return copy


# ── Whole ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sound_installation() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("No problem found.")
    said = facts(done.stdout)
    build = _library.build
    assert said["sageattention"] == f"{build.version}, built for PyTorch {build.torch} and CUDA {build.cuda}"
    assert said["PyTorch"].startswith(torch.__version__)
    assert "sm_80" in said["kernels"]
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith("sm")}
    if not torch.cuda.is_available():
        assert set(rows) == set(dispatch.KERNELS) - {"sm90_qk_int8_pv_f16"}
    for name, row in rows.items():
        for error in row[1:5]:  # doctor.FORMS
            assert 0.3 * dispatch.KERNELS[name].error < float(error) <= float(row[5])


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise")
def test_nobody_reads_on(package: Path) -> None:
    """As in `| head`: it ends without a traceback, and without what takes long."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sageattention"],
        stdout=writes, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search_path(package.parent)}, check=False,
    )  # fmt: skip
    os.close(writes)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_beside_another_pytorch(package: Path) -> None:
    record = json.loads((package / "_build.json").read_text(encoding="utf-8"))
    (package / "_build.json").write_text(json.dumps({**record, "torch": "2.0.1"}), encoding="utf-8")
    done = run(package.parent)
    assert done.returncode == 1
    assert facts(done.stdout)["sageattention"].endswith(f"built for PyTorch 2.0.1 and CUDA {record['cuda']}")
    assert (
        f"Problem 1: import sageattention fails: sageattention {record['version']} here was built for PyTorch 2.0 "
        in done.stdout
    )
    assert "pip install 'torch==2.0.*'" in done.stdout
    assert "Traceback" not in done.stderr


def test_without_pytorch(package: Path) -> None:
    (package.parent / "torch.py").write_text("raise ImportError('libtorch_cpu.so: no such file')", encoding="utf-8")
    done = run(package.parent)
    assert done.returncode == 1
    assert "Problem 1: import torch fails: libtorch_cpu.so: no such file\n  To do: install PyTorch" in done.stdout
    assert "Traceback" not in done.stderr


def test_what_is_left_of_a_pytorch(package: Path) -> None:
    (package.parent / "torch.py").touch()
    done = run(package.parent)
    assert done.returncode == 1
    assert "Problem 1: import torch fails: module 'torch' has no attribute '__version__'" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_module_that_is_not_whole(package: Path) -> None:
    (package / "reference.py").write_text("def attention(", encoding="utf-8")
    done = run(package.parent)
    assert done.returncode == 1
    assert "Problem 1: import sageattention fails: SyntaxError: " in done.stdout
    assert "Traceback" not in done.stderr
    assert "SyntaxError" in run(package.parent, words=("-c", "import sageattention")).stderr


@pytest.mark.skipif(sys.platform == "win32", reason="paths are Unicode there")
def test_a_folder_whose_name_is_no_text() -> None:
    program = "import os; from sageattention._library import library; library.set_kernel_directory(os.fsdecode(b'/jos\\xe9'), ['sm_80'])"
    done = run(words=("-c", program))
    assert done.returncode == 0, done.stderr


def test_a_folder_of_other_letters_than_the_terminals(package: Path) -> None:
    elsewhere = package.parent / "josé"
    shutil.copytree(_library.PACKAGE, elsewhere / "sageattention", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(elsewhere, environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No problem found." in done.stdout


@pytest.mark.parametrize("gone", ["_build.json", "_C"])
def test_a_missing_file_of_the_package(package: Path, gone: str) -> None:
    for path in package.glob(gone + "*"):
        path.unlink()
    done = run(package.parent)
    assert done.returncode == 1
    assert "Problem 1: import sageattention fails: sageattention: " in done.stdout
    assert "reinstall the package" in done.stdout


def test_another_program_gets_the_import_error(package: Path) -> None:
    """Only this package's own report goes on without what cannot be imported."""
    (package / "_build.json").unlink()
    other = package.parent / "other"
    other.mkdir()
    (other / "__init__.py").write_text("from sageattention import sageattn", encoding="utf-8")
    (other / "__main__.py").write_text("", encoding="utf-8")
    for words in (("-m", "other"), ("-m", "other", "--attention", "sageattention"), ("-mother", "-m", "sageattention")):
        done = run(package.parent, words=words)
        assert done.returncode == 1
        assert "ImportError: sageattention: " in done.stderr
        assert "_build.json is missing or damaged" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-msageattention",),
        ("-Ximporttime", "-m", "sageattention"),
        ("-sm", "sageattention"),
        ("-W", "ignore", "-m", "sageattention"),
    ],
)
def test_however_the_report_is_asked_for(package: Path, words: tuple[str, ...]) -> None:
    (package / "_build.json").unlink()
    done = run(package.parent, words=words)
    assert "Problem 1: import sageattention fails: sageattention: " in done.stdout, done.stderr


def test_other_words_are_refused(package: Path) -> None:
    done = run(package.parent, words=("-m", "sageattention", "doctor"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: python -m sageattention" in done.stderr


def test_kernels_of_another_version(package: Path) -> None:
    """As where conda's two packages were upgraded apart. The report imports for a second time what failed."""
    (package / "cubins").mkdir()
    manifest = {"version": "2.1.9", "cuda": "12.8", "architectures": [], "files": []}
    (package / "cubins" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    done = run(package.parent)
    assert "Problem 1: import sageattention fails: sageattention " in done.stdout
    assert "found kernels of version 2.1.9" in done.stdout


# ── Kernel files ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whole_kernel_files(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.Report()
    doctor.kernel_files(report)
    assert report.end() == 0
    assert f"files in {kernels}: compute_80, " in capsys.readouterr().out


@pytest.mark.parametrize("state", ["missing", "damaged"])
def test_a_spoilt_kernel_file(kernels: Path, state: str) -> None:
    path = kernels / "sm_80" / "quant_k_int8-d64-fp16.cubin"
    if state == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = doctor.Report()
    doctor.kernel_files(report)
    assert report.problems == [doctor.Problem(f"the kernel file {path} is {state}", doctor.REINSTALL)]
    assert report.end() == 1


def test_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "KERNEL_DIRECTORIES", (tmp_path / "a", tmp_path / "b"))
    report = doctor.Report()
    doctor.kernel_files(report)
    (problem,) = report.problems
    assert problem.what == f"there are no kernels in {tmp_path / 'a'} or {tmp_path / 'b'}"
    assert "sageattention-cubins" in problem.remedy


# ── Driver and GPUs, as they would answer ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("found", "pytorch", "available", "expected"),
    [
        (None, "12.8", False, []),
        ((13, 0), "12.8", True, []),
        ((12, 8), "12.8", True, []),
        ((12, 8), None, False, ["there is an NVIDIA driver, but this PyTorch was built without CUDA"]),
        ((12, 8), "12.8", False, ["PyTorch finds no GPU"]),
        (
            (12, 8), "13.0", True,
            [f"{x} wants a driver for CUDA 13.0, this one is for 12.8" for x in ("PyTorch", "sageattention")],
        ),
    ],
)  # fmt: skip
def test_driver(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int] | None, pytorch: str | None, available: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(doctor, "driver_cuda", lambda: found)
    monkeypatch.setattr(torch.version, "cuda", pytorch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    report = doctor.Report()
    doctor.driver(report, {"cuda": "13.0" if pytorch == "13.0" else "12.8"})
    assert [problem.what for problem in report.problems] == expected


@needs_no_gpu
def test_no_driver_here() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver here")
    assert doctor.driver_cuda() is None


@pytest.mark.parametrize(("code", "expected"), [(0, None), (34, "(error 34): it is the stub"), (999, "(error 999)")])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, code: int, expected: str | None) -> None:
    """As of the stub that CUDA's toolkit has for linkers, where its folder is on the loader's path."""

    class Library:
        def __init__(self, name: str) -> None: ...

        def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
            version._obj.value = 13010
            return code

    monkeypatch.setattr(ctypes, "CDLL", Library)
    if expected is None:
        assert doctor.driver_cuda() == (13, 1)
        return
    report = doctor.Report()
    doctor.driver(report, {})
    (problem,) = report.problems
    assert expected in problem.what


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ada GPU, and one that is too old."""
    capabilities = [(8, 9), (7, 5)]

    def folder(index: int) -> str:
        if index == 1:
            raise RuntimeError("no kernel for compute capability 7.5 (device 1)\nstack")
        return "sm_89"

    present = frozenset({"sm80_qk_int8_pv_f16", "sm89_qk_int8_pv_f8", "sm90_qk_int8_pv_f16"})
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: f"GPU of {index}",
        "get_device_capability": lambda index: capabilities[int(str(index).replace("cuda:", ""))],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dispatch, "kernel_folder", folder)
    monkeypatch.setattr(doctor, "failure_of_pytorch", lambda device: "")
    monkeypatch.setattr(_library, "kernels", {"sm_89": present})


@pytest.mark.usefixtures("two_gpus")
def test_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    errors: dict[str, Any] = {
        "sm80_qk_int8_pv_f16": {"plain": float("nan"), "masked": 0.01, "packed": 0.01, "causal": 0.01},
        "sm89_qk_int8_pv_f8": {"plain": 0.03, "masked": 0.5, "packed": 0.6, "causal": 0.7},
    }
    monkeypatch.setattr(doctor, "error_of", lambda kernel, device, form: errors[kernel][form])
    monkeypatch.setattr(doctor, "speed_of", lambda kernel, device: (2.0, 4e11))
    report = doctor.Report()
    doctor.gpus(report)
    assert [problem.what for problem in report.problems] == [
        "sm80_qk_int8_pv_f16 on cuda:0 is nan off exact attention, at most 0.0127 is right",
        "sm89_qk_int8_pv_f8 on cuda:0 is 0.5000 off exact attention under a mask, at most 0.0424 is right",
        "sm89_qk_int8_pv_f8 on cuda:0 is 0.6000 off exact attention of packed sequences, at most 0.0424 is right",
        "sm89_qk_int8_pv_f8 on cuda:0 is 0.7000 off exact attention of a causal call in float16 with offsets in K and V, at most 0.0424 is right",
        "GPU 1: sageattention: no kernel runs on compute capability 7.5 (device 1, GPU of 1), they are for 8.0 and later, 8.6, 8.9 and 12.x, 8.9 and 12.x, "
        "9.0 alone; use a GPU of compute capability 8.0 or later",
    ]
    said = capsys.readouterr().out
    assert facts(said)["GPU 0"] == "GPU of 0, compute capability 8.9"
    assert facts(said)["runs"].startswith("sm_89; sageattn takes sm89_qk_int8_pv_f8: ")
    rows = [line.split() for line in said.splitlines() if line.startswith("sm")]
    assert [row[0] for row in rows] == ["sm80_qk_int8_pv_f16", "sm89_qk_int8_pv_f8"]
    assert rows[1][6:] == ["2.000", "200"]


@pytest.mark.usefixtures("two_gpus")
def test_a_pytorch_without_code_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "failure_of_pytorch", lambda device: "CUDA error: no kernel image is available")
    report = doctor.Report()
    doctor.gpus(report)
    assert report.problems[0].what == "PyTorch itself computes nothing on GPU 0: CUDA error: no kernel image is available"


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError])
@pytest.mark.usefixtures("two_gpus")
def test_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fail(kernel: str, device: str, form: str) -> float:
        raise kind(f"kernel file {kernel}.cubin is damaged; reinstall\nstack")

    monkeypatch.setattr(doctor, "error_of", fail)
    report = doctor.Report()
    doctor.self_test(report, "cuda:0", dispatch.Gpu((8, 9)), frozenset({"sm80_qk_int8_pv_f16"}))
    (problem,) = report.problems
    assert problem.what == "sm80_qk_int8_pv_f16 fails on cuda:0: kernel file sm80_qk_int8_pv_f16.cubin is damaged; reinstall"
