"""Releases: a tag, what is released under it, its notes and sums; on GitHub a draft until every file is there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from sage_factory import FactoryError
from sage_factory.files import put, sha256
from sage_factory.make import archives
from sage_factory.ship import collect, indexes
from sage_factory.ship.summary import table
from sage_factory.what import matrix


class ReleaseError(FactoryError):
    """There is no release; the message says why."""


@dataclass(frozen=True)
class Release:
    """A tag and what is released under it."""

    tag: str
    files: collect.Collection
    index_url: str
    channel_url: str

    @property
    def package(self) -> matrix.Package:
        return matrix.load().packages[self.files.builds[0].package]

    def sums(self) -> str:
        """SHA256SUMS, as `sha256sum --check` takes it."""
        named = {path.name: path for path in self.files.files}
        return "".join(f"{sha256(named[name].read_bytes())}  {name}\n" for name in sorted(named))

    def notes(self) -> str:
        """Markdown: what there is for whom, how it is installed and checked."""
        titles = ["PyTorch", "CUDA", "Python", "platforms", "GPU code"]
        lines = [*table(titles, [self._row(groups) for groups in self._rows()]), ""]
        lines += ["With pip, beside the PyTorch that is installed:", "", "```sh"]
        for groups in self._rows():
            build, folder = groups[0].builds[0], indexes.describe(groups[0].wheels[0].name, "", "").folder
            where = f"{self.index_url.rstrip('/')}/{folder}/"
            what = f"{self.package.name}=={self.package.version}"
            lines.append(f"pip install {what} --index-url {where}  # PyTorch {build.torch_series}, CUDA {build.cuda}")
        lines += ["```", ""]
        if self.channel_url:
            command = f"conda install -c {self.channel_url} -c conda-forge {self.package.name}={self.package.version}"
            lines += ["With conda, which finds the build for the PyTorch that is there:", "", "```sh", command, "```", ""]
        commit = self.files.groups[0].made["commit"]
        lines += [
            f"Built of the sources of commit {commit}. `sha256sum --check SHA256SUMS` says whether files are whole, "
            "`gh attestation verify FILE --repo OWNER/REPO` where they were built, `pixi run reproduce FILE` builds one again.",
            "",
        ]
        return "\n".join(lines)

    def _rows(self) -> list[list[collect.Group]]:
        """The platforms of each PyTorch × CUDA, in order of version."""
        rows: dict[tuple[Version, Version], list[collect.Group]] = {}
        for group in self.files.groups:
            rows.setdefault((matrix.release_order(group.builds[0].torch), Version(group.builds[0].cuda)), []).append(group)
        return [rows[key] for key in sorted(rows)]

    def _row(self, groups: Sequence[collect.Group]) -> list[str]:
        build = groups[0].builds[0]
        pythons = sorted({build.python for group in groups for build in group.builds}, key=Version)
        platforms = [group.builds[0].platform for group in groups]
        folders = collect.inside(groups[0].kernels, archives.cubins(groups[0].builds[0].package) + "manifest.json")[
            "architectures"
        ]
        code = sorted(folders, key=lambda name: (name.startswith("compute_"), int(re.sub(r"\D", "", name))))
        return [
            build.torch_series + (" and later" if build.stable_abi else ""),
            build.cuda,
            ", ".join(pythons),
            ", ".join(platforms),
            ", ".join(code),
        ]


def prepare(tag: str, files: collect.Collection, index_url: str, channel_url: str = "") -> Release:
    """The release of these files, or ReleaseError if they are not to be released under this tag."""
    release = Release(tag, files, index_url, channel_url)
    if others := sorted({build.package for build in files.builds} - {release.package.name}):
        raise ReleaseError(f"a release is of one package: this is of {release.package.name} and of {', '.join(others)}")
    version = release.package.tags + release.package.version
    if not re.fullmatch(rf"{re.escape(version)}(-build\.[1-9]\d*)?", tag):
        raise ReleaseError(
            f"tag {tag} is not one of {release.package.name} {release.package.version}, which variants.yaml states: "
            f"expected {version} or {version}-build.N. `pixi run tag` makes the next"
        )
    commits = {str(group.made.get("commit", "")): group.operators.name for group in files.groups}
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


def write(release: Release, folder: Path) -> list[Path]:
    """Notes and sums; the files of the release with them."""
    put(folder / "NOTES.md", release.notes().encode())
    put(folder / "SHA256SUMS", release.sums().encode())
    return [*release.files.files, folder / "SHA256SUMS"]


# ── GitHub ────────────────────────────────────────────────────────────────────────────────────────────────


def publish(tag: str, files: Sequence[Path], notes: Path) -> int:
    """Bring the GitHub release of a tag up to date and make it public; the number of files that were new."""
    releases = indexes.releases()
    expected = {path.name: f"sha256:{sha256(path.read_bytes())}" for path in files}
    for earlier in (release for release in releases if release["tag_name"] != tag and not release["draft"]):
        for name in (asset["name"] for asset in earlier["assets"] if asset["digest"] != expected.get(asset["name"])):
            if name in expected and name.endswith(".whl"):
                raise ReleaseError(
                    f"{name} was released as {earlier['tag_name']} with other content, and pip's index can have one of that "
                    "name: raise the version in variants.yaml"
                )
    there = next((release for release in releases if release["tag_name"] == tag), None)
    if there is None:
        _gh("release", "create", tag, "--draft", "--verify-tag", "--title", tag, "--notes-file", str(notes))
        there = {"draft": True, "assets": []}
    published = {asset["name"]: asset for asset in there["assets"]}
    for name in [name for name, asset in published.items() if asset["state"] != "uploaded"]:
        _gh("release", "delete-asset", tag, name, "--yes")  # an upload that was cut off
        del published[name]
    if other := [n for n, asset in published.items() if n in expected and asset["digest"] != expected[n]]:
        raise ReleaseError(f"published files are never replaced, and release {tag} has other content: {', '.join(other)}")
    if stray := sorted(published.keys() - expected.keys()):
        raise ReleaseError(f"release {tag} has files that this one has not: {', '.join(stray)}")
    new = [path for path in files if path.name not in published]
    if new and not there["draft"]:
        raise ReleaseError(f"release {tag} is public already and lacks {new[0].name}: release a new build, `pixi run tag`")
    for path in new:
        _gh("release", "upload", tag, str(path))
        print(f"uploaded {path.name}", flush=True)
    if there["draft"]:
        _gh("release", "edit", tag, "--draft=false")
    return len(new)


def _gh(*command: str) -> None:
    done = subprocess.run(["gh", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"`gh {' '.join(command[:2])}` failed: {done.stderr.strip()}. Run it again to go on")
