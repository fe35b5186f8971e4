"""Packages as rattler-build makes them: only those that passed their tests are found again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rattler_build import RattlerBuildError

from sage_factory import ROOT
from sage_factory.make import engine
from sage_factory.what import matrix

HERE = matrix.host_platform()


@pytest.mark.parametrize("passes", [True, False])
def test_a_package_is_found_again_only_if_it_passed_its_tests(passes: bool, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
package: {{name: tiny, version: "1"}}
build: {{noarch: generic, script: 'echo made > "$PREFIX/made"'}}
tests: [{{package_contents: {{files: ["{"made" if passes else "missing"}"]}}}}, {{script: ["{"true" if passes else "false"}"]}}]
""")
    # What an interrupted run left must not be taken for a result.
    (tmp_path / "making" / "noarch").mkdir(parents=True)
    (tmp_path / "making" / "noarch" / "left.conda").write_text("")
    (one,) = engine.render({"target_platform": [HERE]}, recipe).values()
    if passes:
        made = engine.make(one, [], tmp_path / "conda", 1_600_000_000)
        assert made in (tmp_path / "conda" / "noarch").iterdir()
        assert made.name in (tmp_path / "conda" / "noarch" / "repodata.json").read_text()
    else:
        with pytest.raises((engine.TestError, RattlerBuildError)):
            engine.make(one, [], tmp_path / "conda", 1_600_000_000)
    assert len(list((tmp_path / "conda").rglob("*.conda"))) == passes


@pytest.mark.skipif(os.name == "nt", reason="there every path is text")
def test_a_package_is_found_below_a_path_that_the_locale_does_not_know(tmp_path: Path) -> None:
    folder = tmp_path / "ünï"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        "package: {name: tiny, version: '1'}\nbuild: {noarch: generic, script: 'touch $PREFIX/a'}\n"
    )
    (folder / "variant.json").write_text(json.dumps({"target_platform": [HERE]}))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts", "_package", "tiny", "--recipe", folder / "recipe.yaml",
         "--variant", folder / "variant.json", "--channel", (tmp_path / "none").as_uri(), "--seconds", "1600000000",
         "--output", folder / "conda"],
        env=os.environ | locale, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert len(list((folder / "conda" / "noarch").glob("tiny-*.conda"))) == 1
