"""Install wheels as their users will, and run them: `clean-install [--torch 2.8.0] [--cuda 12.9] [--python 3.12]`, by default all of
dist/wheels that this machine can run.

Each gets a clean environment of its Python, the newest PyTorch of its series that pip brings, and is installed in both its forms:
the file of a release, and what pip's indexes have of it. One for every PyTorch from 2.9 on gets a second environment, of the newest
PyTorch and its newest Python.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sage_factory import ROOT, FactoryError
from sage_factory.inspect import clean
from sage_factory.make import archives, wheels
from sage_factory.ship import indexes
from sage_factory.what import matrix


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", help="sageattention or sageattn3 (default: both)")
    parser.add_argument("--torch", help="a PyTorch version, such as 2.8.0")
    parser.add_argument("--cuda", help="a CUDA version, such as 12.9")
    parser.add_argument("--python", help="a Python version, such as 3.12")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist" / "wheels", help="default: dist/wheels")
    parser.add_argument("--index-url", default=indexes.address(), help="where pip's indexes are, which wheels of theirs state")


def run(args: argparse.Namespace) -> int:
    here = matrix.host_platform()
    builds = matrix.builds(package=args.package, platform=here, torch=args.torch, cuda=args.cuda, python=args.python)
    there = {build: path for build in builds if (path := args.wheels / build.wheel_name).is_file()}
    if not there:
        raise FactoryError(f"{args.wheels} holds no wheel of that kind for this machine: {builds[0].wheel_name} would be one")
    for build, path in there.items():
        made = json.loads(archives.read_wheel(path).files[f"{build.package}/_build.json"])
        with tempfile.TemporaryDirectory() as scratch:
            offered = wheels.for_index(path, build=build, out_dir=Path(scratch), index_url=args.index_url)
            for python, torch in clean.pytorches(build):
                with clean.environment(python) as interpreter:
                    clean.pytorch(interpreter, build, torch, cxx11_abi=made.get("cxx11_abi", True))
                    clean.tried(interpreter, list({one.name: one for one in (path, offered)}.values()), build.package)
                print(f"{path.name} and {build.index_name} install and run beside {torch} with Python {python}")
    return 0
