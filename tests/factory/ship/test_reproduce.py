"""Building again: from which commit, in a checkout of its own, and what is said of the two files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import samples

from sage_factory import commands
from sage_factory.git import git
from sage_factory.make import seal, wheels
from sage_factory.ship import reproduce
from sage_factory.what import inputs, matrix
from sage_factory.with_what import venvs

SOURCES = ("csrc", "README.md")


# Which commit.


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small git repository in the project's place."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setattr("sage_factory.git.ROOT", root)
    monkeypatch.setattr(reproduce, "PLACE", root / "build" / "reproduce")
    monkeypatch.setattr(inputs, "OPERATORS", SOURCES)
    for kind in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{kind}_NAME", "x")
        monkeypatch.setenv(f"GIT_{kind}_EMAIL", "x@example.org")
    git("init", "--quiet", "--initial-branch=main")
    return root


def commit(root: Path, files: Mapping[str, str], when: int = 1_700_000_000) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    git("add", *files)
    git("commit", "--quiet", "-m", "x", f"--date={when}")
    return git("rev-parse", "HEAD")


def made(at: str) -> reproduce.Origin:
    return reproduce.Origin("v2.2.0", at, SOURCES, ("--cuda", "12.8"))


def test_the_release_is_built_again_else_this_checkout_else_the_sources(repository: Path) -> None:
    sources = commit(repository, {"csrc/a.cpp": "1", "README.md": "1", "variants.yaml": "1"})
    assert reproduce.checkout_of(made(sources)) == sources
    table = commit(repository, {"variants.yaml": "2"})
    assert reproduce.checkout_of(made(sources)) == table, "the sources are the same, and the table may be what was built by"
    git("tag", "v2.2.0")
    later = commit(repository, {"variants.yaml": "3"})
    assert reproduce.checkout_of(made(sources)) == table
    git("tag", "v2.1.0")
    assert reproduce.checkout_of(made(sources)) == table
    newer = commit(repository, {"csrc/a.cpp": "2"})
    git("tag", "-d", "v2.2.0")
    assert reproduce.checkout_of(made(sources)) == sources
    assert reproduce.checkout_of(made(newer)) == newer
    assert later != newer


def test_of_releases_of_the_same_sources_it_is_the_one_whose_table_has_the_number(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = matrix.TABLE.read_text(encoding="utf-8")
    row = '{pytorch: 2.8.0, cuda: "12.8"}'
    assert row in text
    first = commit(repository, {"csrc/a.cpp": "1", "README.md": "1", "variants.yaml": text})
    git("tag", "v2.2.0")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "4000000000 +0000")  # later
    repaired = commit(repository, {"variants.yaml": text.replace(row, row.replace("}", ", build: 1}"))})
    git("tag", "v2.2.0-build.1")
    build = samples.build()
    for number, expected in ((0, first), (1, repaired), (2, repaired)):
        of = dataclasses.replace(made(first), build=dataclasses.replace(build, number=number))
        assert reproduce.checkout_of(of) == expected
    other = dataclasses.replace(build, cuda="12.9")  # was not repaired
    assert reproduce.checkout_of(dataclasses.replace(made(first), build=other)) == repaired


def a_wheel(folder: Path, at: str) -> Path:
    files = samples.operators()
    name = "site-packages/sageattention/_build.json"
    files[name] = json.dumps({**json.loads(files[name]), "commit": at}).encode()
    operators = samples.operators_conda(folder, files)
    return wheels.emit(operators, samples.cubins_conda(folder), build=samples.build(), out_dir=folder)


def fake_build(out: Callable[[Path], object]) -> Callable[[Path, Sequence[str]], Path]:
    """In place of the minutes of a real build: something that puts files into the checkout's dist/."""

    def build(place: Path, arguments: Sequence[str]) -> Path:
        assert (place / "csrc" / "a.cpp").read_text() == "1", "the checkout is of the commit"
        assert list(arguments) == ["--cuda", "12.8", "--torch", "2.8.0", "--python", "3.12"]
        out(place / "dist" / "wheels")
        return place / "dist"

    return build


@pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the samples are for linux-64")
def test_a_wheel_is_built_again_in_a_checkout_of_its_own(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = commit(repository, {"csrc/a.cpp": "1", "README.md": "1"})
    commit(repository, {"csrc/a.cpp": "2"})
    path = a_wheel(tmp_path / "published", at)
    monkeypatch.setattr(reproduce, "build", fake_build(lambda folder: a_wheel(folder, at)))
    assert commands.main(["reproduce", str(path)]) == 0
    assert f"identical: {path.name}, sha256 " in capsys.readouterr().out
    assert list(reproduce.PLACE.iterdir()) == []
    assert git("worktree", "list").count("\n") == 0

    offered = wheels.for_index(path, build=samples.build(), out_dir=tmp_path / "index", index_url="https://example.org/")
    with monkeypatch.context() as later:  # the table has no such build any more
        later.setattr(reproduce, "build", fake_build(lambda folder: shutil.copytree(path.parent, folder)))
        samples.promise((), later)
        assert commands.main(["reproduce", str(offered)]) == 0
    assert f"identical: {offered.name}, sha256 " in capsys.readouterr().out

    def other(folder: Path) -> None:
        again = a_wheel(folder, at)
        samples.rewrite(again, samples.contents(again) | {"sageattention/__init__.py": b"changed\n"})

    monkeypatch.setattr(reproduce, "build", fake_build(other))
    assert commands.main(["reproduce", str(path)]) == 1
    assert "sageattention/__init__.py: line 1 is '' and 'changed'" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="there no environment is shared")
