"""pip's indexes, static (PEP 503), in a folder with its wheels or linking to releases: one for each major version of CUDA, whose
wheels are for every PyTorch, and one for each CUDA × PyTorch.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sage_factory import FactoryError, alone
from sage_factory.files import put, sha256, sweep
from sage_factory.gh import gh
from sage_factory.make import archives, wheels
from sage_factory.ship import chooser
from sage_factory.what import matrix
from sage_factory.what.build import Build

WITHDRAWN = "Withdrawn:"  # what the notes of a release begin with that nobody shall install any more

# Local versions, as Build writes them: index_version, and the wheel_version of a package whose wheels have one themselves. An
# index does not tell PyTorch's patches and our repairs apart.
CUDA, TORCH = r"cu(?P<major>\d+)(?P<minor>\d)", r"torch(?P<torch>\d+\.\d+)"
LOCAL = (rf"{TORCH}(?:\.abi)?\.{CUDA}(?:\.\d+)?", rf"{CUDA}{TORCH}\.(?:abi|\d+)(?:\.\d+)?")


class SiteError(FactoryError):
    """An index cannot be written; the message says why."""


@dataclass(frozen=True)
class Link:
    """One file of an index."""

    project: str
    folder: str  # the index of its CUDA × PyTorch
    major: str  # the index of its CUDA's major version
    name: str
    url: str  # below the root of all indexes where it is no whole address
    sha256: str
    requires_python: str
    metadata_sha256: str | None = None
    yanked: str | None = None  # why nobody shall take it who does not ask for it by its version (PEP 592)


def describe(name: str, url: str, sha256: str, metadata_sha256: str | None = None) -> Link:
    """The link of a wheel, whose name says all that an index tells."""
    try:
        project, version, _, _ = parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise SiteError(f"{name} is not a wheel's name: {error}") from error
    said = next((found for form in LOCAL if (found := re.fullmatch(form, version.local or ""))), None)
    if said is None:
        raise SiteError(
            f"{name} does not say for which PyTorch and CUDA it is, as the versions 2.2.0+torch2.8.cu128 and 1.0.0+cu128torch2.8.0 do"
        )
    major, minor, torch = said["major"], said["minor"], said["torch"]
    every = ".abi" in said[0]
    # Of a PyTorch that the table has no more, as in an old release, METADATA alone says it.
    pythons = matrix.load().requires_python(torch, stable_abi=every)
    folder = f"cu{major}{minor}-torch{torch.replace('.', '')}{'-or-later' if every else ''}"
    return Link(canonicalize_name(project), folder, f"cu{major}", name, url, sha256, pythons, metadata_sha256)


def pages(links: Iterable[Link]) -> dict[str, str]:
    """Every page of every index, by path: of each project HTML (PEP 503) and the same as JSON (PEP 691)."""
    links = list(links)
    tree: dict[str, dict[str, list[Link]]] = {}
    for link in sorted(links, key=lambda link: (link.folder, link.name)):
        for folder in (link.major, link.folder):
            tree.setdefault(folder, {}).setdefault(link.project, []).append(link)
    names = sorted(tree)
    offers = [
        chooser.Offer(link.name, _below(link.url, ""), link.folder, link.major, link.sha256)
        for link in links
        if link.yanked is None
    ]
    answer = {"index.html": chooser.page(offers, names)}
    for folder in names:
        projects = tree[folder]
        answer[f"{folder}/index.html"] = _page(folder, [_anchor(f"{project}/", project) for project in projects])
        for project, files in projects.items():
            page = _page(f"{project} for {folder}", [_file(link) for link in files])
            answer[f"{folder}/{project}/index.html"] = page
            answer[f"{folder}/{project}/index.json"] = json.dumps(_described(project, files), indent=1) + "\n"
    return answer


def _described(project: str, files: Sequence[Link]) -> dict[str, Any]:
    """A project as JSON, for servers that answer what they are asked for and for programs. Clients leave out keys they do not know."""
    found = []
    for link in files:
        one = {
            "filename": link.name,
            "url": _below(link.url),
            "hashes": {"sha256": link.sha256},
            "requires-python": link.requires_python,
        }
        one |= {"core-metadata": {"sha256": link.metadata_sha256}} if link.metadata_sha256 else {}
        found.append({**one, "yanked": False if link.yanked is None else link.yanked or True})
    return {"meta": {"api-version": "1.0"}, "name": project, "files": found}


def _below(url: str, root: str = "../../") -> str:
    """An address below the root of all indexes, from the page of a project in one, or from where `root` leads there."""
    return url if "://" in url else root + quote(url)


def _file(link: Link) -> str:
    more = {"data-requires-python": link.requires_python} if link.requires_python else {}
    if link.metadata_sha256:
        # PEP 714's name and the one that older pips know.
        more |= {f"data-{kind}-metadata": f"sha256={link.metadata_sha256}" for kind in ("core", "dist-info")}
    if link.yanked is not None:
        more["data-yanked"] = link.yanked
    return _anchor(f"{_below(link.url)}#sha256={link.sha256}", link.name, more)


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
        place = path.relative_to(site).as_posix()
        yield describe(path.name, place, sha256(path.read_bytes()), found)


def build_of(wheel: Path) -> Build:
    """The build of variants.yaml that a wheel is, by either of its names."""
    if build := matrix.load().named(wheel.name):
        return build
    raise SiteError(f"{wheel.name} is no build of variants.yaml, so that no index has a place for it: `matrix` lists them")


def target(wheel: Path, site: Path) -> Path:
    """Where a wheel lies in a folder of indexes."""
    name = build_of(wheel).index_name
    link = describe(name, name, "")
    return site / link.folder / link.project / name


def _as_offered(given: Iterable[Path], scratch: Path, index_url: str) -> dict[Path, Path]:
    """The wheels by what the indexes have of them: where a release has made it, that very file."""
    found = {}
    for wheel in given:
        build = build_of(wheel)
        # A package's wheel may have one name in both forms; then the address tells them apart.
        made = wheel.name == build.index_name and (wheel.name != build.wheel_name or wheels.index_url(wheel))
        found[wheel] = wheel if made else wheels.for_index(wheel, build=build, out_dir=scratch, index_url=index_url)
    return found


def missing(given: Iterable[Path], site: Path, index_url: str = "") -> list[Path]:
    """The wheels that a folder of indexes lacks; SiteError if it has one with other content."""
    with tempfile.TemporaryDirectory() as scratch:
        return _lacking(_as_offered(given, Path(scratch), index_url), site)


def _lacking(offered: Mapping[Path, Path], site: Path) -> list[Path]:
    planned = {wheel: (made, target(wheel, site)) for wheel, made in offered.items()}
    differ = {
        wheel: path
        for wheel, (made, path) in planned.items()
        if path.is_file() and not archives.holds(path, archives.read_wheel(made).files)
    }
    if differ:
        names = ", ".join(map(str, differ.values()))
        raise SiteError(f"published files are never replaced, and these have other content: {names}{_but_for_address(differ)}")
    return [wheel for wheel, (_, path) in planned.items() if not path.is_file()]


def _but_for_address(differ: Mapping[Path, Path]) -> str:
    """What helps where wheels differ from what is published of them in the address of the indexes alone, which both state."""
    addresses = set()
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(archives.ArtifactError):
        for wheel, path in differ.items():
            addresses.add(url := wheels.index_url(path))
            made = wheels.for_index(wheel, build=build_of(wheel), out_dir=Path(scratch), index_url=url)
            if len(addresses) > 1 or not archives.holds(path, archives.read_wheel(made).files):
                return ""
        return f". They differ in the address of the indexes alone: run it again with --index-url '{url}'"
    return ""


def add(given: Sequence[Path], site: Path, index_url: str = "") -> list[Path]:
    """Add what is not there yet, by its local version and with the address of the indexes, then write the pages anew; what was new."""
    with tempfile.TemporaryDirectory() as scratch:
        offered = _as_offered(given, Path(scratch), index_url)  # what is no wheel leaves no folder
        with _alone(site):
            new = _lacking(offered, site)
            for wheel, made in offered.items():
                content = archives.read_wheel(made).files
                metadata = next(data for name, data in content.items() if name.endswith(".dist-info/METADATA"))
                path = target(wheel, site)
                # pip may ask for the metadata of any wheel that it sees.
                put(path.with_name(f"{path.name}.metadata"), metadata)
                if wheel in new:  # else its digest is known to somebody, and its content is this
                    put(path, made.read_bytes())
            _write(there(site), site)
    return new


@contextlib.contextmanager
def _alone(site: Path) -> Iterator[None]:
    with alone.alone(site / ".lock", f"another process that writes to {site}"):
        sweep(site, ".", "*", "*/*")
        yield


def _write(links: Iterable[Link], site: Path) -> None:
    for name, text in pages(links).items():
        put(site / name, text.encode())


def address() -> str:
    """Where the indexes of this project are: as $INDEX_URL says, else GitHub Pages of the repository that a workflow runs in."""
    owner, _, name = os.environ.get("GITHUB_REPOSITORY", "").partition("/")
    host = f"{owner.lower()}.github.io"
    pages = f"https://{host}/" if name.lower() == host else f"https://{host}/{name}"  # the owner's own, or the repository's
    return os.environ.get("INDEX_URL") or (pages if name else "")


# ── GitHub's releases ─────────────────────────────────────────────────────────────────────────────────────


def releases(repository: str = "") -> list[Mapping[str, Any]]:
    """The releases of a GitHub repository, by default the checkout's, as GitHub describes them."""
    repository = repository or "{owner}/{repo}"
    said = gh("api", "--paginate", "--slurp", f"repos/{repository}/releases?per_page=100")
    return [release for page in json.loads(said) for release in page]


