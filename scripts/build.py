"""Build conda packages and wheels: `build.py --cuda 12.8 [--torch 2.8.0] [--python 3.12 ...]` or `--profile NAME`.

Kernels are compiled once per CUDA version and operators once per PyTorch, each found again when nothing that goes
into it changed; a wheel for another Python is a re-zip. All is tested and verified before any of it enters dist/.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import alone
import artifact
import channel
import child
import inputs
import matrix
import place
import variant
import venvs
import verify
import wheel
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

WORK = matrix.ROOT / "build"
PACKAGES = WORK / "conda"  # the channel that packages are built into, and found in again
CONDA_FORGE = "conda-forge"


class BuildError(RuntimeError):
    """A build that cannot go on; the message says what happened and what to do."""


# Failures that explain themselves: their message is all that the reader needs.
FAULTS = (
    BuildError,
    child.ChildError,
    channel.ChannelError,
    venvs.SetupError,
    matrix.MatrixError,
    wheel.WheelError,
    artifact.ArtifactError,
)


@dataclass
class Clock:
    """How long each kind of step took."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass(frozen=True)
class Request:
    """One PyTorch × CUDA, and the Pythons that wheels are wanted for."""

    build: matrix.Build
    pythons: tuple[matrix.Build, ...]

    @property
    def title(self) -> str:
        return f"PyTorch {self.build.torch}, CUDA {self.build.cuda}"


@dataclass
class Factory:
    """What the steps of one run share."""

    channel_kind: str
    console: Console
    clock: Clock = field(default_factory=Clock)
    reused: list[str] = field(default_factory=list)

    def packages(self, request: Request) -> tuple[Path, Path]:
        """The kernels' and the operators' conda package of one request, built if they are not there yet."""
        build = request.build
        system = channel.compiler() if self.channel_kind == "pypi" else None
        commit = inputs.commit(inputs.OPERATORS)
        facts = self._facts(build, system, commit)
        digests = {
            "kernels_digest": inputs.digest(inputs.KERNELS, facts["kernels"]),
            "operators_digest": inputs.digest(inputs.OPERATORS, facts["operators"]),
        }
        pin = f"{channel.PYTHON}.*" if system else _conda_forge_python()
        digests["sageattention_commit"] = commit
        settings = variant.of(build, python_pin=pin, digests=digests, gcc=system.major if system else None)
        cuda, torch = build.cuda.replace(".", ""), build.torch.replace(".", "")
        cubins = f"sageattention-cubins-{build.version}-cu{cuda}_h{digests['kernels_digest']}_0.conda"
        operators = f"sageattention-{build.version}-torch{torch}_cu{cuda}_h{digests['operators_digest']}_0.conda"
        wanted = [
            ("kernels", "sageattention-cubins", PACKAGES / "noarch" / cubins, inputs.KERNELS),
            ("operators", "sageattention", PACKAGES / build.platform / operators, inputs.OPERATORS),
        ]
        for _, _, path, _ in wanted:
            if path.is_file() and (faults := verify.verify_conda(path)):
                self.console.print(f"[yellow]building again:[/] {faults[0]}", highlight=False)
                path.unlink()
        if all(path.is_file() for _, _, path, _ in wanted):
            self.reused += [path.name for _, _, path, _ in wanted]
            return wanted[0][2], wanted[1][2]
        if build.platform.startswith("win-") and not wanted[0][2].is_file():
            # The same kernels serve every platform, and one platform's compiler makes them.
            raise BuildError(f"kernels are compiled on Linux: copy {cubins} from there to {PACKAGES / 'noarch'}")
        source = self._channel(request)
        for step, name, path, names in wanted:
            if path.is_file():
                self.reused.append(path.name)
                continue
            with self.clock.step(step):
                self._build(name, f"{step} ({request.title})", settings, source, inputs.seconds(names))
            if not path.is_file():
                raise BuildError(f"rattler-build made another package than {path.name}: see {WORK / 'logs' / (name + '.log')}")
        return wanted[0][2], wanted[1][2]

    def _facts(self, build: matrix.Build, system: channel.Compiler | None, commit: str) -> Mapping[str, list[str]]:
        """What a package depends on besides the project's files. No path: equal checkouts make equal packages."""
        common = [build.version, build.cuda, self.channel_kind]
        kernels = [*common, *matrix.targets(build.architectures), "ptx", *build.ptx]
        operators = [*common, build.torch, build.platform, commit]  # _build.json says the commit
        if system:
            table = matrix.load().cuda[build.cuda]
            kernels += [f"{name}={version}" for name, version in table.pypi.items()]
            kernels.append(hashlib.sha256(channel.SHIM.read_bytes()).hexdigest())
            operators += [system.version, _content(venvs.lock_file(f"torch-{build.torch}"))]
        # An operators package names the very kernels it was made for.
        return {"kernels": kernels, "operators": [*operators, *kernels]}

    def _channel(self, request: Request) -> str:
        if self.channel_kind != "pypi":
            return self.channel_kind
        with self.clock.step("channel"):
            return channel.lay([request.build], lambda text: self.console.print(f"[dim]channel: {text}[/]")).as_uri()

    def _build(self, name: str, title: str, settings: Mapping[str, list[str]], source: str, seconds: int) -> None:
        PACKAGES.mkdir(parents=True, exist_ok=True)
        file = WORK / f"{name}.variant.json"
        file.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        command: list[str | Path] = [
            sys.executable,
            Path(__file__).with_name("package.py"),
            name,
            "--variant",
            file,
            "--channel",
            source,
            "--output",
            PACKAGES,
            "--seconds",
            str(seconds),
            "--child",
        ]
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
                log = WORK / "logs" / f"{name}.log"
                child.run(f"building {title}", command, log=log, on_line=on_line, environment=environment)
            except child.ChildError as error:
                raise BuildError(_why(error, self.channel_kind)) from error
            progress.update(task, total=1, completed=1, description=f"{title}: built and tested")

    def wheels(self, request: Request, cubins: Path, operators: Path, staging: Path) -> list[Path]:
        """One verified wheel per Python, in `staging`."""
        made, faults = [], []
        with self.clock.step("verifying"):
            for package in (cubins, operators):
                faults += [f"{package.name}: {fault}" for fault in verify.verify_conda(package)]
        with _progress(self.console) as progress:
            task = progress.add_task(f"wheels ({request.title})", total=len(request.pythons))
            for build in request.pythons:
                with self.clock.step("packing"):
                    path = wheel.emit(operators, cubins, python=build.python, build=build, out_dir=staging)
                with self.clock.step("verifying"):
                    faults += [f"{path.name}: {fault}" for fault in verify.verify_wheel(path)]
                made.append(path)
                progress.advance(task)
        if faults:
            raise BuildError(
                "verification found faults, so nothing was put into dist/:\n" + "\n".join(f"  {f}" for f in faults)
            )
        return made


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
    if channel_kind != "pypi" and re.search(r"(?i)request failed|error sending request|failed to fetch|dns error", text):
        return (f"the channel {channel_kind} cannot be reached: check the network, or build from PyPI with "
                f"`--channel pypi` (`python3 scripts/run.py` does); log: {error.log}")  # fmt: skip
    return f"{error}\n" + "\n".join(error.telling())


