"""Show what a CI run builds: `plan --event push --ref refs/tags/v2.2.0`, or `plan --profile stable` for one that is asked for.

Where $GITHUB_OUTPUT is set (a step of a GitHub workflow) the same goes there, as job matrices.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sage_factory import FactoryError
from sage_factory.ship import earlier, indexes, tag
from sage_factory.what import matrix, plan

ERROR = 2


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--event", default="", help="pull_request, push or workflow_dispatch")
    parser.add_argument("--ref", default="", help="refs/heads/main or refs/tags/v2.2.0")
    parser.add_argument("--profile", default="", help="a profile of variants.yaml instead of the event's own")
    parser.add_argument(
        "--releases",
        metavar="OWNER/REPO",
        default=os.environ.get("GITHUB_REPOSITORY", ""),
        help="of a release: what this repository's earlier ones of the version hold is not built again",
    )
    parser.add_argument(
        "--channel-url",
        default=os.environ.get("CHANNEL_URL", ""),
        help="of a release: the channel that its conda packages go to",
    )
    parser.add_argument("--platform", default="", help="one platform instead of those of the profile")


def run(args: argparse.Namespace) -> int:
    found = plan.plan(args.event, args.ref, args.profile, args.platform)
    if found.release:
        if args.channel_url.startswith("s3:"):  # now, not when the release is public
            raise FactoryError(
                f"the channel {args.channel_url} takes the program `rattler-build`, which the workflow's job has not: leave the "
                f"variable CHANNEL_URL empty, and publish releases by hand, `pixi run publish --profile … --channel {args.channel_url}`"
            )
        if args.channel_url and not args.channel_url.startswith(("https://", "http://")):  # `publish` takes it for a folder
            raise FactoryError(
                f"the channel {args.channel_url} is on no server, and a folder would go with the machine of the workflow's job: give "
                "the variable CHANNEL_URL a whole address, such as https://SERVER/NAME"
            )
        found = checked(found, args.ref.removeprefix("refs/tags/"), args.releases)
    show(found)
    if path := os.environ.get("GITHUB_OUTPUT"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{key}={value}\n" for key, value in found.outputs().items())
    return 0


def checked(found: plan.Plan, name: str, repository: str) -> plan.Plan:
    """The plan of a release, without what earlier ones have; an error if there shall be no such release."""
    if not repository:
        return found
    tag.check(name)
    releases = indexes.releases(repository)
    left = earlier.left(found.builds, earlier.published(releases, matrix.tagged(name), name))
    earlier.refuse_withdrawn(releases, left, name)
    return dataclasses.replace(found, builds=left)


def show(found: plan.Plan) -> None:
    """The jobs, as a table."""
    purpose = "a release" if found.release else f"kept {found.retention_days} days"
    title = f"{found.profile}: {len(found.builds)} builds, {purpose}"
    table = Table("package", "platform", "runner", "PyTorch", "CUDA", "Python", title=title)
    for job in found.jobs:
        table.add_row(*(job[key] for key in ("package", "platform", "runner", "torch", "cuda", "pythons")))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print("kernels once for " + ", ".join(f"{kernel['package']}, CUDA {kernel['cuda']}" for kernel in found.kernels))
