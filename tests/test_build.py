"""From a request to dist/: what is built again, what is not, and that a failure leaves nothing behind."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rattler_build import RattlerBuildError, assemble_package
from rich.console import Console
from sage_factory import ROOT, alone, child
from sage_factory.inspect import verify
from sage_factory.make import engine, packages, seal
from sage_factory.ship import place
from sage_factory.what import inputs, matrix
from sage_factory.with_what import channel

HERE = matrix.host_platform()


def arguments(**given: object) -> argparse.Namespace:
    defaults = {"cuda": None, "torch": None, "python": None, "profile": None, "platform": None, "kernels": False}
    return argparse.Namespace(**(defaults | given))


def a_package(folder: Path, name: str, string: str, *, depends: list[str] | None = None, year: int = 2020) -> Path:
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    (files / "content").write_text("same")
    when = datetime(year, 1, 1, tzinfo=UTC)
    subdir = "noarch" if "cubins" in name else HERE
    out = assemble_package(
        name, "2.2.0", subdir, string, folder / subdir, files_dir=files, depends=depends or [], timestamp=when
    )
    return Path(out.path)


def listing(folder: Path) -> dict[str, str]:
    """Every file below, hidden ones too, with its content's hash."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# Requests.


def test_a_bare_cuda_version_means_its_pytorch_and_the_python_at_hand() -> None:
    (request,) = packages.requests(arguments(cuda="12.8"))
    assert (request.build.torch, [b.python for b in request.pythons]) == ("2.8.0", [channel.PYTHON])


def test_a_profile_is_grouped_so_that_nothing_is_compiled_twice() -> None:
    requests = packages.requests(arguments(profile="sage2-all", platform="linux-64"))
    assert [(r.build.torch, r.build.cuda, len(r.pythons)) for r in requests] == [
        ("2.6.0", "12.6", 4), ("2.7.0", "12.8", 3), ("2.8.0", "12.9", 3)
    ]  # fmt: skip
    kernels = packages.requests(arguments(profile="all", platform="linux-64", kernels=True))
    assert [r.build.cuda for r in kernels] == list(matrix.load().cuda), "one request a CUDA version"


def test_nothing_asked_for() -> None:
    with pytest.raises(matrix.MatrixError, match="say what to build"):
        packages.requests(arguments())


# Digests.


def test_digest_is_of_content_not_of_place_or_time(tmp_path: Path) -> None:
    digests: list[str] = []
    for name in ("a", "b"):
        root = tmp_path / name
        (root / "src").mkdir(parents=True)
        (root / "src" / "k.cu").write_text("kernel")
        os.utime(root / "src" / "k.cu", (len(digests), len(digests)))
        (root / "src" / "__pycache__").mkdir()
        (root / "src" / "__pycache__" / name).write_text(name)
        digests.append(inputs.digest(["src"], ["12.8"], root))
    assert digests[0] == digests[1]
    assert inputs.digest(["src"], ["12.9"], tmp_path / "a") != digests[0]
    (tmp_path / "a" / "src" / "k.cu").write_text("another kernel")
    assert inputs.digest(["src"], ["12.8"], tmp_path / "a") != digests[0]
    (tmp_path / "b" / "src" / "k.cu").rename(tmp_path / "b" / "src" / "l.cu")
    assert inputs.digest(["src"], ["12.8"], tmp_path / "b") != digests[0]


def test_inputs_are_sorted_alike_on_every_platform(tmp_path: Path) -> None:
    names = ["B", "a-b", "a/b", "c"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in inputs.files(["c", "a", "a-b", "B"], tmp_path)] == names


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="an input of the build is missing"):
        inputs.files(["csrc"], tmp_path)


