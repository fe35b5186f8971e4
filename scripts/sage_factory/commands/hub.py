"""Lay builds out as kernels of the Hugging Face hub: `hub` writes dist/hub/KERNEL/build/VARIANT for all operators' packages in dist/conda.

`kernels.get_local_kernel(Path("dist/hub/sage-attention"))` loads the one that fits: KERNEL is what a repository of the hub holds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sage_factory import ROOT, FactoryError
from sage_factory.inspect import verify
from sage_factory.make import hub
from sage_factory.ship import collect
from sage_factory.what import matrix


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the conda packages are (default: dist)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist" / "hub", help="where a folder for each kernel goes (default: dist/hub)"
    )


def run(args: argparse.Namespace) -> int:
    packages = sorted(path for name in matrix.load().packages for path in args.dist.glob(f"conda/*/{name}-*-torch*.conda"))
    if not packages:
        raise FactoryError(f"{args.dist} holds no conda package of operators: `build` makes them")
    pairs = [(operators, collect.kernels_of(operators)) for operators in packages]
    if faults := verify.named({path for pair in pairs for path in pair}):
        raise FactoryError("faults were found, so nothing was laid:\n" + "\n".join(sorted(faults)))
    for operators, cubins in pairs:
        print(hub.lay(operators, cubins, args.out))
    return 0
