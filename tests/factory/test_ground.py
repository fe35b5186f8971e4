"""What every stage uses: processes that are alone, children that leave nothing behind, the clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_factory import alone, child, files
from sage_factory.clock import Clock


def test_the_second_build_waits_and_says_so(tmp_path: Path) -> None:
    script = f"import fcntl, os, time; f = open({str(tmp_path / 'build.lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    script += "f.write(str(os.getpid())); f.flush(); print('held', flush=True); time.sleep(0.5)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        said: list[str] = []
        with alone.alone(tmp_path / "build.lock", "another build in this checkout", said.append):
            assert f"waiting for another build in this checkout (process {other.pid})" in said[0]
            assert other.wait() == 0


def test_an_interrupted_child_ends_with_its_descendants(tmp_path: Path) -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    seen: list[int] = []

    def interrupt(line: str) -> None:
        seen.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run("sleeping", [sys.executable, "-c", script], log=tmp_path / "log", on_line=interrupt)
    stat = Path(f"/proc/{seen[0]}/stat")
    for _ in range(50):
        # An ended process whose parent has not asked for its status yet is a zombie.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {seen[0]} still runs")


def test_a_failed_child_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(child.ChildError, match=r"compiling failed \(exit status 3\).*log") as caught:
        child.run("compiling", [sys.executable, "-c", "print('why'); raise SystemExit(3)"], log=tmp_path / "log")
    assert caught.value.tail == ("why",)
    assert (tmp_path / "log").read_text() == "why\n"


def test_two_processes_that_write_one_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def meanwhile(self: Path, target: Path) -> Path:
        with monkeypatch.context() as other:
            other.setattr(Path, "replace", replace)
            other.setattr(os, "getpid", lambda: 1)
            files.put(target, b"another's")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    files.put(tmp_path / "file", b"mine")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"mine"}


def test_a_step_counts_the_processor_time_of_its_children() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.step("busy"):
            subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    wall, cpu = clock.seconds["busy"]
    assert 0.5 <= cpu < 2
    assert wall >= 0.6