def test_packages_already_there_are_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", tmp_path)
    built: list[str] = []

    def fake(_self: packages.Factory, one: packages.Planned, *_rest: object) -> None:
        built.append(one.name)
        kernels, operators = (one.settings[f"{kind}_digest"][0] for kind in ("kernels", "operators"))
        cuda, torch = (one.settings[key][0].replace(".", "") for key in ("cuda_compiler_version", "pytorch_version"))
        string = f"cu{cuda}_h{kernels}_0" if "cubins" in one.name else f"torch{torch}_cu{cuda}_h{operators}_0"
        a_package(tmp_path, one.name, string)

    monkeypatch.setattr(packages.Factory, "_build", fake)
    damaged: set[Path] = set()
    monkeypatch.setattr(verify, "verify_conda", lambda path: [f"{path.name} is damaged"] if path in damaged else [])
    by_torch = {t: packages.requests(arguments(cuda="12.8", torch=t, python=["3.12"]))[0] for t in ("2.7.0", "2.8.0")}
    factory = packages.Factory("conda-forge", Console(quiet=True))
    first = factory.packages(by_torch["2.8.0"])
    assert built == ["sageattention-cubins", "sageattention"]
    assert factory.packages(by_torch["2.8.0"]) == first
    assert len(built) == 2
    damaged.add(first[1])
    assert factory.packages(by_torch["2.8.0"]) == first
    assert built.pop() == "sageattention"
    damaged.clear()
    other = factory.packages(by_torch["2.7.0"])
    assert built == ["sageattention-cubins", "sageattention", "sageattention"], "kernels serve every PyTorch"
    assert other[0] == first[0]
    assert factory.packages(by_torch["2.8.0"], kernels_only=True) == first[:1]


def test_a_step_counts_the_processor_time_of_its_children() -> None:
    clock = packages.Clock()
    for _ in range(2):
        with clock.step("busy"):
            subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    wall, cpu = clock.seconds["busy"]
    assert 0.5 <= cpu < 2
    assert wall >= 0.6


# Children.


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


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        (["noise", "FAILED: k.cubin", "k.cu(3): error: no such thing", "ninja: build stopped", "more noise"], "pypi",
         "FAILED: k.cubin\nk.cu(3): error: no such thing"),
        (["noise", "  a.cpp:4:1: error: expected ')'", "  error: subprocess-exited-with-error", "error: Script failed"], "pypi",
         "a.cpp:4:1: error: expected ')'"),
        (["noise", "Traceback (most recent call last):", "RuntimeError: at import", "Script failed with status 1", "noise"], "pypi",
         "RuntimeError: at import"),
        (["cc1plus: fatal error: No space left on device"], "pypi", "free some space"),
        (["Request failed after 3 retries", "error: Failed to resolve dependencies"], "conda-forge", "--channel pypi"),
        (["Retry attempt #2. Sleeping 2.6s before the next attempt", "error: Failed to resolve dependencies"], "conda-forge",
         "--channel pypi"),
        (["error: Failed to resolve dependencies"], "pypi", "error: Failed to resolve dependencies"),
    ],
)  # fmt: skip
def test_a_failed_build_says_why(lines: list[str], kind: str, said: str) -> None:
    message = packages._why(child.ChildError("building", 1, lines, Path("log")), kind)
    assert said in message
    assert "noise" not in message.partition("\n")[2]


# Packages.


