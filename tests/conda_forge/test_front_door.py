"""`pixi run` as a developer types it and as CI does, in a fresh clone on a machine with an empty home: real pixi, real programs.

The machine has pixi, git, what Debian has, and a channel on loopback under conda-forge's name, which laid.py makes of PyPI and this
system: `python3.12 tests/conda_forge/laid.py build/laid`, in an environment of `test`. Where it was not laid, nothing is asked.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conda_forge import pixi
from conda_forge.conftest import run
from sage_factory import ROOT
from sage_factory.what import plan

WHEEL = "sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl"
SOME = "wheel and not test_clean"  # uv takes the laid Python for an environment's, which it makes none of
pytestmark = pytest.mark.slow


def processes(clone: Path) -> list[str]:
    """Processes that work in the clone, or were started from it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(clone) in command or str(clone) in str((entry / "cwd").readlink()):
                found.append(command)
        except OSError:
            continue
    return found


# As a developer.


def test_the_first_command_of_the_readme(machine: pixi.Pixi, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    done = run(machine, clone, "build-cu128")
    first = time.monotonic() - start
    assert "WARN" not in done.stderr
    assert (clone / "dist" / "wheels" / WHEEL).is_file()
    start = time.monotonic()
    again = run(machine, clone, "build-cu128")
    second = time.monotonic() - start
    assert "unchanged, so not compiled again" in again.stderr
    with capsys.disabled():
        print(f"\n`pixi run build-cu128` in a fresh clone: {first:.0f} s, again: {second:.0f} s")


def test_what_it_emits_asks_for_what_conda_forges_compilers_say(machine: pixi.Pixi, clone: Path) -> None:
    index = json.loads((clone / "dist" / "conda" / "linux-64" / "repodata.json").read_text(encoding="utf-8"))
    (record,) = index["packages.conda"].values()
    assert record["noarch"] == "python"
    assert not any(spec.startswith("python_abi") for spec in record["depends"]), "one package for every Python"
    assert {"python >=3.9", "pytorch 2.8.*", "libgcc >=12", "libstdcxx >=12"} <= set(record["depends"])


def test_the_wheel_is_tested(machine: pixi.Pixi, clone: Path) -> None:
    done = run(machine, clone, "test", "-k", SOME)
    assert " passed" in done.stdout
    assert "whl installed" in done.stdout


@pytest.mark.parametrize("words", [["lint"], ["matrix"], ["build", "--profile", "default"], ["verify"], ["summary"]])
def test_a_task_ends_well(machine: pixi.Pixi, clone: Path, words: list[str]) -> None:
    assert "WARN" not in run(machine, clone, *words).stderr


def in_a_terminal(machine: pixi.Pixi, clone: Path, *words: str) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    environment = machine.environment | {"SAGEATTENTION_CHANNEL": f"{machine.address}/conda-forge", "TERM": "xterm"}
    process = subprocess.Popen(
        [machine.program, *words],
        cwd=clone,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


def read(terminal: int, until: str, seconds: float) -> str:
    """What a terminal shows until it shows `until`."""
    shown, end = "", time.monotonic() + seconds
    while until not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # its program has ended
                break
    return shown


def test_an_interrupted_build_shows_where_it_is_and_leaves_nothing(machine: pixi.Pixi, clone: Path) -> None:
    built = (clone / "build" / "conda").rename(clone / "build" / "built")
    before = sorted((clone / "dist").rglob("*"))
    process, terminal = in_a_terminal(machine, clone, "run", "build-cu128")
    shown = read(terminal, "sm_", 300)
    assert "kernels (CUDA 12.8)" in shown
    os.killpg(process.pid, signal.SIGINT)
    shown += read(terminal, "interrupted", 60)
    assert process.wait(timeout=60) != 0
    os.close(terminal)
    assert "interrupted: compilers are ended" in shown
    time.sleep(2)
    assert processes(clone) == []
    assert sorted((clone / "dist").rglob("*")) == before
    shutil.rmtree(clone / "build" / "conda")
    built.rename(clone / "build" / "conda")


def test_a_shell_has_the_tools(machine: pixi.Pixi, clone: Path) -> None:
    process, terminal = in_a_terminal(machine, clone, "shell")
    read(terminal, "(sageattention", 60)
    os.write(terminal, b"python -c 'import rattler_build, sys; print(\"it is\", 6 * 7, sys.prefix)'; exit\n")
    assert f"it is 42 {clone}/.pixi/envs/default" in read(terminal, "it is 42 " + str(clone), 60).replace("\r\n", "")
    assert process.wait(timeout=60) == 0
    os.close(terminal)


# As CI.

JOBS: list[dict[str, Any]] = [
    job
    for name in ("build", "pages")
    for job in yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))["jobs"].values()
]
VALUES = {
    "PROFILE": "default", "PLATFORM": "linux-64", "CUDA": "12.9", "TORCH": "2.8.0", "PYTHONS": "3.12",
    "TAG": "v2.2.0", "REASON": "none",
    "GITHUB_EVENT_NAME": "pull_request", "GITHUB_REF": "refs/pull/7/merge", "GITHUB_REF_NAME": "v2.2.0",
    "GITHUB_REPOSITORY": "owner/name", "GH_TOKEN": "none", "GH_HOST": "127.0.0.1",
}  # fmt: skip
# What a machine that is no Windows and has no GitHub makes of a command: its last words.
UNDONE = {
    "release": "cp312-win_amd64.whl",
    "publish": "cp312-win_amd64.whl",
    "index": "releases",
    "earlier": "releases",
    "withdraw": "releases",
}


