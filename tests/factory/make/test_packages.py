"""The packages of a build: what is built again, what is not, and why a build failed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import samples
from rich.console import Console

from sage_factory import child
from sage_factory.clock import Clock
from sage_factory.make import packages
from sage_factory.what import inputs, matrix
from sage_factory.with_what import channel, venvs


def test_packages_already_there_are_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", tmp_path)
    monkeypatch.setattr(packages, "SOURCES", tmp_path / "sources")
    built: list[str] = []

    def fake(_self: packages.Packages, one: packages.Planned, *_rest: object) -> None:
        built.append(one.name)
        kernels, operators = (one.settings[f"{kind}_digest"][0] for kind in ("kernels", "operators"))
        cuda, torch = (one.settings[key][0].replace(".", "") for key in ("cuda_compiler_version", "pytorch_version"))
        string = f"cu{cuda}_h{kernels}_0" if "cubins" in one.name else f"torch{torch}_cu{cuda}_h{operators}_0"
        samples.assembled(tmp_path, one.name, string)

    monkeypatch.setattr(packages.Packages, "_build", fake)
    damaged: set[Path] = set()

    def faults(path: Path) -> list[str]:
        return [f"{path.name} is damaged"] if path in damaged else []

    here, found = matrix.host_platform(), packages.Packages("conda-forge", Console(quiet=True), Clock(), faults)
    by_torch = {t: matrix.builds(platform=here, cuda="12.8", torch=t, python="3.12")[0] for t in ("2.7.0", "2.8.0")}
    first = found.of(by_torch["2.8.0"])
    assert built == ["sageattention-cubins", "sageattention"]
    assert found.of(by_torch["2.8.0"]) == first
    assert len(built) == 2
    damaged.add(first[1])
    assert found.of(by_torch["2.8.0"]) == first
    assert built.pop() == "sageattention"
    damaged.clear()
    other = found.of(by_torch["2.7.0"])
    assert built == ["sageattention-cubins", "sageattention", "sageattention"], "kernels serve every PyTorch"
    assert other[0] == first[0]
    assert found.of(by_torch["2.8.0"], kernels_only=True) == first[:1]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that are built of, for a test to edit."""
    folder = tmp_path / "checkout"
    inputs.copy(["csrc", "recipe", "LICENSE", "README.md", "pyproject.toml", "sageattention", "variants.yaml"], folder)
    for function in (inputs.files, inputs.copy, inputs.digest, inputs.seconds, inputs.commit):
        monkeypatch.setattr(function, "__defaults__", (folder,))
    monkeypatch.setattr(packages.Packages._planned, "__defaults__", (folder,))
    monkeypatch.setattr(packages, "WORK", tmp_path)
    monkeypatch.setattr(packages, "PACKAGES", tmp_path / "conda")
    monkeypatch.setattr(packages, "SOURCES", tmp_path / "sources")
    return folder


