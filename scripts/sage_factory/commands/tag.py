"""Tag a release: v2.2.0 on the checked-out commit, or v2.2.0-build.N where that is taken; sageattn3-v1.0.0 with --package sageattn3.

`git push` sends it.

A second build of a version adds combinations that the first had not, or repairs rows that say `build: N` in variants.yaml. What
the tag starts is in docs/packaging.md.
"""

from __future__ import annotations

import argparse

from sage_factory.ship import tag


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", default="sageattention", help="what is released (default: sageattention)")
    parser.add_argument("--dry-run", action="store_true", help="say which tag it would be")


def run(args: argparse.Namespace) -> int:
    name = tag.tag(args.package, dry_run=args.dry_run)
    print(f"{name}: {'not made, this is a dry run' if args.dry_run else f'release it with `git push origin {name}`'}")
    return 0
