"""Once a week CI builds every row of variants.yaml, and a tag releases what users have now."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml
from packaging.version import Version

from sage_factory import ROOT
from sage_factory.what import matrix

WORKFLOWS = ROOT / ".github" / "workflows"
CONTENT: dict[Any, Any] = yaml.safe_load((WORKFLOWS / "weekly.yml").read_text(encoding="utf-8"))


def rows(profile: str, platform: str = "linux-64") -> set[tuple[str, str]]:
    return {(torch, cuda) for _, torch, cuda in of_packages(profile, platform)}


def of_packages(profile: str, platform: str = "linux-64") -> set[tuple[str, str, str]]:
    return {(build.package, build.torch, build.cuda) for build in matrix.builds(profile, platform=platform)}


def asked() -> dict[str, str]:
    """The profile that each job has built."""
    said = {name: job["steps"][-1]["run"] for name, job in CONTENT["jobs"].items()}
    return {name: re.search(r"profile[= ](\S+)", command)[1] for name, command in said.items()}  # type: ignore[index]


def test_it_runs_once_a_week() -> None:
    (when,) = CONTENT[True]["schedule"]
    minute, hour, day, month, weekday = when["cron"].split()
    assert (day, month) == ("*", "*")
    assert all(part.isdigit() for part in (minute, hour, weekday))


def test_every_row_is_built() -> None:
    table = matrix.load()
    everything = {(table.package_of(row).name, row["pytorch"], row["cuda"]) for row in table.rows}
    built = set().union(*(of_packages(profile) for profile in asked().values()))
    assert everything <= built, f"no job of weekly.yml builds {sorted(everything - built)}"


def test_a_tag_releases_what_users_have() -> None:
    table = matrix.load()
    for platform in ("linux-64", "win-64"):
        released = rows("release", platform)
        assert rows("sage2-all", platform) <= released <= rows(asked()["conda-forge"], platform)
        for version in table.pytorch:
            series = Version(version.rstrip("+"))
            later = [torch for torch, _ in released if torch.endswith("+") and series >= Version(torch[:-1])]
            assert later or version in {torch for torch, _ in released}, f"PyTorch {version} is in no release"
    # A driver runs what any release of its major version of CUDA compiled.
    assert {cuda.split(".")[0] for _, cuda in rows("today")} == {cuda.split(".")[0] for cuda in table.cuda}
    # conda-forge, which releases are built with, must have it; what it has not got is built of PyPI's.
    assert all(table.pytorch[torch].conda_forge for torch, _ in rows(asked()["conda-forge"]) if not torch.endswith("+"))
    for package in table.packages.values():
        assert {build.package for build in matrix.builds(package.profile)} == {package.name}, (
            "each package has releases of its own"
        )
    assert not any(table.pytorch[torch].conda_forge for torch, _ in rows("newest"))


def test_the_workflow_that_is_started_takes_the_request() -> None:
    words = shlex.split(CONTENT["jobs"]["conda-forge"]["steps"][0]["run"])
    other: dict[Any, Any] = yaml.safe_load((WORKFLOWS / words[words.index("run") + 1]).read_text(encoding="utf-8"))
    assert "profile" in other[True]["workflow_dispatch"]["inputs"]
    assert CONTENT["jobs"]["conda-forge"]["permissions"] == {"actions": "write"}
    assert CONTENT["jobs"]["newest"]["permissions"] == {"contents": "read"}
