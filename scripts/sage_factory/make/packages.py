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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from sage_factory import ROOT, alone, child
from sage_factory.inspect import verify
from sage_factory.make import archives, wheels
from sage_factory.ship import place
from sage_factory.what import inputs, matrix, variant
from sage_factory.with_what import channel, venvs

WORK = ROOT / "build"
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
    wheels.WheelError,
    archives.ArtifactError,
)


@dataclass
class Clock:
    """How long each kind of step took: seconds that passed, and of processors, all child processes included."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        start, cpu = time.monotonic(), _cpu()
        try:
            yield
        finally:
            wall, used = self.seconds.get(name, (0.0, 0.0))
            self.seconds[name] = wall + time.monotonic() - start, used + _cpu() - cpu


def _cpu() -> float:
    """Seconds of processors that this process and its ended children have used. (Windows does not count children.)"""
    return sum(os.times()[:4])


@dataclass(frozen=True)
class Request:
    """One PyTorch × CUDA, and the Pythons that wheels are wanted for."""

    build: matrix.Build
    pythons: tuple[matrix.Build, ...]

    @property
    def title(self) -> str:
        return f"PyTorch {self.build.torch}, CUDA {self.build.cuda}"


@dataclass(frozen=True)
class Planned:
    """A conda package to be: the recipe's output, the file that comes of it, and what goes in."""

    step: str
    of: str
    name: str
    path: Path
    inputs: tuple[str, ...]
    settings: Mapping[str, list[str]] = field(hash=False)


