"""Going on to another PyTorch or CUDA: real pip and real uv against the indexes on loopback. PyTorch is a stand-in of a few bytes, since
what is asked is what they choose.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import loopback
import pytest
import samples
import tools

from sage_factory import ROOT
from sage_factory.files import put, sha256
from sage_factory.make import wheels
from sage_factory.ship import indexes
from sage_factory.what import matrix

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
OFFERED = [
    ("2.7.0", "12.8"),
    ("2.8.0", "12.8"),
    ("2.8.0", "12.9"),
    ("2.9.0", "12.8"),
    ("2.9.0", "13.0"),
    ("2.10.0", "12.9"),
    ("2.9+", "12.8"),
]
pytestmark = [
    pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the stand-ins are for linux-64"),
    pytest.mark.skipif(
        PYTHON not in matrix.load().pytorch["2.8.0"].python, reason="PyTorch 2.8 has no release for this Python"
    ),
]


@dataclass(frozen=True)
class World:
    """Our indexes, and one of PyTorches."""

    url: str
    torch: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    made = [
        next(
            build
            for build in matrix.builds(platform="linux-64", torch=torch, cuda=cuda)
            if build.python == PYTHON or build.stable_abi
        )
        for torch, cuda in OFFERED
    ]
    indexes.add([samples.tiny_wheel(root / "wheels", build) for build in made], root / "ours")
    there = root / "pypi" / "torch"
    names = [
        samples.other_wheel(there, "torch", version).name
        for version in ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0")
    ]
    (there / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))
    with loopback.offering(root) as server:
        yield World(f"{server.url}/ours", f"{server.url}/pypi/")


@dataclass(frozen=True)
class Machine:
    """An environment, and the installer that its owner uses."""

    installer: tuple[str, ...]
    prefix: Path

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON", "UV_"))}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "UV_NO_CONFIG": "1", "UV_NO_CACHE": "1"}
        return subprocess.run([*self.installer, *arguments], capture_output=True, text=True, check=False, env=environment)

    def torch(self, version: str, world: World) -> None:
        done = self.install(f"torch=={version}", "--index-url", world.torch)
        assert done.returncode == 0, done.stderr

    def has(self, name: str) -> str | None:
        """The version that is installed."""
        found = [path.name for path in self.prefix.glob(f"lib/python*/site-packages/{name}-*.dist-info")]
        assert len(found) < 2
        return found[0].removesuffix(".dist-info").partition("-")[2] if found else None


@pytest.fixture(params=["pip", "uv"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    prefix = tmp_path / "environment"
    venv.create(prefix)
    python = str(prefix / "bin" / "python")
    if request.param == "pip":
        return Machine((sys.executable, "-m", "pip", "--python", python, "--no-cache-dir", "install"), prefix)
    uv = tools.beside("uv")
    assert uv, "uv is not installed: it is among the tests' requirements"
    return Machine((uv, "pip", "install", "--python", python), prefix)


def test_the_same_command_follows_pytorch_up_and_down(machine: Machine, world: World) -> None:
    """The command of README, of the notes and of the import error."""
    command = ("--upgrade", "sageattention", "--index-url", f"{world.url}/cu12/")
    for torch, built in (
        ("2.8.0", "2.2.0+torch2.8.cu129"),
        ("2.9.1", "2.2.0+torch2.9.cu128"),
        ("2.10.0", "2.2.0+torch2.10.cu129"),
        ("2.11.0", "2.2.0+torch2.9.abi.cu128"),
        ("2.7.1", "2.2.0+torch2.7.cu128"),
    ):
        machine.torch(torch, world)
        done = machine.install(*command)
        assert done.returncode == 0, done.stderr
        assert (machine.has("torch"), machine.has("sageattention")) == (torch, built)


def test_both_in_one_go(machine: Machine, world: World) -> None:
    more = "--extra-index-url"
    for torch, built in (("2.8.0", "2.2.0+torch2.8.cu129"), ("2.9.1", "2.2.0+torch2.9.cu128")):
        done = machine.install(
            "--upgrade", f"torch=={torch}", "sageattention", "--index-url", f"{world.url}/cu12/", more, world.torch
        )
        assert done.returncode == 0, done.stderr
        assert (machine.has("torch"), machine.has("sageattention")) == (torch, built)


@pytest.mark.parametrize("index", ["cu12", "cu129-torch28"])
def test_a_build_for_another_cuda_is_named_by_its_version(machine: Machine, world: World, index: str) -> None:
    machine.torch("2.8.0", world)
    assert machine.install("sageattention", "--index-url", f"{world.url}/cu128-torch28/").returncode == 0
    assert machine.has("sageattention") == "2.2.0+torch2.8.cu128"
    done = machine.install("sageattention==2.2.0+torch2.8.cu129", "--index-url", f"{world.url}/{index}/")
    assert done.returncode == 0, done.stderr
    assert machine.has("sageattention") == "2.2.0+torch2.8.cu129"
    done = machine.install("sageattention==2.2.0+torch2.8.cu128", "--index-url", f"{world.url}/cu12/")
    assert machine.has("sageattention") == "2.2.0+torch2.8.cu128", "and back"


def test_what_the_report_says_of_a_damaged_file_leaves_pytorch_alone(machine: Machine, world: World) -> None:
    said = re.search(r"pip install ((?:--\S+ )+)with", (ROOT / "sageattention" / "doctor.py").read_text(encoding="utf-8"))
    assert said
    machine.torch("2.8.0", world)
    exact = ("sageattention==2.2.0+torch2.8.cu128", "--index-url", f"{world.url}/cu12/")
    assert machine.install(*exact).returncode == 0
    (damaged,) = machine.prefix.glob("lib/python*/site-packages/sageattention/__init__.py")
    (own,) = machine.prefix.glob("lib/python*/site-packages/torch.py")
    for path in (damaged, own):
        path.write_text("not what was installed")
    done = machine.install(*said[1].split(), *exact)
    assert done.returncode == 0, done.stderr
    assert (damaged.read_text(), own.read_text()) == ("", "not what was installed")
    assert (machine.has("torch"), machine.has("sageattention")) == ("2.8.0", "2.2.0+torch2.8.cu128")


def test_beside_a_pytorch_that_no_build_is_for_nothing_is_changed(machine: Machine, world: World) -> None:
    machine.torch("2.8.0", world)
    assert machine.install("sageattention", "--index-url", f"{world.url}/cu12/").returncode == 0
    machine.torch("2.6.0", world)
    done = machine.install("--upgrade", "sageattention", "--index-url", f"{world.url}/cu12/")
    assert done.returncode != 0
    assert "torch" in done.stderr
    assert (machine.has("torch"), machine.has("sageattention")) == ("2.6.0", "2.2.0+torch2.8.cu129")
    assert machine.install("--upgrade", "sageattention", "--index-url", f"{world.url}/cu13/").returncode != 0


def test_what_was_withdrawn_is_taken_only_by_who_asks_for_it(machine: Machine, tmp_path: Path, world: World) -> None:
    offered = []
    for number in (0, 1):  # the second, which repaired something, was worse
        build = dataclasses.replace(samples.build(PYTHON), number=number)
        path = wheels.for_index(samples.tiny_wheel(tmp_path, build), build=build, out_dir=tmp_path / "files")
        asset = {"name": path.name, "browser_download_url": path.as_uri(), "digest": f"sha256:{sha256(path.read_bytes())}"}
        body = "Withdrawn: worse" if number else ""
        offered.append({"tag_name": f"v{number}", "draft": False, "body": body, "assets": [asset]})
    for name, text in indexes.pages(indexes.links(offered)).items():
        put(tmp_path / "site" / name, text.replace(tmp_path.as_uri(), "../../..").encode())
    machine.torch("2.8.0", world)
    with loopback.offering(tmp_path) as server:
        index = f"{server.url}/site/cu12/"
        assert machine.install("sageattention", "--index-url", index).returncode == 0
        assert machine.has("sageattention") == "2.2.0+torch2.8.cu128"
        done = machine.install("sageattention==2.2.0+torch2.8.cu128.1", "--index-url", index)
        assert done.returncode == 0, done.stderr
        assert machine.has("sageattention") == "2.2.0+torch2.8.cu128.1"
        assert "worse" in done.stderr + done.stdout


def test_poetry_locks_it(world: World, tmp_path: Path) -> None:
    poetry = tools.program("poetry")
    (tmp_path / "pyproject.toml").write_text(
        f"""
