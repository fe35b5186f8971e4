"""Put finished files into dist/: all of them or none, with the index that belongs to them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rattler.index import index_fs

from sage_factory import ROOT, FactoryError, alone
from sage_factory.files import sha256, sweep
from sage_factory.make import archives
from sage_factory.what import matrix

WORK = ROOT / "build"
# What tells two packages of one name and version apart before the digest does: torch280_cu128_h0123456789_0.
CONDA = re.compile(r"(?P<kind>.+)_h[0-9a-f]+_\d+\.conda")
# Which files are being renamed and which removed. It is there only meanwhile, or when that was interrupted.
JOURNAL = ".placing.json"


class PlaceError(FactoryError):
    """What was to be placed is not there any more, or has no place; the message says what."""


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    """A folder for files that are not verified yet."""
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="staging-", dir=WORK, ignore_cleanup_errors=True) as name:
        yield Path(name)


def check(output: Path) -> None:
    """PlaceError where nothing can be put, which is better known before minutes of compiling. Nothing is left there."""
    try:
        there = next(path for path in (output, *output.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".", dir=there):
            pass
    except OSError as error:
        raise PlaceError(f"no files can be put into {output} ({error.strerror}): name another folder with --output") from error


def destination(path: Path, output: Path) -> Path:
    """Wheels go to wheels/, a conda package to the folder of its platform, as in any channel."""
    folder = output / "wheels" if path.suffix == ".whl" else output / "conda" / path.parent.name
    return folder / path.name


def place(ready: Sequence[Path], output: Path) -> list[Path]:
    """Copy the files beside their places, index the channel as it will be, and only then rename all of them."""
    with _alone(output):
        return _place(ready, output)


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Builds of other checkouts, and of others who may write there, may have the same output."""
    lock, what = output / ".lock", f"another build that puts files into {output}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(alone.alone(lock, what))
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
            alone.say(f"{output} is where there are no locks: let no other build put files there meanwhile")
        with contextlib.suppress(OSError):  # somebody else's
            lock.chmod(0o666)
        yield


def _place(ready: Sequence[Path], output: Path) -> list[Path]:
    planned = {path: destination(path, output) for path in ready}
    partial: dict[Path, Path] = {}
    try:
        for source, target in planned.items():
            partial[_copy(source, target)] = target
        with staging() as scratch:
            old = superseded(planned.values())
            for index in _index(planned, output, old, scratch):
                target = output / "conda" / index.parent.name / index.name
                partial[_copy(index, target)] = target
        _write_journal(partial, old, output)
        settle(output)
    except BaseException:
        settle(output)  # a few renames more, or what was copied goes: all or nothing
        raise
    return list(planned.values())


def _write_journal(partial: Mapping[Path, Path], old: Sequence[Path], output: Path) -> None:
    """From here on the files belong into `output`, whatever happens to this process."""
    renames = {str(t.relative_to(output)): str(target.relative_to(output)) for t, target in partial.items()}
    digests = {str(target.relative_to(output)): sha256(t.read_bytes()) for t, target in partial.items()}
    document = {"rename": renames, "sha256": digests, "remove": [str(path.relative_to(output)) for path in old]}
    unfinished = output / f"{JOURNAL}.partial"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(output / JOURNAL)


def settle(output: Path) -> None:
    """Finish the renames of a `place` that was interrupted in them, and remove what one interrupted before them had copied."""
    journal = output / JOURNAL
    if journal.is_file():
        plan = json.loads(journal.read_text(encoding="utf-8"))
        lost = []
        for temporary, target in plan["rename"].items():
            try:
                (output / temporary).replace(output / target)
            except FileNotFoundError:
                there = (output / target).is_file() and sha256((output / target).read_bytes())
                # Else it was renamed already. (Older checkouts wrote no sums.)
                if not there or there != plan.get("sha256", {}).get(target, there):
                    lost.append(target)
        if lost:
            journal.unlink()
            raise PlaceError(f"copies in {output} were removed before they had their names: {', '.join(lost)}. Build again")
        for name in plan["remove"]:
            (output / name).unlink(missing_ok=True)
        journal.unlink()
    sweep(output, ".", "wheels", "conda/*")  # nobody else's, such as a release's that is being written


