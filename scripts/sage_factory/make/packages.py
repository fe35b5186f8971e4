"""The two conda packages of a build: found again where nothing that goes into them changed, else built.

Kernels are compiled once per CUDA version, operators once per PyTorch. A package's name ends in a digest of all that went in, so
that the one which would be built can be looked for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sage_factory import ROOT, FactoryError, child
from sage_factory.clock import Clock
from sage_factory.files import sha256
from sage_factory.what import inputs, matrix, variant
from sage_factory.what.build import Build
from sage_factory.with_what import channel, venvs

WORK = ROOT / "build"
PACKAGES = WORK / "conda"  # the channel that packages are built into, and found in again
SOURCES = WORK / "sources"  # what is built, a copy: it is what the digests are of, whoever edits the checkout meanwhile


class BuildError(FactoryError):
    """A build that cannot go on; the message says what happened and what to do."""


@dataclass(frozen=True)
class Planned:
    """A conda package to be: the recipe's output, the file that comes of it, and what goes in."""

    step: str
    of: str
    name: str
    path: Path
    seconds: int  # its time
    settings: Mapping[str, list[str]] = field(hash=False)


@dataclass
class Packages:
    """The packages of one run: where their requirements come from, and what is wrong with one that is there."""

    channel_kind: str
    console: Console
    clock: Clock
    faults: Callable[[Path], Sequence[str]]
    reused: list[str] = field(default_factory=list)

    def of(self, build: Build, *, kernels_only: bool = False) -> list[Path]:
        """The kernels' and the operators' package of a build, built if they are not there yet."""
        planned = self._copied(build)[: 1 if kernels_only else 2]
        if self.channel_kind == "pypi" and not kernels_only:
            channel.check_operators(channel.compiler())  # before the kernels, which take minutes
        for one in planned:
            if one.path.is_file() and (faults := self.faults(one.path)):
                self.console.print(f"[yellow]building again:[/] {faults[0]}", highlight=False)
                one.path.unlink()
            if one.path.is_file():
                self.reused.append(one.path.name)
                continue
            # The same kernels serve every platform, and nvcc on Windows would take another host compiler.
            if one.step == "kernels" and matrix.load().platforms[build.platform].windows:
                raise BuildError(f"kernels are compiled on Linux: copy {one.path.name} from there to {one.path.parent}")
            source = self._channel(one, build)
            with self.clock.step(one.step):
                self._build(one, f"{one.step} ({one.of})", source)
            if not one.path.is_file():
                log = WORK / "logs" / f"{one.name}.log"
                raise BuildError(f"rattler-build made another package than {one.path.name}: see {log}")
        return [one.path for one in planned]

    def _copied(self, build: Build) -> tuple[Planned, Planned]:
        """The two packages of a build, whose sources are copied."""
        inputs.copy([*inputs.KERNELS, *inputs.operators(build.package), matrix.TABLE.name], SOURCES)
        planned = self._planned(build, SOURCES)
        if planned != self._planned(build):
            raise BuildError("the sources changed while they were copied, so nothing was built of them: run it again")
        return planned

    def _planned(self, build: Build, root: Path = ROOT) -> tuple[Planned, Planned]:
        """The two packages of a build by name, so that what is there already can be found. `root` is where the sources lie."""
        system = channel.compiler() if self.channel_kind == "pypi" else None
        sources = inputs.operators(build.package)
        commit = inputs.commit(sources)
        pin = f"{channel.PYTHON}.*" if system else _conda_forge_python()
        settings = variant.of(build, python_pin=pin, gcc=system.major if system else None)
        facts = self._facts(build, system, commit, settings)
        kernels = inputs.digest(inputs.KERNELS, facts["kernels"], root)
        operators = inputs.digest(sources, facts["operators"], root)
        digests = {"kernels_digest": kernels, "operators_digest": operators, "sage_commit": commit}
        settings |= {key: [value] for key, value in digests.items()}
        cubins = PACKAGES / "noarch" / f"{build.cubins_stem}{kernels}_0.conda"
        package = PACKAGES / build.platform / f"{build.operators_stem}{operators}_{build.number}.conda"
        times = inputs.seconds(inputs.KERNELS), inputs.seconds(sources)
        return (
            Planned("kernels", f"CUDA {build.cuda}", build.cubins, cubins, times[0], settings),
            Planned("operators", f"PyTorch {build.torch}", build.package, package, times[1], settings),
        )

    def _facts(
        self, build: Build, system: channel.Compiler | None, commit: str, settings: Mapping[str, list[str]]
    ) -> Mapping[str, list[str]]:
        """What a package depends on besides the project's files. No path: equal checkouts make equal packages."""
        # A mirror of conda-forge has what conda-forge has.
        common = [build.package, build.version, build.cuda, "pypi" if system else "conda-forge"]
        kernels = [*common, *matrix.targets(build.architectures), "ptx", *build.ptx]
        # All that the recipe is told, but for the Python: no binary depends on it. _build.json says the commit.
        operators = [*(f"{key}={value}" for key, (value,) in settings.items() if key != "python"), commit]
        table = matrix.load()
        cuda, platform = table.cuda[build.cuda], table.platforms[build.platform]
        if not system:
            kernels.append(f"gcc={table.gcc}")
        else:
            kernels += [f"{name}={version}" for name, version in cuda.pypi.items()]
            kernels.append(sha256(channel.SHIM.read_bytes()))
            locks = (venvs.lock_file(name) for name in (f"torch-{_compiled_with(build)}", "tools"))
            operators += [system.version, *(sha256(lock.read_bytes()) for lock in locks)]
            if platform.glibc and platform.glibc_first:
                operators.append(channel.sysroot(platform.glibc, platform.name, platform.glibc_first).digest())
        # An operators package names the very kernels it was made for.
        return {"kernels": kernels, "operators": [*operators, *kernels]}

    def _channel(self, one: Planned, build: Build) -> str:
        """Where the package's requirements come from: kernels ask for no PyTorch, operators for no CUDA."""
        if self.channel_kind != "pypi":
            return self.channel_kind
        of = {"cuda": build.cuda} if one.step == "kernels" else {"torch": _compiled_with(build), "beside": build.conda_first}
        if "torch" in of and matrix.load().pytorch[build.torch].old_abi_on_pypi:
            self.console.print(
                f"[yellow]note:[/] PyPI's PyTorch {build.torch} has libstdc++'s old ABI: these operators load beside that one, "
                "not beside those of PyTorch's own index or conda-forge; for them build with --channel conda-forge",
                highlight=False,
            )
        with self.clock.step("channel"):
            return channel.lay(
                build.platform, report=lambda text: self.console.print(f"[dim]channel: {text}[/]"), **of
            ).as_uri()

    def _build(self, one: Planned, title: str, source: str) -> None:
        PACKAGES.mkdir(parents=True, exist_ok=True)
        file = WORK / f"{one.name}.variant.json"
        file.write_text(json.dumps(one.settings, indent=1), encoding="utf-8")
        command: list[str | Path] = [sys.executable, ROOT / "scripts", "_package", one.name, "--child"]
        command += ["--recipe", SOURCES / "recipe" / "recipe.yaml", "--variant", file]
        command += ["--channel", source, "--output", PACKAGES, "--seconds", str(one.seconds)]
        environment = dict(os.environ)
        if self.channel_kind == "pypi":
            environment["RATTLER_CACHE_DIR"] = str(WORK / "rattler")
        with _progress(self.console) as progress:
            task = progress.add_task(title, total=None)

            def on_line(line: str) -> None:
                if match := re.match(r"\s*\[(\d+)/(\d+)\] (.*)", line):
                    progress.update(task, completed=int(match[1]), total=int(match[2]), description=f"{title}: {match[3][:60]}")
                elif line.startswith(("step: ", "downloading ")):
                    progress.update(task, description=f"{title}: {line.removeprefix('step: ')[:60]}")

            try:
                log = WORK / "logs" / f"{one.name}.log"
                child.run(f"building {title}", command, log=log, on_line=on_line, environment=environment)
            except child.ChildError as error:
                raise BuildError(_why(error, self.channel_kind)) from error
            progress.update(task, total=1, completed=1, description=f"{title}: built and tested")


