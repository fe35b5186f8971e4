"""Publish what a profile promises: conda packages to a channel, wheels to pip's indexes.

`publish --profile sage2-all --channel https://prefix.dev/NAME --index DIR [--dry-run]`. What is there already is left
alone, so that an interrupted run is finished by the next; a file that is there with other content is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sage_factory import ROOT, FactoryError
from sage_factory.ship import collect, indexes, publish


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, help="what must be there, whole, and is published")
    parser.add_argument("--platform", help="of one platform only")
    parser.add_argument(
        "--channel",
        type=lambda text: text if "://" in text else Path(text),
        help="https://prefix.dev/NAME, https://conda.anaconda.org/OWNER, s3://BUCKET/NAME or a folder",
    )
    parser.add_argument("--index", type=Path, help="folder of pip's indexes")
    parser.add_argument("--index-url", default=indexes.address(), help="where they are served, for the wheels to state")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the files are (default: dist)")
    parser.add_argument("--dry-run", action="store_true", help="show what would go where, and change nothing")


def run(args: argparse.Namespace) -> int:
    if not args.channel and not args.index:
        raise FactoryError("say where to: --channel, --index or both")
    to = publish.channel(str(args.channel)) if args.channel else None
    found = collect.collect(args.dist, args.profile, args.platform)
    for path in found.others:
        print(f"not of profile {args.profile}: {path.name}", file=sys.stderr)
    planned = publish.publish(found, to, args.index, show, dry_run=args.dry_run, index_url=args.index_url)
    would = "would be " if args.dry_run else ""
    print(f"{planned} {would}new, {len(found.files)} files of profile {args.profile} in all")
    return 0


def show(rows: Sequence[publish.Row]) -> None:
    """What goes where."""
    table = Table(Column("file", overflow="fold"), Column("to", overflow="fold"), "")
    for name, to, new in rows:
        table.add_row(escape(name), escape(to), "[green]new" if new else "there already")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
