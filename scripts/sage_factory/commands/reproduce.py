"""Build a released file again and compare: `reproduce FILE` says that it is identical, or where it differs.

What was built of which sources is read from the file: `_build.json` states PyTorch, CUDA and the commit, a package's
timestamp is that of the commit. The build is made in a checkout of its own, with that checkout's own scripts and locks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from sage_factory.files import sha256
from sage_factory.ship import reproduce

ERROR = 2


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a wheel or conda package of a release")
    parser.add_argument("--commit", help="build at this commit instead of the one that the file leads to")


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    found = reproduce.reproduce(args.file.resolve(), args.commit)
    if found:
        print(f"{args.file.name} differs from what was built (as published, then as built):")
        print("\n".join(f"  {said}" for said in found))
        return 1
    digest = sha256(args.file.read_bytes())
    print(f"identical: {args.file.name}, sha256 {digest}, built again in {time.monotonic() - start:.0f} s")
    return 0
