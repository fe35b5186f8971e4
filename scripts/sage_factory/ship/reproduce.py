"""A released file built again and compared: by what it says of itself, in a checkout of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sage_factory import ROOT, FactoryError
from sage_factory.git import GitError, git, holding, resolved
from sage_factory.inspect import compare
from sage_factory.make import archives, wheels
from sage_factory.what import inputs, matrix
from sage_factory.what.build import Build
from sage_factory.what.table import MatrixError, Package, known
from sage_factory.with_what import venvs

PLACE = ROOT / "build" / "reproduce"


class ReproduceError(FactoryError):
    """The file cannot be built again here; the message says why."""


@dataclass(frozen=True)
class Origin:
    """How a file was made."""

    tag: str  # that its version is released under
    commit: str  # that last changed its inputs
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]  # of `build`
    build: Build | None = None  # as the file says, whatever the table at hand has; none of kernels


def origin(path: Path) -> Origin:
    """How a wheel or conda package was made, as it says itself."""
    content = compare.entries(path)
    index = json.loads(content.get("info/index.json", b"{}"))
    for package in matrix.load().packages.values():
        if index.get("name") == package.cubins:
            made = json.loads(content[f"{archives.cubins(package.name)}manifest.json"])
            commit = _commit_at(index["timestamp"] // 1000, inputs.KERNELS)
            what = (*_named(package), "--kernels", "--cuda", made["cuda"])
            return Origin(package.tags + made["version"], commit, inputs.KERNELS, what)
    name = next((name for name in content if name.endswith("/_build.json")), "")
    package = known("package", name.split("/")[-2] if name else "(none)", matrix.load().packages)
    made = json.loads(content[name])
    commit = made.get("commit", "")
    if not commit or commit.endswith("+"):
        said = f"changes after {commit[:-1]} that were not committed" if commit else "no git checkout"
        raise ReproduceError(f"{path.name} says that it was built of {said}: its sources are not to be had")
    arguments = [*_named(package), "--cuda", made["cuda"], "--torch", made["torch"]]
    platform, python = index.get("subdir"), ""
    if path.suffix == ".whl":
        tag = _tag(path)
        platform = next((p.name for p in matrix.load().platforms.values() if p.wheel == tag.platform), tag.platform)
        if one := re.fullmatch(r"cp(\d)(\d+)", tag.interpreter):  # others are for every Python
            python = f"{one[1]}.{one[2]}"
            arguments += ["--python", python]
    if platform != matrix.host_platform():
        raise ReproduceError(f"{path.name} is built on {platform}, and this machine is {matrix.host_platform()}")
    build = Build(
        package.name, made["version"], platform, made["cuda"], made["torch"], python, (), (),
        matrix.load().platforms[platform].wheel, package.local_version,
        index_platforms=tuple(path.stem.rpartition("-")[2].split(".")),
    )  # fmt: skip
    repairs = (replace(build, number=n) for n in range(100))  # the number is in the name alone
    build = next((one for one in repairs if one.has(path.name)), build)
    return Origin(package.tags + made["version"], commit, inputs.operators(package.name), tuple(arguments), build)


def _named(package: Package) -> tuple[str, ...]:
    """The first package is what `build` means by itself, in checkouts too in which there was no other."""
    return () if package.name == next(iter(matrix.load().packages)) else ("--package", package.name)


def _tag(wheel: Path) -> Tag:
    try:
        # An index's wheel has several platforms, in no order: ours is one that the table names.
        ours = {platform.wheel for platform in matrix.load().platforms.values()}
        return min(parse_wheel_filename(wheel.name)[3], key=lambda tag: (tag.platform not in ours, str(tag)))
    except InvalidWheelFilename as error:
        raise ReproduceError(f"the file name is not a wheel's: {error}") from error


def _commit_at(seconds: int, names: Sequence[str]) -> str:
    for line in git("log", "--all", "--format=%H %ct", "--", *names).splitlines():
        commit, when = line.split()
        if int(when) == seconds:
            return commit
    raise ReproduceError(
        f"no commit here changed {', '.join(names)} at {seconds} s since 1970, as the package says: `git fetch`"
    )


def checkout_of(made: Origin) -> str:
    """The commit to check out: of the release, or of this checkout, if their sources are these; else the sources' own.

    What else goes in (variants.yaml, the locks) may be younger than the sources. Of several releases of the same sources it is the
    newest whose table has the file's number.
    """
    tags = git("tag", "--sort=-creatordate", "--list", made.tag, f"{made.tag}-build.*").split()
    alike = [name for name in (*tags, "HEAD") if git("log", "-1", "--format=%H", name, "--", *made.inputs) == made.commit]
    fitting = (name for name in alike if made.build is None or _number_at(name, made.build) == made.build.number)
    return resolved(next(fitting, None) or next(iter(alike), made.commit))


def _number_at(name: str, build: Build) -> int | None:
    """The number that variants.yaml gives a build at a commit; None where it has no such build, or is not to be read."""
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch, matrix.TABLE.name)
        try:
            table.write_text(git("show", f"{name}:{matrix.TABLE.name}"), encoding="utf-8")
            builds = matrix.load(table).all_builds
        except (GitError, MatrixError):
            return None
    wanted = (build.package, build.platform, build.torch, build.cuda)
    found = (b for b in builds if (b.package, b.platform, b.torch, b.cuda) == wanted and build.python in ("", b.python))
    return next((one.number for one in found), None)


def trusted(commit: str) -> None:
    """ReproduceError unless a release or main holds the commit: what a file names is executed, and anybody can make a file.

    The checkout at hand is trusted: it is running.
    """
    releases = [f"refs/tags/{package.tags}*" for package in matrix.load().packages.values()]
    if commit != resolved("HEAD") and not holding(commit, [*releases, "refs/heads/main", "refs/remotes/origin/main"]):
        raise ReproduceError(
            f"no release and not main holds commit {commit[:12]}, so it is not executed here: `git fetch --tags` if it was merged "
            "since, or look at it and check it out yourself"
        )


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A checkout of that commit, removed at the end. It shares those environments whose locks are the same."""
    place = PLACE / f"{commit[:12]}-{os.getpid()}"
    git("worktree", "prune")
    git("worktree", "add", "--quiet", "--detach", str(place), commit)
    try:
        (place / ".venvs").mkdir(exist_ok=True)
        for lock in (lock for folder in venvs.LOCKS for lock in folder.glob("*.txt")):
            # By another way of making them it would make its own, in their place.
            same = all(_same(path, place) for path in (lock, Path(venvs.__file__))) and venvs.complete(lock.stem)
            if same and os.name == "posix":
                (place / ".venvs" / lock.stem).symlink_to(venvs.VENVS / lock.stem)
        yield place
    finally:
        git("worktree", "remove", "--force", str(place))