def _compiled_with(build: Build) -> str:
    return matrix.load().pytorch[build.torch].compiled_with


def _conda_forge_python() -> str:
    """The build environment's Python, by its full conda-forge name."""
    python = matrix.load().build_python
    kind = "cpython" if python in ("3.9", "3.10", "3.11", "3.12") else f"cp{python.replace('.', '')}"
    return f"{python}.* *_{kind}"


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
    )


def _why(error: child.ChildError, channel_kind: str) -> str:
    """The lines of a failed build that say what was wrong."""
    text = "\n".join(error.tail)
    if error.disk_full:
        return str(error)
    if channel_kind != "pypi" and re.search(
        r"(?i)request failed|retry attempt|error sending request|failed to fetch|dns error", text
    ):
        # pixi's own mirrors, which brought its environment, are not rattler-build's.
        return (f"the channel {channel_kind} cannot be reached: check the network, name a mirror by `--channel` or "
                "SAGEATTENTION_CHANNEL, or build from PyPI with `--channel pypi` (`python3 scripts/run.py` does); "
                f"log: {error.log}")  # fmt: skip
    ours = re.escape(WORK.as_uri())  # channels that have no packages at first
    if lacking := re.search(rf"(?m)^subdir (\S+) of channel (?!{ours})(.+) was not found, ignoring", text):
        return (f"the channel {lacking[2]} was not found, or has no {lacking[1]}: give --channel conda-forge, a mirror of it, or "
                f"pypi; log: {error.log}")  # fmt: skip
    return f"{error}\n" + "\n".join(error.telling())
