"""Kill builds at random moments, and hold what is left to what a build that nobody killed leaves.

`python tests/killing.py [--kills 50] [--compiling 10] [--seed 1]`, in an environment that can build. It works in a clone
of the checkout's last commit with the packages of build/conda in it, so that most builds only verify, pack and place; the
`--compiling` ones have to compile kernels or operators too.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def listing(folder: Path) -> dict[str, str]:
    """Every file below, hidden ones too, with the hash of its content, in which an index says not when it was made."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        str(path.relative_to(folder)): hashlib.sha256(re.sub(rb'"indexed_timestamp":\d+', b"", data)).hexdigest()
        for path, data in files.items()
    }


@dataclass
class Checkout:
    """A clone of the checkout, the command that builds in it, and what that builds."""

    root: Path
    environment: dict[str, str]
    random: random.Random
    seconds: float = 0.0
    good: dict[str, str] = field(default_factory=dict)
    old: dict[str, str] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)

    @classmethod
    def clone(cls, folder: Path, seed: int) -> Checkout:
        root = folder / "checkout"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
        (root / ".venvs").symlink_to(ROOT / ".venvs")
        if (ROOT / "build" / "conda").is_dir():
            shutil.copytree(ROOT / "build" / "conda", root / "build" / "conda")
        environment = dict(os.environ)
        if "CONDA_PREFIX" not in environment:
            environment.setdefault("SAGEATTENTION_CHANNEL", "pypi")
        return cls(root, environment, random.Random(seed))

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.root / "scripts" / "build.py"), "--cuda", "12.8"]
        return subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def build(self) -> str:
        """A build that nobody kills; what it said."""
        with self.start() as process:
            said = process.communicate()[0]
        if process.returncode:
            raise AssertionError(f"the build failed with status {process.returncode}:\n{said}")
        return said

    def prepare(self) -> None:
        """Learn what a build leaves and how long it takes, and make an older build of it for later ones to replace."""
        self.build()
        start = time.monotonic()
        self.build()
        self.seconds = time.monotonic() - start
        self.good = listing(self.dist)
        for path in self.dist.glob("conda/*/*.conda"):
            shutil.copyfile(path, path.with_name(path.name.replace("_0.conda", "00_0.conda")))  # a digest of other sources
            path.unlink()
        for path in self.dist.glob("wheels/*.whl"):
            path.write_bytes(b"an older wheel")
        for path in self.dist.glob("conda/*/repodata.json"):
            path.write_text("{}", encoding="utf-8")
        self.old = listing(self.dist)
        shutil.copytree(self.dist, self.root / "old")

    def reset(self) -> None:
        """dist/ with an older build in it."""
        shutil.rmtree(self.dist, ignore_errors=True)
        shutil.copytree(self.root / "old", self.dist)

    def kill_one(self, seconds: float, *, where: str) -> None:
        """Start a build and kill it: at any time, or as soon as something is new in dist/ and a moment later."""
        process = self.start()
        end = time.monotonic() + (self.random.uniform(0, seconds) if where == "anywhere" else 4 * self.seconds)
        while time.monotonic() < end and process.poll() is None:
            if where == "placing" and any(self.dist.rglob(".*.partial")):
                time.sleep(self.random.uniform(0, 0.03))
                break
            time.sleep(0.001)
        finished = process.poll() is not None
        victims = [process.pid, *_children(process.pid)]
        victim = self.random.choice(["the build", "everything"])
        for pid in victims[: 1 if victim == "the build" else None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        self.kills["too late" if finished else f"{where}, {victim}"] += 1

    def visible_files_are_whole(self) -> None:
        """Straight after a kill: whatever has a name of its own in dist/ is what the old or the new build made."""
        for name, digest in listing(self.dist).items():
            if not Path(name).name.startswith("."):
                assert digest in {self.old.get(name), self.good.get(name)}, f"{name} is neither the old nor the new file"

    def next_build_is_as_if_nothing_had_been(self) -> None:
        """The next build leaves just what a first one would: nothing missing, damaged, twice or left over."""
        self.build()
        left = listing(self.dist)
        assert left == self.good, dict(left.items() ^ self.good.items())
        for folder in (self.dist / "conda").iterdir():
            index = json.loads((folder / "repodata.json").read_text(encoding="utf-8"))["packages.conda"]
            assert {name: entry["sha256"] for name, entry in index.items()} == {
                path.name: self.good[str(path.relative_to(self.dist))] for path in folder.glob("*.conda")
            }
        assert not list((self.root / "build").glob("staging-*")), "staging of a killed build is still there"


def _children(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        try:
            direct = [int(word) for word in path.read_text().split()]
        except OSError:  # it has ended
            continue
        found += [*direct, *(below for child in direct for below in _children(child))]
    return found


def run(folder: Path, kills: int, compiling: int, seed: int, say: Callable[[str], None] = print) -> Checkout:
    """`kills` builds are killed, each of them followed by a whole one, and `compiling` more in a row before one."""
    checkout = Checkout.clone(folder, seed)
    checkout.prepare()
    say(f"a build that only packs takes {checkout.seconds:.1f} s")
    for number in range(kills):
        checkout.reset()
        checkout.kill_one(checkout.seconds, where="placing" if number % 2 else "anywhere")
        checkout.visible_files_are_whole()
        checkout.next_build_is_as_if_nothing_had_been()
    if compiling:
        packages = sorted((checkout.root / "build" / "conda").glob("*/*.conda"))
        for number in range(compiling):
            checkout.reset()
            if number % 3 == 0:  # the kernels too, else the operators alone
                for path in packages:
                    path.unlink(missing_ok=True)
            for path in packages:
                if path.parent.name != "noarch":
                    path.unlink(missing_ok=True)
            checkout.kill_one(20 + 10 * (number % 3 == 0), where="anywhere")
            checkout.visible_files_are_whole()
        checkout.next_build_is_as_if_nothing_had_been()
    return checkout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="builds that only pack (default: 50)")
    parser.add_argument("--compiling", type=int, default=10, help="builds that compile (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (default: 1)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="killing-") as folder:
        checkout = run(Path(folder), args.kills, args.compiling, args.seed)
    for what, count in sorted(checkout.kills.items()):
        print(f"{count:4} killed {what}")
    print(f"{checkout.kills.total()} kills: nothing corrupt, nothing twice, all there after the next build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
