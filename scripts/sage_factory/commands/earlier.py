"""Take what earlier releases of the version have: `earlier --tag v2.2.0-build.1 --profile sage2-all` completes dist/ with it.

With `--packages` only their conda packages are fetched, into build/conda, where a build finds those that it need not make. Of a first
release there is nothing to take.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sage_factory import ROOT
from sage_factory.ship import earlier, indexes
from sage_factory.what import matrix


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", required=True, help="the release that is being made")
    parser.add_argument("--profile", required=True, help="what it holds")
    parser.add_argument("--packages", action="store_true", help="conda packages alone, for a build to find")
    parser.add_argument(
        "--repository", default=os.environ.get("GITHUB_REPOSITORY", ""), help="OWNER/NAME (default: the checkout's)"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what is completed (default: dist)")


def run(args: argparse.Namespace) -> int:
    builds = matrix.builds(args.profile)
    there = earlier.published(indexes.releases(args.repository), matrix.tagged(args.tag), args.tag)
    files = earlier.wanted(there, builds)
    if args.packages:
        placed = earlier.fetch(files, ROOT / "build" / "conda", args.repository)
    else:
        placed = earlier.complete(files, args.dist, args.repository)
    for path in placed:
        print(path.name)
    print(f"{len(placed)} files of earlier releases, which have {len(files)} of profile {args.profile}")
    return 0
