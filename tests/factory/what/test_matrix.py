"""variants.yaml and its reader: the combinations promised, and a reason for every one refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from sage_factory import ROOT
from sage_factory.make import engine
from sage_factory.what import matrix, variant
from sage_factory.what.build import release_order
from sage_factory.what.table import MatrixError
from sage_factory.with_what import locks

COUNTS = {
    "sage2-all": 10,
    "default": 1,
    "stable": 3,
    "pytorch26": 4,
    "pytorch27": 3,
    "pytorch28": 3,
    "python310": 3,
    "python311": 3,
    "python312": 3,
    "sage3-all": 4,
    "sage3-release": 6,
}


@pytest.mark.parametrize("platform", ["linux-64", "win-64", "linux-aarch64"])
@pytest.mark.parametrize(("profile", "count"), COUNTS.items())
def test_profiles_have_their_builds_on_every_platform(profile: str, count: int, platform: str) -> None:
    assert len(matrix.builds(profile, platform=platform)) == count


def test_sage2_all_is_the_set_that_was_always_released() -> None:
    there = {(b.torch, b.cuda, b.python) for b in matrix.builds("sage2-all", platform="linux-64")}
    wanted = {("2.6.0", "12.6", python) for python in ("3.9", "3.10", "3.11", "3.12")}
    wanted |= {(t, c, p) for t, c in (("2.7.0", "12.8"), ("2.8.0", "12.9")) for p in ("3.10", "3.11", "3.12")}
    assert there == wanted


def test_sage3_all_is_four_cuda_versions_of_one_pytorch_and_python() -> None:
    for platform in ("linux-64", "win-64"):
        there = {b.wheel_name for b in matrix.builds("sage3-all", platform=platform)}
        tag = matrix.load().platforms[platform].wheel
        assert there == {f"sageattn3-1.0.0+cu{cuda}torch2.9.0-cp312-cp312-{tag}.whl" for cuda in ("128", "129", "130", "131")}
    later = {b.wheel_name for b in matrix.builds("sage3-release", platform="linux-64")} - {
        b.wheel_name for b in matrix.builds("sage3-all", platform="linux-64")
    }
    assert later == {f"sageattn3-1.0.0+cu{cuda}torch2.9.abi-py3-none-linux_x86_64.whl" for cuda in ("129", "130")}
    # And today's PyTorch.
    assert {b.cuda for b in matrix.builds(package="sageattn3", torch="2.15.0")} == {"13.2"}
    architectures = {b.cuda: b.architectures for b in matrix.builds(package="sageattn3")}
    assert architectures.pop("12.8") == ("12.0a",), "12.1 came with CUDA 12.9"
    assert set(architectures.values()) == {("12.0a", "12.1a")}
    assert all(not b.ptx for b in matrix.builds(package="sageattn3"))


def test_default_and_stable() -> None:
    (default,) = matrix.builds("default", platform="linux-64")
    assert (default.torch, default.cuda, default.python) == ("2.8.0", "12.9", "3.12")
    stable = matrix.builds("stable", platform="linux-64")
    assert {(b.torch, b.python) for b in stable} == {("2.6.0", "3.12"), ("2.7.0", "3.12"), ("2.8.0", "3.12")}


@pytest.mark.parametrize("torch", ["2.7.0", "2.8.0", "2.9.0"])
def test_the_later_releases_for_cuda_128(torch: str) -> None:
    assert matrix.builds(platform="linux-64", cuda="12.8", torch=torch, python="3.12")


@pytest.mark.parametrize("torch", ["2.7.0", "2.8.0"])
def test_windows_from_39_to_312(torch: str) -> None:
    there = {b.python for b in matrix.builds(platform="win-64", torch=torch)}
    assert {"3.9", "3.10", "3.11", "3.12"} <= there


@pytest.mark.parametrize("cuda", matrix.load().cuda)
def test_a_bare_cuda_version_means_one_pytorch_that_is_built(cuda: str) -> None:
    assert matrix.builds(platform="linux-64", cuda=cuda, torch=matrix.load().default_torch(cuda, "sageattention"))


def test_todays_world_is_there() -> None:
    table = matrix.load()
    assert {*(f"2.{minor}.0" for minor in range(6, 16)), "2.9+"} == set(table.pytorch)
    assert {"12.6", "12.8", "12.9", "13.0", "13.2"} <= set(table.cuda)
    assert {b.platform for b in matrix.builds()} == {"linux-64", "win-64", "linux-aarch64"}
    assert {b.python for b in matrix.builds()} == {f"3.{minor}" for minor in range(9, 16)}
    assert {b.torch for b in matrix.builds()} == set(table.pytorch), "a PyTorch without a row"
    assert {b.cuda for b in matrix.builds()} == set(table.cuda), "a CUDA version without a row"


def test_every_cuda_serves_every_gpu_that_it_can_compile_for() -> None:
    """A binary without suffix serves the later minor versions of its major one: 10.0 also 10.3, 12.0 also 12.1."""
    table = matrix.load()
    for cuda in table.cuda.values():
        assert cuda.ptx == ("8.0",)
        known = {a.name.rstrip("a") for a in table.architectures.values() if Version(a.cuda) <= Version(cuda.version)}
        for wanted in known - {a.rstrip("a") for a in cuda.architectures}:
            major, minor = wanted.split(".")
            assert any(
                a.split(".")[0] == major and a.split(".")[1] < minor and not a.endswith("a") for a in cuda.architectures
            ), f"CUDA {cuda.version} has nothing for {wanted}"


def test_the_machine_at_hand_is_one_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for system, machine, name in (
        ("Linux", "x86_64", "linux-64"),
        ("Windows", "AMD64", "win-64"),
        ("Linux", "aarch64", "linux-aarch64"),
    ):
        monkeypatch.setattr("platform.system", lambda answer=system: answer)
        monkeypatch.setattr("platform.machine", lambda answer=machine: answer)
        assert matrix.host_platform() == name
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(
        MatrixError, match=r"a machine of the kind 'darwin aarch64': variants\.yaml has linux x86_64, windows amd64"
    ):
        matrix.host_platform()


def test_names() -> None:
    (build, other) = matrix.builds(platform="linux-64", cuda="12.8", torch="2.8.0", python="3.12")
    assert build.wheel_name == "sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl"
    (build,) = matrix.builds(platform="win-64", cuda="13.0", torch="2.11.0", python="3.14")
    assert build.wheel_name == "sageattention-2.2.0-2110.130-cp314-cp314-win_amd64.whl"
    assert other.wheel_name == "sageattn3-1.0.0+cu128torch2.8.0-cp312-cp312-linux_x86_64.whl"
    assert (other.cubins_stem, other.operators_stem) == ("sageattn3-cubins-1.0.0-cu128_h", "sageattn3-1.0.0-torch280_cu128_h")
    assert matrix.targets(["8.0", "9.0a"]) == ("sm_80", "sm_90a")
    names = [b.wheel_name for b in matrix.builds()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"profile": "nonsense"}, "unknown profile 'nonsense'.*all, sage2-all, default"),
        ({"platform": "osx-64"}, "unknown platform 'osx-64'.*linux-64, win-64"),
        ({"cuda": "11.8"}, "unknown CUDA version '11.8'.*12.6, 12.8"),
        ({"torch": "1.13"}, "unknown PyTorch '1.13'.*2.6.0"),
        ({"cuda": "12.8", "torch": "2.6.0"}, "no build of PyTorch 2.6.0.*there PyTorch is 2.7.0, 2.8.0"),
        ({"torch": "2.8.0", "python": "3.14"}, "no build for Python 3.14 of PyTorch 2.8.0.*3.9, 3.10"),
        (
            {"torch": "2.9+", "cuda": "12.8", "python": "3.12"},
            "one wheel serves every Python from 3.10 on, so leave --python out",
        ),
        ({"profile": "stable-abi", "python": "3.9"}, "no build for Python 3.9 .*: one wheel serves every Python from 3.10 on"),
        ({"profile": "default", "cuda": "12.6"}, "nothing to build with profile default, CUDA 12.6: there CUDA is 12.[0-9]$"),
        (
            {"package": "sageattn3", "platform": "linux-64", "cuda": "12.6", "torch": "2.6.0"},
            "nothing to build with package sageattn3, platform linux-64, CUDA 12.6: there CUDA is 12.8, 12.9, 13.0, 13.1, 13.2$",
        ),
        (
            {"profile": "default", "package": "sageattn3"},
            "nothing to build with profile default, .*: `matrix` lists every build",
        ),
    ],
)
def test_a_request_without_answer_says_what_there_is(request_: dict[str, str], said: str) -> None:
    with pytest.raises(MatrixError, match=said):
        matrix.builds(request_.pop("profile", None), **request_)  # type: ignore[arg-type]


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            raw = raw[key]
        raw[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("cuda/12.6/architectures", ["8.0", "12.0"]), "CUDA 12.6 cannot compile architecture 12.0.*12.8 or newer"),
        (_set("cuda/12.6/ptx", ["7.5"]), "unknown architecture '7.5'"),
        (_set("rows", [{"pytorch": "2.8.0", "cuda": "12.8", "python": ["3.14"]}]), "no release for Python 3.14"),
        (_set("rows", [{"pytorch": "2.8.0", "cuda": "12.8", "os": "linux"}]), r"unknown keys \['os'\]"),
        (_set("rows", [{"pytorch": "2.8.0", "cuda": "11.8"}]), "unknown CUDA version '11.8'"),
        (
            _set("rows", [{"pytorch": "2.8.0", "cuda": "12.8"}, {"pytorch": "2.8.0", "cuda": "12.8", "python": ["3.12"]}]),
            "two rows make sageattention-2.2.0-280.128-cp312-",
        ),
        (
            _set("rows", [{"package": "sage", "pytorch": "2.8.0", "cuda": "12.8"}]),
            "unknown package 'sage'.*sageattention, sageattn3",
        ),
        (
            _set("rows", [{"package": "sageattn3", "pytorch": "2.6.0", "cuda": "12.6"}]),
            "CUDA 12.6 compiles sageattn3 for none of 12.0a, 12.1a",
        ),
        (_set("packages/sageattn3/architectures", ["12.9a"]), "unknown architecture '12.9a'"),
        (_set("profiles/all", [{"gpu": "9.0"}]), r"unknown predicates \['gpu'\]"),
        (_set("profiles/all", [{"pytorch": "2.6.0", "cuda": "13.0"}]), "profile all selects nothing"),
        (_set("packages/sageattention/version", 2.3), "variants.yaml: packages: sageattention: version is 2.3: .* quote it"),
        (_set("packages/sageattn3/local_version", "no"), "sageattn3: local_version is 'no': expected true or false"),
        (_set("packages/sageattention/version", "two"), "version of a package 'two' is not a version"),
        (_set("platforms/linux-64/glibc", 2.28), "linux-64: glibc is 2.28: .* quote it"),
        (_set("architectures/8.0/cuda", 12.0), "architectures: 8.0: cuda is 12.0: .* quote it"),
        (_set("cuda", {12.6: {}}), "cuda: a key is 12.6: .* quote it"),
        (_set("pytorch/2.8.0/python", [3.9]), "2.8.0: python: entry 1 is 3.9: .* quote it"),
        (_set("pytorch/2.8.0/conda_forge", [12]), "conda_forge: entry 1 is 12: .* quote it"),
        (_set("pytorch/2.8.0/conda_forge", ["11"]), "unknown conda_forge of PyTorch 2.8.0, '11'.*12, 13"),
        (_set("pytorch/2.9+", {"python": ["3.10"]}), "PyTorch 2.9. has no `release`"),
        (_set("pytorch/2.9+/release", "2.99.0"), "unknown release of PyTorch 2.9., '2.99.0'"),
        (_set("rows", [{"pytorch": "2.8.0", "cuda": "12.8"}, None]), "rows: entry 2 is empty"),
        (_set("profiles/all", [{"cuda": 12.6}]), "profiles: all: entry 1: cuda is 12.6: .* quote it"),
        (
            _set("profiles/all", [{"on_request": True}, {"package": "sageatention"}]),
            "unknown package of profile all, 'sageatention': variants.yaml has sageattention, sageattn3",
        ),
        (_set("profiles/all", [{"on_request": True}, {"python": ["3.9", "3.8"]}]), "unknown python of profile all, '3.8'"),
        (_set("profiles/all", [{"in": ["default", "stable"]}]), "unknown in of profile all, "),
        (_set("profiles/all", [{"newest": "cuda"}]), "unknown newest of profile all, 'cuda'.*python"),
        (_set("profiles/sage2-all", [{"in": "release"}]), "profile sage2-all is in itself: sage2-all → release → sage2-all"),
        (_set("platforms", None), "variants.yaml: platforms is empty"),
        (_set("platforms/linux-64", {"host": "linux x86_64"}), "lacks or misnames"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    raw = copy.deepcopy(yaml.safe_load(matrix.TABLE.read_text(encoding="utf-8")))
    change(raw)
    path = tmp_path / "variants.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(MatrixError, match=said):
        matrix.load(path)


NEW_ROWS = """
platforms:
  linux-ppc64le: {host: linux ppc64le, wheel: linux_ppc64le, c: gcc, cxx: gxx, runner: power,
                  glibc: "2.28", glibc_first: "2.17"}
