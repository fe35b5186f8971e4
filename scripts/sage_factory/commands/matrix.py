"""Show what is built: every row of variants.yaml, or those of a profile, a platform, some versions.

With `--kernels` the kernel sets, since all builds of a package and CUDA version share one. What CI makes of it is shown by `plan`.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Column, Table

from sage_factory.what import matrix

ERROR = 2


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", help="a package, such as sageattn3 (default: every one)")
    parser.add_argument("--profile", help="a named selection of variants.yaml (default: every build)")
    parser.add_argument("--platform", help="a platform (default: those of the profile)")
    parser.add_argument("--cuda", help="a CUDA version, such as 12.8")
    parser.add_argument("--torch", help="a PyTorch version, such as 2.8.0")
    parser.add_argument("--python", nargs="+", help="Python versions, such as 3.12")
    parser.add_argument("--kernels", action="store_true", help="the kernel sets that these builds share, one a CUDA version")


def run(args: argparse.Namespace) -> int:
    chosen = matrix.builds(
        args.profile, package=args.package, platform=args.platform, cuda=args.cuda, torch=args.torch, python=args.python
    )
    if args.kernels:
        titles = ["package", "CUDA", "GPU architectures", "PTX"]
        rows = [
            [one["package"], one["cuda"], " ".join(one["architectures"]), " ".join(one["ptx"])]
            for one in matrix.kernel_sets(chosen)
        ]
    else:
        titles = ["package", "platform", "PyTorch", "CUDA", "Python", "GPU architectures", "wheel"]
        rows = [[b.package, b.platform, b.torch, b.cuda, b.python, " ".join(b.architectures), b.wheel_name] for b in chosen]
    table = Table(*(Column(title, overflow="fold") for title in titles))
    for row in rows:
        table.add_row(*row)
    # In a file or a log no column is cut to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    return 0
