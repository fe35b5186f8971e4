"""Say where two wheels or two conda packages differ, entry by entry: `compare FILE OTHER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sage_factory.inspect import compare

ERROR = 2


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("other", type=Path)


def run(args: argparse.Namespace) -> int:
    found = compare.differences(args.file, args.other)
    print("\n".join(found) if found else "identical")
    return 1 if found else 0