architectures:
  "13.0": {cuda: "13.9"}
cuda:
  "13.9":
    {architectures: ["9.0a", "13.0"], ptx: ["8.0"], pytorch: 2.99.0, gcc_below: "17",
     pypi: {nvidia-cuda-nvcc: 13.9.1}}
pytorch:
  2.99.0: {python: ["3.15", "3.16"]}
rows:
  - {pytorch: 2.99.0, cuda: "13.9"}
"""


def test_a_pytorch_cuda_python_architecture_and_platform_are_added_by_the_table_alone(tmp_path: Path) -> None:
    """The real table with one of each added, taken through everything that reads it."""
    raw, new = yaml.safe_load(matrix.TABLE.read_text(encoding="utf-8")), yaml.safe_load(NEW_ROWS)
    for section, entries in new.items():
        raw[section] = raw[section] + entries if section == "rows" else raw[section] | entries
    path = tmp_path / "variants.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    table = matrix.load(path)

    added = matrix.builds(cuda="13.9", matrix=table)
    assert {(b.platform, b.python) for b in added} == {(p, y) for p in table.platforms for y in ("3.15", "3.16")}
    (build,) = matrix.builds("all", platform="linux-ppc64le", cuda="13.9", python="3.16", matrix=table)
    assert build.wheel_name == "sageattention-2.2.0-2990.139-cp316-cp316-linux_ppc64le.whl"
    sets = matrix.kernel_sets(matrix.builds("all", package="sageattention", matrix=table), table)
    assert sets[-1]["cuda"] == "13.9"
    assert len(matrix.builds("sage2-all", platform="linux-ppc64le", matrix=table)) == 10

    digests = {"kernels_digest": ["0"], "operators_digest": ["1"], "sage_commit": ["c"]}
    settings = variant.of(build, python_pin="3.16.*", table=table) | digests
    kernels, operators = engine.render(settings).values()
    assert kernels.recipe.to_dict()["build"]["script"]["env"]["SAGE_ARCHITECTURES"] == "9.0a;13.0"
    assert "cuda-nvcc_linux-ppc64le 13.9.*" in kernels.recipe.to_dict()["requirements"]["build"]
    assert "pytorch 2.99.*" in operators.recipe.to_dict()["requirements"]["run"]
    assert operators.recipe.to_dict()["build"]["string"] == "torch2990_cu139_h1_0"

    there = {one.name: one.requirements for one in locks.locks(table)}
    assert there["cuda-13.9"] == ("nvidia-cuda-nvcc==13.9.1",)
    assert there["torch-2.99.0"] == ("torch==2.99.0",)
    pixi = locks.with_platforms((ROOT / "pixi.toml").read_text(encoding="utf-8"), table)
    assert '  { name = "linux-ppc64le-cuda", platform = "linux-ppc64le", cuda = "12" },\n  "linux-ppc64le",\n' in pixi


def test_locks_hold_the_tables_pins() -> None:
    table, folder = matrix.load(), ROOT / "recipe" / "pypi"
    pins = {f"cuda-{c.version}": dict(c.pypi) for c in table.cuda.values()}
    pins |= {f"torch-{torch.compiled_with}": {"torch": torch.compiled_with} for torch in table.pytorch.values()}
    assert {p.stem for p in folder.glob("*.txt")} == {*pins, "tools"}
    for name, wanted in pins.items():
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        for name_, version in wanted.items():
            block = re.search(rf"^{re.escape(name_)}=={re.escape(version)}\b.*?(?=^\S|\Z)", text, re.M | re.S)
            assert block, f"{name}.txt lacks {name_}=={version}"
            assert "--hash=sha256:" in block.group(), f"{name}.txt lacks the hashes of {name_}"
        assert "://" not in text


def test_the_stable_abi_is_one_build_for_every_python() -> None:
    builds = matrix.builds("stable-abi")
    assert [(b.platform, b.cuda) for b in builds] == [(p, c) for c in ("12.8", "13.0") for p in ("linux-64", "win-64")]
    for build in builds:
        assert build.stable_abi
        assert (build.requires_torch, build.requires_python) == ("torch>=2.9", ">=3.10")
        # The first that conda-forge has for that CUDA.
        assert (build.conda_first, build.conda_torch) == {"12.8": ("2.9.0", ">=2.9"), "13.0": ("2.10.0", ">=2.10")}[build.cuda]
    assert builds[0].wheel_name == "sageattention-2.2.0-29.128-py3-none-linux_x86_64.whl"
    assert builds[0].operators_stem == "sageattention-2.2.0-torch29on_cu128_h"
    pinned = matrix.builds(torch="2.9.0", cuda="12.8")[0]
    assert (pinned.requires_torch, pinned.requires_python, pinned.conda_torch) == ("torch==2.9.*", ">=3.10", "2.9.*")
    assert not set(builds) & set(matrix.builds("sage2-all"))


def test_pytorch_in_order() -> None:
    assert sorted(["2.10.0", "2.9+", "2.9.0", "2.8.0"], key=release_order) == ["2.8.0", "2.9.0", "2.9+", "2.10.0"]


def test_a_solver_takes_operators_for_one_pytorch_first() -> None:
    table = matrix.load()
    numbers = [
        variant.number(matrix.builds(torch=torch, cuda="12.8")[0], table) for torch in ("2.8.0", "2.9+", "2.9.0", "2.10.0")
    ]
    assert numbers == sorted(set(numbers))


def printed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts"), "matrix", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_builds_of_one_cuda_share_a_kernel_job_whatever_their_platform() -> None:
    jobs = matrix.kernel_sets(matrix.builds("sage2-all"))
    assert [(job["cuda"], job["platform"]) for job in jobs] == [
        ("12.6", "linux-64"),
        ("12.8", "linux-64"),
        ("12.9", "linux-64"),
    ]
    windows = matrix.kernel_sets(matrix.builds("sage2-all", platform="win-64"))
    assert windows == jobs


def test_a_release_is_ten_builds_for_each_of_two_platforms() -> None:
    """linux-aarch64 is built when it is asked for; a pull request, main and a tag make what they always made."""
    per_profile = {name: [b.platform for b in matrix.builds(name)] for name in ("default", "stable", "sage2-all")}
    assert per_profile["sage2-all"] == ["linux-64"] * 4 + ["win-64"] * 4 + (["linux-64"] * 3 + ["win-64"] * 3) * 2
    assert {name: len(found) for name, found in per_profile.items()} == {"default": 2, "stable": 6, "sage2-all": 20}
    assert matrix.builds("all") == matrix.builds()


def test_the_table_and_the_errors_of_the_command_line() -> None:
    lines = [line for line in printed("--profile", "stable", "--platform", "win-64").stdout.splitlines() if "win_amd64" in line]
    assert len(lines) == 3
    kernels = printed("--profile", "sage2-all", "--kernels").stdout
    assert [line.split()[3] for line in kernels.splitlines() if "sageattention" in line] == ["12.6", "12.8", "12.9"]
    wrong = printed("--profile", "nope")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: unknown profile 'nope'")
