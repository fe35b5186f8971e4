"""Child processes that leave nothing behind: streamed, logged, and ended with all their descendants on Ctrl-C.

A parent that is killed outright can end nothing: its child notices (`end_with_parent`) and ends itself. Not so what run.py starts,
which has run.py's terminal and group.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sage_factory import FactoryError, alone

FULL = "No space left on device"
LITTLE = 64 * 2**20  # bytes; a build takes less
# Where the lines begin that say why a build failed, the most telling first (pip indents what it passes on), and
# where they end.
SIGNS = (
    r"\s*(FAILED:|CMake Error|ninja: error:)",
    r"\s*\S+:\d+:(\d+:)? (fatal )?error:",
    r"Traceback \(most recent call last\)",
    r"\S+\.sh: line \d+: ",
    r"\s*(error|ERROR)\b(?!: (subprocess-exited|PyRattlerBuildError: Script failed))",
)
END = r"\s*(ninja: build stopped|Script (failed|execution failed)|note: This error originates)"

# What a user tells every Python and every pip. An environment of ours has packages of its own, in its own place, and a script there
# its neighbours. Of indexes, certificates and the like pip may be told.
USERS = {
    *("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_DRY_RUN"),
    *("PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_GROUP", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"),
    *("PIP_PLATFORM", "PIP_PYTHON_VERSION", "PIP_IMPLEMENTATION", "PIP_ABI"),
}


def without_users(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for the Python of another environment, without what the user tells every Python and pip."""
    return {name: value for name, value in environment.items() if name not in USERS}


def said(
    command: Sequence[str], *, directory: Path | None = None, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a program of another environment says, told `more` by its own; that it fails is for the caller to see."""
    return subprocess.run(
        command,
        cwd=directory,
        env=without_users(os.environ) | dict(more or {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


class ChildError(FactoryError):
    """A command that failed, with the end of what it said."""

    def __init__(self, what: str, status: int, tail: Sequence[str], log: Path) -> None:
        self.tail, self.log = tuple(tail), log
        self.disk_full = any(FULL in line for line in tail)
        reason = f"{FULL.lower()}: free some space and run it again" if self.disk_full else f"exit status {status}"
        # Not every tool notices that what it wrote is not there.
        if not self.disk_full and (free := shutil.disk_usage(log.parent).free) < LITTLE:
            reason += f", and only {free / 1e6:.1f} MB are free on this disk: is that the cause?"
        super().__init__(f"{what} failed ({reason}); the whole log is {log}")

    def telling(self) -> list[str]:
        """The few lines that say what was wrong."""
        said = self.tail
        ends = [i for i, line in enumerate(said) if re.match(END, line)] + [len(said)]
        first = next((i for sign in SIGNS for i, line in enumerate(said) if re.match(sign, line)), max(0, ends[0] - 15))
        last = next(i for i in ends if i > first or i == len(said))
        return list(said[first:last][:40])


def run(
    what: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    on_line: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run a command to its end; its last lines are returned, all of them are in the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=400)
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            [str(part) for part in command],
            # Never written to: it closes when this process ends, however it ends.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            # A session of its own, so that its end is the end of the compilers that it started too.
            start_new_session=os.name == "posix",
            pass_fds=alone.held if os.name == "posix" else (),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.rstrip()
                record.write(line + "\n")
                tail.append(line)
                if on_line:
                    on_line(line)
            status = process.wait()
        except BaseException:
            end(process)
            raise
    if status:
        raise ChildError(what, status, tail, log)
    return list(tail)


def end(process: subprocess.Popen[str]) -> None:
    """End a process and its descendants: politely, then not."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        try:
            if os.name == "posix":
                os.killpg(process.pid, number)
            else:
                process.terminate()
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    process.wait()


def end_with_parent() -> None:
    """In a child of `run`: kill this process and its descendants once the parent is gone."""
    parent = os.dup(0)
    # What this process starts shall neither read from the pipe nor wait for it.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        os.read(parent, 1)
        if os.name == "posix":
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
