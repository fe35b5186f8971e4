"""Run a task of pixi.toml where pixi or conda-forge is not to be had.

`python3 scripts/run.py` lists the tasks, `python3 scripts/run.py TASK [ARGUMENT ...]` runs one, in a private
virtual environment filled from PyPI. Standard library only. It reads the part of pixi's task language that
pixi.toml uses and refuses the rest, so that a task means the same under both.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import difflib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sage_factory import ROOT, FactoryError, interrupts
from sage_factory.with_what import cpu_torch, venvs

UNDERSTOOD = {"cmd", "depends-on", "description", "default-environment"}
# What means something to pixi's shell, and `{{ … }}`, which pixi replaces by values.
SHELL = re.compile(r"[|&;<>`$*?{]")


class TaskError(FactoryError):
    """The task cannot be run as asked; the message says why."""


@dataclass(frozen=True)
class Task:
    """One task of pixi.toml."""

    name: str
    table: Mapping[str, Any]

    @property
    def description(self) -> str:
        return str(self.table.get("description", ""))


@dataclass(frozen=True)
class Manifest:
    """What run.py needs of pixi.toml."""

    tasks: Mapping[str, Task]
    locks: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TaskError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise TaskError(f"{path} is not valid TOML: {error}") from error
        features = raw.get("feature", {}).values()
        platforms = [table for home in (raw, *features) for table in home.get("target", {}).values()]
        if others := ", ".join(name for table in (*features, *platforms) for name in table.get("tasks", {})):
            raise TaskError(f"{others}: of a feature or a platform, whose tasks scripts/run.py does not know: use pixi")
        tasks = {name: Task(name, _understood(name, value)) for name, value in raw.get("tasks", {}).items()}
        return cls(tasks, raw.get("tool", {}).get("run", {}).get("environments", {}))

    def task(self, name: str) -> Task:
        if name in self.tasks:
            return self.tasks[name]
        near = difflib.get_close_matches(name, self.tasks, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"there is no task {name!r}.{meant} `python3 scripts/run.py` lists the tasks")

    def environment_of(self, task: Task) -> str:
        """Where the task runs: in the environment that it names, if it names one."""
        return str(task.table.get("default-environment", "default"))

    def locks_of(self, environment: str) -> Sequence[str]:
        if environment not in self.locks:
            there = ", ".join(self.locks) or "none"
            raise TaskError(f"environment {environment!r} has no entry in pixi.toml's [tool.run.environments]: {there}")
        return self.locks[environment]


def _understood(name: str, value: Any) -> Mapping[str, Any]:
    """The table of a task, once nothing in it is unknown here."""
    cmd = value.get("cmd") if isinstance(value, dict) else None
    if not isinstance(cmd, str) or not cmd.strip():
        raise TaskError(f"task {name!r} is no table with a string as `cmd`, and scripts/run.py knows no other: use pixi")
    if unknown := value.keys() - UNDERSTOOD:
        raise TaskError(f"task {name!r} uses {', '.join(sorted(unknown))}, which scripts/run.py does not know: use pixi")
    for other in value.get("depends-on", []):
        if not isinstance(other, dict) or other.keys() != {"task", "environment"}:
            raise TaskError(f"task {name!r} depends on {other!r}, not on a task and environment by these keys alone: use pixi")
    return dict(value)


@dataclass(frozen=True)
class Step:
    """One command to run: a task with its arguments in an environment."""

    task: Task
    command: tuple[str, ...]
    environment: str


def plan(manifest: Manifest, name: str, arguments: Sequence[str] = (), environment: str | None = None) -> list[Step]:
    """The steps of task `name` in order: what it depends on comes first, each once. Asked for --help, a task is run without those,
    which take minutes: one that wants a wheel says so if no build has left one. pixi runs them all the same.
    """
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
    asked_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    for other in () if asked_for_help else task.table.get("depends-on", ()):
        _add(manifest, other["task"], (), other["environment"], steps, (*above, name))
    cmd = task.table["cmd"]
    if SHELL.search(cmd):
        raise TaskError(f"task {name!r} needs pixi's shell or templates ({cmd!r}), which scripts/run.py has not: use pixi")
    step = Step(task, (*shlex.split(cmd), *arguments), environment or manifest.environment_of(task))
    if step not in steps:
        steps.append(step)


def set_up(manifest: Manifest, environment: str) -> Sequence[str]:
    """Make an environment of pixi.toml, if it is not there; the names under .venvs/ of what it is made of, its own first."""
    own, *others = manifest.locks_of(environment)
    for lock in others:
        if _without_cuda(lock):
            cpu_torch.ensure(lock)
        else:
            venvs.ensure(lock)
    name, beside = folder(manifest, environment), _beside(others)
    venvs.ensure(name, of=own, beside=beside)
    return [name, *beside]


def is_set_up(manifest: Manifest, environment: str) -> bool:
    """Whether `set_up` would find nothing to do."""
    own, *others = manifest.locks_of(environment)
    return venvs.complete(folder(manifest, environment), of=own, beside=_beside(others))


def folder(manifest: Manifest, environment: str) -> str:
    """Its name under .venvs/: its lock's, which several may share; its own where it lies beside others, and so is like none."""
    own, *beside = manifest.locks_of(environment)
    return environment if beside else own