@dataclass
class Factory:
    """What the steps of one run share."""

    channel_kind: str
    console: Console
    clock: Clock = field(default_factory=Clock)
    reused: list[str] = field(default_factory=list)

    def packages(self, request: Request, *, kernels_only: bool = False) -> list[Path]:
        """The kernels' and the operators' conda package of one request, built if they are not there yet."""
        planned = self._planned(request.build)[: 1 if kernels_only else 2]
        for one in planned:
            if one.path.is_file() and (faults := verify.verify_conda(one.path)):
                self.console.print(f"[yellow]building again:[/] {faults[0]}", highlight=False)
                one.path.unlink()
            if one.path.is_file():
                self.reused.append(one.path.name)
                continue
            # The same kernels serve every platform, and nvcc on Windows would take another host compiler.
            if one.name.endswith("-cubins") and matrix.load().platforms[request.build.platform].windows:
                raise BuildError(f"kernels are compiled on Linux: copy {one.path.name} from there to {one.path.parent}")
            source = self._channel(one, request.build)
            with self.clock.step(one.step):
                self._build(one, f"{one.step} ({one.of})", source)
            if not one.path.is_file():
                log = WORK / "logs" / f"{one.name}.log"
                raise BuildError(f"rattler-build made another package than {one.path.name}: see {log}")
        return [one.path for one in planned]

    def _planned(self, build: matrix.Build) -> tuple[Planned, Planned]:
        """The two packages of a build by name, so that what is there already can be found."""
        system = channel.compiler() if self.channel_kind == "pypi" else None
        commit = inputs.commit(inputs.OPERATORS)
        facts = self._facts(build, system, commit)
        kernels = inputs.digest(inputs.KERNELS, facts["kernels"])
        operators = inputs.digest(inputs.OPERATORS, facts["operators"])
        digests = {"kernels_digest": kernels, "operators_digest": operators, "sageattention_commit": commit}
        pin = f"{channel.PYTHON}.*" if system else _conda_forge_python()
        settings = variant.of(build, python_pin=pin, digests=digests, gcc=system.major if system else None)
        cuda, torch = build.cuda.replace(".", ""), build.torch.replace(".", "")
        cubins = PACKAGES / "noarch" / f"sageattention-cubins-{build.version}-cu{cuda}_h{kernels}_0.conda"
        package = PACKAGES / build.platform / f"sageattention-{build.version}-torch{torch}_cu{cuda}_h{operators}_0.conda"
        return (
            Planned("kernels", f"CUDA {build.cuda}", "sageattention-cubins", cubins, inputs.KERNELS, settings),
            Planned("operators", f"PyTorch {build.torch}", "sageattention", package, inputs.OPERATORS, settings),
        )

    def _facts(self, build: matrix.Build, system: channel.Compiler | None, commit: str) -> Mapping[str, list[str]]:
        """What a package depends on besides the project's files. No path: equal checkouts make equal packages."""
        common = [build.version, build.cuda, self.channel_kind]
        kernels = [*common, *matrix.targets(build.architectures), "ptx", *build.ptx]
        operators = [*common, build.torch, build.platform, commit]  # _build.json says the commit
        if system:
            table = matrix.load().cuda[build.cuda]
            kernels += [f"{name}={version}" for name, version in table.pypi.items()]
            kernels.append(hashlib.sha256(channel.SHIM.read_bytes()).hexdigest())
            operators += [system.version, *(_content(venvs.lock_file(name)) for name in (f"torch-{build.torch}", "tools"))]
        # An operators package names the very kernels it was made for.
        return {"kernels": kernels, "operators": [*operators, *kernels]}

    def _channel(self, one: Planned, build: matrix.Build) -> str:
        """Where the package's requirements come from: kernels ask for no PyTorch, operators for no CUDA."""
        if self.channel_kind != "pypi":
            return self.channel_kind
        needs = {"cuda": build.cuda} if one.name.endswith("-cubins") else {"torch": build.torch}
        if "torch" in needs and matrix.load().pytorch[build.torch].old_abi_on_pypi:
            self.console.print(
                f"[yellow]note:[/] PyPI's PyTorch {build.torch} has libstdc++'s old ABI: these operators load beside that one, "
                "not beside those of PyTorch's own index or conda-forge; for them build with --channel conda-forge",
                highlight=False,
            )
        with self.clock.step("channel"):
            return channel.lay(
                build.platform, report=lambda text: self.console.print(f"[dim]channel: {text}[/]"), **needs
            ).as_uri()

    def _build(self, one: Planned, title: str, source: str) -> None:
        PACKAGES.mkdir(parents=True, exist_ok=True)
        file = WORK / f"{one.name}.variant.json"
        file.write_text(json.dumps(one.settings, indent=1), encoding="utf-8")
        command: list[str | Path] = [
            sys.executable,
            ROOT / "scripts",
            "_package",
            one.name,
            "--variant",
            file,
            "--channel",
            source,
            "--output",
            PACKAGES,
            "--seconds",
            str(inputs.seconds(one.inputs)),
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
                log = WORK / "logs" / f"{one.name}.log"
                child.run(f"building {title}", command, log=log, on_line=on_line, environment=environment)
            except child.ChildError as error:
                raise BuildError(_why(error, self.channel_kind)) from error
            progress.update(task, total=1, completed=1, description=f"{title}: built and tested")

    def verified(self, packages: Sequence[Path]) -> None:
        """Both conda packages, as they are when wheels are packed from them."""
        with self.clock.step("verifying"):
            _refuse({path: verify.verify_conda(path) for path in packages})

    def wheels(self, request: Request, packages: Sequence[Path], staging: Path) -> list[Path]:
        """One verified wheel per Python, in `staging`."""
        cubins, operators = packages
        made: dict[Path, list[str]] = {}
        with _progress(self.console) as progress:
            task = progress.add_task(f"wheels ({request.title})", total=len(request.pythons))
            for build in request.pythons:
                with self.clock.step("packing"):
                    path = wheels.emit(operators, cubins, python=build.python, build=build, out_dir=staging)
                with self.clock.step("verifying"):
                    made[path] = verify.verify_wheel(path)
                progress.advance(task)
        _refuse(made)
        return list(made)


def _refuse(faults: Mapping[Path, Sequence[str]]) -> None:
    said = [f"  {path.name}: {fault}" for path, found in faults.items() for fault in found]
    if said:
        raise BuildError("verification found faults, so nothing was put into dist/:\n" + "\n".join(said))


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
    if channel_kind != "pypi" and re.search(
        r"(?i)request failed|retry attempt|error sending request|failed to fetch|dns error", text
    ):
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
    groups: dict[tuple[str, ...], list[matrix.Build]] = {}
    for build in chosen:
        torch_too = () if args.kernels else (build.torch,)
        groups.setdefault((build.platform, build.cuda, *torch_too), []).append(build)
    return [Request(group[0], tuple(group)) for group in groups.values()]


def summary(console: Console, made: list[Path], factory: Factory, total: tuple[float, float]) -> None:
    table = Table(Column("file", overflow="fold"), Column("MB", justify="right"), Column("sha256", overflow="fold"))
    for path in made:
        table.add_row(path.name, f"{path.stat().st_size / 1e6:.2f}", _content(path))
    console.print(table)
    times = Table("step", *(Column(title, justify="right") for title in ("seconds", "CPU seconds", "of the CPU seconds")))
    seconds = factory.clock.seconds
    rest = [whole - sum(part[i] for part in seconds.values()) for i, whole in enumerate(total)]
    for name, (wall, cpu) in {**seconds, "rest": rest, "all": total}.items():
        times.add_row(name, f"{wall:.1f}", f"{cpu:.1f}", f"{cpu / max(total[1], 1e-9):.0%}")
    console.print(times)
    if wheels := sum(path.suffix == ".whl" for path in made):
        console.print(f"{wheels} wheels, {total[1] / wheels:.1f} CPU seconds each", highlight=False)
    if factory.reused:
        console.print(f"unchanged, so not compiled again: {', '.join(factory.reused)}", highlight=False)


def report(args: argparse.Namespace, platform: str, seconds: Mapping[str, tuple[float, float]]) -> None:
    """What each step took, for summary.py: seconds that passed, and of processors."""
    given = [args.profile, args.torch and f"torch{args.torch}", args.cuda and f"cu{args.cuda}"]
    name = "-".join(["kernels" if args.kernels else platform, *filter(None, given)])
    path = args.output / "reports" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"steps": seconds}, indent=1), encoding="utf-8")
    partial.replace(path)