def requests(args: argparse.Namespace) -> list[Request]:
    """What the command line asks for, grouped so that nothing is compiled twice."""
    here = matrix.host_platform()
    if not args.cuda and not args.profile:
        raise matrix.MatrixError("say what to build: --cuda X, --profile NAME or both; `matrix.py` lists every build")
    torch, pythons = args.torch, args.python
    if not args.profile:
        torch = torch or matrix.load().default_torch(args.cuda)
        pythons = pythons or [channel.PYTHON]
    chosen = matrix.builds(args.profile, platform=args.platform or here, cuda=args.cuda, torch=torch, python=pythons)
    groups: dict[tuple[str, str, str], list[matrix.Build]] = {}
    for build in chosen:
        groups.setdefault((build.platform, build.cuda, build.torch), []).append(build)
    return [Request(group[0], tuple(group)) for group in groups.values()]


def summary(console: Console, made: list[Path], factory: Factory, total: float) -> None:
    table = Table(Column("file", overflow="fold"), Column("MB", justify="right"), Column("sha256", overflow="fold"))
    for path in made:
        table.add_row(path.name, f"{path.stat().st_size / 1e6:.2f}", _content(path))
    console.print(table)
    steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in factory.clock.seconds.items())
    console.print(f"{steps}; total {total:.1f} s", highlight=False)
    if factory.reused:
        console.print(f"unchanged, so not compiled again: {', '.join(factory.reused)}", highlight=False)


def run(args: argparse.Namespace, console: Console) -> None:
    start = time.monotonic()
    factory = Factory(args.channel, console)
    wanted = requests(args)
    if foreign := {r.build.platform for r in wanted} - {matrix.host_platform()}:
        # The operators take that platform's compiler, and their tests that platform.
        raise BuildError(f"packages for {', '.join(foreign)} are built there, not on {matrix.host_platform()}")
    with alone.alone(WORK / "build.lock", "another build in this checkout", console.print), place.staging() as staging:
        place.recover(args.output, staging)
        ready: list[Path] = []
        for request in wanted:
            cubins, operators = factory.packages(request)
            wheels = factory.wheels(request, cubins, operators, staging)
            ready += [path for path in (cubins, operators, *wheels) if path not in ready]
        with factory.clock.step("placing"):
            made = place.place(ready, args.output)
    summary(console, made, factory, time.monotonic() - start)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", help="CUDA version of the kernels, such as 12.8")
    parser.add_argument("--torch", help="PyTorch version (default: the one variants.yaml gives that CUDA)")
    parser.add_argument("--python", nargs="+", help="Pythons to make wheels for (default: the one at hand, or the profile's)")
    parser.add_argument("--profile", help="a named selection of variants.yaml instead of one combination")
    parser.add_argument("--platform", help="platform to build for (default: this machine's)")
    parser.add_argument(
        "--channel",
        default=os.environ.get("SAGEATTENTION_CHANNEL") or CONDA_FORGE,
        help="conda-forge (or a mirror of it), or pypi: a channel laid from PyPI wheels "
        "(default: $SAGEATTENTION_CHANNEL or conda-forge)",
    )
    parser.add_argument("--output", type=Path, default=matrix.ROOT / "dist", help="where finished files go (default: dist)")
    args = parser.parse_args()
    args.output = args.output.resolve()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        run(args, console)
    except KeyboardInterrupt:
        console.print("\ninterrupted: compilers are ended, and of this build's files dist/ holds all or none")
        return 130
    except FAULTS as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except OSError as error:
        hint = ": free some space and run it again; dist/ is as it was" if error.errno == errno.ENOSPC else ""
        console.print(
            f"[red]error:[/] {error.strerror}: {error.filename or 'no file named'}{hint}",
            highlight=False,
            soft_wrap=True,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
