"""What the recipe asks for on each platform, solved in a channel that has conda-forge's names and versions.

conda-forge itself may not be reached from here, so the channel is written out: what is proved is that the requirements are
understood, agree with each other and with packages as conda-forge has them, Windows and aarch64 included.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rattler import BuildString, GenericVirtualPackage, PackageName, Version, solve

from sage_factory.make import engine
from sage_factory.what import matrix, variant

DIGESTS = {"kernels_digest": "0", "operators_digest": "1", "sageattention_commit": "c"}
STABLE = {f"{b.platform}-torch{b.torch}": b for p in matrix.load().platforms for b in matrix.builds("stable", platform=p)}


def conda_forge(folder: Path, build: matrix.Build) -> Path:
    """A channel with what conda-forge has for this build, but for a PyTorch made with a later CUDA than the kernels."""
    table = matrix.load()
    python, cuda = table.build_python, table.cuda[build.cuda]
    series = build.cuda.split(".")[0]
    there: list[tuple[str, str, str, list[str]]] = [
        ("python", f"{python}.8", "h0_cpython", []),
        ("python", "3.14.1", "h0_cp314", []),
        ("pip", "25.3", "h0", [f"python {python}.*"]),
        ("scikit-build-core", "0.11.6", "h0", [f"python {python}.*"]),
        ("cmake", "4.1.2", "h0", []),
        ("ninja", "1.13.1", "h0", []),
        (f"cuda-nvcc_{build.platform}", f"{build.cuda}.93", "h0", []),
        ("cuda-version", f"{series}.9", "h0", []),
        # A later release of the series than the table names, as conda-forge often has.
        (
            "pytorch",
            f"{build.torch_series}.1",
            "cuda_py_0",
            [f"python {python}.*", f"cuda-version >={series}.9,<{int(series) + 1}"],
        ),
    ]
    if table.platforms[build.platform].windows:
        there += [("vs2022_win-64", "19.44.35207", "h0", []), ("vs_win-64", "2022.14", "h0", [])]
    else:
        there += [(f"{name}_{build.platform}", f"{cuda.gcc}.4.0", "h0", []) for name in ("gcc", "gxx")]
        there += [(f"sysroot_{build.platform}", f"{glibc}", "h0", []) for glibc in ("2.17", "2.28", "2.34")]
    for subdir, packages in ((build.platform, there), ("noarch", [])):
        records = {
            f"{name}-{version}-{string}.conda": {
                "name": name, "version": version, "build": string, "build_number": 0, "depends": depends, "subdir": subdir
            }
            for name, version, string, depends in packages
        }  # fmt: skip
        (folder / subdir).mkdir(parents=True)
        (folder / subdir / "repodata.json").write_text(json.dumps({"packages": {}, "packages.conda": records}))
    return folder


def environment(channel: Path, platform: str, specs: list[str]) -> dict[str, str]:
    glibc = matrix.load().platforms[platform].glibc
    system = GenericVirtualPackage(PackageName("__glibc" if glibc else "__win"), Version(glibc or "0"), BuildString("0"))
    found = asyncio.run(
        solve([channel.as_uri()], specs, platforms=[platform, "noarch"], virtual_packages=[system])  # type: ignore[list-item]
    )
    return {record.name.normalized: str(record.version) for record in found}


@pytest.mark.parametrize("name", STABLE)
def test_what_the_recipe_asks_for_can_be_had(name: str, tmp_path: Path) -> None:
    build = STABLE[name]
    channel = conda_forge(tmp_path, build)
    python = matrix.load().build_python
    outputs = engine.render(variant.of(build, python_pin=f"{python}.* *_cpython", digests=DIGESTS))
    asked: dict[str, Any] = {n: o.recipe.to_dict()["requirements"] for n, o in outputs.items()}
    kernels = environment(channel, build.platform, asked["sageattention-cubins"]["build"])
    assert kernels[f"cuda-nvcc_{build.platform}"].startswith(build.cuda)
    tools = environment(channel, build.platform, asked["sageattention"]["build"])
    assert not any(tool.startswith("cuda") for tool in tools)
    if glibc := matrix.load().platforms[build.platform].glibc:
        assert tools[f"sysroot_{build.platform}"] == glibc
    else:
        assert {"vs2022_win-64", "vs_win-64"} <= set(tools)
    host = environment(channel, build.platform, [f"python {python}.* *_cpython", *asked["sageattention"]["host"][1:]])
    assert host["pytorch"] == f"{build.torch_series}.1"
    run = [spec for spec in asked["sageattention"]["run"] if isinstance(spec, str)]
    assert environment(channel, build.platform, run)["pytorch"] == f"{build.torch_series}.1"
