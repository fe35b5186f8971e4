"""Real conda, in a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tools


@dataclass(frozen=True)
class Conda:
    """A conda that knows no channel but those of a command."""

    program: str
    home: Path
    solver: str

    def __call__(self, *arguments: str, driver: str = "", check: bool = True) -> dict[str, Any]:
        """What `conda ARGUMENTS --json` answers, its exit status among it; raises with that if it fails."""
        own = {"CONDARC": self.home / "condarc", "CONDA_PKGS_DIRS": self.home / "pkgs", "CONDA_ENVS_DIRS": self.home / "envs"}
        told = {
            "CONDA_OVERRIDE_CUDA": driver,
            "CONDA_OVERRIDE_GLIBC": "2.28",
            "CONDA_SOLVER": self.solver,
            "NO_PROXY": "127.0.0.1",
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CONDA_", "PIXI_", "PYTHON", "VIRTUAL_ENV"))}
        done = subprocess.run(
            [self.program, *arguments, "--json"],
            env=kept | {"HOME": str(self.home)} | {name: str(value) for name, value in (own | told).items()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout) if done.stdout.lstrip().startswith("{") else {"error": done.stderr}
        if check and done.returncode:
            raise AssertionError(f"conda {' '.join(arguments)} ended with {done.returncode}: {answer.get('error') or answer}")
        return answer | {"returncode": done.returncode}

    def prefix(self, environment: str) -> Path:
        return self.home / "envs" / environment


def installed(home: Path, solver: str) -> Conda:
    """conda in an empty home, if there is one that has this solver."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "condarc").write_text("channels: []\n", encoding="utf-8")
    found = Conda(tools.program("conda"), home, solver)
    probe = found("create", "--dry-run", "--name", "probe", check=False)
    if "not recognized" in probe.get("error", ""):
        pytest.skip(f"this conda has no solver {solver}")
    if probe["returncode"]:
        pytest.fail(f"{found.program} creates no environment at all: {probe.get('error') or probe}")
    return found


def linked(answer: dict[str, Any]) -> dict[str, str]:
    """What a command put into an environment, or would: versions and builds by name."""
    return {one["name"]: f"{one['version']} {one['build_string']}" for one in answer["actions"]["LINK"]}
