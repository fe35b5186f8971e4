"""A build as a kernel of the Hugging Face hub: its folder's name, its metadata, and that it holds what the packages hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import samples

from sage_factory import commands
from sage_factory.make import hub, wheels
from sage_factory.what import matrix


def test_the_same_files_but_for_the_namespace(tmp_path: Path) -> None:
    operators, cubins = samples.operators_conda(tmp_path / "linux-64"), samples.cubins_conda(tmp_path / "noarch")
    laid = hub.lay(operators, cubins, tmp_path / "hub")
    assert laid == tmp_path / "hub" / "sage-attention" / "build" / "torch28-cxx11-cu128-x86_64-linux"
    files = {path.relative_to(laid).as_posix(): path.read_bytes() for path in laid.rglob("*") if path.is_file()}
    made, metadata = (json.loads(files.pop(name)) for name in ("_build.json", "metadata.json"))
    packed = {f"sageattention/{name}": data for name, data in files.items() if name != "LICENSE"}
    payload = {name: data for name, data in wheels.payload(operators, cubins).items() if name.startswith("sageattention/")}
    assert packed == {name: data for name, data in payload.items() if name != "sageattention/_build.json"}
    assert {**json.loads(payload["sageattention/_build.json"]), "namespace": "sageattention_torch280_cu128_h2"} == made
    assert metadata == {
        "name": "sage-attention",
        "id": "sageattention_torch280_cu128_h2",
        "version": 2,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ["8.0", "8.6", "8.9", "9.0a", "10.0", "12.0", "8.0+PTX"]},
    }


def test_each_package_is_a_kernel_of_its_own(tmp_path: Path) -> None:
    """`hub` lays all that there are; FP4's has a version of its own, and says that it runs on no other GPUs."""
    for package in matrix.load().packages:
        samples.operators_conda(tmp_path / "conda" / "linux-64", package=package)
        samples.cubins_conda(tmp_path / "conda" / "noarch", package=package)
    assert commands.main(["hub", "--dist", str(tmp_path), "--out", str(tmp_path / "hub")]) == 0
    laid = tmp_path / "hub" / "sage-blackwell" / "build" / "torch28-cxx11-cu128-x86_64-linux"
    assert (laid.parents[2] / "sage-attention" / "build" / laid.name / "metadata.json").is_file()
    metadata = json.loads((laid / "metadata.json").read_text())
    assert metadata == {
        "name": "sage-blackwell",
        "id": "sageattn3_torch280_cu128_h2",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ["12.0a"]},
    }
    assert json.loads((laid / "_build.json").read_text())["namespace"] == metadata["id"]


def test_laid_again_in_place_of_what_was_there(tmp_path: Path) -> None:
    packages = samples.operators_conda(tmp_path / "linux-64"), samples.cubins_conda(tmp_path / "noarch")
    first = hub.lay(*packages, tmp_path / "hub")
    (first / "stale.py").write_text("")
    assert hub.lay(*packages, tmp_path / "hub") == first
    assert not (first / "stale.py").exists()
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_two_at_once_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = samples.operators_conda(tmp_path / "linux-64"), samples.cubins_conda(tmp_path / "noarch")
    held: list[bool] = []

    def renamed(path: Path, target: Path) -> Path:
        held.append(samples.locked(tmp_path / "hub"))
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", renamed)
    for _ in range(2):
        hub.lay(*packages, tmp_path / "hub")
    assert held == [True] * 3, "what one writes no other removes"


@pytest.mark.parametrize("step", ["renaming", "removing"])
def test_one_that_is_killed_leaves_a_whole_one(step: str, tmp_path: Path) -> None:
    packages = samples.operators_conda(tmp_path / "linux-64"), samples.cubins_conda(tmp_path / "noarch")
    first = hub.lay(*packages, tmp_path / "hub")
    files = {path.name for path in first.rglob("*")}

    def killed(path: Path, *rest: object, **options: object) -> object:
        if path.is_dir() and path.name.startswith(f".{first.name}."):
            raise KeyboardInterrupt
        return act(path, *rest, **options)

    owner, name = (Path, "rename") if step == "renaming" else (shutil, "rmtree")
    act = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            hub.lay(*packages, tmp_path / "hub")
    there = first if step == "removing" else first.with_name(f".{first.name}.old")
    assert {path.name for path in there.rglob("*")} == files
    assert hub.lay(*packages, tmp_path / "hub") == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize(
    ("platform", "torch", "abi", "name"),
    [
        ("linux-64", "2.8.0", True, "torch28-cxx11-cu128-x86_64-linux"),
        ("linux-64", "2.10.0", True, "torch210-cxx11-cu128-x86_64-linux"),
        ("linux-64", "2.7.0", False, "torch27-cxx98-cu128-x86_64-linux"),
        ("linux-aarch64", "2.8.0", True, "torch28-cxx11-cu128-aarch64-linux"),
        ("win-64", "2.8.0", True, "torch28-cu128-x86_64-windows"),
    ],
)
def test_names(platform: str, torch: str, abi: bool, name: str) -> None:
    build = matrix.builds(platform=platform, torch=torch, cuda="12.8")[0]
    assert hub.variant(build, cxx11_abi=abi) == name


def test_the_stable_abis_name() -> None:
    (build,) = matrix.builds("stable-abi", platform="linux-64", cuda="12.8")
    assert hub.variant(build, cxx11_abi=True) == "torch-stable-abi29-cu128-x86_64-linux"


def test_nothing_is_laid_of_a_faulty_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dist = samples.a_dist(tmp_path / "dist")
    arguments = ["hub", "--dist", str(dist), "--out", str(tmp_path / "hub")]
    assert commands.main(arguments) == 0
    (laid,) = (tmp_path / "hub" / "sage-attention" / "build").iterdir()
    assert capsys.readouterr().out == f"{laid}\n"
    (operators,) = dist.glob("conda/linux-64/*.conda")
    operators.write_bytes(operators.read_bytes()[:-40])
    assert commands.main([*arguments[:-1], str(tmp_path / "other")]) == 1
    assert not (tmp_path / "other").exists()
    assert commands.main(["hub", "--dist", str(tmp_path / "nothing")]) == 1
    assert "holds no conda package of operators" in capsys.readouterr().err
