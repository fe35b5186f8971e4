"""What is left by processes that are killed, disks that fill up and files that rot: nothing that the next run trips over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import killing
import pytest
import samples

from sage_factory import ROOT, alone, child
from sage_factory.files import sha256
from sage_factory.make import archives, engine
from sage_factory.ship import place

SCRIPTS = ROOT / "scripts"
NEW, OLD = "bbbb", "aaaa"
posix = pytest.mark.skipif(os.name != "posix", reason="kills and process groups as POSIX has them")


def files(folder: Path, digest: str) -> list[Path]:
    """Both packages and a wheel, as a build of sources with this digest leaves them."""
    kernels = samples.index("sageattention-cubins") | {"build": f"cu128_h{digest}_0"}
    needs = ["python >=3.9", "pytorch 2.8.*", f"sageattention-cubins ==2.2.0 cu128_h{digest}_0"]
    operators = samples.index("sageattention") | {"build": f"torch280_cu128_h{digest}_0", "depends": needs}
    wheel = folder / samples.build().wheel_name
    packages = [
        samples.conda(folder / "noarch", {f"share/{digest}": b""}, kernels),
        samples.conda(folder / "linux-64", {f"site-packages/{digest}": b""}, operators),
    ]
    wheel.write_bytes(digest.encode())
    return [*packages, wheel]


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """dist/ with an older build in it."""
    monkeypatch.setattr(place, "WORK", tmp_path / "build")
    place.place(files(tmp_path / OLD, OLD), tmp_path / "dist")
    return tmp_path / "dist"


def builds(dist: Path) -> set[str]:
    """Which builds' files there are; every package must be in the index, and nothing else."""
    found = {path.read_text(encoding="utf-8") for path in dist.glob("wheels/*.whl")}
    for folder in (dist / "conda").iterdir():
        index = json.loads((folder / "repodata.json").read_text(encoding="utf-8"))["packages.conda"]
        there = {path.name: sha256(path.read_bytes()) for path in folder.glob("*.conda")}
        assert {name: entry["sha256"] for name, entry in index.items()} == there
        found |= {name.rpartition("_h")[2].partition("_")[0] for name in there}
    assert not [path for path in dist.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
    return found


# Interrupted between any two steps.


@contextlib.contextmanager
def interrupting(step: int) -> Iterator[None]:
    """Ctrl-C before the `step`th time that a file is copied, written through, renamed or removed."""
    steps = 0

    def counted(act: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal steps
            steps += 1
            if steps == step:
                raise KeyboardInterrupt
            return act(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "hardlink_to"), (shutil, "copyfile"), (os, "fsync")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


def test_a_build_interrupted_anywhere_while_it_places_is_all_there_or_not_at_all(tmp_path: Path, dist: Path) -> None:
    ready = files(tmp_path / NEW, NEW)
    seen = []
    for step in range(1, 100):
        try:
            with interrupting(step):
                place.place(ready, dist)
        except KeyboardInterrupt:
            (found,) = builds(dist)
            seen.append(found)
        else:
            break
        shutil.rmtree(dist)
        place.place(files(tmp_path / OLD, OLD), dist)
    assert builds(dist) == {NEW}
    # First nothing had happened yet; from some step on all will.
    assert seen == sorted(seen)
    assert set(seen) == {OLD, NEW}


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
from sage_factory.ship import place
place.WORK = Path({work!r})
replace = Path.replace
def once(self, target):
    if Path(target).suffix == ".whl":
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = once
place.place([Path(name) for name in {ready!r}], Path({dist!r}))
"""


@posix
def test_the_next_build_finishes_what_a_killed_one_was_renaming(tmp_path: Path, dist: Path) -> None:
    ready = [str(path) for path in files(tmp_path / NEW, NEW)]
    code = KILLED.format(scripts=str(SCRIPTS), work=str(place.WORK), ready=ready, dist=str(dist))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert (dist / place.JOURNAL).is_file()
    own = place.WORK / "staging-own"
    for staging in (own, place.WORK / "staging-left"):
        staging.mkdir()
    place.recover(dist, own)
    assert builds(dist) == {NEW}
    assert list(place.WORK.iterdir()) == [own]


@pytest.mark.parametrize("old", [False, True])
def test_copies_that_are_gone_are_not_taken_for_renamed(
    tmp_path: Path, dist: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    ready = files(tmp_path / NEW, NEW)
    wheel = place.destination(ready[2], dist)
    if not old:
        wheel.unlink()

    def cleaned(output: Path) -> None:
        wheel.with_name(f".{wheel.name}.partial").unlink(missing_ok=True)
        settle(output)

    settle = place.settle
    monkeypatch.setattr(place, "settle", cleaned)
    with pytest.raises(place.PlaceError, match=f"removed before they had their names: wheels/{wheel.name}. Build again"):
        place.place(ready, dist)
    monkeypatch.setattr(place, "settle", settle)
    assert (dist / "conda" / "linux-64" / f"sageattention-2.2.0-torch280_cu128_h{OLD}_0.conda").is_file()
    place.recover(dist, tmp_path)
    place.place(ready, dist)
    assert builds(dist) == {NEW}


@posix
@pytest.mark.parametrize("second", ["recover", "place"])
def test_another_checkouts_build_waits_while_one_places(tmp_path: Path, dist: Path, second: str) -> None:
    ready = files(tmp_path / NEW, NEW)
    arguments = "Path({dist!r}), Path('.')" if second == "recover" else "[Path({wheel!r})], Path({dist!r})"
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
from sage_factory.ship import place
place.WORK = Path({str(tmp_path / "other")!r})
place.{second}({arguments.format(dist=str(dist), wheel=str(ready[2]))})
"""
    started: list[subprocess.Popen[str]] = []
    said = ""

    def meanwhile(partial: Mapping[Path, Path], old: Sequence[Path], output: Path) -> None:
        nonlocal said
        started.append(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True))
        assert started[0].stderr is not None
        said = started[0].stderr.readline()
        write(partial, old, output)

    write = place._write_journal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "_write_journal", meanwhile)
        place.place(ready, dist)
    assert said.startswith(f"waiting for another build that puts files into {dist} (process {os.getpid()})")
    assert started[0].wait(timeout=30) == 0
    started[0].communicate()
    assert builds(dist) == {NEW}