def test_what_is_built_is_what_the_digest_is_of_whoever_edits_meanwhile(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = matrix.builds(platform=matrix.host_platform(), cuda="12.8", torch="2.8.0", python="3.12")[0]
    found = packages.Packages("conda-forge", Console(quiet=True), Clock(), lambda _path: [])
    kernel, module = (Path(name) for name in ("csrc/kernels/rotate.cuh", "sageattention/core.py"))
    before = {name: (checkout / name).read_bytes() for name in (kernel, module)}
    planned = found._planned(build)
    built: list[str] = []

    def run(_what: str, command: list[str | Path], **_options: object) -> None:
        name, recipe = str(command[3]), Path(command[command.index("--recipe") + 1])
        for one in before:
            (checkout / one).write_text(f"edited while {name} is built")
        assert (recipe.parents[1] / kernel).read_bytes() == before[kernel]
        assert (recipe.parents[1] / module).read_bytes() == before[module]
        path = planned[len(built)].path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        built.append(name)

    monkeypatch.setattr(child, "run", run)
    assert found.of(build) == [one.path for one in planned]
    assert built == ["sageattention-cubins", "sageattention"]
    assert {one.path for one in found._planned(build)}.isdisjoint(one.path for one in planned), "those are built next"


@pytest.mark.parametrize("changed", ["csrc/torch/ops.cpp", "commit", "seconds"])
def test_sources_that_change_while_they_are_copied_are_not_built(
    changed: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = matrix.builds(platform=matrix.host_platform(), cuda="12.8", torch="2.8.0", python="3.12")[0]
    found = packages.Packages("conda-forge", Console(quiet=True), Clock(), lambda _path: [])
    if changed in ("commit", "seconds"):
        answers = iter(range(10))
        monkeypatch.setattr(inputs, changed, lambda _names: str(next(answers)) if changed == "commit" else next(answers))
    else:
        copy = inputs.copy

        def edited(names: list[str], folder: Path) -> None:
            copy(names, folder)
            (checkout / changed).write_text("edited")

        monkeypatch.setattr(inputs, "copy", edited)
    with pytest.raises(packages.BuildError, match=r"the sources changed while they were copied.* run it again"):
        found.of(build)


def test_a_mirror_makes_the_packages_of_conda_forge() -> None:
    build = matrix.builds(platform="linux-64", cuda="12.8", torch="2.8.0", python="3.12")[0]

    def names(kind: str) -> list[str]:
        made = packages.Packages(kind, Console(quiet=True), Clock(), lambda _path: [])
        return [one.path.name for one in made._planned(build)]

    assert names("conda-forge") == names("https://mirror.example/conda-forge")
    assert names("conda-forge") != names("pypi")


@pytest.mark.parametrize(
    ("entry", "change", "kernels"),
    [
        ("", {"gcc": "13"}, True),
        ("platforms", {"glibc": "2.17"}, False),
        ("packages", {"version": "2.3.0"}, True),
    ],
)
def test_what_variants_yaml_says_of_a_build_is_in_its_name(
    monkeypatch: pytest.MonkeyPatch, entry: str, change: dict[str, str], kernels: bool
) -> None:
    table = matrix.load()
    build = matrix.builds(platform="linux-64", cuda="12.8", torch="2.8.0", python="3.12")[0]
    found = packages.Packages("conda-forge", Console(quiet=True), Clock(), lambda _path: [])
    before = [one.path.name for one in found._planned(build)]
    more: dict[str, Any] = dict(change)
    if entry:
        name, entries = {"platforms": build.platform, "packages": build.package}[entry], getattr(table, entry)
        more = {entry: {**entries, name: dataclasses.replace(entries[name], **change)}}
    changed = dataclasses.replace(table, **more)
    monkeypatch.setattr(matrix, "load", lambda: changed)
    build = next(one for one in changed.all_builds if (one.cuda, one.torch, one.python) == ("12.8", "2.8.0", "3.12"))
    after = [one.path.name for one in found._planned(build)]
    assert [old != new for old, new in zip(before, after, strict=True)] == [kernels, True]


@pytest.mark.parametrize(
    ("changed", "kernels"),
    [("shim", True), ("toolkit", True), ("ptx", True), ("architectures", True), ("compiler", False), ("lock", False)],
)
def test_what_a_build_from_pypi_is_made_with_is_in_its_name(
    changed: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a package that was made with another would be taken for it, and not built again."""
    monkeypatch.setattr(channel, "compiler", lambda: channel.Compiler("gcc", "g++", "12.2.0"))
    build = matrix.builds(platform="linux-64", cuda="12.8", torch="2.8.0", python="3.12")[0]
    found = packages.Packages("pypi", Console(quiet=True), Clock(), lambda _path: [])
    before = [one.path.name for one in found._planned(build)]
    other = tmp_path / "other"
    other.write_text("other")
    if changed == "shim":
        monkeypatch.setattr(channel, "SHIM", other)
    elif changed == "toolkit":
        table = matrix.load()
        cuda = dataclasses.replace(table.cuda["12.8"], pypi={**table.cuda["12.8"].pypi, "nvidia-cuda-nvrtc-cu12": "12.8.99"})
        one = dataclasses.replace(table, cuda={**table.cuda, "12.8": cuda})
        monkeypatch.setattr(matrix, "load", lambda: one)
    elif changed == "compiler":
        monkeypatch.setattr(channel, "compiler", lambda: channel.Compiler("gcc", "g++", "12.3.0"))
    elif changed == "lock":
        lock_file = venvs.lock_file
        monkeypatch.setattr(venvs, "lock_file", lambda name: other if name == "torch-2.8.0" else lock_file(name))
    else:
        build = dataclasses.replace(build, **{changed: getattr(build, changed)[1:]})
    after = [one.path.name for one in found._planned(build)]
    assert [old != new for old, new in zip(before, after, strict=True)] == [kernels, True]


def test_functions_bound_to_an_older_glibc_make_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    build = matrix.builds(platform="linux-64", cuda="12.8", torch="2.8.0", python="3.12")[0]
    found = packages.Packages("pypi", Console(quiet=True), Clock(), lambda _path: [])
    before = [one.path.name for one in found._planned(build)]
    monkeypatch.setattr(channel, "MOVED", channel.MOVED[1:])
    after = [one.path.name for one in found._planned(build)]
    assert [old != new for old, new in zip(before, after, strict=True)] == [False, True]


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        (["noise", "FAILED: k.cubin", "k.cu(3): error: no such thing", "ninja: build stopped", "more noise"], "pypi",
         "FAILED: k.cubin\nk.cu(3): error: no such thing"),
        (["noise", "  a.cpp:4:1: error: expected ')'", "  error: subprocess-exited-with-error", "error: Script failed"], "pypi",
         "a.cpp:4:1: error: expected ')'"),
        (["noise", "Traceback (most recent call last):", "RuntimeError: at import", "Script failed with status 1", "noise"], "pypi",
         "RuntimeError: at import"),
        (["noise", "$SRC_DIR/conda_build.sh: line 34: X: unbound variable", "Script failed with status 1", "noise",
          "error: PyRattlerBuildError: Script failed to execute"], "pypi", "conda_build.sh: line 34: X: unbound variable"),
        (["a word of no known kind", "Script failed with status 1", "noise", "error: PyRattlerBuildError: Script failed to execute"],
         "pypi", "a word of no known kind"),
        ([f"subdir linux-64 of channel {packages.WORK.as_uri()}/making/ was not found, ignoring",
          "subdir linux-64 of channel file:///does/not/exist/ was not found, ignoring", "error: Failed to resolve dependencies"],
         "/does/not/exist", "the channel file:///does/not/exist/ was not found, or has no linux-64: give --channel conda-forge"),
        ([f"subdir linux-64 of channel {packages.PACKAGES.as_uri()}/ was not found, ignoring", "error: Failed to resolve dependencies"],
         "https://mirror.example/conda-forge", "error: Failed to resolve dependencies"),
        (["cc1plus: fatal error: No space left on device"], "pypi", "free some space"),
        (["Request failed after 3 retries", "error: Failed to resolve dependencies"], "conda-forge",
         "name a mirror by `--channel` or SAGEATTENTION_CHANNEL, or build from PyPI with `--channel pypi`"),
        (["Retry attempt #2. Sleeping 2.6s before the next attempt", "error: Failed to resolve dependencies"], "conda-forge",
         "--channel pypi"),
        (["error: Failed to resolve dependencies"], "pypi", "error: Failed to resolve dependencies"),
    ],
)  # fmt: skip
def test_a_failed_build_says_why(lines: list[str], kind: str, said: str) -> None:
    message = packages._why(child.ChildError("building", 1, lines, Path("log")), kind)
    assert said in message
    assert "noise" not in message.partition("\n")[2]
