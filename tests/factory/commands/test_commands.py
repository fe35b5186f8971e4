"""The commands: the task list, the folder and the help agree, and what cannot be done ends as one line."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sage_factory import ROOT, FactoryError, commands
from sage_factory.commands import matrix
from sage_factory.with_what import tasks

TASKS = tasks.Manifest.read(ROOT / "pixi.toml").tasks


def test_every_command_is_a_task_and_every_task_a_command_or_a_shortcut() -> None:
    words = {name: str(task.table["cmd"]).split() for name, task in TASKS.items()}
    assert all(command[:2] == ["python", "scripts"] for command in words.values())
    assert {name for name, command in words.items() if command[2:] == [name]} == set(commands.names())
    shortcuts = {command[2] for name, command in words.items() if command[2:] != [name]}
    assert shortcuts <= set(commands.names()), "build-cu128 is `build` with a version, test is `with-wheel` with pytest"


def test_without_a_command_they_are_listed_as_pixi_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == commands.main(["--help"]) == 0
    first, second = capsys.readouterr().out.split("Commands ")[1:]
    assert first == second
    listed = dict(line.split(maxsplit=1) for line in first.splitlines()[1:])
    assert listed == {name: TASKS[name].description for name in commands.names()}


def test_files_are_those_of_the_folder_where_a_task_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INIT_CWD", str(tmp_path))
    absolute = ROOT / "dist" / "y.whl"

    def given() -> list[Path]:
        return list(
            commands.arguments(importlib.import_module("sage_factory.commands.verify"), ["./x.whl", str(absolute)]).file
        )

    def channel(told: str) -> str:
        publish = importlib.import_module("sage_factory.commands.publish")
        return str(commands.arguments(publish, ["--profile", "x", "--channel", told]).channel)

    monkeypatch.chdir(ROOT)
    assert given() == [tmp_path / "x.whl", absolute]
    assert [channel("ours"), channel("s3://bucket/ours")] == [str(tmp_path / "ours"), "s3://bucket/ours"]
    monkeypatch.chdir(tmp_path.parent)  # started without pixi and run.py, below which INIT_CWD may be of another
    assert given() == [tmp_path.parent / "x.whl", absolute]


@pytest.mark.parametrize("name", commands.names())
def test_each_says_how_it_is_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith(f"usage: python scripts {name}")


def test_from_the_command_line() -> None:
    def run_python(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_python(str(ROOT / "scripts"), *words)

    unknown = run("biuld", "--cuda", "12.8")
    assert (unknown.returncode, unknown.stderr) == (2, "error: there is no command 'biuld': `python scripts` lists them\n")
    assert "there is no command '__init__'" in run("__init__").stderr
    for door, more in (("python3 scripts/run.py", {}), ("pixi run", {"PIXI_ENVIRONMENT_NAME": "default"})):
        bare = run_python("-S", str(ROOT / "scripts"), "matrix", **more)
        said = f"error: `matrix` needs rich, which is not here: run `{door} matrix`\n"
        assert (bare.returncode, bare.stderr) == (1, said), "a machine may have one of the two doors alone"
    wrong = run("tag", "--dry", "more")
    assert wrong.returncode == 2
    assert "usage: python scripts tag" in wrong.stderr
    assert "unrecognized arguments: --dry more" in wrong.stderr


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (FactoryError("[no] such thing"), 2, "error: [no] such thing\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 2, "error: No space left on device: a: free some space and run it again\n"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "error: Permission denied: a\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_a_status(
    fault: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: argparse.Namespace) -> int:
        raise fault

    monkeypatch.setattr(matrix, "run", fail)
    assert commands.main(["matrix"]) == status
    assert capsys.readouterr().err == said


def test_lint_without_its_tools_says_how_to_run_it(tmp_path: os.PathLike[str]) -> None:
    command = [sys.executable, str(ROOT / "scripts"), "lint"]
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr == "error: no mypy and no ruff here: run `python3 scripts/run.py lint`\n"


def test_what_outlives_the_interpreter_does_not_change_the_exit_status() -> None:
    aborting = "import atexit, os, sys; atexit.register(os.abort)"  # as a thread of a library may, at the interpreter's end
    code = f"{aborting}; from sage_factory import commands; print('said', end=''); commands.leave(3)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, env=environment)
    assert (done.returncode, done.stdout) == (3, b"said")


def test_what_nobody_could_read_is_no_success() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    code = "from sage_factory import commands; print('said', end=''); commands.leave(0)"
    assert subprocess.run([sys.executable, "-c", code], stdout=writer, check=False, env=environment).returncode == 1
    os.close(writer)
