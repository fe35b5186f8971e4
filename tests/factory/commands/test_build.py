"""`build`: what is asked for, and errors in one line."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from sage_factory import ROOT
from sage_factory.commands import build
from sage_factory.inspect import verify
from sage_factory.make import packages
from sage_factory.ship import place
from sage_factory.what import matrix
from sage_factory.what.table import MatrixError
from sage_factory.with_what import channel


def arguments(**given: object) -> argparse.Namespace:
    defaults = {
        "package": None,
        "cuda": None,
        "torch": None,
        "python": None,
        "profile": None,
        "platform": None,
        "kernels": False,
    }
    return argparse.Namespace(**(defaults | given))


def test_a_bare_cuda_version_means_its_pytorch_and_the_python_at_hand() -> None:
    (group,) = build.requested(arguments(cuda="12.8"))
    assert [(one.package, one.torch, one.python) for one in group] == [("sageattention", "2.8.0", channel.PYTHON)]
    (group,) = build.requested(arguments(cuda="12.8", package="sageattn3"))
    assert [(one.package, one.torch, one.python) for one in group] == [("sageattn3", "2.8.0", channel.PYTHON)]


@pytest.mark.parametrize("cuda", ["12.9", "13.0", "13.1"])
def test_where_a_package_has_no_row_of_the_usual_pytorch_it_is_the_newest_that_it_has(cuda: str) -> None:
    (group,) = build.requested(arguments(cuda=cuda, package="sageattn3", python=["3.12"]))
    assert [one.wheel_name for one in group] == [
        f"sageattn3-1.0.0+cu{cuda.replace('.', '')}torch2.9.0-cp312-cp312-linux_x86_64.whl"
    ]


def test_a_profile_is_grouped_so_that_nothing_is_compiled_twice() -> None:
    groups = build.requested(arguments(profile="sage2-all", platform="linux-64"))
    assert [(group[0].torch, group[0].cuda, len(group)) for group in groups] == [
        ("2.6.0", "12.6", 4), ("2.7.0", "12.8", 3), ("2.8.0", "12.9", 3)
    ]  # fmt: skip
    kernels = build.requested(arguments(profile="all", platform="linux-64", kernels=True))
    assert [group[0].cuda for group in kernels if group[0].package == "sageattention"] == list(matrix.load().cuda), (
        "once a CUDA"
    )
    assert [group[0].cuda for group in kernels if group[0].package == "sageattn3"] == ["12.8", "12.9", "13.0", "13.1", "13.2"]


def test_kernels_are_for_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for that of the factory, which a package may have no wheel for."""
    monkeypatch.setattr("sage_factory.commands.build.channel.PYTHON", "3.11")
    (group,) = build.requested(arguments(package="sageattn3", cuda="13.0", platform="linux-64", kernels=True))
    assert {one.cuda for one in group} == {"13.0"}


def test_kernels_are_for_no_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the one that their CUDA version usually means, which a package may have no row of."""
    every = {"package": "sageattn3", "pytorch": "2.9+", "cuda": "13.0"}
    table = dataclasses.replace(matrix.load(), rows=(every,))
    monkeypatch.setattr(matrix, "load", lambda: table)
    (group,) = build.requested(arguments(package="sageattn3", cuda="13.0", platform="linux-64", kernels=True))
    assert [one.torch for one in group] == ["2.9+"]


def test_nothing_asked_for() -> None:
    with pytest.raises(MatrixError, match="say what to build"):
        build.requested(arguments())


def test_packages_that_are_there_are_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Making is told how to inspect: by what inspects them once they are made, too."""

    def of(self: packages.Packages, *_args: object, **_options: object) -> list[Path]:
        assert self.faults is verify.verify_conda
        return [tmp_path / "sageattention-2.2.0-torch280_cu128_h0_0.conda"]

    monkeypatch.setattr(packages.Packages, "of", of)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(place, "WORK", tmp_path / "build")
    with pytest.raises(packages.BuildError, match=r"nothing was put into dist/:\n.*h0_0\.conda does not exist"):
        build.run(arguments(cuda="12.8", kernels=True, channel="pypi", output=tmp_path / "dist"))
    assert not (tmp_path / "dist").exists()


def test_errors_are_one_message_and_a_status(tmp_path: Path) -> None:
    for wrong, said in (
        (["--cuda", "11.8"], "unknown CUDA version '11.8'"),
        (["--profile", "nope"], "unknown profile 'nope'"),
        (["--cuda", "12.8", "--torch", "2.6.0"], "no build of PyTorch 2.6.0"),
        (["--cuda", "12.8", "--platform", "win-64", "--python", "3.12"], "packages for win-64 are built there"),
        (["--cuda", "12.8", "--kernels", "--output", __file__], f"no files can be put into {__file__} (Not a directory)"),
        (["--cuda", "12.8", "--kernels", "--output", "/proc/x/y"], "no files can be put into /proc/x/y (No such file"),
    ):
        command = [sys.executable, str(ROOT / "scripts"), "build", "--output", str(tmp_path / "dist"), *wrong]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "dist").exists()
