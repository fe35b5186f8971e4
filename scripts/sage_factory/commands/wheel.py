"""Pack wheels from two conda packages: no compiler, no unpacking, the same inputs give the same bytes.

`wheel OPERATORS.conda CUBINS.conda --python 3.12 --out dist/wheels`. `build` packs them by itself.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sage_factory import ROOT
from sage_factory.make import wheels


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", type=Path, help="conda package `sageattention` or `sageattn3`")
    parser.add_argument("cubins", type=Path, help="conda package of its kernels, `…-cubins`, of the same CUDA version")
    parser.add_argument("--python", nargs="+", required=True, help="Pythons to pack wheels for, such as 3.12")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "wheels", help="default: dist/wheels")


def run(args: argparse.Namespace) -> int:
    # Everything is packed before anything is placed.
    builds = [wheels.find_build(args.operators, python) for python in args.python]
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out, prefix=".wheels-") as scratch:
        made = [wheels.emit(args.operators, args.cubins, build=b, out_dir=Path(scratch)) for b in builds]
        for path in made:
            print(path.replace(args.out / path.name))
    return 0
