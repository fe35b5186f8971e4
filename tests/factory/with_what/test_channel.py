"""The channel made from PyPI: what is in it, and the small nvcc over NVRTC."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conda_forge import model
from rich.console import Console

from sage_factory import ROOT, alone, commands
from sage_factory.clock import Clock
from sage_factory.make.packages import Packages, Planned
from sage_factory.what import inputs, matrix
from sage_factory.with_what import channel, venvs

TORCH, CUDA = "2.8.0", "12.8"


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheel sets that look installed, without a download."""
    for lock, names in {
        "tools": ["cmake-4.0.0", "ninja-1.13.0", "pip-26.0", "scikit_build_core-1.1.0", "packaging-26.0", "pathspec-1.0"],
        f"torch-{TORCH}": ["torch-2.8.0", "typing_extensions-4.16.0", "nvidia_nccl_cu12-2.27"],
        f"cuda-{CUDA}": ["nvidia_cuda_nvrtc_cu12-12.8.93"],
    }.items():
        site = tmp_path / lock / channel.SITE
        for name in names:
            (site / f"{name}.dist-info").mkdir(parents=True)
            (site / name.split("-")[0]).mkdir()
    monkeypatch.setattr(venvs, "VENVS", tmp_path)
    monkeypatch.setattr(venvs, "ensure", lambda name: tmp_path / name)
    monkeypatch.setattr(venvs, "complete", lambda name: True)
    monkeypatch.setattr(channel, "WORK", tmp_path / "work")
    monkeypatch.setattr(channel, "compiler", lambda: channel.Compiler("/usr/bin/gcc", "/usr/bin/g++", "12.2.0"))
    return tmp_path


def silent(_text: str) -> None:
    pass


def contents(laid: Path) -> dict[str, dict[str, object]]:
    repodata = json.loads((laid / matrix.host_platform() / "repodata.json").read_text(encoding="utf-8"))
    return {record["name"]: record for record in repodata["packages.conda"].values()}


@pytest.mark.skipif(os.name == "nt", reason="there every path is text")
def test_a_path_may_be_of_bytes_that_the_locale_does_not_know(tmp_path: Path) -> None:
    wrapper = channel.Thin("one", "1", texts={"bin/one": os.fsdecode(b"#!/bin/sh\nexec /\xc3\xbc\xff\n")})
    wrapper.write(tmp_path)
    assert (tmp_path / "bin" / "one").read_bytes() == b"#!/bin/sh\nexec /\xc3\xbc\xff\n"
    assert len(wrapper.digest()) == 64


def test_holds_what_the_recipe_asks_for_under_conda_forges_names(pypi: Path) -> None:
    here = matrix.host_platform()
    both = {"python", "cmake", "ninja", "pip", "scikit-build-core", *(f"{name}_{here}" for name in ("gcc", "gxx", "sysroot"))}
    kernels = contents(channel.lay(here, cuda=CUDA, report=silent))
    assert set(kernels) == both | {f"cuda-nvcc_{here}"}, "kernels take no PyTorch"
    assert kernels[f"cuda-nvcc_{here}"]["version"] == "12.8.93"
    found = contents(channel.lay(here, torch=TORCH, report=silent))
    assert set(found) == both | {"pytorch", "typing_extensions"}, "operators take no CUDA"
    assert found["pytorch"]["version"] == TORCH
    assert found[f"sysroot_{here}"]["version"] == "2.28"
    assert found["python"]["version"] == sys.version.split()[0]