def recover(output: Path, own: Path) -> None:
    """What a build does first, once it is alone: finish or remove what a killed one has left, but for its `own` staging."""
    if output.is_dir():
        with _alone(output):
            settle(output)
    for left in WORK.glob("staging-*"):
        if left != own:
            shutil.rmtree(left, ignore_errors=True)


def superseded(targets: Iterable[Path]) -> list[Path]:
    """Packages in dist/ that differ from a new one in their digest alone, and the wheels packed of them: builds of older sources.

    Kernels that a package of operators still asks for stay: there they are the newest.
    """
    new = set(targets)
    replaced = {path: older for path in new if (older := _alike(path) - new)}
    packages = {old for older in replaced.values() for old in older}
    wheels = {wheel for path in replaced for wheel in _wheels(path)} - new
    needed = _needed({p for path in new for p in path.parent.parent.glob("*/*.conda")} - new - packages)
    stays = {p for p in packages if p.parent.name == "noarch" and p.stem.rpartition("-")[2] in needed}
    for path in stays:
        _depends(path)
    return sorted((packages - stays) | wheels)


def _alike(path: Path) -> set[Path]:
    """The conda packages beside one that have its name and version but for the digest; none of a wheel."""
    kind = _kind(path)
    return {other for other in path.parent.glob("*.conda") if kind and _kind(other) == kind}


def _kind(path: Path) -> str:
    match = CONDA.fullmatch(path.name)
    return match["kind"] if match else ""


def _needed(packages: Iterable[Path]) -> set[str]:
    """The build strings of the kernels that these packages ask for."""
    return {need.split()[-1] for path in packages for need in _depends(path) if "==" in need}


def _wheels(operators: Path) -> Iterator[Path]:
    """The wheels in dist/ that were packed of an operators' package, or of one that it replaces, whatever their Python."""
    alike = (b for b in matrix.load().all_builds if b.platform == operators.parent.name)
    if build := next((b for b in alike if operators.name.startswith(b.operators_stem)), None):
        for one in (replace(build, number=number) for number in range(build.number + 1)):
            begins = one.wheel_name.removesuffix(f"{one.wheel_tag}.whl")
            yield from (operators.parents[2] / "wheels").glob(f"{begins}*-{one.wheel_platform}.whl")


def _depends(path: Path) -> list[str]:
    """What a package that stays in dist/ asks for."""
    try:
        return list(map(str, json.loads(archives.read_conda(path).info["info/index.json"])["depends"]))
    except (archives.ArtifactError, ValueError, KeyError, TypeError) as error:
        # It would be in the index, and nobody could install it.
        raise archives.ArtifactError(f"{path} is damaged ({error}): remove it, then run this again") from error


def _copy(source: Path, target: Path) -> Path:
    """A hidden copy in the target's own folder, so that putting it in place is one rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as file:  # on the disk before its name is: power may fail too
            os.fsync(file.fileno())
    except OSError as error:
        # Of the two files it is the new one that has no room.
        raise OSError(error.errno, error.strerror, str(target)) from error
    return temporary


def _index(planned: Mapping[Path, Path], output: Path, old: Sequence[Path], scratch: Path) -> list[Path]:
    """The channel's index with the new packages in it and the superseded ones out."""
    there = [p for p in (output / "conda").glob("*/*.conda") if p not in old and p not in planned.values()]
    shadow = shadowed([*there, *(p for p in planned if p.suffix == ".conda")], scratch / "conda")
    asyncio.run(index_fs(shadow, write_zst=False, write_shards=False))
    return sorted(shadow.glob("*/repodata.json"))


def shadowed(packages: Iterable[Path], folder: Path) -> Path:
    """A channel of the same packages, to make an index in that nobody reads yet."""
    (folder / "noarch").mkdir(parents=True)
    for source in packages:
        link = folder / source.parent.name / source.name
        link.parent.mkdir(exist_ok=True)
        try:
            link.hardlink_to(source.resolve())  # the indexer passes by symbolic ones
        except OSError:
            shutil.copyfile(source, link)
    return folder
