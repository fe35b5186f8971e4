"""pip's indexes: one static PEP 503 index for each CUDA × PyTorch, in a folder with its wheels or linking to releases."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sage_factory import FactoryError, alone
from sage_factory.files import put, sha256
from sage_factory.make import archives


class SiteError(FactoryError):
    """An index cannot be written; the message says why."""


@dataclass(frozen=True)
class Link:
    """One file of an index."""

    project: str
    folder: str
    name: str
    url: str
    sha256: str
    requires_python: str
    metadata_sha256: str | None = None


def describe(name: str, url: str, sha256: str, metadata_sha256: str | None = None) -> Link:
    """The link of a wheel, whose name says all that an index tells."""
    try:
        project, version, tag, tags = parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise SiteError(f"{name} is not a wheel's name: {error}") from error
    # py3: by LibTorch's stable ABI, for every Python of the PyTorchs from that one on.
    python = re.fullmatch(r"cp(\d)(\d+)|py3", next(iter(tags)).interpreter)
    # The build tag 280.128, or the local version cu128torch2.8.0. The last digit of PyTorch is the patch, which an index does
    # not tell apart; 2.9+ is 29.
    said = re.fullmatch(r"(?P<torch>\d+)\.(?P<cuda>\d+)", "".join(map(str, tag)))
    said = said or re.fullmatch(r"cu(?P<cuda>\d+)torch(?P<torch>\d+\.\d+\.\d)", version.local or "")
    if said is None or python is None:
        raise SiteError(f"{name} does not say for which PyTorch, CUDA and Python it is, as {{torch}}.{{cuda}}-cp3xx does")
    torch = said["torch"].replace(".", "")
    folder = f"cu{said['cuda']}-torch{torch[:-1] if python[1] else f'{torch}-or-later'}"
    requires = f"=={python[1]}.{python[2]}.*" if python[1] else ">=3.10"
    return Link(canonicalize_name(project), folder, name, url, sha256, requires, metadata_sha256)


def pages(links: Iterable[Link]) -> dict[str, str]:
    """Every page of every index, by path."""
    tree: dict[str, dict[str, list[Link]]] = {}
    for link in sorted(links, key=lambda link: (link.folder, link.name)):
        tree.setdefault(link.folder, {}).setdefault(link.project, []).append(link)
    answer = {"index.html": _page("Indexes, one for each CUDA and PyTorch", [_anchor(f"{folder}/", folder) for folder in tree])}
    for folder, projects in tree.items():
        answer[f"{folder}/index.html"] = _page(folder, [_anchor(f"{project}/", project) for project in projects])
        for project, files in projects.items():
            answer[f"{folder}/{project}/index.html"] = _page(f"{project} for {folder}", [_file(link) for link in files])
    return answer


def _file(link: Link) -> str:
    more = {"data-requires-python": link.requires_python}
    if link.metadata_sha256:
        # PEP 714's name and the one that older pips know.
        more |= {f"data-{kind}-metadata": f"sha256={link.metadata_sha256}" for kind in ("core", "dist-info")}
    return _anchor(f"{link.url}#sha256={link.sha256}", link.name, more)


def _anchor(href: str, text: str, more: Mapping[str, str] | None = None) -> str:
    said = "".join(f' {key}="{html.escape(value)}"' for key, value in {"href": href, **(more or {})}.items())
    return f"<a{said}>{html.escape(text)}</a><br>"


def _page(title: str, lines: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="pypi:repository-version" content="1.1"><title>{html.escape(title)}</title>'
    return "\n".join(["<!DOCTYPE html>", f"<html><head>{head}</head><body>", *lines, "</body></html>", ""])


# ── a folder with its wheels ──────────────────────────────────────────────────────────────────────────────


def there(site: Path) -> Iterator[Link]:
    """The wheels that a folder of indexes offers."""
    for path in site.glob("*/*/*.whl"):
        metadata = path.with_name(f"{path.name}.metadata")
        found = sha256(metadata.read_bytes()) if metadata.is_file() else None
        # A `+` in an address is a space to some servers.
        yield describe(path.name, quote(path.name), sha256(path.read_bytes()), found)


def target(wheel: Path, site: Path) -> Path:
    """Where a wheel lies in a folder of indexes."""
    link = describe(wheel.name, wheel.name, "")
    return site / link.folder / link.project / wheel.name


def missing(wheels: Iterable[Path], site: Path) -> list[Path]:
    """The wheels that a folder of indexes lacks; SiteError if it has one with other content."""
    planned = {wheel: target(wheel, site) for wheel in wheels}
    if other := [str(path) for wheel, path in planned.items() if path.is_file() and path.read_bytes() != wheel.read_bytes()]:
        raise SiteError("published files are never replaced, and these have other content: " + ", ".join(other))
    return [wheel for wheel, path in planned.items() if not path.is_file()]


def add(wheels: Sequence[Path], site: Path) -> list[Path]:
    """Copy what is not there yet, then write the pages anew; what was new."""
    with alone.alone(site / ".lock", f"another process that adds to {site}", lambda text: print(text, file=sys.stderr)):
        new = missing(wheels, site)
        for wheel in wheels:
            content = archives.read_wheel(wheel).files
            metadata = next(data for name, data in content.items() if name.endswith(".dist-info/METADATA"))
            path = target(wheel, site)
            # pip may ask for the metadata of any wheel that it sees.
            put(path.with_name(f"{path.name}.metadata"), metadata)
            put(path, wheel.read_bytes())
        for name, text in pages(there(site)).items():
            put(site / name, text.encode())
    return new


# ── GitHub's releases ─────────────────────────────────────────────────────────────────────────────────────


def releases(repository: str = "{owner}/{repo}") -> list[Mapping[str, Any]]:
    """The releases of a GitHub repository, by default the checkout's, as GitHub describes them."""
    command = ["gh", "api", "--paginate", "--slurp", f"repos/{repository}/releases?per_page=100"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise SiteError("`gh`, GitHub's command line, is not installed: `pixi run` brings it") from error
    except subprocess.CalledProcessError as error:
        raise SiteError(f"GitHub does not list the releases of {repository}: {error.stderr.strip()}") from error
    return [release for page in json.loads(done.stdout) for release in page]


def links(releases: Iterable[Mapping[str, Any]]) -> list[Link]:
    """The wheels of releases, as GitHub describes them."""
    found: dict[str, Link] = {}
    for release in releases:
        for asset in release["assets"]:
            name, digest = asset["name"], asset.get("digest") or ""
            if release["draft"] or not name.endswith(".whl"):
                continue
            if not digest.startswith("sha256:"):
                raise SiteError(f"GitHub gives no SHA-256 of {name} in release {release['tag_name']}")
            link = describe(name, asset["browser_download_url"], digest.removeprefix("sha256:"))
            if found.setdefault(name, link).sha256 != link.sha256:
                raise SiteError(f"{name} is in two releases with other content in each; one is {release['tag_name']}")
    return list(found.values())