def test_operators_are_tested_beside_a_pytorch_that_they_require(pypi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those for every PyTorch from 2.9 on the conda package with kernels of CUDA 13 requires a later one than they are compiled with."""
    (build,) = matrix.builds("stable-abi", platform=matrix.host_platform(), cuda="13.0")
    (pypi / f"torch-{TORCH}").rename(pypi / "torch-2.9.0")
    shutil.copytree(pypi / "torch-2.9.0", pypi / "torch-2.10.0")
    monkeypatch.setattr(channel, "torch_environment", lambda version, _: f"torch-{version}")
    packages = Packages("pypi", Console(quiet=True), Clock(), lambda _: [])
    planned = Planned("operators", "", build.package, pypi, 0, {})
    laid = [packages._channel(planned, build)]
    for spec, version in (("pytorch 2.9.*", "2.9.0"), (f"pytorch {build.conda_torch}", "2.10.0")):
        found = model.solved(laid, [spec], build.platform, model.machine(build.platform))
        assert found["pytorch"].split()[0] == version


@pytest.mark.skipif(os.name == "nt", reason="packages are activated by a shell")
def test_an_apostrophe_in_a_path_reaches_the_compiler(tmp_path: Path) -> None:
    found = channel.Compiler("/it's/gcc", "/it's/g++", "12.2.0")
    packages = [*channel.compilers(found, "linux-64"), channel.sysroot("2.28", "linux-64", "2.2.5")]
    script = "".join(text for one in packages for place, text in one.texts.items() if place.endswith(".sh"))
    # CMake hands $CXXFLAGS to a shell.
    script += """eval "printf '%s\\n' \"\\$CC\" \"\\$CXX\" $CXXFLAGS" """
    environment = os.environ | {"CONDA_PREFIX": "/it's a", "CXXFLAGS": "-O2"}
    said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["/it's/gcc", "/it's/g++", "-O2", "-include", "/it's a/share/glibc-2.28/symbols.h"]


@pytest.mark.skipif(os.name == "nt", reason="the wrappers are scripts of a shell")
@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
def test_wrappers_take_paths_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    place = tmp_path / 'a $HOME `b` "c" it\'s'
    place.mkdir()
    python = place / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(channel, "installed", lambda *_: place)
    for name in ("nvidia/cu13/bin/nvcc", "nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("#!/bin/sh\nprintf '%s\\n' ran \"$@\"\n")
        (place / name).chmod(0o755)
    monkeypatch.setattr(channel, "SHIM", place / "shim.py")
    (place / "shim.py").write_text("import sys; print('ran', *sys.argv[1:], sep='\\n')")
    found = channel.Compiler(str(place / "gcc"), str(place / "g++"), "12.2.0")
    channel.nvcc(matrix.load().cuda[cuda], "linux-64", found, silent).write(tmp_path / "laid")

    def said(name: str) -> list[str]:
        done = subprocess.run([tmp_path / "laid" / "bin" / name, "x y"], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert said("ptxas") == ["ran", "x y"]
    first = ["-ccbin", found.cxx] if cuda == "13.0" else [str(place), "12.8.93"]
    assert said("nvcc") == ["ran", *first, "x y"]


def test_is_laid_once_and_the_same_again(pypi: Path) -> None:
    first = channel.lay(matrix.host_platform(), torch=TORCH, report=silent)
    index = first / matrix.host_platform() / "repodata.json"
    laid = index.stat().st_mtime_ns
    assert channel.lay(matrix.host_platform(), torch=TORCH, report=silent) == first
    assert index.stat().st_mtime_ns == laid
    builds = {name: record["build"] for name, record in contents(first).items()}
    shutil.rmtree(first)
    assert channel.lay(matrix.host_platform(), torch=TORCH, report=silent) == first
    assert {name: record["build"] for name, record in contents(first).items()} == builds


def test_other_tools_make_another_channel(pypi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = channel.lay(matrix.host_platform(), torch=TORCH, report=silent)
    monkeypatch.setattr(channel, "compiler", lambda: channel.Compiler("/usr/bin/gcc", "/usr/bin/g++", "12.4.0"))
    assert channel.lay(matrix.host_platform(), torch=TORCH, report=silent) != first


def test_whatever_is_in_a_package_is_in_its_digest() -> None:
    """By which a channel is found again."""
    one = channel.Thin("one", "1", ["python 3.11.*"], {"bin/a": Path("/a")}, {"bin/b": "b"})
    others = [channel.Thin("two", "1"), channel.Thin("one", "2"), channel.Thin("one", "1", ["python 3.12.*"]),
              channel.Thin("one", "1", links={"bin/a": Path("/b")}), channel.Thin("one", "1", texts={"bin/b": "a"})]  # fmt: skip
    changed = [channel.Thin(*(getattr(other, name) or getattr(one, name) for name in vars(one))) for other in others]
    assert len({thin.digest() for thin in (one, *changed)}) == 6


def test_as_a_command_it_waits_for_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: list[Path] = []

    @contextlib.contextmanager
    def hold(path: Path, *_rest: object) -> Iterator[None]:
        held.append(path)
        yield
        held.clear()

    def lay(*_args: object, **_kwargs: object) -> Path:
        assert held == [ROOT / "build" / "build.lock"]
        return tmp_path

    monkeypatch.setattr(alone, "alone", hold)
    monkeypatch.setattr(channel, "lay", lay)
    assert commands.main(["channel", "--cuda", CUDA]) == 0
    assert held == []


def test_what_a_channel_is_for_is_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["channel"]) == 1
    assert "say what the channel is for: --cuda" in capsys.readouterr().err


def test_a_failure_leaves_no_half_channel(pypi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(channel, "assemble_package", full)
    with pytest.raises(OSError, match="No space left"):
        channel.lay(matrix.host_platform(), torch=TORCH, report=silent)
    assert not list((pypi / "work" / "channels").glob("*"))


def test_serves_its_own_machine_only() -> None:
    with pytest.raises(channel.ChannelError, match=r"serves the Linux machine.*win-64.*--channel conda-forge"):
        channel.lay("win-64", torch=TORCH, report=silent)


def test_says_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(channel.ChannelError, match=r"no C\+\+ compiler found.*apt install g\+\+"):
        channel.compiler()


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have PATH hold compilers of these versions alone, by their endings: `on_path(**{"": "14.2.0", "-12": "12.4.0"})`."""

    def put(**versions: str) -> None:
        for ending, version in versions.items():
            for name in ("gcc", "g++"):
                (tmp_path / f"{name}{ending}").write_text(f"#!/bin/sh\necho {version}\n")
                (tmp_path / f"{name}{ending}").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return put


@pytest.mark.skipif(os.name == "nt", reason="the stand-ins are scripts of a shell")
@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"": "12.2.0"}, "g++"),
        ({"": "11.4.0", "-12": "12.3.0"}, "g++"),
        ({"": "13.3.0", "-11": "11.4.0", "-12": "12.3.0", "-14": "14.2.0"}, "g++-12"),
        ({"": "15.1.0", "-10": "10.5.0"}, "g++-10"),
        ({"-12": "12.3.0"}, "g++-12"),
        ({"": "13.3.0", "-14": "14.2.0"}, "g++"),
    ],
)
def test_the_compiler_is_one_whose_operators_load_where_it_is_promised(
    on_path: Callable[..., None], tmp_path: Path, there: dict[str, str], taken: str
) -> None:
    on_path(**there)
    found = channel.compiler()
    assert (found.c, found.cxx) == (str(tmp_path / taken.replace("++", "cc")), str(tmp_path / taken))


