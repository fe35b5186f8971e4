"""Propose pixi.lock as it lies here: one commit with that file on a branch of its own, and a pull request for it.

`pixi update --no-install` makes the file, where conda-forge is reached; .github/workflows/lock.yml does both. The checkout stays
as it is. `gh` has to be logged in (GH_TOKEN).
"""

from __future__ import annotations

import argparse

from sage_factory.ship import propose


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="main", help="the branch to merge it into (default: main)")


def run(args: argparse.Namespace) -> int:
    print(propose.propose(args.base))
    return 0
