"""What a CI run builds, for each of its triggers or on request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sage_factory.what import matrix
from sage_factory.what.build import Build
from sage_factory.what.table import MatrixError

# The profile of each trigger; of a tag its package has one. Requests by hand name theirs.
PULL_REQUEST, BRANCH = "default", "stable"
# That GitHub makes of a matrix.
MOST_JOBS = 256


@dataclass(frozen=True)
class Plan:
    """The jobs of one run. A job builds one PyTorch × CUDA × platform, whose Pythons share all that is compiled."""

    profile: str
    release: bool
    retention_days: int
    builds: tuple[Build, ...]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """One job a package and CUDA version."""
        return matrix.kernel_sets(self.builds)

    @property
    def jobs(self) -> list[dict[str, str]]:
        """One job a package and PyTorch × CUDA × platform."""
        platforms = matrix.load().platforms
        return [
            {
                "name": _name(one),
                "package": one.package,
                "platform": one.platform,
                "runner": platforms[one.platform].runner,
                "torch": one.torch,
                "cuda": one.cuda,
                "pythons": " ".join(build.python for build in group),
            }
            for group in matrix.groups(self.builds)
            for one in group[:1]
        ]

    @property
    def installs(self) -> list[dict[str, str]]:
        """One job a wheel, on a machine that can run it."""
        platforms = matrix.load().platforms
        return [
            {
                "job": _name(build),
                "package": build.package,
                "runner": platforms[build.platform].runner,
                "torch": build.torch,
                "cuda": build.cuda,
                "python": build.python,
            }
            for build in self.builds
        ]

    def outputs(self) -> dict[str, str]:
        """What the workflow's other jobs read."""
        if len(self.builds) > MOST_JOBS:  # one job a wheel is the largest matrix
            raise MatrixError(
                f"profile {self.profile} has {len(self.builds)} wheels to install, and GitHub runs {MOST_JOBS} jobs of a matrix at most: "
                "name a smaller profile, or one platform"
            )
        return {
            "profile": self.profile,
            "release": json.dumps(self.release),
            "retention-days": str(self.retention_days),
            "kernels": json.dumps({"include": self.kernels}),
            "jobs": json.dumps({"include": self.jobs}),
            "installs": json.dumps({"include": self.installs}),
        }


def _name(build: Build) -> str:
    """Of the job that makes it, and so of its artifact."""
    return f"{build.package}-{build.platform}-torch{build.torch}-cu{build.cuda}"


def plan(event: str = "", ref: str = "", profile: str = "", platform: str = "") -> Plan:
    """The plan for a trigger, as GitHub names it, or for a profile that is asked for."""
    tag = ref.removeprefix("refs/tags/")
    released = matrix.tagged(tag) if event == "push" and tag != ref else None
    if not profile:
        if event not in ("pull_request", "push"):
            raise MatrixError(f"event {event!r} has no profile of its own: name one with --profile")
        profile = released.profile if released else BRANCH if event == "push" else PULL_REQUEST
    # A pull request's files are for looking at; those of main and of requests may be wanted for a while.
    days = 7 if event == "pull_request" else 30
    return Plan(profile, released is not None, days, matrix.builds(profile, platform=platform or None))