@pytest.mark.skipif(os.name == "nt", reason="the stand-ins are scripts of a shell")
def test_a_compiler_that_is_too_new_is_refused_before_anything_is_compiled(
    on_path: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(**{"": "14.2.0"})
    said = r"g\+\+ is GCC 14.2.0, too new for operators.*CXXABI_1.3.15.*`apt install g\+\+-12`"
    packages = Packages("pypi", Console(quiet=True), Clock(), lambda _: [])
    for name in ("installed", "torch_environment"):
        monkeypatch.setattr(channel, name, lambda *_: pytest.fail("something was fetched"))
    monkeypatch.setattr(inputs, "commit", lambda _: "c" * 40)
    (build,) = matrix.builds(platform=matrix.host_platform(), torch=TORCH, cuda=CUDA, python="3.12", package="sageattention")
    with pytest.raises(channel.ChannelError, match=said):
        packages.of(build)
    with pytest.raises(channel.ChannelError, match=said):
        channel.lay(matrix.host_platform(), torch=TORCH, report=silent)


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's doing")
@pytest.mark.parametrize("source", ["driver", "kernel_store", "library", "tensor_map"])
def test_operators_call_nothing_that_a_newer_glibc_has_by_another_name(source: str, tmp_path: Path) -> None:
    # By 2.38.
    renamed = {"strtol": "long", "strtoll": "long long", "strtoul": "unsigned long", "strtoull": "unsigned long long"}
    lines = [f'{kind} {name}(const char*, char**, int) noexcept __asm__("__isoc23_{name}");' for name, kind in renamed.items()]
    (tmp_path / "newer.h").write_text('extern "C" {\n' + "\n".join(lines) + "\n}\n")
    command = [channel.compiler().cxx, "-std=c++17", "-include", "newer.h", f"-I{ROOT / 'csrc'}", '-DSAGE_PACKAGE="s"', "-c"]
    subprocess.run([*command, ROOT / "csrc/runtime" / f"{source}.cpp", "-o", "made.o"], cwd=tmp_path, check=True)
    said = subprocess.run(["nm", "-u", tmp_path / "made.o"], capture_output=True, text=True, check=True).stdout
    assert "_Z" in said
    assert "__isoc23" not in said


def test_nvcc_13_refuses_a_compiler_that_is_too_new(pypi: Path) -> None:
    found = channel.Compiler("/usr/bin/gcc", "/usr/bin/g++", "16.1.0")
    with pytest.raises(channel.ChannelError, match=r"takes gcc below 16, but /usr/bin/g\+\+ is 16.1.0"):
        channel.nvcc(matrix.load().cuda["13.0"], "linux-64", found, silent)


def test_says_which_pythons_a_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PYTHON", "3.8")
    with pytest.raises(channel.ChannelError, match=r"PyTorch 2.8.0 has no release for the Python at hand, 3.8.*3.12"):
        channel.torch_environment("2.8.0", silent)
