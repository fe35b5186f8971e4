"""Environments: each is set up whole or done again, once for all who wait."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sage_factory import ROOT
from sage_factory.with_what import venvs

RUN = ROOT / "scripts" / "run.py"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty place for environments, with a lock that needs nothing from the network."""
    monkeypatch.setattr(venvs, "ROOT", tmp_path)
    monkeypatch.setattr(venvs, "VENVS", tmp_path / ".venvs")
    monkeypatch.setattr(venvs, "LOCKS", (tmp_path,))
    (tmp_path / "small.txt").write_text("", encoding="utf-8")
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill environments without pip; the names filled."""
    filled: list[str] = []

    def fill(name: str, lock: Path, beside: Sequence[str]) -> None:
        filled.append(name)
        venvs.python_of(name).parent.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(venvs, "_fill", fill)
    return filled


@pytest.mark.slow
def test_an_environment_is_made_and_sees_its_neighbour(place: Path) -> None:
    (place / "other.txt").write_text("", encoding="utf-8")
    venvs.ensure("other")
    python = venvs.ensure("small", beside=["other"])
    (venvs.site_packages("other") / "neighbour.py").write_text("here = 1", encoding="utf-8")
    done = subprocess.run(
        [python, "-c", "import neighbour, sys; print(neighbour.here, sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", str(place / ".venvs" / "small")]


@pytest.fixture
def part(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a lock of a part of the channel, with one wheel that lies here."""
    monkeypatch.setattr(venvs, "PARTS", place / "parts")
    monkeypatch.setattr(venvs, "LOCKS", (place, place / "parts"))
    wheel = place / "something-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("something.py", "here = 1\n")
        archive.writestr("something-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: something\nVersion: 1\n")
        archive.writestr("something-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("something-1.dist-info/RECORD", "")
    (place / "build.txt").touch()
    (place / "parts").mkdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (place / "parts" / "part.txt").write_text(f"something @ {wheel.as_uri()} --hash=sha256:{digest}\n", encoding="utf-8")
    return "part"


@pytest.mark.slow
def test_a_part_of_the_channel_is_filled_by_another_environments_pip(part: str) -> None:
    python = venvs.ensure(part)
    code = "import something, importlib.util, sys; print(something.__file__, importlib.util.find_spec('pip'))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(venvs.site_packages("part") / "something.py"), "None"]


@pytest.mark.slow
def test_where_pip_installs_to_is_not_the_users_choice(part: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "never.txt").write_text("something==2\n", encoding="utf-8")
    settings = {"target": place / "one", "user": 1, "dry-run": 1, "constraint": place / "never.txt"}
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (place / "pip.conf").write_text("\n".join(["[install]", *lines, ""]), encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(place / "pip.conf"))
    for name in ("TARGET", "PREFIX", "ROOT"):
        monkeypatch.setenv(f"PIP_{name}", str(place / "three"))
    venvs.ensure(part)
    assert (venvs.site_packages(part) / "something.py").is_file()


def test_an_environment_that_pip_put_nothing_into_is_not_complete(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venvs, "_logged", lambda *_: (venvs.site_packages(part) / "pip").mkdir(parents=True, exist_ok=True))
    with pytest.raises(venvs.SetupError, match=r"pip .*part\.txt` ended well, but something did not come there"):
        venvs.ensure(part)
    assert not venvs.complete(part)


def test_what_a_lock_names_for_other_systems_or_a_neighbour_has_is_not_missed(place: Path) -> None:
    lock = place / "small.txt"
    lock.write_text(
        "Py_YAML[more]==6.0 \\\n    --hash=sha256:00\ncolorama==1 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    assert venvs._lacking("small", lock) == {"py-yaml"}
    (venvs.site_packages("other") / "py.yaml-6.0.dist-info").mkdir(parents=True)
    venvs.site_packages("small").mkdir(parents=True)
    (venvs.site_packages("small") / "beside.pth").write_text(f"{venvs.site_packages('other')}\n")
    assert not venvs._lacking("small", lock)


def test_a_free_threaded_pythons_environments_are_laid_out_as_it_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **more: f"{more['vars']['base']}/lib/python3.13t/site-packages")
    assert venvs.site_packages("small") == place / ".venvs" / "small" / "lib" / "python3.13t" / "site-packages"


def test_an_environment_is_made_once_and_again_when_its_lock_changes(place: Path, quick: list[str]) -> None:
    venvs.ensure("small")
    venvs.ensure("small")
    assert quick == ["small"]
    (place / "small.txt").write_text("# changed", encoding="utf-8")
    venvs.ensure("small")
    assert quick == ["small", "small"]


def test_for_another_python_or_neighbour_an_environment_is_made_anew(
    place: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venvs.ensure("small")
    venvs.ensure("small", beside=["other"])
    assert len(quick) == 2, "it does not see that neighbour's packages"
    assert (venvs.complete("small"), venvs.complete("small", beside=["other"])) == (False, True)
    monkeypatch.setattr(sys, "version", "3.99.0")
    assert not venvs.complete("small", beside=["other"])
    venvs.ensure("small", beside=["other"])
    assert len(quick) == 3


def test_where_it_was_moved_to_an_environment_is_made_anew(
    place: Path, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip and venv write names the place: programs' first lines, the interpreter's home, neighbours."""
    venvs.ensure("small")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(venvs, "VENVS", (place / ".venvs").rename(tmp_path / "elsewhere" / ".venvs"))
    assert not venvs.complete("small")
    venvs.ensure("small")
    assert quick == ["small", "small"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(venvs, "VENVS", tmp_path / "link" / ".venvs")
    assert venvs.complete("small"), "the same place by another name"


@pytest.mark.skipif(os.name == "nt", reason="links are for administrators there")
def test_environments_behind_a_link_are_those_of_the_place_that_it_leads_to(tmp_path: Path) -> None:
    """Else what is written there names a link, which may go before they do."""
    checkout, shared = tmp_path / "checkout", tmp_path / "shared"
    shutil.copytree(ROOT / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".venvs").symlink_to(shared)
    code = "from sage_factory.with_what import venvs; venvs.keep('small', 'x', lambda: venvs.bin_dir('small').mkdir(parents=True)); "
    code += "print(venvs.VENVS, venvs.python_of('small').parents[2], sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(checkout / "scripts")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(shared)] * 2
    assert (shared / "small" / venvs.STAMP).read_text() == "x", "a place that was not there is made"


def test_an_interrupted_set_up_is_done_again(place: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = venvs._fill

    def interrupted(name: str, lock: Path, beside: Sequence[str]) -> None:
        whole(name, lock, beside)
        raise KeyboardInterrupt

    monkeypatch.setattr(venvs, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        venvs.ensure("small")
    monkeypatch.setattr(venvs, "_fill", whole)
    venvs.ensure("small")
    assert quick == ["small", "small"]


@pytest.mark.skipif(os.name == "nt", reason="flock is not there")
def test_a_second_process_waits_for_the_first(place: Path) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(RUN.parent)!r})
        from sage_factory.with_what import venvs
        here = Path({str(place)!r})
        venvs.ROOT, venvs.VENVS, venvs.LOCKS = here, here / ".venvs", (here,)
        def fill(name, lock, beside):
            (venvs.VENVS / name).mkdir()  # fails if another one is at it
            print("filled", flush=True)
            time.sleep(0.5)
        venvs._fill = fill
        venvs.ensure("small")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=30) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "".join(out for out, _ in said) == "filled\n"


def test_an_unknown_lock_is_said(place: Path) -> None:
    with pytest.raises(venvs.SetupError, match=r"no lock file none\.txt .* There are: small"):
        venvs.ensure("none")


def test_a_python_without_ensurepip_is_told_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(venvs.SetupError, match="apt-get install python3-venv"):
        venvs.ensure("small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: [Errno -3] Temporary failure in name resolution", "index cannot be reached"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "not the one that was locked"),
        ("ERROR: No matching distribution found for torch==2.8.0", "pip found no wheel for Python 3."),
        ("ERROR: something new\n", "ERROR: something new"),
        ("", "failed without a word"),
    ],
)
def test_a_failed_set_up_says_one_thing_to_do(place: Path, text: str, message: str) -> None:
    (place / ".venvs").mkdir()
    command = [sys.executable, "-c", f"import sys; print({text!r}); sys.exit(1)"]
    with pytest.raises(venvs.SetupError) as caught:
        venvs._logged(command, "small")
    assert message in str(caught.value)
    assert "small.log" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_users_python_settings_do_not_leak_in() -> None:
    env = venvs.environ(
        ["build", "torch"], {"PYTHONPATH": "/mine", "PYTHONHOME": "/mine", "PYTHONSAFEPATH": "1", "PATH": "/usr/bin"}
    )
    assert not env.keys() & {"PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"}
    assert env["PATH"].split(os.pathsep) == [str(venvs.bin_dir("build")), str(venvs.bin_dir("torch")), "/usr/bin"]
