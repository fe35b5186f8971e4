"""Show what is built: every row of variants.yaml, or those of a profile, a platform, some versions.

`--json` prints {"include": [one object a build]} on one line, as GitHub's fromJSON takes it for a job matrix; with
`--kernels` one object a package and CUDA version instead, since all builds of one CUDA version share its kernels.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Column, Table

from sage_factory.what import matrix

ERROR = 2
TITLES = {"package": "package", "platform": "platform", "torch": "PyTorch", "cuda": "CUDA", "python": "Python",
          "architectures": "GPU architectures", "ptx": "PTX", "wheel": "wheel"}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", help="a package, such as sageattn3 (default: every one)")
    parser.add_argument("--profile", help="a named selection of variants.yaml (default: every build)")
    parser.add_argument("--platform", help="a platform (default: those of the profile)")
    parser.add_argument("--cuda", help="a CUDA version, such as 12.8")
    parser.add_argument("--torch", help="a PyTorch version, such as 2.8.0")
    parser.add_argument("--python", nargs="+", help="Python versions, such as 3.12")
    parser.add_argument("--kernels", action="store_true", help="the kernel sets that these builds share, one a CUDA version")
    parser.add_argument("--json", action="store_true", help='print {"include": [...]} on one line')


def run(args: argparse.Namespace) -> int:
    chosen = matrix.builds(
        args.profile, package=args.package, platform=args.platform, cuda=args.cuda, torch=args.torch, python=args.python
    )
    found = matrix.kernel_sets(chosen) if args.kernels else [matrix.described(build) for build in chosen]
    if args.json:
        print(json.dumps({"include": found}))
        return 0
    shown = ("package", "cuda", "architectures", "ptx") if args.kernels else tuple(key for key in TITLES if key != "ptx")
    table = Table(*(Column(TITLES[key], overflow="fold") for key in shown))
    for one in found:
        table.add_row(*(" ".join(one[key]) if isinstance(one[key], list) else one[key] for key in shown))
    # In a file or a log no column is cut to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    return 0
