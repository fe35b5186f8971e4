"""bench/language_model.py, as it is tried where there is no GPU: two steps of a small network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sageattention import dispatch

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "language_model.py"


@pytest.mark.slow
def test_every_kernel_is_evaluated(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--steps", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {row["kernel"] for row in result["loss"]} - {""} == set(dispatch.KERNELS)
    assert all(abs(row["more"]) < 0.01 for row in result["loss"])
    for layer in result["layers"]:
        assert 0.0 < layer["sink_mass"] <= layer["largest_sink_mass"] < 1.0
        assert all(0.0 < error < 0.05 for error in layer["relative_l1"].values())
    assert f"| sageattn | {result['loss'][2]['kernel']} |" in done.stdout
