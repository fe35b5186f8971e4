"""Releases: a tag, what is released under it, its notes and sums; on GitHub a draft until every file is there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_factory import FactoryError, task
from sage_factory.files import put, sha256
from sage_factory.gh import GhError, gh
from sage_factory.inspect import verify
from sage_factory.make import archives, sbom, wheels
from sage_factory.ship import collect, earlier, indexes
from sage_factory.ship import tag as tags
from sage_factory.ship.publish import read_at
from sage_factory.what import matrix, offers
from sage_factory.what.build import Build
from sage_factory.what.table import Package


class ReleaseError(FactoryError):
    """There is no release; the message says why."""


@dataclass(frozen=True)
class Release:
    """A tag and what is released under it."""

    tag: str
    files: collect.Collection
    index_url: str
    channel_url: str
    repository: str  # OWNER/NAME on GitHub; empty where it is elsewhere

    @property
    def package(self) -> Package:
        return matrix.load().packages[self.files.builds[0].package]

    @property
    def bill(self) -> str:
        """The name of its bill of materials."""
        return f"{self.package.name}-{self.tag.removeprefix(self.package.tags)}.cdx.json"

    def notes(self) -> str:
        """Markdown: what there is for whom, how it is installed and checked."""
        groups = offers.rows(self.files.builds)
        rows = [[*offers.row(builds), self._code(builds[0])] for builds in groups]
        lines = [*offers.table([*offers.TITLES, "GPU code"], rows), ""]
        lines += [
            "With pip or uv, beside the PyTorch that is installed, and once more when that was replaced by another:",
            "",
            "```sh",
        ]
        lines += [*offers.commands(self.files.builds, self.index_url.rstrip("/")), "```", ""]
        for builds in groups:
            linux = [build for build in builds if not matrix.load().platforms[build.platform].windows]  # the others have none
            new = all(self._group(build).made.get("cxx11_abi", True) for build in linux)
            if said := offers.abi(builds, cxx11_abi=new):
                lines += [said, ""]
        if self.channel_url:
            command = f"conda install -c {read_at(self.channel_url)} -c conda-forge {self.package.name}={self.package.version}"
            lines += ["With conda, which finds the build for the PyTorch that is there:", "", "```sh", command, "```", ""]
        checks = "`sha256sum --check --ignore-missing SHA256SUMS` says whether files are whole, "
        if self.repository:
            checks += f"`gh attestation verify FILE --repo {self.repository}` where they were built, "
        checks += "`pixi run reproduce FILE` builds one again."
        lines.append(f"Built of the sources of {self._sources()}. {checks}")
        return "\n".join([*lines, ""])

    def _sources(self) -> str:
        """Of which commits: of one, or of those of earlier releases too."""
        commits: dict[str, list[str]] = {}
        for build in self.files.builds:
            commits.setdefault(self._group(build).made["commit"], []).append(build.index_version)
        if len(commits) == 1:
            return f"commit {next(iter(commits))}"
        return "; ".join(f"commit {commit}: {', '.join(sorted(set(versions)))}" for commit, versions in commits.items())

    def _group(self, build: Build) -> collect.Group:
        return next(group for group in self.files.groups if build in group.builds)

    def _code(self, build: Build) -> str:
        """What GPUs there is machine code for."""
        folders = collect.inside(self._group(build).kernels, archives.cubins(build.package) + "manifest.json")["architectures"]
        return ", ".join(sorted(folders, key=lambda name: (name.startswith("compute_"), int(re.sub(r"\D", "", name)))))


def prepare(tag: str, files: collect.Collection, index_url: str, channel_url: str = "", repository: str = "") -> Release:
    """The release of these files, or ReleaseError if they are not to be released under this tag."""
    release = Release(tag, files, index_url, channel_url, repository)
    if others := sorted({build.package for build in files.builds} - {release.package.name}):
        raise ReleaseError(f"a release is of one package: this is of {release.package.name} and of {', '.join(others)}")
    tags.number(tag, release.package)
    new = [group for group in files.groups if group.operators.name not in files.earlier]
    commits = {str(group.made.get("commit", "")): group.operators.name for group in new}
    for commit, name in commits.items():
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            said = "sources that were not committed" if commit.endswith("+") else "no commit"
            raise ReleaseError(f"{name} says that it was built of {said} ({commit or 'none'}): commit, and build again")
    if len(commits) > 1:
        raise ReleaseError(
            "the packages were built of different sources: " + ", ".join(f"{n} of {c}" for c, n in commits.items())
        )
    names = [path.name for path in files.files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ReleaseError(f"two files of one name cannot lie in one release: {', '.join(twice)}")
    return release


def write_again(release: Release, folder: Path) -> list[Path]:
    """`write` after a run that made the same release, if one did, and perhaps was signed for: the same files, or ReleaseError."""
    built = folder / "BUILT"
    before = built.read_text(encoding="utf-8") if built.exists() else ""
    files = write(release, folder)
    again = built.read_text(encoding="utf-8")
    if release.bill in before and (changed := sorted(set(before.splitlines()) - set(again.splitlines()))):
        put(built, before.encode())
        names = ", ".join(line.split()[1] for line in changed)
        raise ReleaseError(
            f"an earlier run has made {release.tag} ready with other content: {names}. If that was signed for, publish the files of "
            f"that run, for the --index-url that it was told, {release.index_url} here; if not, delete {folder} and begin again"
        )
    return files


def write(release: Release, folder: Path) -> list[Path]:
    """Notes, the wheels as pip's indexes have them, and sums; all files of the release."""
    put(folder / "NOTES.md", release.notes().encode())
    out, offered, there = folder / "index", [], release.files.earlier
    for group in release.files.groups:
        for build, path in zip(group.builds, group.wheels, strict=True):
            if build.index_name in there:
                offered.append(path if build.index_name == path.name else out / build.index_name)
            else:
                offered.append(wheels.for_index(path, build=build, out_dir=out, index_url=release.index_url))
    new = [path for path in offered if path.name not in there]
    if faults := verify.named(new):
        raise ReleaseError("the wheels for pip's indexes have faults:\n" + "\n".join(faults))
    # Of a name there is one file in a release, and what an index has says where that is.
    names = {path.name for path in offered}
    others = [path for path in release.files.files if path.name not in names]
    # Of all of them: an index looks for it beside the wheel, in the newest release that has that.
    files = [*others, *offered, *(metadata_of(path, out) for path in offered)]
    package = release.package
    bill = folder / release.bill
    put(bill, sbom.of_release(package.name, package.version, release.tag, files))
    files.append(bill)
    put(folder / "SHA256SUMS", sums(files).encode())
    # What this run can say of: provenance of the others is that of their own release.
    put(folder / "BUILT", sums([path for path in files if path.name.removesuffix(".metadata") not in there]).encode())
    return [*files, folder / "SHA256SUMS"]


