"""The summary of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import samples

from sage_factory import commands
from sage_factory.files import sha256


def test_summary_lists_versions_sizes_hashes_and_times(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (dist / "reports").mkdir()
    (dist / "reports" / "linux-64-cu12.8.json").write_text(
        json.dumps({"steps": {"operators": [20.04, 30.0], "all": [25.0, 31.5]}})
    )
    (dist / "reports" / "kernels-cu12.8.json").write_text(json.dumps({"steps": {"kernels": [2.0, 3.0], "all": [2.5, 3.5]}}))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    assert commands.main(["summary", "--dist", str(dist)]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out
    assert page.startswith("### 4 files\n")
    for path, said in (
        (dist / "wheels" / samples.BUILDS[0].wheel_name, "2.2.0 | 2.8.0 | 12.8 | 3.11 | linux-64"),
        (
            dist / "conda" / "linux-64" / "sageattention-2.2.0-torch280_cu128_h2_0.conda",
            "2.2.0 | 2.8.0 | 12.8 | any | linux-64",
        ),
        (dist / "conda" / "noarch" / "sageattention-cubins-2.2.0-cu128_h1_0.conda", "2.2.0 | any | 12.8 | any | any"),
    ):
        assert f"| {path.name} | {said} | {path.stat().st_size / 1e6:.2f} | `{sha256(path.read_bytes())}` |" in page
    assert "| linux-64-cu12.8 |  | 25.0 (31.5) | 20.0 (30.0) |" in page


def test_where_nothing_was_made_there_is_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dist in (tmp_path, tmp_path / "none"):
        assert commands.main(["summary", "--dist", str(dist)]) == 1
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", f"error: {dist} holds no conda package and no wheel: `build` makes them\n")
