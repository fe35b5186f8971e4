"""Write what follows from variants.yaml and pyproject.toml's groups: the hash-pinned locks, and pixi.toml's platforms.

`lock.py` refreshes all locks, `lock.py test torch-2.8.0` these two.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from sage_factory import ROOT
from sage_factory.what import matrix

TOOLS_PYTHON = "3.11"  # the oldest Python that the scripts run on


@dataclass(frozen=True)
class Lock:
    """One lock file and what goes into it."""

    path: Path
    requirements: tuple[str, ...] = ()
    group: str | None = None
    python: str = TOOLS_PYTHON
    closure: bool = True  # with all dependencies, or the named wheels alone

    @property
    def name(self) -> str:
        return self.path.stem


class LockError(Exception):
    """A lock could not be made; the message says which and why."""


def locks(table: matrix.Matrix | None = None) -> Iterator[Lock]:
    """Every lock there should be."""
    table = table or matrix.load()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for group in pyproject["dependency-groups"]:
        yield Lock(ROOT / "scripts" / "locks" / f"{group}.txt", group=group)
    for torch in table.pytorch.values():
        yield Lock(_recipe(f"torch-{torch.version}"), (f"torch=={torch.version}",), python=torch.python[0])
    for cuda in table.cuda.values():
        pins = tuple(f"{name}=={version}" for name, version in cuda.pypi.items())
        yield Lock(_recipe(f"cuda-{cuda.version}"), pins, closure=False)
    yield Lock(_recipe("tools"), table.tools)


def _recipe(name: str) -> Path:
    return ROOT / "recipe" / "pypi" / f"{name}.txt"


def write(lock: Lock) -> None:
    """Resolve `lock` and replace its file once the answer is complete."""
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, answer = Path(scratch, "in.txt"), Path(scratch, "out.txt")
        source.write_text("\n".join(lock.requirements) + "\n", encoding="utf-8")
        wanted = ["--group", f"{ROOT / 'pyproject.toml'}:{lock.group}"] if lock.group else [str(source)]
        # No header and no index: neither this machine's paths nor anybody's mirror belongs in a lock.
        options = ["--universal", "--generate-hashes", "--no-header", "--no-annotate", "--python-version", lock.python]
        options += [] if lock.closure else ["--no-deps"]
        done = subprocess.run(
            ["uv", "pip", "compile", "--quiet", *options, "--output-file", str(answer), *wanted],
            env=os.environ | certificates(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LockError(f"cannot resolve {lock.name}: {done.stderr.strip()}")
        partial = lock.path.with_suffix(".partial")
        partial.write_text(answer.read_text(encoding="utf-8"), encoding="utf-8")
        partial.replace(lock.path)


def with_platforms(manifest: str, table: matrix.Matrix | None = None) -> str:
    """pixi.toml with the platforms of the table: each as a machine with a driver and as one without."""
    lines = []
    for platform in (table or matrix.load()).platforms.values():
        glibc = f', glibc = "{platform.glibc}"' if platform.glibc else ""
        for suffix, cuda in (("-cuda", ', cuda = "12"'), ("", "")):
            lines.append(f'  {{ name = "{platform.name}{suffix}", platform = "{platform.name}"{cuda}{glibc} }},\n')
    return re.sub(r"^platforms = \[\n.*?^\]$", "platforms = [\n" + "".join(lines) + "]", manifest, flags=re.M | re.S)


def certificates() -> dict[str, str]:
    """uv does not read pip's configuration: hand it the certificates that pip was told of."""
    told = os.environ.get("PIP_CERT")
    return {"SSL_CERT_FILE": told} if told and "SSL_CERT_FILE" not in os.environ else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="locks to refresh (default: all)")
    args = parser.parse_args()
    try:
        there = {lock.name: lock for lock in locks()}
        if unknown := [name for name in args.name if name not in there]:
            raise LockError(f"unknown lock {', '.join(unknown)}: there are {', '.join(there)}")
        pixi = ROOT / "pixi.toml"
        text = pixi.read_text(encoding="utf-8")
        if (wanted := with_platforms(text)) != text:
            pixi.write_text(wanted, encoding="utf-8")
        for name in track(args.name or list(there), description="locking", transient=True):
            write(there[name])
    except (LockError, matrix.MatrixError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
