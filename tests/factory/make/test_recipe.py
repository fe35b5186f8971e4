"""recipe/recipe.yaml, rendered for every PyTorch × CUDA × platform of variants.yaml."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sage_factory import ROOT
from sage_factory.make import engine
from sage_factory.what import matrix, variant
from sage_factory.what.build import Build
from sage_factory.with_what import venvs

DIGESTS = {"kernels_digest": ["0123456789"], "operators_digest": ["abcdef0123"], "sage_commit": ["c" * 40]}
BUILDS = {f"{b.package}-{b.platform}-torch{b.torch}-cu{b.cuda}": b for b in matrix.builds()}


def rendered(build: Build, **digests: str) -> dict[str, dict[str, Any]]:
    settings = variant.of(build, python_pin=f"{build.python}.*") | DIGESTS | {key: [value] for key, value in digests.items()}
    return {name: one.recipe.to_dict() for name, one in engine.render(settings).items()}


@pytest.mark.parametrize("name", BUILDS)
def test_every_variant_renders_to_two_packages_pinned_together(name: str) -> None:
    build = BUILDS[name]
    cuda, torch = build.cuda.replace(".", ""), build.torch_tag
    outputs = rendered(build)
    assert set(outputs) == {build.cubins, build.package}
    cubins, operators = outputs[build.cubins], outputs[build.package]
    assert {o["package"]["version"] for o in outputs.values()} == {build.version}
    assert cubins["build"]["string"] == f"cu{cuda}_h0123456789_0"
    assert operators["build"]["string"] == f"torch{torch}_cu{cuda}_habcdef0123_0"
    assert cubins["build"]["noarch"] == "generic"
    assert operators["build"]["python"]["version_independent"] is True
    run = operators["requirements"]["run"]
    assert {"pin_subpackage": {"name": build.cubins, "exact": True}} in run
    assert f"pytorch {build.conda_torch}" in run
    assert f"pytorch {build.torch_series}.*" in operators["requirements"]["host"]
    # Whichever release of the series the channel has, the package is named after the table's.
    assert operators["build"]["script"]["env"]["SAGE_TORCH_RELEASE"] == build.torch


@pytest.mark.parametrize("name", BUILDS)
def test_kernels_and_operators_do_not_share_a_compiler(name: str) -> None:
    build = BUILDS[name]
    outputs = rendered(build)
    cubins, operators = (outputs[n]["requirements"] for n in (build.cubins, build.package))
    assert f"cuda-nvcc_{build.platform} {build.cuda}.*" in cubins["build"]
    assert not cubins.get("run")
    # On conda-forge a PyTorch of one CUDA cannot be solved for beside the compiler of another.
    assert "cuda" not in str([operators["build"], operators["host"], operators["run"]]).replace(build.cubins, "")
    assert operators["run_constraints"] == build.conda_constrains


@pytest.mark.parametrize("name", [n for n in BUILDS if "-linux-" in n])
def test_linux_promises_its_glibc(name: str) -> None:
    requirements = rendered(BUILDS[name])[BUILDS[name].package]["requirements"]
    assert "__glibc >=2.28" in requirements["run"]
    assert any(r.startswith("sysroot_") and "2.28" in r for r in requirements["build"])


def test_the_architectures_reach_the_kernels() -> None:
    environment = rendered(BUILDS["sageattention-linux-64-torch2.8.0-cu12.8"])["sageattention-cubins"]["build"]["script"]["env"]
    assert environment["SAGE_ARCHITECTURES"] == "8.0;8.6;8.9;9.0a;10.0;12.0"
    assert environment["SAGE_PTX"] == "8.0"
    older = rendered(BUILDS["sageattention-linux-64-torch2.6.0-cu12.6"])["sageattention-cubins"]["build"]["script"]["env"]
    assert older["SAGE_ARCHITECTURES"] == "8.0;8.6;8.9;9.0a"
    for cuda, expected in (("12.8", "12.0a"), ("12.9", "12.0a;12.1a"), ("13.1", "12.0a;12.1a")):
        build = BUILDS[f"sageattn3-linux-64-torch2.9.0-cu{cuda}"]
        cubins = rendered(build)["sageattn3-cubins"]
        assert cubins["build"]["script"]["env"]["SAGE_ARCHITECTURES"] == expected
        assert "compute_" not in str(cubins["tests"]), "no PTX: the instructions are of these GPUs alone"


def test_changed_sources_make_another_package() -> None:
    build = BUILDS["sageattention-linux-64-torch2.8.0-cu12.8"]
    changed = rendered(build, kernels_digest="fedcba9876")
    assert changed["sageattention-cubins"]["build"]["string"] != rendered(build)["sageattention-cubins"]["build"]["string"]


def test_windows_names_its_library() -> None:
    tests = str(rendered(BUILDS["sageattention-win-64-torch2.8.0-cu12.8"])["sageattention"]["tests"])
    assert "sageattention/_C.dll" in tests
    assert "_C.so" not in tests


def test_kernels_are_the_same_package_whichever_pytorch_they_are_built_for() -> None:
    packages = []
    for torch in ("2.7.0", "2.8.0", "2.9.0"):
        build = BUILDS[f"sageattention-linux-64-torch{torch}-cu12.8"]
        settings = variant.of(build, python_pin="3.12.*") | DIGESTS
        packages.append(engine.render(settings)["sageattention-cubins"].variant)
    assert packages[0] == packages[1] == packages[2]


def test_no_script_imports_torch_and_no_recipe_states_a_version() -> None:
    for path in (ROOT / "recipe").glob("build_*"):
        assert not re.search(r"import torch|torch\.utils", path.read_text(encoding="utf-8")), path.name
    recipe = engine.RECIPE.read_text(encoding="utf-8")
    for version in ("2.2.0", "1.0.0", *matrix.load().cuda, *matrix.load().pytorch):
        assert version not in recipe


@pytest.mark.skipif(os.name == "nt", reason="there it is another script")
def test_an_apostrophe_in_a_path_reaches_the_compiler() -> None:
    script = (ROOT / "recipe" / "build_operators.sh").read_text(encoding="utf-8")
    first = script.partition("export CXXFLAGS\n")[0] + """eval "printf '%s\\n' $CXXFLAGS" """  # as CMake hands it to a shell
    environment = os.environ | {"SRC_DIR": "/it's a", "PREFIX": "/host's", "BUILD_PREFIX": "/plain", "CXXFLAGS": "-O2"}
    said = subprocess.run(["bash", "-c", first], env=environment, capture_output=True, text=True, check=True).stdout
    maps = [f"-ffile-prefix-map={mapping}" for mapping in ("/it's a=.", "/host's=/host", "/plain=/build")]
    assert said.splitlines() == ["-O2", "-fno-canonical-system-headers", *maps]


@pytest.mark.skipif(os.name == "nt", reason="there a variable that is not set is empty")
def test_operators_of_no_commit_are_built(tmp_path: Path) -> None:
    """Of sources without git: what is empty rattler-build does not hand on."""
    pip = tmp_path / "pip"
    pip.write_text("""#!/bin/sh\nprintf '%s\\n' "$@"\n""")
    pip.chmod(0o755)
    script = ROOT / "recipe" / "build_operators.sh"
    given = {*re.findall(r"\$\{?([A-Z_]+)", script.read_text(encoding="utf-8"))} - {"SAGE_COMMIT"}
    environment = {"PATH": os.environ["PATH"]} | dict.fromkeys(given, "x") | {"PYTHON": str(pip)}
    said = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "cmake.define.SAGE_COMMIT=" in said.stdout.splitlines()