def commands() -> Iterator[tuple[str, str]]:
    """Every command of the workflows, by the task that it runs. What publishes runs the task by run.py there."""
    for job in JOBS:
        for step in job["steps"]:
            for task in job.get("strategy", {}).get("matrix", {}).get("task", [""]) if "$TASK" in step.get("run", "") else [""]:
                command = with_pixi(step.get("run", "")).replace('"$TASK"', task)
                # `gh` alone, and what takes PyTorch from PyPI, are not pixi's business.
                if command.startswith("pixi run") and "clean-install" not in command:
                    yield command.split()[2], command


def with_pixi(command: str) -> str:
    return command.replace("python3 scripts/run.py", "pixi run")


@pytest.mark.parametrize(("task", "command"), list(commands()), ids=lambda value: value.removeprefix("pixi run "))
def test_a_command_of_the_workflow(machine: pixi.Pixi, clone: Path, task: str, command: str, tmp_path: Path) -> None:
    values = VALUES | {
        "CHANNEL_URL": str(tmp_path / "channel"),
        "INDEX_URL": "https://example.org",
        "GITHUB_OUTPUT": str(tmp_path / "out"),
    }
    if task == "test":
        command += f" -k '{SOME}'"  # all of them: docs/building.md
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=clone, capture_output=True, text=True, check=False,
        env=machine.environment | values | {"SAGEATTENTION_CHANNEL": f"{machine.address}/conda-forge"},
    )  # fmt: skip
    if task in UNDONE:
        assert done.returncode == 1
        assert UNDONE[task] in done.stderr
    else:
        assert done.returncode == 0, done.stderr
    if task == "plan":
        told = dict(line.split("=", 1) for line in (tmp_path / "out").read_text().splitlines())
        assert told == plan.plan("pull_request", "refs/pull/7/merge", "default", "linux-64").outputs()


def test_the_lock_is_made_proposed_and_then_taken_as_it_is(machine: pixi.Pixi, clone: Path, tmp_path: Path) -> None:
    if shutil.which("gh") is None:
        pytest.skip("there was no gh here to lay, which proposes it")
    remote, here = tmp_path / "remote", tmp_path / "here"
    for source, target in ((clone, remote), (remote, here)):
        subprocess.run(["git", "clone", "--quiet", *(["--bare"] if target == remote else []), source, target], check=True)
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "lock.yml").read_text("utf-8"))["jobs"]["lock"]
    steps = [step for step in job["steps"] if "run" in step]
    for step in steps:
        done = subprocess.run(
            ["bash", "-e", "-c", with_pixi(step["run"])], cwd=here, capture_output=True, text=True, check=False,
            env=machine.environment | step.get("env", {}) | VALUES | {"GITHUB_REF_NAME": "main"},
        )  # fmt: skip
        # GitHub is asked last of all, once the branch is there.
        assert (done.returncode, "`gh pr" in done.stderr) == ((1, True) if step is steps[-1] else (0, False)), done.stderr
    made, merged = (here / "pixi.lock").read_bytes(), tmp_path / "merged"
    subprocess.run(["git", "clone", "--quiet", "--branch", "pixi-lock", remote, merged], check=True)
    assert (merged / "pixi.lock").read_bytes() == made
    locked = {"PIXI_LOCKED": "true"}  # as .github/actions/pixi says
    assert "linux-64" in machine("run", "matrix", cwd=merged, more=locked).stdout
    assert (merged / "pixi.lock").read_bytes() == made
    manifest = (merged / "pixi.toml").read_text("utf-8")
    (merged / "pixi.toml").write_text(manifest.replace('rich = ">=14"', 'rich = ">=14"\nuv = "*"', 1), encoding="utf-8")
    assert "lock" in (refused := machine("run", "matrix", cwd=merged, more=locked, check=False)).stderr
    assert refused.returncode != 0
