"""pixi.toml: valid, in agreement with variants.yaml, and within what run.py understands."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sage_factory import ROOT, commands
from sage_factory.what import matrix
from sage_factory.with_what import locks, tasks, venvs

MANIFEST: dict[str, Any] = tomllib.loads((ROOT / "pixi.toml").read_text(encoding="utf-8"))
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tag(cuda: str) -> str:
    return "cu" + cuda.replace(".", "")


def test_is_valid_against_the_schema_of_pixi() -> None:
    path = tools.shared("pixi-manifest.schema.json")
    if path is None:
        pytest.skip("the schema of pixi's manifest does not lie beside this checkout (../shared/pixi-manifest.schema.json)")
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(path.read_text(encoding="utf-8"))
    faults = [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(MANIFEST)]
    assert faults == []
    broken = MANIFEST | {"tasks": {"x": {"command": "python"}}}
    assert not jsonschema.Draft7Validator(schema).is_valid(broken)


def test_what_it_names_of_cuda_is_in_the_table() -> None:
    """Shortcuts for some CUDA versions: `build --cuda X` builds for any without being named here."""
    assert MANIFEST["tasks"]["build"]["cmd"] == "python scripts build"
    features = {name for name in MANIFEST["feature"] if re.fullmatch(r"cu\d+", name)}
    assert features >= {"cu126", "cu128", "cu129", "cu130"}
    others = {f"build-{package}" for package in matrix.load().packages} - {"build-sageattention"}
    assert {name for name in MANIFEST["tasks"] if name.startswith("build-")} == {f"build-{name}" for name in features} | others
    by_tag = {tag(cuda): cuda for cuda in matrix.load().cuda}
    for name in features:
        # Kernels are compiled on Linux alone.
        assert MANIFEST["feature"][name]["target"]["linux"]["dependencies"] == {
            "cuda-nvcc": f"{by_tag[name]}.*",
            "cuda-version": f"{by_tag[name]}.*",
        }
        assert MANIFEST["environments"][name] == [name, "compiler", "build", "any-driver"]
        task = MANIFEST["tasks"][f"build-{name}"]
        assert task["cmd"] == f"python scripts build --cuda {by_tag[name]}"
    # A build's compiler is the one that the recipe requires: only who works on kernels looks for nvcc on the path.
    compilers = {task.get("default-environment") for task in MANIFEST["tasks"].values()} & features
    assert compilers == {MANIFEST["tasks"]["kernels"]["default-environment"]} == {tag(matrix.load().development_cuda)}
    assert all("default-environment" not in task for name, task in MANIFEST["tasks"].items() if name.startswith("build"))


def test_platforms_are_those_that_lock_writes() -> None:
    text = (ROOT / "pixi.toml").read_text(encoding="utf-8")
    assert locks.with_platforms(text) == text
    platforms = list(matrix.load().platforms)
    assert MANIFEST["feature"]["any-driver"]["platforms"] == platforms
    entries = MANIFEST["workspace"]["platforms"]
    assert [entry for entry in entries if isinstance(entry, str)] == platforms
    assert [entry["name"] for entry in entries if isinstance(entry, dict)] == [f"{name}-cuda" for name in platforms]
    # The first that the machine satisfies is taken.
    assert all(entries.index(name) > 0 and entries[entries.index(name) - 1]["platform"] == name for name in platforms)


def test_lock_writes_the_manifest_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    older = re.sub(r'\n  "[a-z0-9-]+",\n\]', "\n]", (ROOT / "pixi.toml").read_text(encoding="utf-8"), count=1)
    (tmp_path / "pixi.toml").write_text(older, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "packaging.md", tmp_path / "docs")
    monkeypatch.setattr("sage_factory.commands.lock.ROOT", tmp_path)
    monkeypatch.setattr(locks, "locks", list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert commands.main(["lock"]) == 1
    assert (tmp_path / "pixi.toml").read_text(encoding="utf-8") == older
    assert commands.main(["lock"]) == 0
    assert (tmp_path / "pixi.toml").read_text(encoding="utf-8") == (ROOT / "pixi.toml").read_text(encoding="utf-8") != older


def test_the_tests_use_the_pytorch_that_their_wheel_is_built_for() -> None:
    cuda = matrix.load().development_cuda
    torch = matrix.load().default_torch(cuda, "sageattention")
    assert MANIFEST["feature"]["torch"]["dependencies"] == {"pytorch": ".".join(torch.split(".")[:2]) + ".*"}
    assert MANIFEST["tool"]["run"]["environments"]["test"] == ["test", f"torch-{torch}"]
    needed = [{"task": f"build-{tag(cuda)}", "environment": "default"}]
    other = [{"task": "build-sageattn3", "environment": "default"}]
    for name, depends in (("test", needed + other), ("bench", needed), ("predict", needed)):
        assert MANIFEST["tasks"][name]["depends-on"] == depends


def test_the_host_compiler_is_the_one_of_the_table() -> None:
    assert MANIFEST["feature"]["compiler"]["target"]["linux"]["dependencies"]["gxx"] == f"{matrix.load().gcc}.*"


def test_environments_name_features_that_exist() -> None:
    for environment, features in MANIFEST["environments"].items():
        assert set(features) <= set(MANIFEST["feature"]), environment


def test_every_task_is_described_and_runs_in_an_environment() -> None:
    wanted = {"build-cu126", "build-cu128", "build-cu129", "build-cu130", "test", "lint", "bench", "matrix", "verify"}
    assert wanted <= MANIFEST["tasks"].keys()
    for name, task in MANIFEST["tasks"].items():
        assert task["description"], name
        assert task.get("default-environment", "default") in MANIFEST["environments"], name


def test_every_task_is_understood_by_run_py() -> None:
    manifest = tasks.Manifest.read(ROOT / "pixi.toml")
    assert list(manifest.tasks) == list(MANIFEST["tasks"])
    for name in manifest.tasks:
        for step in tasks.plan(manifest, name):
            assert step.command[:2] == ("python", "scripts"), name


def test_run_py_has_locks_for_every_environment() -> None:
    entries = MANIFEST["tool"]["run"]["environments"]
    assert entries.keys() == MANIFEST["environments"].keys()
    for names in entries.values():
        for name in names:
            assert venvs.lock_file(name).is_file()


def locked(name: str) -> set[str]:
    text = venvs.lock_file(name).read_text(encoding="utf-8")
    return {canonicalize_name(found) for found in re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)}


# What is called otherwise on conda-forge, and what PyPI has not or a virtual environment and the recipe's channel bring.
ON_PYPI = {"cuda-nvdisasm": "nvidia-cuda-nvdisasm", "matplotlib-base": "matplotlib"}
CONDA_ALONE = {
    "actionlint", "cmake", "cuda-nvcc", "cuda-version", "gh", "gxx",
    "ninja", "pip", "python", "pytorch", "rattler-build",
}  # fmt: skip


def of_group(group: str) -> dict[str, str]:
    """What a dependency group asks for, with the groups that it includes."""
    asked: dict[str, str] = {}
    for entry in PYPROJECT["dependency-groups"][group]:
        if isinstance(entry, str):
            found = Requirement(entry)
            asked[canonicalize_name(found.name)] = str(found.specifier) or "*"
        else:
            asked |= of_group(entry["include-group"])
    return asked


def of_environment(environment: str) -> dict[str, str]:
    """What an environment of pixi.toml asks for on any platform, by its names on PyPI."""
    asked: dict[str, str] = {}
    for feature in (MANIFEST["feature"][name] for name in MANIFEST["environments"][environment]):
        for table in (feature, *feature.get("target", {}).values()):
            asked |= table.get("dependencies", {}) | table.get("pypi-dependencies", {})
    return {canonicalize_name(ON_PYPI.get(name, name)): spec for name, spec in asked.items() if name not in CONDA_ALONE}


@pytest.mark.parametrize("group", PYPROJECT["dependency-groups"])
def test_pixi_pyproject_and_lock_have_the_same_requirements(group: str) -> None:
    assert of_group(group) == of_environment("default" if group == "build" else group)
    assert of_group(group).keys() <= locked(group), "run `python3 scripts/run.py lock`"


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("scripts/locks/*.txt"), *ROOT.glob("recipe/pypi/*.txt")]), ids=lambda p: p.stem
)
def test_locks_pin_hashes_and_name_no_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    for entry in text.replace("\\\n", " ").splitlines():
        assert re.fullmatch(r"[\w.-]+==[^ ]+( ;.*?)?( +--hash=sha256:[0-9a-f]{64})+", entry.strip()), entry[:100]
