"""Lay a local conda channel from PyPI wheels, for machines that cannot reach conda-forge, and say where it is.

`build --channel pypi` does so by itself. It holds what recipe/recipe.yaml asks for, and serves this machine alone.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from sage_factory import ROOT, FactoryError, alone
from sage_factory.what import matrix
from sage_factory.with_what import channel

INTERRUPTED = ": nothing half-written was left"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cuda", help="for kernels: a CUDA version, such as 12.8")
    parser.add_argument("--torch", help="for operators: a PyTorch version, such as 2.8.0")


def run(args: argparse.Namespace) -> int:
    if args.cuda is None and args.torch is None:
        raise FactoryError(
            "say what the channel is for: --cuda, a CUDA version, for kernels, --torch, a PyTorch version, for operators, or both"
        )
    say = Console(stderr=True).print
    # A build lays channels too.
    with alone.alone(ROOT / "build" / "build.lock", "a build in this checkout", say):
        print(channel.lay(matrix.host_platform(), cuda=args.cuda, torch=args.torch, report=say))
    return 0
