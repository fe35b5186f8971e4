"""The wheel installed: the one that fits is found, installed alone and tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import samples

from sage_factory import ROOT, commands
from sage_factory.commands import with_wheel
from sage_factory.inspect import installed

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_the_wheel_for_this_python_is_chosen(tmp_path: Path) -> None:
    for name in (
        "280.128-cp27-cp27",
        f"280.128-cp{HERE.replace('.', '')}-cp{HERE.replace('.', '')}",
        "270.128-cp312-cp312",
    ):
        (tmp_path / f"sageattention-2.2.0-{name}-linux_x86_64.whl").write_bytes(b"")
    (chosen,) = installed.choose(tmp_path, "2.8.0", "12.8")
    assert chosen.name == samples.build(HERE).wheel_name
    other = tmp_path / samples.build(HERE, package="sageattn3").wheel_name
    other.write_bytes(b"")
    for release in ("2.8.0", "2.8.1"):
        assert installed.choose(tmp_path, release, "12.8") == [chosen, other]
    stable = tmp_path / "sageattention-2.2.0-29.128-py3-none-linux_x86_64.whl"
    stable.write_bytes(b"")
    assert installed.choose(tmp_path, "2.9+", "12.8") == [stable]


def test_no_wheel_says_what_there_is_and_what_makes_one(tmp_path: Path) -> None:
    (tmp_path / "sageattention-2.2.0-280.128-cp27-cp27-linux_x86_64.whl").write_bytes(b"")
    for torch, series, todo in (
        ("2.8.1", "2.8", "`python3 scripts/run.py build --cuda 12.8 --torch 2.8.0` makes one"),
        ("2.9+", "2.9+", "`python3 scripts/run.py build --cuda 12.8 --torch 2.9+` makes one"),
        ("2.14.0", "2.14", "variants.yaml has no such row"),
    ):
        with pytest.raises(installed.InstallError) as caught:
            installed.choose(tmp_path, torch, "12.8")
        assert (
            f"{tmp_path} has no wheel for PyTorch {series}, CUDA 12.8 and Python {HERE}: it holds sageattention-2.2.0-280"
            in str(caught.value)
        )
        assert str(caught.value).endswith(todo)


def test_a_wheel_is_installed_alone_and_a_broken_one_does_not_import(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the wheel's own requirement must be there for pip to be content")
    python = installed.install([samples.a_wheel(tmp_path, HERE)], tmp_path / "installed")
    code = "import importlib.metadata as m; print(m.version('sageattention'), m.distribution('sageattention').locate_file(''))"
    said = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "2.2.0"
    assert Path(said[1]).is_relative_to(tmp_path / "installed")
    # The sample has no sageattn.
    (fault,) = installed.import_faults(python)
    assert "does not import and run on the CPU: AttributeError" in fault


def test_a_free_threaded_python_sees_its_neighbours_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "installed" / "lib" / "python3.13t" / "site-packages"
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **more: f"{more['vars']['base']}/lib/python3.13t/site-packages")
    monkeypatch.setattr(installed, "_run", lambda *_: packages.mkdir(parents=True, exist_ok=True))
    installed.install([], tmp_path / "installed")
    assert (packages / "beside.pth").is_file()


def test_the_users_own_modules_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the wheel's own requirement must be there for pip to be content")
    for name in ("pip", "sageattention"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = installed.install([samples.a_wheel(tmp_path, HERE)], tmp_path / "installed")
    (fault,) = installed.import_faults(python)
    assert "not this one" not in fault


def test_a_requirement_that_is_not_there_is_a_fault_of_the_wheel(tmp_path: Path) -> None:
    path = samples.a_wheel(tmp_path, HERE)
    files = samples.contents(path)
    name = f"{samples.DIST_INFO}/METADATA"
    files[name] = files[name].replace(b"torch==2.8.*", b"torch==1.0.*")
    with pytest.raises(installed.InstallError, match=r"(?s)pip cannot install .*torch==1\.0"):
        installed.install([samples.rewrite(path, files)], tmp_path / "installed")


def test_what_is_run_is_handed_on_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    own = commands.arguments(with_wheel, ["-m", "pytest", "-k", "a or b", "--cu", "tests"])
    assert (own.cuda, own.rest) == (None, ["-m", "pytest", "-k", "a or b", "--cu", "tests"])
    own = commands.arguments(with_wheel, ["--cuda", "13.0", "bench/bench.py", "--quick"])
    assert (own.cuda, own.rest) == ("13.0", ["bench/bench.py", "--quick"])
    for program in (["-m", "pytest", "-n", "2"], ["bench/bench.py"]):
        for asked in ("-h", "--help"):
            own = commands.arguments(with_wheel, ["--cuda", "13.0", *program, asked])
            assert (own.cuda, own.rest) == ("13.0", [*program, asked])
    with pytest.raises(SystemExit):
        commands.arguments(with_wheel, ["--cuda", "13.0", "--help"])
    assert "(-m MODULE | SCRIPT)" in capsys.readouterr().out
    assert commands.main(["with-wheel"]) == 1
    assert "say what to run" in capsys.readouterr().err


def test_what_is_run_is_not_told_of_the_users_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []

    def run(*_command: object, env: dict[str, str], **_options: object) -> subprocess.CompletedProcess[str]:
        told.append(env)
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setattr(installed, "choose", lambda *_: [])
    monkeypatch.setattr(installed, "own_folder", lambda _: tmp_path)
    monkeypatch.setattr(installed, "install", lambda *_: Path("python"))
    monkeypatch.setattr(installed, "import_faults", lambda _: [])
    monkeypatch.setattr(os, "chdir", lambda _: None)
    monkeypatch.setattr(os, "execve", lambda _program, _command, environment: told.append(environment))
    monkeypatch.setattr(subprocess, "run", run)
    commands.main(["with-wheel", "--torch", "2.8.0", "bench/bench.py"])
    assert not told[0].keys() & {"PYTHONPATH", "PYTHONSAFEPATH"}


@pytest.mark.parametrize("rest", [["bench/tried.py"], ["-m", "tried"]])
def test_what_is_run_sees_its_neighbours_and_not_the_checkout(tmp_path: Path, rest: list[str]) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (tmp_path / "checkout.py").write_text("", encoding="utf-8")
    (folder / "neighbour.py").write_text("", encoding="utf-8")
    say = "import importlib.util as u; print(*(bool(u.find_spec(n)) for n in ('checkout', 'neighbour')))"
    (folder / "tried.py").write_text(say, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder) if rest[0] == "-m" else ""}
    command = [sys.executable, *with_wheel.apart(rest)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_command_without_a_wheel_fails_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])", encoding="utf-8")
    empty = tmp_path / "wheels"
    empty.mkdir()
    command = [sys.executable, str(ROOT / "scripts"), "with-wheel", "--wheels", str(empty), str(script), "-x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps open files from being removed by itself")
def test_runs_at_the_same_time_keep_their_own_wheel(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for name in (str(other.pid), "999999999", "installed"):
            (tmp_path / name).mkdir()
        assert installed.own_folder(tmp_path) == tmp_path / str(os.getpid())
        assert [path.name for path in tmp_path.iterdir()] == [str(other.pid)]
        other.communicate(b"\n")