def _beside(locks: Iterable[str]) -> list[str]:
    """Their environments' names under .venvs/."""
    return [cpu_torch.folder(lock) if _without_cuda(lock) else lock for lock in locks]


def _without_cuda(lock: str) -> bool:
    """PyTorch on a machine without a driver, as under pixi: 2.5 GB less to fetch, 6 GB less of disk."""
    return lock.startswith("torch-") and sys.platform == "linux" and not has_driver()


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def set_up_ahead(manifest: Manifest, environments: Iterable[str]) -> Iterator[None]:
    """Meanwhile, make environments: what takes minutes to download need not wait for what takes minutes to compile.

    Where that fails, the step that needs it tries again, and says why.
    """
    command, null = [sys.executable, str(ROOT / "scripts" / "run.py"), "-e"], subprocess.DEVNULL
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for environment in dict.fromkeys(environments):
            # Who is terminated on Windows cannot end the pip it started.
            if os.name != "nt" and not is_set_up(manifest, environment):
                processes.append(subprocess.Popen([*command, environment], stdin=null, stdout=null, stderr=null))
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def execute(manifest: Manifest, step: Step) -> int:
    """Run one step in its environment and return its exit status, negative for a signal."""
    environments = set_up(manifest, step.environment)
    env = venvs.environ(environments, dict(os.environ))
    env.setdefault("SAGEATTENTION_CHANNEL", "pypi")
    env |= {"PIXI_PROJECT_ROOT": str(ROOT), "INIT_CWD": str(Path.cwd())}
    env.pop("PIXI_ENVIRONMENT_NAME", None)  # of a shell of pixi's that this was started in: it is not pixi that runs the task
    program = shutil.which(step.command[0], path=env["PATH"])
    if program is None:
        raise TaskError(f"task {step.task.name!r} runs {step.command[0]!r}, which is not in environment {step.environment!r}")
    print(f"▶ {step.task.name}: {shlex.join(step.command)}", file=sys.stderr, flush=True)
    return _forwarding([program, *step.command[1:]], env)


def run(manifest: Manifest, steps: Sequence[Step]) -> int:
    """Run the steps one after the other, and return the exit status of the first that fails, or 0."""
    first, *later = steps
    set_up(manifest, first.environment)
    with set_up_ahead(manifest, (step.environment for step in later)):
        for step in steps:
            if status := execute(manifest, step):
                return status
    return 0


def _forwarding(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `command` and hand it the signals sent to this process."""
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is not None and process.poll() is None:
            process.send_signal(number)

    # A terminal's Ctrl-C reaches the child by itself: here it is only kept from ending run.py before the child.
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, forward)}
    previous[signal.SIGINT] = signal.signal(
        signal.SIGINT, lambda number, frame: None if _in_the_foreground() else forward(number, frame)
    )
    if hasattr(signal, "SIGHUP"):
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, forward)
    try:
        process = subprocess.Popen(command, env=dict(env), cwd=ROOT)
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _in_the_foreground() -> bool:
    """Whether Ctrl-C in a terminal is for this process and its children, wherever they read from."""
    if os.name == "nt":
        return True
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # there is none, as in CI
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def listing(manifest: Manifest) -> str:
    """The tasks and what each does."""
    width = max(map(len, manifest.tasks), default=0)
    lines = [f"  {task.name:<{width}}  {task.description}" for task in manifest.tasks.values()]
    return "\n".join(["Tasks (python3 scripts/run.py TASK [ARGUMENT ...]):", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-e",
        "--environment",
        help="run in this environment of pixi.toml instead of the task's own; without a task, set it up alone",
    )
    parser.add_argument("task", nargs="?", help="a task of pixi.toml; without it and -e the tasks are listed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed on to the task")
    args = parser.parse_args(argv)
    # An exception, so that a set-up under way ends its pip.
    interrupts.once(lambda number: KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
    try:
        manifest = Manifest.read(ROOT / "pixi.toml")
        if args.task is None:
            if args.environment is None:
                print(listing(manifest))
            else:
                set_up(manifest, args.environment)
            return 0
        status = run(manifest, plan(manifest, args.task, args.arguments, args.environment))
    except TaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except venvs.SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the next run starts the unfinished set-up again", file=sys.stderr)
        return 130
    if status < 0:  # die of the signal that the task died of, as a shell would see it without run.py
        with contextlib.suppress(OSError):  # of SIGKILL, which cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status
