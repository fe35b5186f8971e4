"""What a CI run builds: `plan.py --event push --ref refs/tags/v2.2.0`, or `plan.py --profile stable` for one that is asked for.

Shows a table; where $GITHUB_OUTPUT is set (a step of a GitHub workflow) the same goes there, as job matrices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sage_factory.what import matrix

# The profile of each trigger. Requests by hand name theirs.
PULL_REQUEST, BRANCH, TAG = "default", "stable", "sage2-all"


@dataclass(frozen=True)
class Plan:
    """The jobs of one run. A job builds one PyTorch × CUDA × platform, whose Pythons share all that is compiled."""

    profile: str
    release: bool
    retention_days: int
    builds: tuple[matrix.Build, ...]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """One job a CUDA version."""
        return matrix.kernel_sets(self.builds)

    @property
    def jobs(self) -> list[dict[str, str]]:
        """One job a PyTorch × CUDA × platform."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for build in self.builds:
            groups.setdefault((build.platform, build.torch, build.cuda), []).append(build.python)
        platforms = matrix.load().platforms
        return [
            {
                "name": f"{platform}-torch{torch}-cu{cuda}",
                "platform": platform,
                "runner": platforms[platform].runner,
                "torch": torch,
                "cuda": cuda,
                "pythons": " ".join(pythons),
            }
            for (platform, torch, cuda), pythons in groups.items()
        ]

    def outputs(self) -> dict[str, str]:
        """What the workflow's other jobs read."""
        return {
            "profile": self.profile,
            "release": json.dumps(self.release),
            "retention-days": str(self.retention_days),
            "kernels": json.dumps({"include": self.kernels}),
            "jobs": json.dumps({"include": self.jobs}),
        }


def plan(event: str = "", ref: str = "", profile: str = "", platform: str = "") -> Plan:
    """The plan for a trigger, as GitHub names it, or for a profile that is asked for."""
    release = event == "push" and ref.startswith("refs/tags/v")
    if not profile:
        if event not in ("pull_request", "push"):
            raise matrix.MatrixError(f"event {event!r} has no profile of its own: name one with --profile")
        profile = TAG if release else BRANCH if event == "push" else PULL_REQUEST
    # A pull request's files are for looking at; those of main and of requests may be wanted for a while.
    days = 7 if event == "pull_request" else 30
    return Plan(profile, release, days, matrix.builds(profile, platform=platform or None))


def write(outputs: Mapping[str, str], path: Path) -> None:
    """Hand values to the later jobs of a workflow."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{key}={value}\n" for key, value in outputs.items())


def show(found: Plan) -> None:
    purpose = "a release" if found.release else f"kept {found.retention_days} days"
    table = Table(
        "platform", "runner", "PyTorch", "CUDA", "Python", title=f"{found.profile}: {len(found.builds)} builds, {purpose}"
    )
    for job in found.jobs:
        table.add_row(*(job[key] for key in ("platform", "runner", "torch", "cuda", "pythons")))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print("kernels once for CUDA " + ", ".join(kernel["cuda"] for kernel in found.kernels))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--event", default="", help="pull_request, push or workflow_dispatch")
    parser.add_argument("--ref", default="", help="refs/heads/main or refs/tags/v2.2.0")
    parser.add_argument("--profile", default="", help="a profile of variants.yaml instead of the event's own")
    parser.add_argument("--platform", default="", help="one platform instead of those of the profile")
    args = parser.parse_args(argv)
    try:
        found = plan(args.event, args.ref, args.profile, args.platform)
    except matrix.MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(found)
    if path := os.environ.get("GITHUB_OUTPUT"):
        write(found.outputs(), Path(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
