"""Wheels in clean environments, with stand-ins of a few bytes for PyTorch and for what is in the wheel. The real ones are CI's."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import loopback
import pytest
import samples
import tools

from sage_factory import commands
from sage_factory.inspect import clean
from sage_factory.what import matrix
from sage_factory.what.build import Build

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
pytestmark = [
    pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the stand-ins are for linux-64"),
    pytest.mark.skipif(
        PYTHON not in matrix.load().pytorch["2.8.0"].python, reason="PyTorch 2.8 has no release for this Python"
    ),
]
# It prints where it is and what is installed, and is itself what `python -m sageattention` runs.
SCRIPT = "import sys; from importlib.metadata import version; print(*sys.version_info[:2], version('torch'), version('sageattention'))\n"


@pytest.fixture
def torches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pip's index has some PyTorches, and nothing else."""
    for version in ("2.7.1", "2.8.0", "2.8.1", "2.9.0"):
        samples.other_wheel(tmp_path / "index" / "torch", "torch", version)
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    uv = tools.beside("uv")
    assert uv, "uv is not installed: it is among the tests' requirements"
    monkeypatch.setenv("PATH", str(Path(uv).parent), prepend=os.pathsep)
    with loopback.offering(tmp_path / "index") as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield


def dist(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = SCRIPT) -> Path:
    (folder / "test.py").write_text(script)
    monkeypatch.setattr(clean.tried, "__defaults__", (folder / "test.py",))
    build = samples.build(PYTHON)
    path = samples.tiny_wheel(folder / "wheels", build)
    more = {"sageattention/_build.json": b"{}", "sageattention/__main__.py": script.encode()}
    return samples.rewrite(path, samples.contents(path) | more).parent


@pytest.mark.usefixtures("torches")
def test_both_forms_are_installed_beside_the_newest_of_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = dist(tmp_path, monkeypatch)
    assert commands.main(["clean-install", "--wheels", str(wheels), "--python", PYTHON, "--index-url", "https://x.org"]) == 0
    here = PYTHON.replace(".", " ")
    assert capsys.readouterr().out.splitlines()[:-1] == [
        *[f"{here} 2.8.1 2.2.0"] * 2,
        *[f"{here} 2.8.1 2.2.0+torch2.8.cu128"] * 2,
    ]


@pytest.mark.usefixtures("torches")
def test_the_users_own_modules_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = dist(tmp_path, monkeypatch)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pip.py").write_text("raise SystemExit('not this pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    assert commands.main(["clean-install", "--wheels", str(wheels), "--python", PYTHON, "--index-url", "https://x.org"]) == 0


@pytest.mark.usefixtures("torches")
def test_a_wheel_that_does_not_run_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = dist(tmp_path, monkeypatch, "import sys; sys.exit('undefined symbol: _ZN')")
    assert commands.main(["clean-install", "--wheels", str(wheels), "--torch", "2.8.0", "--cuda", "12.8"]) == 1
    assert f"{samples.build(PYTHON).wheel_name} does not run: undefined symbol: _ZN" in capsys.readouterr().err


def test_a_wheel_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        commands.main(["clean-install", "--wheels", str(tmp_path), "--torch", "2.8.0", "--cuda", "12.8", "--python", "3.9"])
        == 1
    )
    assert "holds no wheel of that kind for this machine: sageattention-2.2.0-280.128-cp39-" in capsys.readouterr().err


@pytest.mark.parametrize(("torch", "abi", "from_pip"), [("2.6.0", True, False), ("2.6.0", False, True), ("2.8.0", True, True)])
def test_the_pytorch_is_pips_but_where_its_abi_is_another(
    torch: str, abi: bool, from_pip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's 2.6.0 for Linux has the old C++ ABI."""
    asked: list[list[str]] = []
    monkeypatch.setattr(clean, "_run", lambda _, command, **__: asked.append(command))
    build = next(b for b in matrix.builds(platform="linux-64", torch=torch))
    ((python, series),) = clean.pytorches(build)
    assert python == build.python
    clean.pytorch(Path("python"), build, series, cxx11_abi=abi)
    ((*command, wanted),) = asked
    assert wanted == f"torch=={build.torch_series}.*"
    assert ("--torch-backend" not in command) is from_pip
    windows = next(b for b in matrix.builds(platform="win-64", torch=torch))
    clean.pytorch(Path("python"), windows, series, cxx11_abi=True)
    assert "--torch-backend" not in asked[-1]


def test_one_for_every_pytorch_is_tried_beside_the_first_and_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest has no release for the oldest Python that the wheel is for."""
    made: list[str] = []
    tried: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def environment(python: str) -> Iterator[Path]:
        made.append(python)
        yield tmp_path / str(len(made))

    def pytorch(interpreter: Path, _build: Build, wanted: str, **_abi: bool) -> None:
        tried.append((interpreter.name, wanted))

    def runs(interpreter: Path, files: Sequence[Path], _package: str) -> None:
        tried.append((interpreter.name, *(path.name for path in files)))

    for name, stand_in in (("environment", environment), ("pytorch", pytorch), ("tried", runs)):
        monkeypatch.setattr(clean, name, stand_in)
    (build,) = matrix.builds("stable-abi", platform="linux-64", cuda=samples.CUDA)
    wheel = samples.a_stable_wheel(tmp_path)
    assert commands.main(["clean-install", "--wheels", str(wheel.parent), "--torch", "2.9+", "--cuda", samples.CUDA]) == 0
    newest = list(matrix.load().pytorch.values())[-1]
    assert build.python not in newest.python
    assert made == [build.python, newest.python[-1]]
    both = build.wheel_name, build.index_name
    assert tried == [("1", "torch==2.9.*"), ("1", *both), ("2", "torch>=2.9"), ("2", *both)]
