"""Run Python with the built wheels installed: `with-wheel -m pytest`, `with-wheel bench/bench.py`.

The wheel lies alone in a clean environment beside PyTorch, so that what is tested and measured is the file that would
be published, never the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from sage_factory import ROOT, FactoryError, child
from sage_factory.inspect import installed
from sage_factory.what import matrix


def options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [--cuda CUDA] [--torch TORCH] [--wheels WHEELS] (-m MODULE | SCRIPT) [ARGUMENT ...]"
    parser.add_argument("--cuda", help="CUDA version of the wheel (default: development_cuda of variants.yaml)")
    parser.add_argument("--torch", help="PyTorch that the wheel is for, such as 2.9+ (default: the one of this environment)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist" / "wheels", help="default: dist/wheels")
    parser.set_defaults(rest=[])


def apart(rest: list[str]) -> list[str]:
    """Arguments of Python that keep the checkout, with its sageattention/ that has no _C, off the import path.

    A script has its own folder there, which has its neighbours.
    """
    return ["-P", *rest] if rest[0].startswith("-") else rest


def run(args: argparse.Namespace) -> int:
    if not args.rest:
        raise FactoryError("say what to run: -m MODULE or a script")
    torch = args.torch or installed.torch_version()
    wheels = installed.choose(args.wheels, torch, args.cuda or matrix.load().development_cuda)
    python = installed.install(wheels, installed.own_folder(ROOT / "build" / "installed"))
    if faults := installed.import_faults(python):
        raise FactoryError("; ".join(faults))
    print(f"{' and '.join(wheel.name for wheel in wheels)} installed", flush=True)
    command, environment = [str(python), *apart(args.rest)], child.without_users(os.environ)
    if os.name == "posix":
        os.chdir(ROOT)
        os.execve(command[0], command, environment)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
