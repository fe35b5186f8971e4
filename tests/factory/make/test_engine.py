"""Packages as rattler-build makes them: only those that passed their tests are found again."""

from __future__ import annotations

from pathlib import Path

import pytest
from rattler_build import RattlerBuildError

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