@pytest.mark.parametrize("passes", [True, False])
def test_a_package_is_found_again_only_if_it_passed_its_tests(passes: bool, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
package: {{name: tiny, version: "1"}}
build: {{noarch: generic, script: 'echo made > "$PREFIX/made"'}}
tests: [{{package_contents: {{files: ["{"made" if passes else "missing"}"]}}}}, {{script: ["{"true" if passes else "false"}"]}}]
""")
    # What an interrupted run left must not be taken for a result.
    (tmp_path / "making" / "noarch").mkdir(parents=True)
    (tmp_path / "making" / "noarch" / "left.conda").write_text("")
    (one,) = engine.render({"target_platform": [HERE]}, recipe).values()
    if passes:
        made = engine.make(one, [], tmp_path / "conda", 1_600_000_000)
        assert made in (tmp_path / "conda" / "noarch").iterdir()
        assert made.name in (tmp_path / "conda" / "noarch" / "repodata.json").read_text()
    else:
        with pytest.raises((engine.TestError, RattlerBuildError)):
            engine.make(one, [], tmp_path / "conda", 1_600_000_000)
    assert len(list((tmp_path / "conda").rglob("*.conda"))) == passes


# Sealing.


def test_sealed_packages_of_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    packages = [a_package(tmp_path / str(year), "sageattention", "torch280_cu128_habc_0", year=year) for year in (2021, 2022)]
    assert packages[0].read_bytes() != packages[1].read_bytes()
    for path in packages:
        seal.seal(path, 1_600_000_000)
    assert packages[0].read_bytes() == packages[1].read_bytes()
    with zipfile.ZipFile(packages[0]) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2020, 9, 13, 12, 26, 40)}


# dist/.


def ready(folder: Path, digest: str, torch: str = "280", *, kernels: str | None = None) -> list[Path]:
    cubins = f"cu128_h{kernels or digest}_0"
    wheel = folder / f"sageattention-2.2.0-{torch}.128-cp312-cp312-linux_x86_64.whl"
    needs = [f"sageattention-cubins ==2.2.0 {cubins}"]
    packages = [
        a_package(folder, "sageattention-cubins", cubins),
        a_package(folder, "sageattention", f"torch{torch}_cu128_h{digest}_0", depends=needs),
    ]
    wheel.write_bytes(digest.encode())
    return [*packages, wheel]


def test_places_everything_with_an_index_and_removes_what_it_replaces(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    place.place(ready(tmp_path / "one", "aaaa"), dist)
    place.place(ready(tmp_path / "two", "bbbb"), dist)
    assert set(listing(dist)) == {
        "conda/noarch/repodata.json", f"conda/{HERE}/repodata.json",
        "conda/noarch/sageattention-cubins-2.2.0-cu128_hbbbb_0.conda",
        f"conda/{HERE}/sageattention-2.2.0-torch280_cu128_hbbbb_0.conda",
        "wheels/sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl",
    }  # fmt: skip
    index = (dist / "conda" / HERE / "repodata.json").read_text()
    assert "hbbbb" in index
    assert "haaaa_0.conda" not in index


def test_kernels_that_another_package_asks_for_stay(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    place.place(ready(tmp_path / "one", "aaaa", "270"), dist)
    place.place(ready(tmp_path / "two", "bbbb", "280"), dist)
    assert {p.name.split("_h")[1][:4] for p in (dist / "conda" / "noarch").glob("*.conda")} == {"aaaa", "bbbb"}


@pytest.mark.parametrize("failing", ["copy", "index"])
def test_a_full_disk_leaves_dist_as_it_was(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = tmp_path / "dist"
    place.place(ready(tmp_path / "one", "aaaa"), dist)
    before = listing(dist)
    copies = 0

    def full(source: Path, target: Path) -> None:
        nonlocal copies
        copies += 1
        if copies == 3:
            target.write_bytes(source.read_bytes()[:10])
            raise OSError(28, "No space left on device", str(target))
        target.write_bytes(source.read_bytes())

    async def cannot(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "copy":
        monkeypatch.setattr(shutil, "copyfile", full)
    else:
        monkeypatch.setattr(place, "index_fs", cannot)
    with pytest.raises(OSError, match="No space left"):
        place.place(ready(tmp_path / "two", "bbbb"), dist)
    assert listing(dist) == before


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


def test_errors_are_one_message_and_a_status(tmp_path: Path) -> None:
    for wrong, said in (
        (["--cuda", "11.8"], "unknown CUDA version '11.8'"),
        (["--profile", "nope"], "unknown profile 'nope'"),
        (["--cuda", "12.8", "--torch", "2.6.0"], "no build of PyTorch 2.6.0"),
        (["--cuda", "12.8", "--platform", "win-64", "--python", "3.12"], "packages for win-64 are built there"),
    ):
        command = [sys.executable, str(ROOT / "scripts"), "build", *wrong, "--output", str(tmp_path / "dist")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "dist").exists()