@pytest.mark.parametrize("code", ["as here", "another"])
def test_environments_are_shared_with_a_checkout_that_would_make_the_same(
    repository: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    lock, module = repository / "locks" / "build.txt", repository / "venvs.py"
    first = commit(repository, {"locks/build.txt": "", "venvs.py": "as here"})
    if code != "as here":
        commit(repository, {"venvs.py": code})
    monkeypatch.setattr(reproduce, "ROOT", repository)
    for name, value in (("LOCKS", (lock.parent,)), ("__file__", str(module)), ("complete", lambda _: True)):
        monkeypatch.setattr(venvs, name, value)
    with reproduce.checkout(first) as place:
        assert (place / ".venvs" / "build").is_symlink() == (code == "as here")


def test_an_environment_that_is_not_whole_is_not_shared(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other checkout makes its own, and leaves this one's alone."""
    first = commit(repository, {"locks/build.txt": "", "venvs.py": "as here"})
    monkeypatch.setattr(reproduce, "ROOT", repository)
    for name, value in (
        ("LOCKS", (repository / "locks",)),
        ("__file__", str(repository / "venvs.py")),
        ("complete", lambda _: False),
    ):
        monkeypatch.setattr(venvs, name, value)
    with reproduce.checkout(first) as place:
        assert not (place / ".venvs" / "build").is_symlink()


@pytest.mark.parametrize("channel", ["pypi", "conda-forge"])
def test_a_build_has_the_files_own_time_and_environment(channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, str]] = []

    def run(command: Sequence[str], *, env: Mapping[str, str], **_options: object) -> subprocess.CompletedProcess[str]:
        asked.append(env)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("SAGEATTENTION_CHANNEL", channel)
    mine = ("SOURCE_DATE_EPOCH", "PIXI_PROJECT_ROOT", "VIRTUAL_ENV")
    for name in mine:
        monkeypatch.setenv(name, "1600000000")
    assert reproduce.build(tmp_path, ["--cuda", "12.8"]) == tmp_path / "dist"
    (environment,) = asked
    assert "PATH" in environment
    assert not environment.keys() & {*mine}


def test_what_cannot_be_built_again(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(repository, {"csrc/a.cpp": "1"})
    for at, said in (("c" * 40 + "+", "changes after c+ that were not committed"), ("", "no git checkout")):
        assert commands.main(["reproduce", str(a_wheel(tmp_path / "wheel", at))]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert commands.main(["reproduce", str(a_wheel(tmp_path / "wheel", "d" * 40))]) == 2
    assert f"there is no commit {'d' * 40} here: `git fetch --tags`" in capsys.readouterr().err
    broken = tmp_path / "sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl"
    broken.write_bytes(b"PK")
    assert commands.main(["reproduce", str(broken)]) == 2
    assert "not a whole zip archive" in capsys.readouterr().err


@pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the samples are for linux-64")
def test_what_nobody_merged_is_not_executed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file names the commit that is executed, and a pull request's commits are in the repository too."""
    monkeypatch.setattr(reproduce, "build", lambda *_: pytest.fail("it was executed"))
    commit(repository, {"csrc/a.cpp": "1", "README.md": "1"})
    git("checkout", "--quiet", "-b", "proposed")
    evil = commit(repository, {"csrc/a.cpp": "evil"})
    git("update-ref", "refs/pull/7/head", evil)
    git("checkout", "--quiet", "main")
    git("branch", "--quiet", "-D", "proposed")
    path = a_wheel(tmp_path / "published", evil)
    for more in ([], ["--commit", evil]):
        assert commands.main(["reproduce", str(path), *more]) == 2
        assert f"no release and not main holds commit {evil[:12]}" in capsys.readouterr().err
    git("tag", "v2.2.0", evil)
    reproduce.trusted(evil)


@pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the samples are for linux-64")
def test_a_wheel_for_every_python_is_built_for_none(repository: Path, tmp_path: Path) -> None:
    at = commit(repository, {"csrc/a.cpp": "1"})
    files = samples.operators()
    name = "site-packages/sageattention/_build.json"
    files[name] = json.dumps({**json.loads(files[name]), "torch": "2.9+", "commit": at}).encode()
    (one,) = matrix.builds("stable-abi", platform="linux-64", cuda=samples.CUDA)
    packages = samples.operators_conda(tmp_path, files), samples.cubins_conda(tmp_path)
    path = wheels.emit(*packages, build=one, out_dir=tmp_path)
    assert "-py3-none-" in path.name
    assert reproduce.origin(path).arguments == ("--cuda", samples.CUDA, "--torch", "2.9+")


def test_kernels_are_found_by_their_time(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMITTER_DATE", "1700000100 +0000")
    monkeypatch.setattr(inputs, "KERNELS", ("csrc",))
    at = commit(repository, {"csrc/a.cu": "1"})
    package = samples.cubins_conda(tmp_path)
    seal.seal(package, 1_700_000_100)
    assert reproduce.origin(package) == reproduce.Origin("v2.2.0", at, ("csrc",), ("--kernels", "--cuda", "12.8"))
    seal.seal(package, 1_700_000_101)
    with pytest.raises(reproduce.ReproduceError, match="no commit here changed csrc at 1700000101"):
        reproduce.origin(package)


def test_another_digest_is_said(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "KERNELS", ("csrc",))
    monkeypatch.setenv("GIT_COMMITTER_DATE", "1700000100 +0000")
    commit(repository, {"csrc/a.cu": "1"})
    package = samples.cubins_conda(tmp_path)
    seal.seal(package, 1_700_000_100)

    def build(place: Path, _arguments: Sequence[str]) -> Path:
        made = samples.conda(place / "dist" / "noarch", {}, {**samples.index("sageattention-cubins"), "build": "cu128_h9_0"})
        seal.seal(made, 1_700_000_100)
        return place / "dist"

    monkeypatch.setattr(reproduce, "build", build)
    found = reproduce.reproduce(package, None)
    assert found[0].startswith("the build made sageattention-cubins-2.2.0-cu128_h9_0.conda: another digest means")
    assert any("info/index.json: build is" in line for line in found)
