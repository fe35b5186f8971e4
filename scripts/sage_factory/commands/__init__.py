"""The commands, a file each, named as its task in pixi.toml: `python scripts build` is `commands/build.py`.

A command says which options it takes (`options`) and does what they ask for (`run`). What cannot be done comes out of it as
an exception and leaves here as one line and an exit status: the command's `ERROR`, or 1.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from sage_factory import ROOT, FactoryError, task
from sage_factory.with_what import tasks

FOLDER = Path(__file__).parent
FRONT = "python scripts"


def names() -> list[str]:
    """The commands that there are. Files that begin with `_` are run by other commands alone."""
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py"))


def listing() -> str:
    """The commands and what each does, in pixi.toml's words."""
    there, width = set(names()), max(map(len, names()))
    described = tasks.Manifest.read(ROOT / "pixi.toml").tasks.values()
    lines = [f"  {one.name:<{width}}  {one.description}" for one in described if one.name in there]
    return "\n".join([f"Commands ({FRONT} COMMAND [OPTION ...]):", *lines])


def arguments(command: ModuleType, given: Sequence[str]) -> argparse.Namespace:
    """A command's options. One that runs another program sets a default for `rest`, and gets there what it is to hand on."""
    parser = argparse.ArgumentParser(
        prog=f"{FRONT} {command.__name__.rpartition('.')[2].replace('_', '-')}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `--cu` may be the other program's business
        add_help=False,
    )
    command.options(parser)
    hands_on = parser.get_default("rest") is not None
    if not hands_on:  # what stands behind the other program's name may be for that one
        parser.add_argument("-h", "--help", action="help", help="show this help message and exit")
    found, rest = parser.parse_known_args(given)
    if hands_on:
        if rest[:1] in (["-h"], ["--help"]):
            parser.print_help()
            parser.exit()
        found.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    # Tasks start in the root, and who started one means files of the folder where they did (pixi's variable).
    caller = Path(os.environ.get("INIT_CWD", "") if Path.cwd() == ROOT else "").absolute()
    for name, value in vars(found).items():
        if isinstance(value, Path):
            setattr(found, name, caller / value)
        elif isinstance(value, list):
            setattr(found, name, [caller / one if isinstance(one, Path) else one for one in value])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that comes first; its exit status."""
    name, *given = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return 0
    stem = name.replace("-", "_")
    if stem not in {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}:
        return _failed(f"there is no command {name!r}: `{FRONT}` lists them", 2)
    try:  # this one alone: others have requirements that an environment may lack
        command = importlib.import_module(f"{__name__}.{stem}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("sage_factory"):
            raise
        return _failed(f"`{name}` needs {error.name}, which is not here: run {task(name)}", 1)
    except KeyboardInterrupt:
        return _interrupted()
    try:
        return int(command.run(arguments(command, given)))
    except KeyboardInterrupt:
        return _interrupted(getattr(command, "INTERRUPTED", ""))
    except FactoryError as error:
        return _failed(str(error), getattr(command, "ERROR", 1))
    except OSError as error:
        said = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        hint = ": free some space and run it again" if error.errno == errno.ENOSPC else ""
        return _failed(said + hint, getattr(command, "ERROR", 1))


def leave(status: int) -> NoReturn:
    """End the process with what `main` answered.

    Not by the interpreter's own end: threads of rattler and rattler-build may outlive it, and then abort a process that is done.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads what was said
        status = status or 1
    os._exit(status)


def _interrupted(what_is_left: str = "") -> int:
    print(f"\ninterrupted{what_is_left}", file=sys.stderr)
    return 130


def _failed(said: str, status: int) -> int:
    print(f"error: {said}", file=sys.stderr)
    return status