def test_a_space_in_a_path_reaches_the_compiler_on_windows() -> None:
    script = (ROOT / "recipe" / "build_operators.bat").read_text(encoding="utf-8")
    (line,) = [line for line in script.splitlines() if "/pathmap" in line]
    # What stands outside of quotes names no folder.
    assert line.split('"')[::2] == ["set CXXFLAGS=%CXXFLAGS% ", " ", " ", ""]
    maps = [f"/pathmap:{mapping}" for mapping in ("%SRC_DIR%=.", "%PREFIX%=/host", "%BUILD_PREFIX%=/build")]
    assert line.split('"')[1::2] == maps


def test_operators_find_a_pytorch_laid_as_conda_forge_lays_it(tmp_path: Path) -> None:
    """Headers and import libraries in the environment's folders, another release of the series than the package's name."""
    cmake, ninja = (venvs.bin_dir("tools") / name for name in ("cmake", "ninja"))
    if not cmake.is_file() or os.name == "nt":
        pytest.skip("no CMake from PyPI here: `python3 scripts/run.py build-cu128` brings it")
    package, prefix = tmp_path / "site-packages" / "torch", tmp_path / "prefix"
    for library in (package / "lib" / "libtorch_cpu.so", prefix / "lib" / "libc10.so"):
        library.parent.mkdir(parents=True)
        library.touch()
    (package / "version.py").write_text("__version__ = '2.9.1'\n")

    def configured(release: str) -> subprocess.CompletedProcess[str]:
        values = {"MAKE_PROGRAM": ninja, "TORCH_DIR": package, "TORCH_PREFIX": prefix, "TORCH_RELEASE": release}
        options = [f"-D{'CMAKE' if key == 'MAKE_PROGRAM' else 'SAGE'}_{key}={value}" for key, value in values.items()]
        command: list[str | Path] = [
            cmake,
            "-S",
            ROOT / "csrc" / "torch",
            "-B",
            tmp_path / release,
            "-G",
            "Ninja",
            *options,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = configured("2.9.0")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "2.9.0" / "_build.json").read_text())["torch"] == "2.9.0"
    ninja_file = (tmp_path / "2.9.0" / "build.ninja").read_text()
    assert f"-isystem {prefix}/include" in ninja_file
    assert f"{prefix}/lib/libc10.so" in ninja_file
    wrong = configured("2.8.0")
    assert wrong.returncode == 1
    assert "PyTorch 2.8.0 cannot be compiled against PyTorch 2.9.1" in " ".join(wrong.stderr.split())
