"""Tasks without pixi mean what they mean under pixi, and end as they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sage_factory import ROOT
from sage_factory.with_what import tasks, venvs

RUN = ROOT / "scripts" / "run.py"


def manifest(tmp_path: Path, text: str) -> tasks.Manifest:
    path = tmp_path / "pixi.toml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return tasks.Manifest.read(path)


def commands(steps: Sequence[tasks.Step]) -> list[str]:
    return [" ".join(step.command) for step in steps]


# ── tasks ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_dependencies_come_first_and_once(tmp_path: Path) -> None:
    read = manifest(
        tmp_path,
        """
        [tasks]
        a = "python a.py"
        b = { cmd = ["python", "b.py"], depends-on = ["a"] }
        c = { cmd = "python c.py", depends-on = ["a", { task = "b", environment = "other" }], default-environment = "own" }
        all = [{ task = "c" }]
        """,
    )
    steps = tasks.plan(read, "all")
    assert commands(steps) == ["python a.py", "python b.py", "python c.py"]
    assert [step.environment for step in steps] == ["default", "other", "own"]


def test_a_task_of_a_feature_runs_in_the_environment_that_has_it(tmp_path: Path) -> None:
    read = manifest(
        tmp_path,
        """
        [feature.docs.tasks]
        docs = { cmd = "python docs.py", env = { QUIET = "1" }, cwd = "docs" }
        [environments]
        default = []
        manual = { features = ["docs"] }
        """,
    )
    (step,) = tasks.plan(read, "docs")
    assert (step.environment, step.env, step.cwd.name) == ("manual", {"QUIET": "1"}, "docs")


def test_arguments_follow_the_command_or_fill_its_places(tmp_path: Path) -> None:
    read = manifest(
        tmp_path,
        """
        [tasks]
        plain = "python a.py --x"
        typed = { cmd = "python b.py --cuda {{ cuda }} {{mode}}", args = ["cuda", { arg = "mode", default = "fast", choices = ["fast", "slow"] }] }
        """,
    )
    assert commands(tasks.plan(read, "plain", ["-k", "two words"])) == ["python a.py --x -k two words"]
    assert commands(tasks.plan(read, "typed", ["12.8"])) == ["python b.py --cuda 12.8 fast"]
    assert commands(tasks.plan(read, "typed", ["12.8", "slow"])) == ["python b.py --cuda 12.8 slow"]
    with pytest.raises(tasks.TaskError, match="needs a value for its argument 'cuda'"):
        tasks.plan(read, "typed")
    with pytest.raises(tasks.TaskError, match="is 'idle': expected one of fast, slow"):
        tasks.plan(read, "typed", ["12.8", "idle"])
    with pytest.raises(tasks.TaskError, match="takes 2 argument"):
        tasks.plan(read, "typed", ["12.8", "fast", "more"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'a = { cmd = "x", depends-on = ["b"] }\nb = { cmd = "y", depends-on = ["a"] }',
            "depends on itself: a → b → a",
        ),
        ('a = "python a.py && python b.py"', "needs a shell"),
        ('a = { cmd = "x", clean-env = true }', "uses clean-env, which"),
        ('a = { cmd = "x", depends-on = ["bb"] }\nbbb = "y"', "there is no task 'bb'. Did you mean 'bbb'?"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(tasks.TaskError) as caught:
        tasks.plan(manifest(tmp_path, f"[tasks]\n{text}"), "a")
    assert message in str(caught.value)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(tasks.TaskError, match="is not valid TOML"):
        manifest(tmp_path, "[tasks")
    with pytest.raises(tasks.TaskError, match="cannot read"):
        tasks.Manifest.read(tmp_path / "none.toml")


def test_without_a_task_all_are_listed() -> None:
    done = subprocess.run([sys.executable, RUN], capture_output=True, text=True, check=True)
    assert "build-cu128" in done.stdout
    assert "Build kernels" in done.stdout


def test_an_unknown_task_is_said_with_what_was_meant() -> None:
    done = subprocess.run([sys.executable, RUN, "biuld-cu128"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Did you mean 'build-cu128'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_old_python_is_told_so() -> None:
    code = f"import sys, runpy; sys.version_info = (3, 10, 1, 'final', 0); runpy.run_path({str(RUN)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Traceback" not in done.stderr


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tasks.Manifest:
    """Tasks in an environment that needs no set-up."""
    monkeypatch.setattr(venvs, "ensure", lambda name, beside=(): Path(sys.executable))
    monkeypatch.setattr(venvs, "bin_dir", lambda name: Path(sys.executable).parent)
    return manifest(
        tmp_path,
        """
        [tasks]
        status = { cmd = ["python", "-c", "import sys; sys.exit(7)"] }
        show = { cmd = ["python", "-c", "import os; print(os.environ['SAGEATTENTION_CHANNEL'], os.environ['MINE'])"], env = { MINE = "1" } }
        killed = { cmd = ["python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"] }
        none = "no-such-program"
        [tool.run.environments]
        default = ["build"]
        """,
    )


def test_the_exit_status_is_the_tasks(bare: tasks.Manifest) -> None:
    assert tasks.execute(bare, tasks.plan(bare, "status")[0]) == 7
    assert tasks.execute(bare, tasks.plan(bare, "killed")[0]) == -signal.SIGKILL


def test_tasks_know_that_the_channel_is_pypi(
    bare: tasks.Manifest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SAGEATTENTION_CHANNEL", raising=False)
    assert tasks.execute(bare, tasks.plan(bare, "show")[0]) == 0
    monkeypatch.setenv("SAGEATTENTION_CHANNEL", "conda-forge")
    assert tasks.execute(bare, tasks.plan(bare, "show")[0]) == 0
    assert capfd.readouterr().out.splitlines() == ["pypi 1", "conda-forge 1"]


def test_a_missing_program_is_said(bare: tasks.Manifest) -> None:
    with pytest.raises(tasks.TaskError, match="runs 'no-such-program', which is not in environment 'default'"):
        tasks.execute(bare, tasks.plan(bare, "none")[0])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to hand on")
def test_a_signal_reaches_the_task(tmp_path: Path) -> None:
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(9)); print('up', flush=True); time.sleep(30)"
    code = f"""
        import os, sys
        from pathlib import Path
        sys.path.insert(0, {str(RUN.parent)!r})
        from sage_factory.with_what import tasks
        sys.exit(tasks._forwarding([sys.executable, "-c", {child!r}], dict(os.environ), Path({str(tmp_path)!r})))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(timeout=20) == 9


def test_a_start_is_quick() -> None:
    start = time.monotonic()
    subprocess.run([sys.executable, RUN], capture_output=True, check=True)
    assert time.monotonic() - start < 5
