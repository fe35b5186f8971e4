"""What follows from variants.yaml and pyproject.toml's groups: the hash-pinned locks, and pixi.toml's platforms."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sage_factory import ROOT, FactoryError
from sage_factory.files import put
from sage_factory.what import matrix
from sage_factory.what.table import Matrix
from sage_factory.with_what import venvs

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


class LockError(FactoryError):
    """A lock could not be made; the message says which and why."""


def locks(table: Matrix | None = None) -> Iterator[Lock]:
    """Every lock there should be."""
    table = table or matrix.load()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for group in pyproject["dependency-groups"]:
        yield Lock(venvs.TASKS / f"{group}.txt", group=group)
    for torch in (one for one in table.pytorch.values() if not one.release):
        yield Lock(venvs.PARTS / f"torch-{torch.version}.txt", (f"torch=={torch.version}",), python=torch.python[0])
    for cuda in table.cuda.values():
        pins = tuple(f"{name}=={version}" for name, version in cuda.pypi.items())
        yield Lock(venvs.PARTS / f"cuda-{cuda.version}.txt", pins, closure=False)
    yield Lock(venvs.PARTS / "tools.txt", table.tools)
    # Laid beside the tests' own packages, which have what it requires.
    yield Lock(venvs.TASKS / "hub.txt", (f"kernels=={table.kernels}",), closure=False)


def write(lock: Lock) -> None:
    """Resolve `lock` and replace its file once the answer is complete."""
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
        put(lock.path, answer.read_bytes())


def with_platforms(manifest: str, table: Matrix | None = None) -> str:
    """pixi.toml with the platforms of the table: each as a machine with a driver and, by its bare name, as one without."""
    # pixi refuses a platform of a bare name that declares anything; its own default of glibc is what conda-forge has.
    names = (table or matrix.load()).platforms
    both = "".join(f'  {{ name = "{name}-cuda", platform = "{name}", cuda = "12" }},\n  "{name}",\n' for name in names)
    bare = ", ".join(f'"{name}"' for name in names)
    manifest = re.sub(r"^platforms = \[\n.*?^\]$", f"platforms = [\n{both}]", manifest, flags=re.M | re.S)
    return re.sub(r'^platforms = \["[^\n]*\]$', f"platforms = [{bare}]", manifest, flags=re.M)


def certificates() -> dict[str, str]:
    """uv does not read pip's configuration: hand it the certificates that pip was told of."""
    told = os.environ.get("PIP_CERT")
    return {"SSL_CERT_FILE": told} if told and "SSL_CERT_FILE" not in os.environ else {}
