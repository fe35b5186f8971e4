"""Build conda packages and wheels: `build --cuda 12.8 [--torch 2.8.0] [--python 3.12 ...]` or `build --profile NAME`.

`--package sageattn3` builds that one instead of sageattention, or of a profile that has both.

Kernels are compiled once per CUDA version and operators once per PyTorch, each found again when nothing that goes
into it changed; a wheel for another Python is a re-zip. All is tested and verified before any of it enters dist/.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from sage_factory import ROOT, alone
from sage_factory.clock import Clock, processor_seconds
from sage_factory.files import sha256
from sage_factory.inspect import cost, verify
from sage_factory.make import wheels
from sage_factory.make.packages import BuildError, Packages
from sage_factory.ship import place, summary
from sage_factory.what import matrix
from sage_factory.what.build import Build, package_of_kernels
from sage_factory.what.table import MatrixError
from sage_factory.with_what import channel

INTERRUPTED = ": compilers are ended, and of this build's files dist/ holds all or none"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", help="sageattention or sageattn3 (default: sageattention, or the profile's)")
    parser.add_argument("--cuda", help="CUDA version of the kernels, such as 12.8")
    parser.add_argument("--torch", help="PyTorch version (default: the one variants.yaml gives that CUDA)")
    parser.add_argument("--python", nargs="+", help="Pythons to make wheels for (default: the one at hand, or the profile's)")
    parser.add_argument("--profile", help="a named selection of variants.yaml instead of one combination")
    parser.add_argument("--kernels", action="store_true", help="the kernels' packages alone, one a CUDA version, and no wheel")
    parser.add_argument("--platform", help="platform to build for (default: this machine's)")
    parser.add_argument(
        "--channel",
        default=os.environ.get("SAGEATTENTION_CHANNEL") or channel.CONDA_FORGE,
        help="conda-forge (or a mirror of it), or pypi: a channel laid from PyPI wheels "
        "(default: $SAGEATTENTION_CHANNEL or conda-forge)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where finished files go (default: dist)")


def run(args: argparse.Namespace) -> int:
    """The way of a variant: what is built, with what, made, inspected, put into dist/."""
    start, cpu = time.monotonic(), processor_seconds()
    console, clock, output = Console(stderr=True), Clock(), args.output.resolve()
    wanted = requested(args)
    if foreign := {group[0].platform for group in wanted} - {matrix.host_platform()}:
        # The operators take that platform's compiler, and their tests that platform.
        raise BuildError(f"packages for {', '.join(foreign)} are built there, not on {matrix.host_platform()}")
    place.check(output)
    packages = Packages(args.channel, console, clock, verify.verify_conda)
    with (
        alone.alone(ROOT / "build" / "build.lock", "another build in this checkout", console.print),
        place.staging() as staging,
    ):
        place.recover(output, staging)
        ready: list[Path] = []
        for group in wanted:
            made = packages.of(group[0], kernels_only=args.kernels)
            with clock.step("verifying"):
                refuse(verify.named(made))
            if not args.kernels:
                made += packed(group, made, staging, clock, console)
            ready += [path for path in made if path not in ready]
        with clock.step("placing"):
            placed = place.place(ready, output)
    steps = {**clock.seconds, "all": (time.monotonic() - start, processor_seconds() - cpu)}
    show(console, placed, steps)
    if packages.reused:
        console.print(f"unchanged, so not compiled again: {', '.join(dict.fromkeys(packages.reused))}", highlight=False)
    given = [args.profile, args.package, args.torch and f"torch{args.torch}", args.cuda and f"cu{args.cuda}"]
    name = "-".join(["kernels" if args.kernels else wanted[0][0].platform, *filter(None, given)])
    summary.report(output, name, steps)
    return 0


def requested(args: argparse.Namespace) -> list[tuple[Build, ...]]:
    """What the command line asks for, grouped so that nothing is compiled twice."""
    if not args.cuda and not args.profile:
        raise MatrixError("say what to build: --cuda X, --profile NAME or both; `matrix` lists every build")
    package, torch, pythons = args.package, args.torch, args.python
    if not args.profile:
        package = package or next(iter(matrix.load().packages))
        if not args.kernels:  # which know neither PyTorch nor Python
            torch = torch or matrix.load().default_torch(args.cuda, package)
            if not torch.endswith("+"):  # those are for every Python
                pythons = pythons or [channel.PYTHON]
    platform = args.platform or matrix.host_platform()
    chosen = matrix.builds(args.profile, package=package, platform=platform, cuda=args.cuda, torch=torch, python=pythons)
    return matrix.groups(chosen, kernels=args.kernels)


def packed(group: Sequence[Build], packages: Sequence[Path], staging: Path, clock: Clock, console: Console) -> list[Path]:
    """One verified wheel per Python, in `staging`."""
    cubins, operators = packages
    made: list[Path] = []
    faults: list[str] = []
    for build in track(group, f"wheels (PyTorch {group[0].torch}, CUDA {group[0].cuda})", console=console):
        with clock.step("packing"):
            made.append(wheels.emit(operators, cubins, build=build, out_dir=staging))
        with clock.step("verifying"):
            faults += verify.named(made[-1:])
    refuse(faults)
    return made


def refuse(faults: Sequence[str]) -> None:
    """BuildError if there are any."""
    if faults:
        raise BuildError("verification found faults, so nothing was put into dist/:\n" + "\n".join(faults))


def show(console: Console, made: Sequence[Path], steps: Mapping[str, tuple[float, float]]) -> None:
    """The files, and what each step took."""
    table = Table(Column("file", overflow="fold"), Column("MB", justify="right"), Column("sha256", overflow="fold"))
    for path in made:
        table.add_row(path.name, f"{path.stat().st_size / 1e6:.2f}", sha256(path.read_bytes()))
    console.print(table)
    times = Table("step", *(Column(title, justify="right") for title in ("seconds", "CPU seconds", "of the CPU seconds")))
    total = steps["all"]
    parts = {name: part for name, part in steps.items() if name != "all"}
    rest = (total[0] - sum(wall for wall, _ in parts.values()), total[1] - sum(cpu for _, cpu in parts.values()))
    for name, (wall, cpu) in {**parts, "rest": rest, "all": total}.items():
        times.add_row(name, f"{wall:.1f}", f"{cpu:.1f}", f"{cpu / max(total[1], 1e-9):.0%}")
    console.print(times)
    for path in made:
        if package_of_kernels(path.name):
            whole = cost.total(*cost.of_package(path).values())
            console.print(
                f"{path.name}: {whole.instances} kernel instances, {whole.code / 1e6:.1f} MB of instructions", highlight=False
            )
    if count := sum(path.suffix == ".whl" for path in made):
        console.print(f"{count} wheels, {total[1] / count:.1f} CPU seconds each", highlight=False)