[project]
name = "something"
version = "1.0"
requires-python = ">=3.10,<4"
dependencies = ["torch (==2.9.*)", "sageattention (>=2.2)"]

[tool.poetry]
package-mode = false

[[tool.poetry.source]]
name = "torch"
url = "{world.torch}"

[[tool.poetry.source]]
name = "sage"
url = "{world.url}/cu12/"
priority = "explicit"

[tool.poetry.dependencies]
sageattention = {{ source = "sage" }}
"""
    )
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "POETRY_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"POETRY_VIRTUALENVS_CREATE": "false", "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"}
    done = subprocess.run(
        [poetry, "lock", "--no-interaction"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    locked = (tmp_path / "poetry.lock").read_text(encoding="utf-8")
    assert 'name = "sageattention"\nversion = "2.2.0+torch2.9.cu128"' in locked


def test_uv_locks_it(world: World, tmp_path: Path) -> None:
    uv = tools.beside("uv")
    assert uv
    (tmp_path / "pyproject.toml").write_text(
        f"""
[project]
name = "something"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["torch==2.9.*", "sageattention>=2.2"]

[[tool.uv.index]]
url = "{world.torch}"
default = true

[[tool.uv.index]]
name = "sage"
url = "{world.url}/cu12/"
explicit = true

[tool.uv.sources]
sageattention = {{ index = "sage" }}
"""
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
    environment |= {"NO_PROXY": "127.0.0.1", "UV_NO_CACHE": "1"}
    command = [uv, "lock", "--python", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'name = "sageattention"\nversion = "2.2.0+torch2.9.cu128"' in (tmp_path / "uv.lock").read_text(encoding="utf-8")


def test_all_wheels_of_a_version_are_for_the_same_range_of_pythons(tmp_path: Path) -> None:
    """Poetry takes what one wheel says for what all say, and would refuse a project that more than one Python may run."""
    for python in ("3.10", "3.12"):
        made = samples.tiny_wheel(tmp_path, samples.build(python))
        offered = samples.contents(wheels.for_index(made, build=samples.build(python), out_dir=tmp_path))
        assert b"\nRequires-Python: >=3.9\n" in offered["sageattention-2.2.0+torch2.8.cu128.dist-info/METADATA"]
