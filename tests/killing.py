"""Kill builds and publishing at random moments, and hold what is left to what a run that nobody killed leaves.

`python tests/killing.py [--kills 50] [--compiling 10] [--publishing 50] [--seed 1]`, in an environment that can build. It
works in a clone of the checkout's last commit with the packages of build/conda in it, so that most builds only verify,
pack and place; the `--compiling` ones have to compile kernels or operators too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

ROOT = Path(__file__).resolve().parent.parent
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def listing(folder: Path) -> dict[str, str]:
    """Every file below, hidden ones too, with the hash of its content. No locks and no reports of how long it took, and in an
    index not when it was made.
    """
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".lock" and path.parent.name != "reports":
            data = path.read_bytes()
            if path.name == "repodata.json.zst":
                data = zstandard.ZstdDecompressor().stream_reader(data).read()
            data = re.sub(rb'"indexed_timestamp":\d+', b"", data)
            found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


@dataclass
class Clone:
    """A clone of the checkout, with its environments and its finished packages."""

    root: Path
    environment: dict[str, str]
    random: random.Random
    kills: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_this(cls, folder: Path, seed: int) -> Clone:
        root = folder / "checkout"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
        (root / ".venvs").symlink_to(ROOT / ".venvs")
        if (ROOT / "build" / "conda").is_dir():
            shutil.copytree(ROOT / "build" / "conda", root / "build" / "conda")
        environment = dict(os.environ)
        if "CONDA_PREFIX" not in environment:
            environment.setdefault("SAGEATTENTION_CHANNEL", "pypi")
        return cls(root, environment, random.Random(seed))

    def publishable(self) -> None:
        """Make what is built here a profile, since a profile is what is published."""
        with (self.root / "variants.yaml").open("a", encoding="utf-8") as table:
            table.write(
                f'  killing: [{{package: sageattention, pytorch: 2.8.0, cuda: "12.8", python: "{PYTHON}", platform: linux-64}}]\n'
            )


@dataclass
class Command:
    """A command of the clone that fills a folder, and what that folder holds when nobody kills it."""

    clone: Clone
    arguments: Sequence[str]
    folder: Path
    seconds: float = 0.0
    good: dict[str, str] = field(default_factory=dict)
    old: dict[str, str] = field(default_factory=dict)

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, *self.arguments]
        return subprocess.Popen(
            command,
            cwd=self.clone.root,
            env=self.clone.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self) -> None:
        """Run to the end."""
        with self.start() as process:
            said = process.communicate()[0]
        assert process.returncode == 0, f"{self.arguments[0]} ended with status {process.returncode}:\n{said}"

    def learn(self, age: Callable[[Path], None] | None = None) -> None:
        """What a run leaves, and how long it takes; `age` makes of that what later runs find."""
        self.run()
        start = time.monotonic()
        shutil.rmtree(self.folder)
        self.run()
        self.seconds = time.monotonic() - start
        self.good = listing(self.folder)
        if age:
            age(self.folder)
            self.old = listing(self.folder)
            self.folder.rename(self.folder.with_name("old"))

    def reset(self) -> None:
        """The folder as it was before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.old:
            shutil.copytree(self.folder.with_name("old"), self.folder)

    def kill_one(self, seconds: float, *, where: str) -> None:
        """Start it and kill it: at any time, or as soon as something is new in the folder and a moment later."""
        process, rng = self.start(), self.clone.random
        end = time.monotonic() + (rng.uniform(0, seconds) if where == "anywhere" else 10 * self.seconds)
        while time.monotonic() < end and process.poll() is None:
            if where == "writing" and _half_written(self.folder):
                time.sleep(rng.uniform(0, 0.03))
                break
            time.sleep(0.001)
        finished = process.poll() is not None
        victim = rng.choice(["it alone", "all it started"])
        for pid in [process.pid, *(_children(process.pid) if victim == "all it started" else ())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        name = Path(self.arguments[0]).name
        self.clone.kills[f"{name}: too late" if finished else f"{name}: {where}, {victim}"] += 1

    def named_files_are_whole(self) -> None:
        """Straight after a kill: what has a name of its own is what the old or the new run made."""
        for name, digest in listing(self.folder).items():
            if not any(part.startswith(".") for part in Path(name).parts):
                known = {self.old.get(name), self.good.get(name)}
                # An index is of some moment between the two.
                assert digest in known or name.endswith((".html", ".json", ".zst")), f"{name} is not whole"

    def next_one_is_as_if_nothing_had_been(self) -> None:
        """The next run leaves just what a first one would: nothing missing, damaged, twice or left over."""
        self.run()
        left = listing(self.folder)
        assert left == self.good, dict(left.items() ^ self.good.items())
        for path in self.folder.glob("*/*/repodata.json"):
            index = json.loads(path.read_text(encoding="utf-8"))["packages.conda"]
            there = {p.name: self.good[str(p.relative_to(self.folder))] for p in path.parent.glob("*.conda")}
            assert {name: entry["sha256"] for name, entry in index.items()} == there
        assert not list((self.clone.root / "build").glob("staging-*")), "staging of a killed build is still there"


def _half_written(folder: Path) -> bool:
    """Whether a file below has no name of its own yet; unlike `rglob`, `os.walk` lets folders vanish while it looks."""
    return any(name.startswith(".") and name.endswith(".partial") for _, _, names in os.walk(folder) for name in names)


def _children(pid: int) -> list[int]:
    """All descendants of a process."""
    direct: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            direct += map(int, path.read_text().split())
    return [*direct, *(below for child in direct for below in _children(child))]


def _older(dist: Path) -> None:
    """Make of dist/ what a build of other sources would have left."""
    for path in dist.glob("conda/*/*.conda"):
        path.rename(path.with_name(path.name.replace("_0.conda", "00_0.conda")))  # a digest of other sources
    for path in dist.glob("wheels/*.whl"):
        path.write_bytes(b"an older wheel")
    for path in dist.glob("conda/*/repodata.json"):
        path.write_text("{}", encoding="utf-8")


def builder(clone: Clone) -> Command:
    """A build, into a dist/ that holds an older one."""
    build = Command(clone, ["scripts", "build", "--cuda", "12.8", "--torch", "2.8.0"], clone.root / "dist")
    build.learn(_older)
    return build


def kill_packing(build: Command, kills: int) -> None:
    """Kill builds that only pack, each followed by a whole one."""
    for number in range(kills):
        build.reset()
        build.kill_one(build.seconds, where="writing" if number % 2 else "anywhere")
        build.named_files_are_whole()
        build.next_one_is_as_if_nothing_had_been()


def kill_compiling(build: Command, kills: int) -> None:
    """Kill builds that compile, in a row, and then let one finish."""
    packages = sorted((build.clone.root / "build" / "conda").glob("*/*.conda"))
    for number in range(kills):
        build.reset()
        for path in packages:
            if path.parent.name != "noarch" or number % 3 == 0:  # the kernels too, else the operators alone
                path.unlink(missing_ok=True)
        build.kill_one(30 if number % 3 == 0 else 20, where="anywhere")
        build.named_files_are_whole()
    build.next_one_is_as_if_nothing_had_been()


def kill_publishing(clone: Clone, kills: int) -> None:
    """Kill publishers of what is in dist/, each followed by a whole run."""
    clone.publishable()
    out = clone.root / "out" / "published"
    to = ["--profile", "killing", "--channel", str(out / "channel"), "--index", str(out / "simple")]
    publish = Command(clone, ["scripts", "publish", *to], out)
    publish.learn()
    for number in range(kills):
        publish.reset()
        publish.kill_one(publish.seconds, where="writing" if number % 2 else "anywhere")
        publish.named_files_are_whole()
        publish.next_one_is_as_if_nothing_had_been()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="builds that only pack (default: 50)")
    parser.add_argument("--compiling", type=int, default=10, help="builds that compile (default: 10)")
    parser.add_argument("--publishing", type=int, default=50, help="publishers (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (default: 1)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="killing-") as folder:
        clone = Clone.of_this(Path(folder), args.seed)
        build = builder(clone)
        print(f"a build that only packs takes {build.seconds:.1f} s", flush=True)
        kill_packing(build, args.kills)
        if args.compiling:
            kill_compiling(build, args.compiling)
        build.run()
        if args.publishing:
            kill_publishing(clone, args.publishing)
    for what, count in sorted(clone.kills.items()):
        print(f"{count:4} killed {what}")
    print(f"{clone.kills.total()} kills: nothing corrupt, nothing twice, all there after the next run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
