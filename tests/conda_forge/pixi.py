"""Real pixi, in a home of its own, with a folder on loopback in the place of conda-forge and PyPI: by pixi's own mirrors."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rattler
import tools
import yaml

from conda_forge import model

# What of this process's environment pixi gets: nothing that speaks of another Python, compiler or channel.
KEPT = ("LANG", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ")


@dataclass(frozen=True)
class Pixi:
    """A machine on which pixi was just installed."""

    program: str
    home: Path
    address: str  # of a folder with conda-forge/ and simple/

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        path = os.pathsep.join([str(Path(self.program).parent), "/usr/bin", "/bin"])
        # A driver is what a test says there is, and no other.
        return kept | {
            "HOME": str(self.home),
            "PATH": path,
            "NO_PROXY": "127.0.0.1",
            "CONDA_OVERRIDE_CUDA": "",
            "PIXI_NO_WRAP": "1",
        }

    def __call__(
        self, *arguments: str | Path, cwd: Path, more: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `pixi ARGUMENTS`; raises with all that it said if it fails."""
        done = subprocess.run(
            [self.program, *arguments],
            cwd=cwd,
            env={**self.environment, **(more or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(
                f"pixi {' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done


def installed(home: Path, address: str) -> Pixi:
    """Pixi in an empty home, told once where its packages come from."""
    (home / ".pixi").mkdir(parents=True)
    pypi = importlib.import_module("pip._internal.models.index").PyPI  # where pip's own default stands
    mirrors = {rattler.Channel("conda-forge").base_url.rstrip("/"): "conda-forge", pypi.simple_url: "simple"}
    lines = [f'"{original}" = ["{address}/{mirror}"]' for original, mirror in mirrors.items()]
    (home / ".pixi" / "config.toml").write_text("\n".join(["[mirrors]", *lines]) + "\n", encoding="utf-8")
    return Pixi(tools.program("pixi"), home, address)


def locked(workspace: Path) -> dict[str, dict[str, dict[str, str]]]:
    """What pixi.lock has for each environment and platform: versions and builds by name."""
    content: dict[str, Any] = yaml.safe_load((workspace / "pixi.lock").read_text(encoding="utf-8"))
    # Those that declare something are p1, p2, … in a lock.
    names = {entry["name"]: f"{entry['subdir']}-cuda" if "subdir" in entry else entry["name"] for entry in content["platforms"]}
    found: dict[str, dict[str, dict[str, str]]] = {}
    for environment, entry in content["environments"].items():
        for platform, packages in entry["packages"].items():
            files = [Path(package["conda"]).name for package in packages if "conda" in package]
            parts = [re.fullmatch(r"(.+)-([^-]+)-([^-]+)\.conda", file) for file in files]
            found.setdefault(environment, {})[names[platform]] = {part[1]: f"{part[2]} {part[3]}" for part in parts if part}
    return found


def offered(folder: Path) -> Path:
    """A folder to offer where nothing is installed: the model of conda-forge, and an index with a wheel called ziglang."""
    model.lay(folder / "conda-forge", model.records())
    index = folder / "simple" / "ziglang"
    index.mkdir(parents=True)
    name = "ziglang-0.17.0"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: ziglang\nVersion: 0.17.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    (index / "index.html").write_text(f'<a href="{name}-py3-none-any.whl">{name}-py3-none-any.whl</a>', encoding="utf-8")
    return folder
