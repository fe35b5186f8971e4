"""Write pip's indexes: static ones (PEP 503), so that pip finds the wheel for the PyTorch there: one for each major version of CUDA,
as cu12/, and one for each CUDA × PyTorch.

`index --output DIR [WHEEL ...]` adds wheels to a folder that any web server can offer; `index --releases OWNER/REPO
--output DIR` writes indexes that link to the wheels of every GitHub release so far. Then, beside any PyTorch for CUDA 12,
`pip install --upgrade sageattention --index-url https://…/cu12/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sage_factory import ROOT, FactoryError, task
from sage_factory.ship import indexes


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", nargs="*", type=Path, help="wheels to add (default: all of dist/wheels)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "simple", help="default: dist/simple")
    parser.add_argument("--index-url", default=indexes.address(), help="where that is served, for the wheels to state")
    parser.add_argument("--releases", metavar="OWNER/REPO", help="link to the wheels of this repository's releases instead")


def run(args: argparse.Namespace) -> int:
    if args.releases:
        found = indexes.link(args.releases, args.output)
        print(f"{len(found)} wheels in {len({link.folder for link in found})} indexes: {args.output}")
        return 0
    wheels = args.wheel or sorted((ROOT / "dist" / "wheels").glob("*.whl"))
    if not wheels:
        raise FactoryError(f"dist/wheels holds no wheel: {task('build-cu128')} makes one")
    new = indexes.add(wheels, args.output, args.index_url)
    for path in new:
        print(indexes.target(path, args.output).relative_to(args.output))
    print(f"{len(new)} new, {len(wheels) - len(new)} there already: {args.output}")
    return 0
