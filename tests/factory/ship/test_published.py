"""What conda's solver makes of a published channel, asked over HTTP: the build for the PyTorch, CUDA and Python, or a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import loopback
import pytest
import samples
from conda_forge import model
from rattler import Gateway, solve
from rattler.exceptions import SolverError
from rattler.index import index_fs
from rattler_build import assemble_package

from sage_factory.ship import publish

PYTORCHES = {"2.7.1": ["12.6"], "2.8.0": ["12.8", "12.9"], "2.9.1": ["12.8", "13.0"]}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class World(NamedTuple):
    """Channels, and how a client gets at them."""

    channels: list[str]
    gateway: Gateway


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two channels on loopback: ours as `publish` leaves it, and one with Pythons and PyTorches like conda-forge's."""
    root = tmp_path_factory.mktemp("world")
    ours = root / "packages"
    for torch, cudas in PYTORCHES.items():
        for cuda in cudas:
            series, tag, major = torch.rpartition(".")[0], f"cu{cuda.replace('.', '')}", cuda.split(".")[0]
            kernels = {**samples.index("sageattention-cubins"), "build": f"{tag}_h1_0", "timestamp": 1}
            samples.conda(ours / "noarch", {}, kernels)
            depends = ["python >=3.9", f"pytorch {series}.*", f"sageattention-cubins ==2.2.0 {tag}_h1_0"]
            constrains = [f"__cuda >={major}", f"cuda-version >={cuda},<{int(major) + 1}"]
            described = samples.index("sageattention") | {"depends": depends, "constrains": constrains, "timestamp": 1}
            samples.conda(ours / "linux-64", {}, described | {"build": f"torch{torch.replace('.', '')}_{tag}_h2_0"})
    publish.Folder(root / "ours").put(sorted(ours.glob("*/*.conda")))

    def make(name: str, version: str, build: str, subdir: str = "linux-64", **more: Any) -> None:
        when = datetime(2026, 1, 1, tzinfo=UTC)
        assemble_package(name, version, subdir, build, root / "forge" / subdir, timestamp=when, **more)

    for python in ("3.9", "3.12", "3.14"):
        make("python", f"{python}.0", "h0_0")
    for cuda in ("12.6", "12.8", "12.9", "13.0"):
        make("cuda-version", cuda, "h0_0", "noarch")
    for torch, cudas in PYTORCHES.items():
        pythons = f"python >={'3.10' if torch == '2.9.1' else '3.9'},<3.14"
        make("pytorch", torch, "cpu_0", depends=[pythons])
        newest = int(cudas[-1].split(".")[0])
        needs = [pythons, f"cuda-version >={cudas[-1]},<{newest + 1}", f"__cuda >={newest}"]
        make("pytorch", torch, "cuda_1", build_number=1, depends=needs)
    asyncio.run(index_fs(root / "forge", write_shards=False))
    with loopback.offering(root) as server:
        yield World([f"{server.url}/ours", f"{server.url}/forge"], Gateway(root / "cache"))


def solved(world: World, *specs: str, driver: str | None = None) -> dict[str, str]:
    """What a conda client would install on a machine with this driver: build strings by name."""
    machine = model.virtual(model.machine("linux-64", driver))
    platforms: list[Any] = ["linux-64", "noarch"]
    wanted = solve(world.channels, list(specs), world.gateway, platforms=platforms, virtual_packages=machine)
    found = asyncio.run(wanted)
    return {record.name.normalized: f"{record.version} {record.build}" for record in found}


@pytest.mark.parametrize(
    ("specs", "driver", "built"),
    [
        (["pytorch 2.8.*", "python 3.12.*"], None, "torch280_cu12"),
        (["pytorch 2.8.*", "cuda-version 12.9.*"], "12.9", "torch280_cu12"),
        (["pytorch 2.8.* cpu_*", "cuda-version 12.8.*"], "12.8", "torch280_cu128"),
        (["pytorch 2.7.*", "python 3.9.*"], "12.9", "torch271_cu126"),
        (["pytorch 2.9.* cuda_*"], "13.0", "torch291_cu130"),
        (["pytorch 2.9.*"], "12.9", "torch291_cu128"),  # kernels of CUDA 13 do not run on this driver
        (["sageattention * *cu128*", "pytorch 2.8.*"], "12.9", "torch280_cu128"),
    ],
)
def test_a_solver_picks_the_build_for_the_pytorch_and_cuda(
    world: World, specs: list[str], driver: str | None, built: str
) -> None:
    found = solved(world, "sageattention", *specs, driver=driver)
    version, build = found["sageattention"].split()
    assert (version, build.startswith(built)) == ("2.2.0", True), build
    assert found["sageattention-cubins"].split()[1].split("_")[0] == build.split("_")[1]
    assert found["pytorch"].split()[0].replace(".", "") == build.split("_")[0].removeprefix("torch")


@pytest.mark.parametrize(
    ("specs", "driver", "said"),
    [
        (["pytorch 2.6.*"], None, "pytorch"),
        (["python 3.14.*"], None, "python"),  # that PyTorch has none
        (["pytorch 2.7.*", "cuda-version 13.*"], "13.0", "cuda-version"),
        (["sageattention * *cu130*"], "12.9", "__cuda"),
        (["sageattention * torch280*", "pytorch 2.9.*"], None, "pytorch"),
    ],
)
def test_a_solver_refuses_what_does_not_fit(world: World, specs: list[str], driver: str | None, said: str) -> None:
    with pytest.raises(SolverError, match=said):
        solved(world, "sageattention", *specs, driver=driver)
