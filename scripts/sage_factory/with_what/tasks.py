"""Run a task of pixi.toml where pixi or conda-forge is not to be had.

`python3 scripts/run.py` lists the tasks, `python3 scripts/run.py TASK [ARGUMENT ...]` runs one, in a private
virtual environment filled from PyPI. Standard library only. It reads the part of pixi's task language that
pixi.toml uses and refuses the rest, so that a task means the same under both.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from sage_factory import ROOT, FactoryError
from sage_factory.with_what import venvs

UNDERSTOOD = {"cmd", "args", "depends-on", "env", "cwd", "description", "default-environment", "inputs", "outputs"}
PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
SHELL = re.compile(r"[|&;<>`$*?]")


class TaskError(FactoryError):
    """The task cannot be run as asked; the message says why."""


@dataclass(frozen=True)
class Task:
    """One task of pixi.toml."""

    name: str
    table: Mapping[str, Any]
    feature: str | None = None

    @property
    def description(self) -> str:
        return str(self.table.get("description", ""))


@dataclass(frozen=True)
class Manifest:
    """What run.py needs of pixi.toml."""

    tasks: Mapping[str, Task]
    environments: Mapping[str, Sequence[str]]
    locks: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TaskError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise TaskError(f"{path} is not valid TOML: {error}") from error
        tasks: dict[str, Task] = {}
        homes = {None: raw, **raw.get("feature", {})}
        for feature, home in homes.items():
            for name, value in home.get("tasks", {}).items():
                tasks[name] = Task(name, _as_table(name, value), feature)
        environments = {
            name: value["features"] if isinstance(value, dict) else value for name, value in raw.get("environments", {}).items()
        }
        return cls(tasks, environments, raw.get("tool", {}).get("run", {}).get("environments", {}))

    def task(self, name: str) -> Task:
        if name in self.tasks:
            return self.tasks[name]
        near = difflib.get_close_matches(name, self.tasks, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"there is no task {name!r}.{meant} `python3 scripts/run.py` lists the tasks")

    def environment_of(self, task: Task) -> str:
        """Where the task runs: the environment it names, or the first that has its feature."""
        if named := task.table.get("default-environment"):
            return str(named)
        if task.feature is None:
            return "default"
        for name, features in self.environments.items():
            if task.feature in features:
                return name
        raise TaskError(f"task {task.name!r} is in feature {task.feature!r}, which no environment of pixi.toml has")

    def locks_of(self, environment: str) -> Sequence[str]:
        if environment not in self.locks:
            there = ", ".join(self.locks) or "none"
            raise TaskError(f"environment {environment!r} has no entry in pixi.toml's [tool.run.environments]: {there}")
        return self.locks[environment]


def _as_table(name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"cmd": value}
    if isinstance(value, list):
        return {"depends-on": value}
    if unknown := set(value) - UNDERSTOOD:
        raise TaskError(f"task {name!r} uses {', '.join(sorted(unknown))}, which scripts/run.py does not know: use pixi")
    return dict(value)


@dataclass(frozen=True)
class Step:
    """One command to run: a task with its arguments in an environment."""

    task: Task
    command: tuple[str, ...]
    environment: str
    env: Mapping[str, str] = field(hash=False)
    cwd: Path


def plan(manifest: Manifest, name: str, arguments: Sequence[str] = (), environment: str | None = None) -> list[Step]:
    """The steps of task `name` in order: what it depends on comes first, each once."""
    steps: list[Step] = []
    _add(manifest, name, arguments, environment, steps, ())
    return steps


def _add(
    manifest: Manifest,
    name: str,
    arguments: Sequence[str],
    environment: str | None,
    steps: list[Step],
    above: tuple[str, ...],
) -> None:
    if name in above:
        raise TaskError(f"task {name!r} depends on itself: {' → '.join([*above, name])}")
    task = manifest.task(name)
    wanted = task.table.get("depends-on", [])
    for entry in wanted if isinstance(wanted, list) else [wanted]:
        other = {"task": entry} if isinstance(entry, str) else entry
        given = [value for item in other.get("args", []) for value in _positional(item)]
        _add(manifest, other["task"], given, other.get("environment"), steps, (*above, name))
    command = _command(task, arguments)
    if not command:
        return
    step = Step(
        task,
        command,
        environment or manifest.environment_of(task),
        {key: str(value) for key, value in task.table.get("env", {}).items()},
        ROOT / str(task.table.get("cwd", ".")),
    )
    if step not in steps:
        steps.append(step)


def _positional(item: Any) -> list[str]:
    if isinstance(item, dict):
        raise TaskError(f"scripts/run.py knows positional arguments of dependencies only, not {item}: use pixi")
    return [str(item)]


def _command(task: Task, arguments: Sequence[str]) -> tuple[str, ...]:
    cmd = task.table.get("cmd", [])
    if isinstance(cmd, str) and SHELL.search(cmd):
        raise TaskError(f"task {task.name!r} needs a shell ({cmd!r}), which scripts/run.py has not: use pixi")
    # A place such as {{ cuda }} stays one word, whatever fills it.
    words = shlex.split(PLACE.sub(r"{{\1}}", cmd)) if isinstance(cmd, str) else [str(word) for word in cmd]
    declared = task.table.get("args", [])
    if not declared:
        return (*words, *arguments) if words else ()
    values: dict[str, str] = {}
    left = list(arguments)
    for item in declared:
        spec = {"arg": item} if isinstance(item, str) else item
        if not left and "default" not in spec:
            raise TaskError(f"task {task.name!r} needs a value for its argument {spec['arg']!r}")
        value = left.pop(0) if left else str(spec["default"])
        if "choices" in spec and value not in spec["choices"]:
            raise TaskError(
                f"argument {spec['arg']!r} of task {task.name!r} is {value!r}: expected one of {', '.join(spec['choices'])}"
            )
        values[spec["arg"]] = value
    if left:
        raise TaskError(f"task {task.name!r} takes {len(declared)} argument(s), {len(arguments)} were given: {arguments}")
    return tuple(PLACE.sub(lambda found: values[found[1]], word) for word in words)


def execute(manifest: Manifest, step: Step) -> int:
    """Run one step in its environment and return its exit status, negative for a signal."""
    own, *beside = manifest.locks_of(step.environment)
    venvs.ensure(own, beside=beside)
    env = venvs.environ([own, *beside], dict(os.environ)) | dict(step.env)
    env.setdefault("SAGEATTENTION_CHANNEL", "pypi")
    env["PIXI_PROJECT_ROOT"] = str(ROOT)
    program = shutil.which(step.command[0], path=env["PATH"])
    if program is None:
        raise TaskError(f"task {step.task.name!r} runs {step.command[0]!r}, which is not in environment {step.environment!r}")
    print(f"▶ {step.task.name}: {shlex.join(step.command)}", file=sys.stderr, flush=True)
    return _forwarding([program, *step.command[1:]], env, step.cwd)


def _forwarding(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> int:
    """Run `command` and hand it the signals sent to this process."""
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is not None and process.poll() is None:
            process.send_signal(number)

    # A terminal's Ctrl-C reaches the child by itself: here it is only kept from ending run.py before the child.
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, forward)}
    previous[signal.SIGINT] = signal.signal(
        signal.SIGINT, lambda number, frame: None if sys.stdin and sys.stdin.isatty() else forward(number, frame)
    )
    if hasattr(signal, "SIGHUP"):
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, forward)
    try:
        process = subprocess.Popen(command, env=dict(env), cwd=cwd)
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def listing(manifest: Manifest) -> str:
    """The tasks and what each does."""
    width = max(map(len, manifest.tasks), default=0)
    lines = [f"  {task.name:<{width}}  {task.description}" for task in manifest.tasks.values()]
    return "\n".join(["Tasks (python3 scripts/run.py TASK [ARGUMENT ...]):", *lines])


def _terminated(number: int, _frame: FrameType | None) -> None:
    # An exception, so that a set-up under way ends its pip.
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", "--environment", help="run in this environment of pixi.toml instead of the task's own")
    parser.add_argument("task", nargs="?", help="a task of pixi.toml; without it the tasks are listed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed on to the task")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        manifest = Manifest.read(ROOT / "pixi.toml")
        if args.task is None:
            print(listing(manifest))
            return 0
        for step in plan(manifest, args.task, args.arguments, args.environment):
            status = execute(manifest, step)
            if status < 0:  # die of the signal that the task died of, as a shell would see it without run.py
                signal.signal(-status, signal.SIG_DFL)
                os.kill(os.getpid(), -status)
            if status:
                return status
    except TaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except venvs.SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the next run starts the unfinished set-up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
