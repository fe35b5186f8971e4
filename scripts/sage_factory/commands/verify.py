"""Check artifacts before anybody installs them: `verify [FILE ...]`, by default all of dist/.

Name against metadata against content, hashes, GPU architectures, symbol versions, build-machine paths.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sage_factory import ROOT, FactoryError, task
from sage_factory.inspect import verify

ERROR = 2


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="*", help="wheels and conda packages (default: all of dist/)")


def run(args: argparse.Namespace) -> int:
    files = args.file or sorted([*(ROOT / "dist").glob("wheels/*.whl"), *(ROOT / "dist").glob("conda/*/*.conda")])
    if not files:
        raise FactoryError(f"dist/ holds nothing to verify: {task('build-cu128')} makes something")
    found = {path: verify.verify(path) for path in files}
    table = Table(Column("file", overflow="fold"), Column("verdict", overflow="fold"))
    for path, faults in found.items():
        table.add_row(escape(path.name), "[red]" + escape("\n".join(faults)) if faults else "[green]good")
    Console().print(table)
    return 1 if any(found.values()) else 0
