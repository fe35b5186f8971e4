"""Private virtual environments under `.venvs/`, filled from PyPI with locked hashes.

Standard library only: `run.py` uses this before anything is installed. One environment is one lock
file, of `scripts/locks/` (tools) or `recipe/pypi/` (PyTorch), and has its name unless it is given one of its own.
An environment may lie *beside* others, made before, whose packages it then sees without a second copy: PyTorch with its CUDA
libraries is 6.5 GB.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sage_factory import ROOT, FactoryError, alone, child

VENVS = (ROOT / ".venvs").resolve()  # by the name that what is written there has, whichever link leads to it
TASKS = ROOT / "scripts" / "locks"  # of environments that tasks run in
PARTS = ROOT / "recipe" / "pypi"  # of the channel made from PyPI, or to lie beside: nobody works in them
LOCKS = (TASKS, PARTS)
STAMP = ".complete"

# What a line of pip's log says about a failure, and what the reader can do about it.
CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("No space left on device", "Disk quota exceeded", "Errno 28"),
        "the disk is full. Free some space (PyTorch takes 0.7 GB, with its CUDA libraries 7) and run the command again",
    ),
    (
        ("DO NOT MATCH THE HASHES",),
        "a downloaded file is not the one that was locked. A proxy or mirror may have changed it; "
        "if the index is right, run `python3 scripts/run.py lock`",
    ),
    (
        ("name resolution", "Name or service not known", "NewConnectionError", "Network is unreachable",
         "timed out", "ProxyError", "SSLError", "ConnectionResetError", "Connection refused"),
        "the package index cannot be reached. Check the network and pip's configuration (`pip config list`)",
    ),
    (
        ("No matching distribution found", "Could not find a version"),
        "pip found no wheel for Python {python} on this machine. Either the index cannot be reached or a package "
        "has none for this Python: start with another one, such as the build_python of variants.yaml",
    ),
)  # fmt: skip


class SetupError(FactoryError):
    """An environment could not be set up; the message says why and what to do."""


def lock_file(name: str) -> Path:
    """The lock file of environment `name`."""
    for directory in LOCKS:
        if (path := directory / f"{name}.txt").is_file():
            return path
    known = ", ".join(sorted(path.stem for directory in LOCKS for path in directory.glob("*.txt"))) or "none"
    raise SetupError(f"no lock file {name}.txt in scripts/locks or recipe/pypi. There are: {known}")


def base_python() -> str:
    """The interpreter that environments are made of: not that of one this process may run in, since they do not nest."""
    return getattr(sys, "_base_executable", None) or sys.executable


def python_in(environment: Path) -> Path:
    """The interpreter of an environment anywhere."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def bin_dir(name: str) -> Path:
    """Where the environment keeps its commands."""
    return python_of(name).parent


def python_of(name: str) -> Path:
    """The environment's interpreter."""
    return python_in(VENVS / name)


def site_packages(name: str) -> Path:
    """The environment's `site-packages`."""
    return packages_of(VENVS / name)