def test_what_others_are_writing_stays(dist: Path) -> None:
    for other in (dist / "release" / ".NOTES.md.1.partial", dist / "hub" / "build" / ".torch28.partial" / "a"):
        other.parent.mkdir(parents=True)
        other.touch()
    (dist / "wheels" / ".a.whl.1.partial").touch()
    (dist / f"{place.JOURNAL}.partial").touch()
    place.recover(dist, dist)
    assert not [*dist.glob("wheels/.*"), *dist.glob(".*.partial")]
    assert (dist / "release" / ".NOTES.md.1.partial").exists()


# Files that rotted.


@pytest.mark.parametrize("damage", ["cut short", "a flipped byte", "empty"])
def test_a_damaged_package_in_dist_is_named_and_nothing_is_placed(tmp_path: Path, dist: Path, damage: str) -> None:
    """One that stays, because the new build does not replace it."""
    other = samples.index("sageattention") | {"build": f"torch270_cu128_h{OLD}_0"}
    path = samples.conda(dist / "conda" / "linux-64", {"site-packages/a": b"a" * 500}, other)
    data = bytearray(path.read_bytes())
    if damage == "a flipped byte":
        data[300] ^= 1
    path.write_bytes(bytes(data if damage == "a flipped byte" else data[:-100] if damage == "cut short" else b""))
    before = killing.listing(dist)
    with pytest.raises(archives.ArtifactError, match=r"torch270_cu128_haaaa_0\.conda is damaged .*remove it"):
        place.place(files(tmp_path / NEW, NEW), dist)
    assert killing.listing(dist) == before
    path.unlink()
    place.place(files(tmp_path / NEW, NEW), dist)
    assert builds(dist) == {NEW}


def test_damaged_files_that_a_build_replaces_are_no_hindrance(tmp_path: Path, dist: Path) -> None:
    for path in dist.rglob("*.*"):
        path.write_bytes(path.read_bytes()[:50])
    place.place(files(tmp_path / NEW, NEW), dist)
    assert builds(dist) == {NEW}
    for path in dist.rglob("*.*"):
        path.write_bytes(b"")
    place.place(files(tmp_path / NEW, NEW), dist)
    assert builds(dist) == {NEW}


def test_a_damaged_package_in_the_build_cache_is_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, damaged = (files(tmp_path, digest)[0] for digest in (NEW, OLD))
    damaged.write_bytes(damaged.read_bytes()[:-200])
    engine.index(tmp_path)
    assert list((tmp_path / "noarch").glob("*.conda")) == [whole]
    assert "truncated or damaged" in capsys.readouterr().out


# Full disks.