def _same(path: Path, place: Path) -> bool:
    """Whether another checkout has a file of this one as it is here."""
    other = place / path.relative_to(ROOT)
    return other.is_file() and other.read_bytes() == path.read_bytes()


def build(place: Path, arguments: Sequence[str]) -> Path:
    """Run that checkout's build; what it put out."""
    if os.environ.get("SAGEATTENTION_CHANNEL") == "pypi":
        command = [venvs.base_python(), str(place / "scripts" / "run.py"), "build", *arguments]
    else:
        command = ["pixi", "run", "--manifest-path", str(place / "pixi.toml"), "build", *arguments]
    # The file's own time is wanted, and none of the variables of the environment that this process runs in.
    mine = {"SOURCE_DATE_EPOCH", "PIXI_PROJECT_ROOT", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in mine}
    done = subprocess.run(command, cwd=place, env=environment, check=False)
    if done.returncode:
        raise ReproduceError(f"the build failed with status {done.returncode}: what it said stands above")
    return place / "dist"


def _as_offered(path: Path, built: Path, build: Build) -> Path:
    """What was built, as pip's indexes have it: by the local version and with the address that the published one states."""
    return wheels.for_index(built, build=build, out_dir=built.parent, index_url=wheels.index_url(path))


def reproduce(path: Path, commit: str | None) -> list[str]:
    """Build again and compare: how the two differ."""
    made = origin(path)
    chosen = resolved(commit) if commit else checkout_of(made)
    trusted(chosen)
    print(f"{path.name}: sources of {made.commit[:12]}, built again at {chosen[:12]}", file=sys.stderr, flush=True)
    with checkout(chosen) as place:
        out = build(place, made.arguments)
        again = [p for p in out.rglob(f"*{path.suffix}") if p.name == path.name]
        if made.build and path.name == made.build.index_name:
            again = [_as_offered(path, p, made.build) for p in out.rglob("*.whl") if p.name == made.build.wheel_name]
        if again:
            return compare.differences(path, again[0])
        kind = path.name.partition("_h")[0]
        others = [p for p in out.rglob(f"*{path.suffix}") if p.name.startswith(kind)]
        names = ", ".join(p.name for p in others) or "nothing alike"
        found = [f"the build made {names}: another digest means that something else went in than into {path.name}"]
        return [*found, *(said for other in others for said in compare.differences(path, other))]
