"""Write what follows from variants.yaml and pyproject.toml's groups: the hash-pinned locks, pixi.toml's platforms, and the list of
what a release offers in docs/packaging.md.

`lock` refreshes all locks, `lock test torch-2.8.0` these two.
"""

from __future__ import annotations

import argparse

from rich.progress import track

from sage_factory import ROOT
from sage_factory.files import put
from sage_factory.what import matrix, offers
from sage_factory.with_what import locks


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="locks to refresh (default: all)")


def run(args: argparse.Namespace) -> int:
    there = {lock.name: lock for lock in locks.locks()}
    if unknown := [name for name in args.name if name not in there]:
        raise locks.LockError(f"unknown lock {', '.join(unknown)}: there are {', '.join(there)}")
    pixi = ROOT / "pixi.toml"
    put(pixi, locks.with_platforms(pixi.read_text(encoding="utf-8")).encode())
    page = ROOT / "docs" / "packaging.md"
    released = matrix.builds(next(iter(matrix.load().packages.values())).profile)
    put(page, offers.with_offers(page.read_text(encoding="utf-8"), released).encode())
    for name in track(args.name or list(there), description="locking", transient=True):
        locks.write(there[name])
    return 0
