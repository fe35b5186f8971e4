"""Build one output of the recipe, then run its tests.

`build` runs this as a child, so that an interrupted build ends with the compilers that it started.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rattler_build import RattlerBuildError

from sage_factory import FactoryError, child
from sage_factory.make import engine


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the output to build")
    parser.add_argument("--recipe", type=Path, required=True, help="the recipe, with its sources beside it")
    parser.add_argument("--variant", type=Path, required=True, help="JSON file of rattler-build's variables")
    parser.add_argument("--channel", action="append", required=True, help="where requirements come from")
    parser.add_argument("--seconds", type=int, required=True, help="the package's time, in seconds since 1970")
    parser.add_argument("--output", type=Path, required=True, help="the channel to build into")
    parser.add_argument("--child", action="store_true", help="end, with every compiler, when standard input does")


def run(args: argparse.Namespace) -> int:
    if args.child:
        child.end_with_parent()
    try:
        variant = json.loads(args.variant.read_text(encoding="utf-8"))
        one = engine.render(variant, args.recipe)[args.name]
        package = engine.make(one, args.channel, args.output.resolve(), args.seconds)
        print(f"package: {package}", flush=True)
    except (FactoryError, RattlerBuildError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    return 0
