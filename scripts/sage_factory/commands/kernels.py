"""Compile the kernels alone, for working on them: only what changed, straight into build/kernels-cuXYZ/cubins.

`kernels [--package sageattn3] [--cuda 12.8] [--architecture 9.0] [--proof]`, the architecture once for each. Packages come of `build`.
"""

from __future__ import annotations

import argparse

from sage_factory.make import kernels
from sage_factory.what import matrix


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", default="sageattention", help="whose kernels (default: sageattention)")
    parser.add_argument("--cuda", help="CUDA version (default: development_cuda of variants.yaml)")
    parser.add_argument("--architecture", action="append", default=[], help="such as 9.0; default: all of that CUDA version")
    parser.add_argument(
        "--proof",
        action="store_true",
        help="also the kernels that users of these GPUs are not given, into build/kernels-cuXYZ-proof/cubins",
    )


def run(args: argparse.Namespace) -> int:
    print(
        kernels.compile_kernels(args.package, args.cuda or matrix.load().development_cuda, args.architecture, proof=args.proof)
    )
    return 0