def metadata_of(wheel: Path, folder: Path) -> Path:
    """The file, written to `folder`, that an index has pip read in a wheel's place (PEP 658)."""
    content = archives.read_wheel(wheel).files
    path = folder / f"{wheel.name}.metadata"
    put(path, next(data for name, data in content.items() if name.endswith(".dist-info/METADATA")))
    return path


def sums(files: Sequence[Path]) -> str:
    """SHA256SUMS, as `sha256sum --check` takes it."""
    named = {path.name: path for path in files}
    return "".join(f"{sha256(named[name].read_bytes())}  {name}\n" for name in sorted(named))


# ── GitHub ────────────────────────────────────────────────────────────────────────────────────────────────


def publish(tag: str, files: Sequence[Path], notes: Path) -> int:
    """Bring the GitHub release of a tag up to date and make it public; the number of files that were new."""
    releases = indexes.releases()
    expected = {path.name: f"sha256:{sha256(path.read_bytes())}" for path in files}
    for other in (release for release in releases if release["tag_name"] != tag and not release["draft"]):
        for name in (asset["name"] for asset in other["assets"] if asset["digest"] != expected.get(asset["name"])):
            if name in expected and name.endswith((".whl", ".conda")):
                raise ReleaseError(earlier.differs(name, other["tag_name"]))
    there = next((release for release in releases if release["tag_name"] == tag), None)
    if there is None:
        gh("release", "create", tag, "--draft", "--verify-tag", "--title", tag, "--notes-file", str(notes))
        there = {"draft": True, "assets": []}
    published = {asset["name"]: asset for asset in there["assets"]}
    for name, asset in list(published.items()):
        # An upload that was cut off; of a draft, which nobody has taken anything from, also what an earlier run made otherwise.
        if asset["state"] != "uploaded" or (there["draft"] and asset["digest"] != expected.get(name)):
            gh("release", "delete-asset", tag, name, "--yes")
            del published[name]
    if changed := [n for n, asset in published.items() if n in expected and asset["digest"] != expected[n]]:
        raise ReleaseError(f"published files are never replaced, and release {tag} has other content: {', '.join(changed)}")
    if stray := sorted(published.keys() - expected.keys()):
        raise ReleaseError(f"release {tag} has files that this one has not: {', '.join(stray)}")
    new = [path for path in files if path.name not in published]
    if new and not there["draft"]:
        raise ReleaseError(f"release {tag} is public already and lacks {new[0].name}: release a new build, {task('tag')}")
    for path in new:
        _upload(tag, path, expected[path.name])
        print(f"uploaded {path.name}", flush=True)
    if there["draft"]:
        gh("release", "edit", tag, "--draft=false", "--notes-file", str(notes))
    return len(new)


def _upload(tag: str, path: Path, digest: str) -> None:
    """Upload a file; success too if GitHub has this very file although it said otherwise, as after an answer that was lost."""
    try:
        gh("release", "upload", tag, str(path))
    except GhError:
        assets = [asset for one in indexes.releases() if one["tag_name"] == tag for asset in one["assets"]]
        if not any((a["name"], a["state"], a["digest"]) == (path.name, "uploaded", digest) for a in assets):
            raise


def withdraw(tag: str, reason: str) -> bool:
    """Have the notes of a release say, in their first line, that it is withdrawn and why: indexes yank what it alone holds.

    Returns whether they said something else before. With no reason they say nothing of it.
    """
    release = next((one for one in indexes.releases() if one["tag_name"] == tag), None)
    if release is None:
        raise ReleaseError(f"there is no release {tag}")
    if "\n" in reason:
        raise ReleaseError("the reason is one line")
    if indexes.withdrawn(release) == (reason or None):
        return False
    notes = str(release.get("body") or "")
    if indexes.withdrawn(release) is not None:
        notes = notes.partition("\n")[2].lstrip("\r\n")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "NOTES.md")
        file.write_text(f"{indexes.WITHDRAWN} {reason}\n\n{notes}" if reason else notes, encoding="utf-8")
        gh("release", "edit", tag, "--notes-file", str(file))
    return True
