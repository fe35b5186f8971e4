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
from sage_factory.with_what import cpu_torch, tasks, venvs

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
        a = { cmd = "python a.py" }
        b = { cmd = "python b.py", depends-on = [{ task = "a", environment = "first" }] }
        [tasks.c]
        cmd = "python c.py"
        default-environment = "own"
        depends-on = [{ task = "a", environment = "first" }, { task = "b", environment = "other" }]
        """,
    )
    steps = tasks.plan(read, "c", ["-x"])
    assert commands(steps) == ["python a.py", "python b.py", "python c.py -x"]
    assert [step.environment for step in steps] == ["first", "other", "own"]
    assert [step.environment for step in tasks.plan(read, "c", environment="asked")] == ["first", "other", "asked"]
    assert [step.environment for step in tasks.plan(read, "a")] == ["default"]


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_a_task_asked_for_help_does_not_run_what_it_depends_on(asked: str) -> None:
    manifest = tasks.Manifest.read(ROOT / "pixi.toml")
    assert len(tasks.plan(manifest, "test", ["-k", "help"])) == 3
    assert commands(tasks.plan(manifest, "test", [asked])) == [
        f"python scripts with-wheel -m pytest -n 2 --dist loadfile --max-worker-restart 0 {asked}"
    ]


def test_arguments_follow_the_command(tmp_path: Path) -> None:
    read = manifest(tmp_path, '[tasks]\na = { cmd = "python a.py --x" }')
    (step,) = tasks.plan(read, "a", ["-k", "two words"])
    assert step.command == ("python", "a.py", "--x", "-k", "two words")


def entry(name: str) -> str:
    return f'{{ task = "{name}", environment = "default" }}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f'a = {{ cmd = "x", depends-on = [{entry("b")}] }}\nb = {{ cmd = "y", depends-on = [{entry("a")}] }}',
            "depends on itself: a → b → a",
        ),
        (f'a = {{ cmd = "x", depends-on = [{entry("bb")}] }}\nbbb = {{ cmd = "y" }}', "no task 'bb'. Did you mean 'bbb'?"),
        ('a = { cmd = "python a.py && x" }', "task 'a' needs pixi's shell or templates ('python a.py && x')"),
        ('a = { cmd = "python a.py {{ cuda }}" }', "task 'a' needs pixi's shell or templates"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, text: str, message: str) -> None:
    read = manifest(tmp_path, f"[tasks]\n{text}")
    with pytest.raises(tasks.TaskError) as caught:
        tasks.plan(read, "a")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a = { cmd = "x", args = ["cuda"] }', "task 'a' uses args, which scripts/run.py does not know"),
        ('a = { cmd = "x", env = { A = "1" }, cwd = "docs" }', "task 'a' uses cwd, env, which"),
        ('a = { cmd = "x", inputs = ["f"], outputs = ["g"] }', "task 'a' uses inputs, outputs, which"),
        ('a = { cmd = "x", clean-env = true }', "task 'a' uses clean-env, which"),
        ('a = "x"', "task 'a' is no table with a string as `cmd`"),
        ('a = [{ task = "b" }]', "task 'a' is no table with a string as `cmd`"),
        ('a = { cmd = ["x"] }', "task 'a' is no table with a string as `cmd`"),
        ('a = { cmd = "" }', "task 'a' is no table with a string as `cmd`"),
        ('a = { description = "x" }', "task 'a' is no table with a string as `cmd`"),
        ('a = { cmd = "x", depends-on = "b" }', "task 'a' depends on 'b', not on a task and environment by these keys"),
        ('a = { cmd = "x", depends-on = ["b"] }', "task 'a' depends on 'b', not on"),
        ('a = { cmd = "x", depends-on = [{ task = "b" }] }', "task 'a' depends on {'task': 'b'}, not on"),
        ('a = { cmd = "x", depends-on = [{ task = "b", environment = "c", args = [] }] }', "'args': []}, not on"),
        ('[feature.docs.tasks]\na = "x"', "a: of a feature or a platform, whose tasks scripts/run.py does not know"),
        ('[target.linux.tasks]\na = "x"\nb = "y"', "a, b: of a feature or a platform"),
        ('[feature.docs.target.linux.tasks]\na = "x"', "a: of a feature or a platform"),
    ],
)
def test_what_pixi_knows_and_run_py_does_not_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(tasks.TaskError) as caught:
        manifest(tmp_path, f"[tasks]\n{text}")
    assert message in str(caught.value)
    assert "use pixi" in str(caught.value)


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


@pytest.mark.parametrize("door", [RUN, RUN.parent])
def test_an_old_python_is_told_so(door: Path) -> None:
    code = f"import sys, runpy; sys.version_info = (3, 10, 1, 'final', 0); runpy.run_path({str(door)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Traceback" not in done.stderr


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tasks.Manifest:
    """Tasks in an environment that needs no set-up."""
    monkeypatch.setattr(venvs, "ensure", lambda name, of="", beside=(): Path(sys.executable))
    monkeypatch.setattr(venvs, "bin_dir", lambda name: Path(sys.executable).parent)
    monkeypatch.chdir(tmp_path)
    programs = {
        "status": "import sys; sys.exit(7)",
        "show": "import os; print(os.environ['SAGEATTENTION_CHANNEL'], os.getcwd(), os.environ['INIT_CWD'])",
        "door": f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import sage_factory; print(sage_factory.task('lint'))",
        "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    }
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    lines = [f"{name} = {{ cmd = \"python '{(tmp_path / name).as_posix()}.py'\" }}" for name in programs]
    table = ["[tasks]", *lines, 'none = { cmd = "no-such-program" }', "[tool.run.environments]", 'default = ["build"]']
    return manifest(tmp_path, "\n".join(table))


def test_the_exit_status_is_the_tasks(bare: tasks.Manifest) -> None:
    assert tasks.execute(bare, tasks.plan(bare, "status")[0]) == 7
    assert tasks.execute(bare, tasks.plan(bare, "killed")[0]) == -signal.SIGKILL


def test_tasks_start_in_the_root_and_know_from_where_and_that_the_channel_is_pypi(
    bare: tasks.Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SAGEATTENTION_CHANNEL", raising=False)
    assert tasks.execute(bare, tasks.plan(bare, "show")[0]) == 0
    monkeypatch.setenv("SAGEATTENTION_CHANNEL", "conda-forge")
    assert tasks.execute(bare, tasks.plan(bare, "show")[0]) == 0
    assert capfd.readouterr().out.splitlines() == [f"pypi {ROOT} {tmp_path}", f"conda-forge {ROOT} {tmp_path}"]


def test_a_task_that_run_py_runs_in_a_shell_of_pixis_is_not_taken_for_one_that_pixi_runs(
    bare: tasks.Manifest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIXI_ENVIRONMENT_NAME", "default")
    assert tasks.execute(bare, tasks.plan(bare, "door")[0]) == 0
    assert capfd.readouterr().out == "`python3 scripts/run.py lint`\n"


def test_a_missing_program_is_said(bare: tasks.Manifest) -> None:
    with pytest.raises(tasks.TaskError, match="runs 'no-such-program', which is not in environment 'default'"):
        tasks.execute(bare, tasks.plan(bare, "none")[0])


@pytest.mark.skipif(os.name == "nt", reason="not done there")
def test_what_a_later_step_runs_in_is_set_up_while_the_first_runs(
    bare: tasks.Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And no longer."""
    text = """
        [tasks]
        first = { cmd = "python first.py" }
        last = { cmd = "python last.py", default-environment = "b", depends-on = [{ task = "first", environment = "a" }] }
        [tool.run.environments]
        a = ["a"]
        b = ["b", "c"]
    """
    read = manifest(tmp_path, text)
    (tmp_path / "scripts").mkdir()
    program = "import pathlib, sys, time\npathlib.Path('started').write_text(' '.join(sys.argv[1:]))\ntime.sleep(60)\npathlib.Path('ended').touch()"
    (tmp_path / "scripts" / "run.py").write_text(program, encoding="utf-8")
    waits = "import pathlib, time\nend = time.monotonic() + 20\nwhile not pathlib.Path('started').exists(): assert time.monotonic() < end; time.sleep(0.02)"
    (tmp_path / "first.py").write_text(waits, encoding="utf-8")
    (tmp_path / "last.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.setattr(tasks, "ROOT", tmp_path)
    asked = []
    monkeypatch.setattr(venvs, "complete", lambda name, of="", beside=(): asked.append((name, of, *beside)))
    start = time.monotonic()
    assert tasks.run(read, tasks.plan(read, "last")) == 3
    assert time.monotonic() - start < 30
    assert asked == [("b", "b", "c")]
    assert (tmp_path / "started").read_text(encoding="utf-8") == "-e b"
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize(("driver", "torch"), [(True, "torch-2.8.0"), (False, "torch-2.8.0-cpu")])
def test_an_environment_is_set_up_alone(driver: bool, torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside PyTorch with CUDA's libraries where there is a driver to use them."""
    made: list[tuple[str, ...]] = []

    def without_cuda(lock: str) -> str:
        made.append((f"{lock}-cpu",))
        return f"{lock}-cpu"

    monkeypatch.setattr(tasks, "has_driver", lambda: driver)
    monkeypatch.setattr(cpu_torch, "ensure", without_cuda)
    monkeypatch.setattr(venvs, "ensure", lambda name, of="", beside=(): made.append((name, of, *beside) if of else (name,)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # whose handlers would outlast this test
    assert tasks.main(["-e", "test"]) == 0
    assert made == [(torch,), ("test", "test", torch)]
    assert tasks.main(["-e", "no-such"]) == 2


def test_no_two_environments_pull_a_folder_from_under_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one where it would be made of the same."""
    manifest = tasks.Manifest.read(ROOT / "pixi.toml")
    filled: list[str] = []

    def fill(name: str, lock: Path, beside: Sequence[str]) -> None:
        filled.append(name)
        (tmp_path / name).mkdir(exist_ok=True)

    monkeypatch.setattr(venvs, "VENVS", tmp_path)
    monkeypatch.setattr(venvs, "_fill", fill)
    monkeypatch.setattr(cpu_torch, "_fill", lambda name, lock: fill(name, lock, ()))
    of = {environment: tasks.set_up(manifest, environment)[0] for environment in [*manifest.locks, *manifest.locks]}
    assert len(filled) == len(set(filled)), "each is made once"
    assert {of["default"], of["cu126"], of["lint"], of["test"], of["release"]} == {"build", "lint", "test", "release"}


def forwarding(child: str, before: str = "") -> list[str]:
    """A program that runs another as a task does."""
    code = f"""
        import os, sys
        sys.path.insert(0, {str(RUN.parent)!r})
        from sage_factory.with_what import tasks
        {before}
        sys.exit(tasks._forwarding([sys.executable, "-c", {child!r}], dict(os.environ)))
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to hand on")
def test_a_signal_reaches_the_task() -> None:
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(9)); print('up', flush=True); time.sleep(30)"
    with subprocess.Popen(forwarding(child), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(timeout=20) == 9


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither groups of processes nor SIGINT for one")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_command_once(presses: int) -> None:
    """However often it comes: run.py hands it on where no terminal has sent it to both, and users are impatient."""
    command = f"""
        import pathlib, runpy, sys, time
        sys.path.insert(0, {str(RUN.parent)!r})
        from sage_factory.commands import matrix
        def run(args):
            try:
                print("up", flush=True)
                time.sleep(30)
            finally:
                time.sleep(0.5)
                print("tidied", flush=True)
        matrix.run, sys.argv = run, ["scripts", "matrix"]
        runpy.run_path({str(RUN.parent)!r}, run_name="__main__")
    """
    process = subprocess.Popen(
        forwarding(textwrap.dedent(command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(presses):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.1)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "tidied\n", "\ninterrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="no terminals of this kind there")
def test_a_terminals_ctrl_c_is_not_handed_on_again_wherever_standard_input_is() -> None:
    ours, theirs = os.openpty()
    child = """if 1:
        import os, signal, time
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupt\\n"))
        print("up", flush=True)
        for _ in range(10): time.sleep(0.1)
    """
    command = forwarding(child, f"os.open({os.ttyname(theirs)!r}, os.O_RDWR)")  # which makes it that of the session
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.write(ours, b"\x03")
        assert process.communicate(timeout=20)[0] == "interrupt\n"
    os.close(ours)
    os.close(theirs)


def test_ctrl_c_while_an_environment_is_set_up_ends_once() -> None:
    code = f"""
        import signal, sys, time
        sys.path.insert(0, {str(RUN.parent)!r})
        from sage_factory.with_what import cpu_torch, tasks, venvs
        def ensure(*_arguments, **_options):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                print("tidied")
        venvs.ensure = ensure
        sys.exit(tasks.main(["-e", "default"]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    said = "interrupted: the next run starts the unfinished set-up again\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "tidied\n", said)


def test_a_start_is_quick() -> None:
    start = time.monotonic()
    subprocess.run([sys.executable, RUN], capture_output=True, check=True)
    assert time.monotonic() - start < 5
