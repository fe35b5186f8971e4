"""Write the recipe that could be handed to conda-forge's staged-recipes, of a released archive of the sources.

`feedstock --repository OWNER/REPO --tag v2.2.0 --sha256 SUM --maintainer NAME`: the sum is that of the archive which GitHub makes of the
tag; `curl -sL URL | sha256sum` says it, and an error here says the URL.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sage_factory import ROOT
from sage_factory.git import resolved
from sage_factory.ship import feedstock, tag
from sage_factory.what import matrix


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", metavar="OWNER/REPO", required=True, help="the repository on GitHub")
    parser.add_argument("--tag", required=True, help="the tag whose sources are built")
    parser.add_argument("--sha256", default="", help="of the archive of that tag")
    parser.add_argument("--maintainer", nargs="+", default=[], help="who looks after it, by their names on GitHub")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "staged-recipes" / "sageattention")


def run(args: argparse.Namespace) -> int:
    tag.number(args.tag, matrix.load().packages[feedstock.PACKAGE])  # the recipe says the table's version
    page = f"https://github.com/{args.repository}"
    url = f"{page}/archive/refs/tags/{args.tag}.tar.gz"
    if not re.fullmatch("[0-9a-f]{64}", args.sha256):
        raise feedstock.FeedstockError(f"--sha256 is {args.sha256 or 'not given'}: `curl -sL {url} | sha256sum` says it")
    commit = resolved(args.tag)
    for path in feedstock.write(feedstock.Source(page, url, args.sha256, commit), args.maintainer, args.output):
        print(path)
    return 0