def packages_of(environment: Path) -> Path:
    """The `site-packages` of an environment anywhere that this Python made: of a free-threaded one below lib/python3.13t."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(environment), "platbase": str(environment)}))


def ensure(name: str, *, of: str = "", beside: Sequence[str] = ()) -> Path:
    """Make environment `name` if it is missing or its lock, by default that of its name, changed; return its interpreter.

    Safe to call from several processes: one sets the environment up, the others wait for it. An
    interrupted set-up leaves no stamp and is redone.
    """
    lock = lock_file(of or name)
    keep(name, digest(lock, beside), lambda: _fill(name, lock, beside))
    return python_of(name)


def keep(name: str, wanted: str, fill: Callable[[], None]) -> None:
    """Have `fill` make environment `name`, unless it is there and was made of what `wanted` is the digest of."""
    stamp = VENVS / name / STAMP
    if _read(stamp) == wanted:
        return
    try:
        VENVS.mkdir(exist_ok=True)
        with alone.alone(VENVS / f"{name}.lock", f"another process that sets up .venvs/{name}"):
            if _read(stamp) != wanted:  # another process may have finished it while this one waited
                fill()
                stamp.write_text(wanted, encoding="utf-8")
    except OSError as error:
        hint = "Free some disk space" if error.errno == 28 else "Check the directory's permissions"
        raise SetupError(f"cannot set up environment {name!r} under {VENVS}: {error}. {hint} and try again") from error


def complete(name: str, *, of: str = "", beside: Sequence[str] = ()) -> bool:
    """Whether environment `name` is there, and as its lock says."""
    return _read(VENVS / name / STAMP) == digest(lock_file(of or name), beside)


def environ(names: Sequence[str], base: dict[str, str]) -> dict[str, str]:
    """`base` with the commands of environments `names` in front, as after activation of the first."""
    env = child.without_users(base)
    env["VIRTUAL_ENV"] = str(VENVS / names[0])
    env["PYTHONNOUSERSITE"] = "1"  # the user's own packages must not shadow the locked ones
    env["PATH"] = os.pathsep.join([*(str(bin_dir(name)) for name in names), env.get("PATH", os.defpath)])
    return env


def digest(lock: Path, beside: Sequence[str] = ()) -> str:
    """What an environment is made of."""
    # Of another Python it has its own site-packages, and what is in it names the place where it was made.
    names = [sys.version, sys.base_prefix, "\n".join(beside), str((VENVS / lock.stem).resolve())]
    return hashlib.sha256(b"\0".join([lock.read_bytes(), *map(os.fsencode, names)])).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _fill(name: str, lock: Path, beside: Sequence[str]) -> None:
    empty(name, lock)
    layers = "".join(f"{site_packages(other)}\n" for other in beside)
    if layers:
        (site_packages(name) / "beside.pth").write_text(layers, encoding="utf-8")
    pip(name, "install", lock)


def empty(name: str, lock: Path) -> None:
    """Make an environment that has at most pip, in the place of any that is there; `lock` is what will go into it."""
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"this Python ({sys.executable}) cannot make virtual environments: its module `ensurepip` is missing. "
            "On Debian and Ubuntu: apt-get install python3-venv"
        )
    target = VENVS / name
    print(f"setting up .venvs/{name} from {lock.relative_to(ROOT)}", file=sys.stderr, flush=True)
    if target.exists():
        shutil.rmtree(target)
    # pip takes three seconds to come.
    _logged([base_python(), "-m", "venv", *(["--without-pip"] if lock.parent == PARTS else []), str(target)], name)


def pip(name: str, command: str, lock: Path, *options: str) -> None:
    """Have pip `install` or `download` for the environment what a lock names."""
    # Wheels only: a source distribution would run a build whose own requirements nobody has locked.
    given = ["--disable-pip-version-check", command, "--progress-bar=off", "--only-binary=:all:", "--require-hashes"]
    if command == "install":
        # Python compiles what is imported, a small part. And pip.conf may say another place.
        given += ["--no-compile", "--target="]
    how = ["-m", "pip"]
    if not (site_packages(name) / "pip").is_dir():
        # What `pip --python` runs in another environment, without the process that would stand between pip and an interrupt.
        ensure("build")
        how = [str(site_packages("build") / "pip" / "__pip-runner__.py")]
    asked = [str(python_of(name)), *how, *given, *options, "-r", str(lock)]
    _logged(asked, name)
    if command == "install" and (lacking := _lacking(name, lock)):
        raise SetupError(
            f"environment {name!r} was not set up: `{shlex.join(asked)}` ended well, but {', '.join(sorted(lacking))} did not come "
            "there. `pip config list` shows what else pip was told"
        )


def pins_of(lock: str) -> Iterable[tuple[str, str]]:
    """The lines of a lock by the name of what they pin. A name that is pinned for several Pythons comes with all."""
    found: dict[str, str] = defaultdict(str)
    for pin in re.findall(r"^\S.*(?:\n[ \t].*)*\n", lock, re.M):
        found[re.split(r"[=\[ ]", pin, maxsplit=1)[0]] += pin
    return found.items()


def _lacking(name: str, lock: Path) -> set[str]:
    """What a lock names for every Python and system, and the environment has not got."""
    wanted = [one for one, pin in pins_of(lock.read_text(encoding="utf-8")) if ";" not in pin]
    own = site_packages(name)
    folders = [own, *map(Path, _read(own / "beside.pth").splitlines())]  # what a neighbour has pip does not install again
    there = [path.stem.rpartition("-")[0] for folder in folders for path in folder.glob("*.dist-info")]
    return {_normal(one) for one in wanted} - {_normal(one) for one in there}


def _normal(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()


def run(name: str, *arguments: str) -> None:
    """Have the environment's Python do something that belongs to setting it up."""
    _logged([str(python_of(name)), *arguments], name)


def _logged(command: list[str], name: str) -> None:
    """Run a set-up command, showing its downloads and keeping all it says in the environment's log."""
    log = VENVS / f"{name}.log"
    # Of pip.conf's settings that have no option which undoes them.
    settings = {"PIP_USER": "0", "PIP_DRY_RUN": "0", "PIP_CONSTRAINT": os.devnull}
    env = child.without_users(os.environ) | settings | {"PYTHONUNBUFFERED": "1"}
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            # Where this process is killed, pip goes on for a while: others wait for it.
            pass_fds=alone.held if os.name == "posix" else (),
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                record.write(line)
                if line.lstrip().startswith(("Downloading ", "Installing ")):
                    print("  " + line.strip()[:110], file=sys.stderr, flush=True)
        except BaseException:
            # Left alone it would go on filling an environment that the next run takes apart.
            _end(process)
            raise
    if process.returncode:
        text = log.read_text(encoding="utf-8")
        raise SetupError(f"environment {name!r} was not set up: {_cause(text)}. All that was said: {log}")


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt pip, which then removes what it was unpacking; end it if it takes too long."""
    if os.name == "posix":
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    process.kill()


def _cause(text: str) -> str:
    for needles, explanation in CAUSES:
        if any(needle in text for needle in needles):
            return explanation.format(python=".".join(map(str, sys.version_info[:3])))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the command failed without a word"
