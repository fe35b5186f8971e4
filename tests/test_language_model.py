"""bench/language_model.py, as it is tried where there is no GPU: two steps of a small network."""

from __future__ import annotations

import importlib.util
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
    fp4 = {"sm120_qk_fp4_pv_fp4"} if importlib.util.find_spec("sageattn3") else set()
    assert {row["kernel"] for row in result["loss"]} - {""} == set(dispatch.KERNELS) | fp4
    assert all(abs(row["more"]) < 0.01 for row in result["loss"])
    for layer in result["layers"]:
        assert 0.0 < layer["sink_mass"] <= layer["largest_sink_mass"] < 1.0
        assert all(0.0 < error < (0.2 if "sageattn3" in name else 0.05) for name, error in layer["relative_l1"].items())
    if fp4:  # the first and the last layer are sageattn's, those between are not
        columns = [layer["relative_l1"] for layer in result["layers"]]
        mixed = [column["sageattn3_blackwell, first and last layer sageattn"] for column in columns]
        ends = [column["sageattn"] for column in columns]
        middle = [column["sageattn3_blackwell"] for column in columns]
        assert mixed == [ends[0], *middle[1:-1], ends[-1]]
    assert f"| sageattn | {result['loss'][2]['kernel']} |" in done.stdout
