"""Withdraw a release: `withdraw --tag v2.2.0 --reason "wrong kernels for 8.9"`; without a reason it is offered again.

Its notes say so in their first line. pip's indexes, once they are made anew, yank the wheels that no other release holds: they are
taken only by who asks for that very version. Nothing is removed.
"""

from __future__ import annotations

import argparse

from sage_factory.ship import release


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", required=True, help="the release")
    parser.add_argument("--reason", type=str.strip, default="", help="one line, which pip shows")


def run(args: argparse.Namespace) -> int:
    changed = release.withdraw(args.tag, args.reason)
    said = f"withdrawn: {args.reason}" if args.reason else "offered"
    print(f"{args.tag} is {said}" if changed else f"{args.tag} is {said} already")
    return 0