def run(args: argparse.Namespace, console: Console) -> None:
    start, cpu = time.monotonic(), _cpu()
    factory = Factory(args.channel, console)
    wanted = requests(args)
    if foreign := {r.build.platform for r in wanted} - {matrix.host_platform()}:
        # The operators take that platform's compiler, and their tests that platform.
        raise BuildError(f"packages for {', '.join(foreign)} are built there, not on {matrix.host_platform()}")
    with alone.alone(WORK / "build.lock", "another build in this checkout", console.print), place.staging() as staging:
        place.recover(args.output, staging)
        ready: list[Path] = []
        for request in wanted:
            packages = factory.packages(request, kernels_only=args.kernels)
            factory.verified(packages)
            wheels = [] if args.kernels else factory.wheels(request, packages, staging)
            ready += [path for path in (*packages, *wheels) if path not in ready]
        with factory.clock.step("placing"):
            made = place.place(ready, args.output)
    total = time.monotonic() - start, _cpu() - cpu
    summary(console, made, factory, total)
    report(args, wanted[0].build.platform, {**factory.clock.seconds, "all": total})


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", help="CUDA version of the kernels, such as 12.8")
    parser.add_argument("--torch", help="PyTorch version (default: the one variants.yaml gives that CUDA)")
    parser.add_argument("--python", nargs="+", help="Pythons to make wheels for (default: the one at hand, or the profile's)")
    parser.add_argument("--profile", help="a named selection of variants.yaml instead of one combination")
    parser.add_argument("--kernels", action="store_true", help="the kernels' packages alone, one a CUDA version, and no wheel")
    parser.add_argument("--platform", help="platform to build for (default: this machine's)")
    parser.add_argument(
        "--channel",
        default=os.environ.get("SAGEATTENTION_CHANNEL") or CONDA_FORGE,
        help="conda-forge (or a mirror of it), or pypi: a channel laid from PyPI wheels "
        "(default: $SAGEATTENTION_CHANNEL or conda-forge)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where finished files go (default: dist)")
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
