"""The recipe for conda-forge: that the engine renders it as conda-forge's own variants have it, and what its reviewers ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sage_factory import ROOT, commands
from sage_factory.make import engine
from sage_factory.ship import feedstock
from sage_factory.what import matrix

SUM, COMMIT = "ab" * 32, "cd" * 20
PAGE = "https://github.com/someone/sageattention"
SOURCE = feedstock.Source(PAGE, f"{PAGE}/archive/refs/tags/v2.2.0.tar.gz", SUM, COMMIT)
# What the pinning of August 2026 says for a job of CUDA on linux-64.
PINNING = {
    "target_platform": ["linux-64"], "cuda_compiler": ["cuda-nvcc"], "c_compiler": ["gcc"], "cxx_compiler": ["gxx"],
    "c_compiler_version": ["14"], "cxx_compiler_version": ["14"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.17"],
    "pytorch": ["2.12"], "python": ["3.12.* *_cpython"], "python_min": ["3.10"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    feedstock.write(SOURCE, ["someone", "else"], tmp_path)
    return tmp_path


@pytest.mark.parametrize(("cuda", "major"), [("12.9", 12), ("13.0", 13)])
def test_the_engine_renders_it(folder: Path, cuda: str, major: int) -> None:
    found = engine.render(PINNING | {"cuda_compiler_version": [cuda]}, folder / "recipe.yaml")
    assert set(found) == {"sageattention-cubins", "sageattention"}
    tag = f"cuda{cuda.replace('.', '')}_h"
    for name, one in found.items():
        recipe = one.recipe.to_dict()
        assert recipe["build"]["string"].startswith(tag), name
        assert recipe["build"]["number"] == 0
        assert recipe["source"][0]["sha256"] == SUM
        assert recipe["source"][0]["url"].endswith("/v2.2.0.tar.gz") or SOURCE.url in str(recipe["source"][0]["url"])
    operators = str(found["sageattention"].recipe.to_dict()["requirements"])
    for wanted in ("pytorch 2.12.*", "python >=3.10", f"__cuda >={major}", f"cuda-version >={cuda},<{major + 1}"):
        assert wanted in operators
    kernels = found["sageattention-cubins"].recipe.to_dict()["build"]["script"]["env"]
    assert kernels["SAGE_ARCHITECTURES"].split(";")[-1] == "12.0"
    assert kernels["SAGE_CUDA_VERSION"] == cuda


@pytest.mark.parametrize(
    "other", [{"cuda_compiler_version": ["None"]}, {"cuda_compiler_version": ["12.9"], "target_platform": ["win-64"]}]
)
def test_other_jobs_skip_it(folder: Path, other: dict[str, list[str]]) -> None:
    assert not engine.render(PINNING | other, folder / "recipe.yaml")


def test_every_cuda_of_the_table_has_its_own_architectures(folder: Path) -> None:
    for cuda in matrix.load().cuda.values():
        one = engine.render(PINNING | {"cuda_compiler_version": [cuda.version]}, folder / "recipe.yaml")["sageattention-cubins"]
        said = one.recipe.to_dict()["build"]["script"]["env"]["SAGE_ARCHITECTURES"]
        assert said.split(";") == list(cuda.architectures)


def test_a_cuda_that_the_table_has_not_has_the_newest_ones_architectures(folder: Path) -> None:
    one = engine.render(PINNING | {"cuda_compiler_version": ["99.0"]}, folder / "recipe.yaml")["sageattention-cubins"]
    env = one.recipe.to_dict()["build"]["script"]["env"]
    newest = list(matrix.load().cuda.values())[-1]
    assert (env["SAGE_ARCHITECTURES"].split(";"), env["SAGE_PTX"].split(";")) == ([*newest.architectures], [*newest.ptx])


def test_it_has_what_conda_forge_asks_for(folder: Path) -> None:
    text = (folder / "recipe.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    assert list(recipe)[-2:] == ["about", "extra"]
    assert recipe["extra"]["recipe-maintainers"] == ["someone", "else"]
    assert {"homepage", "license", "license_file", "summary"} <= set(recipe["about"])
    for output in recipe["outputs"]:
        build = output["requirements"]["build"]
        assert '${{ stdlib("c") }}' in build, "conda-forge asks for it beside every compiler"
        assert output["tests"], "a package without tests"
        assert "path" not in str(output.get("source", "")), "sources of the checkout"
    # None of the names that only our own variants know.
    ours = {
        "cuda_tag",
        "kernels_digest",
        "operators_digest",
        "sage_package",
        "sage_project",
        "sage_version",
        "sage_number",
        "sage_build",
        "sage_commit",
        "pytorch_version",
        "cuda_ptx",
    }
    assert not [name for name in ours if re.search(rf"\b{name}\b", text)]
    named = {output["build"]["script"]["file"] for output in recipe["outputs"]} | {"test_cpu.py"}
    assert named == {path.name for path in folder.iterdir()} - {"recipe.yaml"}
    assert all((folder / name).read_bytes() == (ROOT / "recipe" / name).read_bytes() for name in named)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(feedstock.FeedstockError, match="asks for maintainers"):
        feedstock.write(SOURCE, [], tmp_path)
    asked = ["feedstock", "--repository", "someone/sageattention", "--tag", "v2.2.0", "--maintainer", "someone"]
    assert commands.main(asked) == 1
    assert f"--sha256 is not given: `curl -sL {SOURCE.url} | sha256sum` says it" in capsys.readouterr().err


def test_the_tag_is_of_the_version_that_the_recipe_says(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["feedstock", "--repository", "someone/sageattention", "--sha256", SUM, "--maintainer", "someone"]
    assert commands.main([*asked, "--tag", "v2.1.0"]) == 1
    assert "tag v2.1.0 is not one of sageattention 2.2.0" in capsys.readouterr().err
