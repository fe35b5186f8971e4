"""Prepare a release of a profile: `release --tag v2.2.0 --profile sage2-all` writes its notes and sums to dist/release/.

`--publish` makes it a GitHub release: a draft until every file is there, so that an interrupted run is finished by the
next. Nothing is released of a folder that lacks a file or has a faulty one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sage_factory import ROOT, FactoryError, alone
from sage_factory.ship import collect, indexes, release


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", required=True, help="v2.2.0 or v2.2.0-build.1")
    parser.add_argument("--profile", required=True, help="what must be there, whole, and is released")
    parser.add_argument("--platform", help="of one platform only")
    parser.add_argument("--index-url", default=indexes.address(), help="where pip's indexes are, for the notes")
    parser.add_argument("--channel-url", default=os.environ.get("CHANNEL_URL", ""), help="the conda channel, for the notes")
    parser.add_argument("--repository", default=os.environ.get("GITHUB_REPOSITORY", ""), help="OWNER/NAME, for the notes")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the files are (default: dist)")
    parser.add_argument("--publish", action="store_true", help="make it a GitHub release")


def run(args: argparse.Namespace) -> int:
    if "://" not in args.index_url:  # pip would look for a folder
        raise FactoryError("say where pip's indexes are, by a whole address, https://…: --index-url or $INDEX_URL")
    files = collect.collect(args.dist, args.profile, args.platform)
    made = release.prepare(args.tag, files, args.index_url, args.channel_url, args.repository)
    folder = args.dist / "release"
    with alone.alone(folder / ".lock", f"another process that writes to {folder}"):
        ready = (release.write_again if args.publish else release.write)(made, folder)
        print(made.notes())
        if args.publish:
            new = release.publish(args.tag, ready, folder / "NOTES.md")
            print(f"release {args.tag} is public: {new} files new, {len(ready)} in all")
    return 0
