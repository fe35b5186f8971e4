"""pixi.toml as pixi reads it: which platforms an environment has, and what it asks for on each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from conda_forge import model

# From here on a feature that names a subdir means the platform of that name and none of its variants with a driver.
EXACT_PLATFORMS = "0.72.1"


# Of each environment, of each of its platforms: versions and builds by name.
Table = dict[str, dict[str, dict[str, str]]]


class Platform(NamedTuple):
    name: str
    subdir: str
    virtual: Mapping[str, str]


class Manifest:
    """What of pixi.toml decides what is installed."""

    def __init__(self, text: str) -> None:
        self.table: dict[str, Any] = tomllib.loads(text)
        self.platforms = {found.name: found for found in map(_platform, self.table["workspace"]["platforms"])}
        self.environments: dict[str, list[str]] = self.table["environments"]

    def platforms_of(self, environment: str) -> list[Platform]:
        """Those that every feature of the environment has."""
        wanted = [set(self._feature(name).get("platforms", self.platforms)) for name in self.environments[environment]]
        return [platform for name, platform in self.platforms.items() if all(name in names for names in wanted)]

    def specs(self, environment: str, platform: Platform) -> list[str]:
        """What the environment asks conda-forge for on that platform."""
        asked: dict[str, str] = {}
        for feature in (self.table, *map(self._feature, self.environments[environment])):
            tables = [feature, *(t for selector, t in feature.get("target", {}).items() if _selects(selector, platform))]
            for table in tables:
                asked |= table.get("dependencies", {})
        return [f"{name} {version}" for name, version in asked.items()]

    def solved(self, channel: str) -> Table:
        """Every environment on every platform that it has; one that cannot be solved stops all, as with pixi."""
        return {
            environment: {
                platform.name: model.solved([channel], self.specs(environment, platform), platform.subdir, platform.virtual)
                for platform in self.platforms_of(environment)
            }
            for environment in self.environments
        }

    def _feature(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.table["feature"][name]
        return found

    def refused(self) -> Iterator[str]:
        """What pixi's schema lets pass and pixi does not (crates/pixi_manifest/src/platform.rs)."""
        for entry in self.table["workspace"]["platforms"]:
            if isinstance(entry, dict) and entry.get("name") == entry["platform"] and entry.keys() - {"name", "platform"}:
                yield f"platform {entry['name']}: one that is named like its subdir cannot declare virtual packages"
        floor = SpecifierSet(self.table["workspace"]["requires-pixi"])
        subdirs = [platform.subdir for platform in self.platforms.values()]
        for name, feature in self.table["feature"].items():
            meant = [p for p in feature.get("platforms", []) if subdirs.count(p) > 1]
            if meant and floor.contains("0.72.0"):
                yield f"feature {name}: before pixi {EXACT_PLATFORMS} {meant[0]} means its variants too, which {floor} lets in"


def _platform(entry: str | Mapping[str, str]) -> Platform:
    if isinstance(entry, str):
        return Platform(entry, entry, model.machine(entry))
    declared = {f"__{key}": version for key, version in entry.items() if key not in ("name", "platform")}
    return Platform(entry["name"], entry["platform"], model.machine(entry["platform"]) | declared)


def _selects(selector: str, platform: Platform) -> bool:
    families = {"linux": "linux-", "win": "win-", "unix": "linux-"}
    return selector in (platform.name, platform.subdir) or platform.subdir.startswith(families.get(selector, "nothing"))


def shown(table: Table, platforms: list[str]) -> Iterator[str]:
    """How many packages, and of which CUDA compiler or PyTorch."""
    yield f"{'':9}" + "".join(f"{name:20}" for name in platforms)
    for environment, of in table.items():
        cells = []
        for name in platforms:
            found = of.get(name, {})
            nvcc = [f"nvcc {version.split()[0]}" for package, version in found.items() if package == "cuda-nvcc"]
            torch = [" ".join(v.split("_")[0].split()) for package, v in found.items() if package == "pytorch"]
            cells.append(" ".join([str(len(found)), *nvcc, *torch]) if found else "–")
        yield f"{environment:9}" + "".join(f"{cell:20}" for cell in cells)
