"""pixi.toml against conda-forge's records: what each environment asks for on each platform can be had together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from rattler.exceptions import SolverError

from conda_forge import faults, model, refresh
from conda_forge.manifest import Manifest, Table, shown
from sage_factory import ROOT
from sage_factory.what import matrix

TEXT = (ROOT / "pixi.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table(forge: str) -> Table:
    return Manifest(TEXT).solved(forge)


def test_every_environment_is_solved_on_every_platform(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest(TEXT)
    assert table.keys() == manifest.environments.keys()
    with capsys.disabled():
        print("\npixi.toml on conda-forge, environment × platform: packages known to the model, compiler, PyTorch")
        print("\n".join(shown(table, list(manifest.platforms))))


def test_with_a_driver_pytorch_comes_with_cuda_and_without_one_it_does_not(table: Table) -> None:
    for environment in ("test", "bench"):
        builds = {platform: found["pytorch"].split()[1] for platform, found in table[environment].items()}
        assert len(builds) == 6
        for platform, build in builds.items():
            assert build.startswith("cuda12" if platform.endswith("-cuda") else "cpu"), platform


def test_no_driver_is_needed_where_none_changes_anything(table: Table) -> None:
    bare = list(matrix.load().platforms)
    for environment in table.keys() - {"test", "bench"}:
        assert list(table[environment]) == bare, environment
    for cuda, environment in (("12.6", "cu126"), ("13.0", "cu130")):
        for platform in ("linux-64", "linux-aarch64"):
            assert table[environment][platform]["cuda-nvcc"].startswith(cuda)


def test_an_environment_has_what_its_tasks_need_and_no_more(table: Table) -> None:
    for environment, of in table.items():
        for platform, found in of.items():
            compiles = {"gxx", "cmake", "ninja", "cuda-nvcc"} & found.keys()
            assert bool(compiles) == (platform.startswith("linux-") and (environment == "test" or environment.startswith("cu")))
            assert ("pytorch" in found) == (environment in ("test", "bench"))
            assert ({"diffusers", "transformers"} <= found.keys()) == (environment == "test")
            assert ("rattler-build" in found) == (environment == "release")


def test_a_refreshed_model_says_the_same(table: Table, forge: str, tmp_path: Path) -> None:
    """Made of the model, as it would be of conda-forge."""
    path = tmp_path / "model.yaml"
    path.write_text(asyncio.run(refresh.refreshed(forge)), encoding="utf-8")
    channel = model.lay(tmp_path / "conda-forge", model.records(path)).as_uri()
    assert Manifest(TEXT).solved(channel) == table


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faults.platform_named_like_its_subdir, "cannot declare virtual packages"),
        (faults.compiler_for_13_where_the_driver_is_12, "__cuda"),
        (faults.pixi_that_gives_a_bare_name_to_variants, "before pixi 0.72.1 linux-64 means its variants too"),
        (faults.floors_that_conda_forge_does_not_have, "py-rattler >=0.28"),
    ],
)
def test_a_manifest_with_a_fault_is_refused(fault: Callable[[str], str], said: str, forge: str) -> None:
    assert list(Manifest(TEXT).refused()) == []
    broken = fault(TEXT)
    assert broken != TEXT
    manifest = Manifest(broken)
    found = list(manifest.refused())
    if not found:
        with pytest.raises(SolverError) as caught:
            manifest.solved(forge)
        found = [str(caught.value)]
    assert said in found[0]