@posix
def test_a_full_disk_is_named_and_dist_stays_as_it_was(tmp_path: Path) -> None:
    """A real one of 200 kB, where this process may mount it."""
    inside = """
import os, sys
from pathlib import Path
sys.path[:0] = [{scripts!r}, {tests!r}, {here!r}]
import killing, test_faults
from sage_factory.ship import place
disk = Path({disk!r})
place.WORK = Path({work!r})
place.place(test_faults.files(disk.parent / "old", "aaaa"), disk / "dist")
before = killing.listing(disk)
ready = test_faults.files(disk.parent / "new", "bbbb")
ready[2].write_bytes(os.urandom(300_000))
try:
    place.place(ready, disk / "dist")
except OSError as error:
    print(error.strerror, Path(error.filename).name)
assert killing.listing(disk) == before, killing.listing(disk)
ready[2].write_bytes(b"bbbb")
place.place(ready, disk / "dist")
assert test_faults.builds(disk / "dist") == {{"bbbb"}}
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    code = inside.format(
        scripts=str(SCRIPTS),
        tests=str(ROOT / "tests"),
        here=str(Path(__file__).parent),
        disk=str(disk),
        work=str(tmp_path / "build"),
    )
    mount = f'mount -t tmpfs -o size=200k none "{disk}" || exit 99; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here to mount a small disk with")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no small disk may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"No space left on device {samples.build().wheel_name}"


def test_a_failure_on_a_nearly_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMake and others go on when a write fails: their next step then says something else."""
    command = [sys.executable, "-c", "print('+ cmake\\nninja: error: loading build.ninja'); raise SystemExit(1)"]
    for free, said in (
        (700_000, r"exit status 1, and only 0\.7 MB are free on this disk"),
        (2**40, r"failed \(exit status 1\)"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(2**40, 0, free))
        with pytest.raises(child.ChildError, match=said) as caught:
            child.run("compiling", command, log=tmp_path / "log")
        assert caught.value.telling() == ["ninja: error: loading build.ninja"]


# Parents that are killed.

CHILD = """
import subprocess, sys, time
sys.path.insert(0, {scripts!r})
from sage_factory import child
if {watching}:
    child.end_with_parent()
print("Installing", subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""
PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
from sage_factory import alone, child
from sage_factory.with_what import venvs
command, log = [sys.executable, "-c", {code!r}], Path({log!r})
with alone.alone(Path({lock!r}), "another", print):
    if {pip}:
        venvs.VENVS = log.parent
        venvs._logged(command, log.name)
    else:
        child.run("sleeping", command, log=log, on_line=lambda line: print(line, file=sys.stderr, flush=True))
"""


def started(tmp_path: Path, *, watching: bool, pip: bool = False) -> tuple[subprocess.Popen[str], int]:
    """A process that holds a lock and runs a child with a grandchild, and the grandchild's number."""
    code = CHILD.format(scripts=str(SCRIPTS), watching=watching)
    places = {"lock": str(tmp_path / "lock"), "log": str(tmp_path / "log")}
    parent = PARENT.format(scripts=str(SCRIPTS), code=code, pip=pip, **places)
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    return process, int(process.stderr.readline().split()[-1])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ended(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@posix
def test_compilers_end_when_the_build_is_killed(tmp_path: Path) -> None:
    parent, grandchild = started(tmp_path, watching=True)
    parent.kill()
    assert ended(grandchild)
    parent.communicate()


@posix
@pytest.mark.parametrize("pip", [False, True], ids=["build", "environment"])
def test_a_lock_lasts_until_what_its_killed_holder_started_has_ended(tmp_path: Path, pip: bool) -> None:
    parent, grandchild = started(tmp_path, watching=False, pip=pip)
    parent.kill()
    parent.wait()
    with (tmp_path / "lock").open("a+", encoding="utf-8") as handle:
        assert not alone._locked(handle)
        family = (_parent(grandchild), grandchild)
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        assert all(ended(pid) for pid in family)
        assert alone._locked(handle)
    parent.communicate()


# The build itself.


@posix
@pytest.mark.slow
def test_killed_builds_two_at_once_and_killed_publishers_leave_what_one_leaves(tmp_path: Path) -> None:
    """`python tests/killing.py` kills fifty of each, and compilers too."""
    if not (killing.ROOT / ".git").exists():
        pytest.skip("this checkout cannot be cloned: it has no .git")
    seed = int(time.time())
    print(f"python tests/killing.py --seed {seed}")
    clone = killing.Clone.of_this(tmp_path, seed=seed)
    build = killing.builder(clone)
    killing.kill_packing(build, 3)
    build.reset()
    both = [build.start(), build.start()]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("waiting for another build in this checkout" in text for text in said) == 1
    assert killing.listing(build.folder) == build.good
    killing.kill_publishing(clone, 3)
    assert clone.kills.total() == 6
