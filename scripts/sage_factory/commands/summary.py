"""Show what a run made, as Markdown: versions, sizes, hashes, and the times of each build.

Where $GITHUB_STEP_SUMMARY is set (a step of a GitHub workflow) it becomes part of the run's page.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sage_factory import ROOT
from sage_factory.ship import summary


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="default: dist")


def run(args: argparse.Namespace) -> int:
    text = "\n".join(summary.summary(args.dist)) + "\n"
    print(text, end="")
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    return 0