def withdrawn(release: Mapping[str, Any]) -> str | None:
    """Why a release was withdrawn, which the first line of its notes says; None if it was not."""
    first = str(release.get("body") or "").partition("\n")[0].strip()
    return first.removeprefix(WITHDRAWN).strip() if first.startswith(WITHDRAWN) else None


def link(repository: str, site: Path) -> list[Link]:
    """Write indexes that link to the wheels of a repository's releases; the wheels."""
    with _alone(site):  # listed there, too: who writes last is to have seen the newest
        found = links(releases(repository))
        if not found:
            raise SiteError(f"no release of {repository} has a wheel: there is nothing to list")
        _write(found, site)
    return found


def links(releases: Iterable[Mapping[str, Any]]) -> list[Link]:
    """The wheels of releases, as GitHub describes them. Yanked are those that withdrawn ones alone hold."""
    found: dict[str, Link] = {}
    for release in sorted(releases, key=lambda release: withdrawn(release) is not None):
        why = withdrawn(release)
        beside = {asset["name"]: asset for asset in release["assets"]}
        for asset in release["assets"]:
            name, digest = asset["name"], asset.get("digest") or ""
            if release["draft"] or not name.endswith(".whl") or "+" not in name:
                continue  # wheels by the names that builds give them are for who takes a file
            if canonicalize_name(name.partition("-")[0]) not in matrix.load().packages:
                continue  # somebody else's
            if not digest.startswith("sha256:"):
                raise SiteError(f"GitHub gives no SHA-256 of {name} in release {release['tag_name']}")
            # What lies beside a file is found by its address and an ending.
            metadata = str(beside.get(f"{name}.metadata", {}).get("digest") or "").removeprefix("sha256:") or None
            link = describe(name, asset["browser_download_url"], digest.removeprefix("sha256:"), metadata)
            link = replace(link, yanked=why)
            if found.setdefault(name, link).sha256 != link.sha256:
                raise SiteError(f"{name} is in two releases with other content in each; one is {release['tag_name']}")
    return list(found.values())
