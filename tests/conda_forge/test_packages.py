"""What the recipe asks for and what comes of it, against conda-forge's records: builds can be made, users get the right one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from packaging.version import Version
from rattler.exceptions import SolverError

from conda_forge import emitted, model
from sage_factory.what import matrix
from sage_factory.what.build import Build

BUILDS = {f"{b.package}-{b.platform}-torch{b.torch}-cu{b.cuda}": b for b in emitted.builds()}
DRIVERS = [None, "11.8", "12.4", "12.9", "13.0", "13.2"]
Pytorches = dict[tuple[str, str], set[str]]


def cudas(pytorch: str) -> str:
    """What a build of conda-forge's PyTorch is for: `cuda129_mkl_py312_h0_302` → 12.9, `cpu_…` → cpu."""
    kind = pytorch.split("_", maxsplit=1)[0]
    return f"{kind[4:-1]}.{kind[-1]}" if kind.startswith("cuda") else kind


@pytest.fixture(scope="module")
def pytorches() -> Pytorches:
    """By platform and series of PyTorch: what conda-forge builds it for."""
    found: Pytorches = {}
    for record in model.records():
        if record["name"] == "pytorch":
            series = record["version"].rpartition(".")[0]
            found.setdefault((record["subdir"], series), set()).add(cudas(record["build"]))
    return found


# Building.


@pytest.mark.parametrize("name", BUILDS)
def test_every_row_can_be_built_and_installed(name: str, forge: str, pytorches: Pytorches) -> None:
    build, python = BUILDS[name], matrix.load().build_python
    platform, machine = matrix.load().platforms[build.platform], model.machine(build.platform)
    kernels, operators = (output["requirements"] for output in emitted.of(build).values())

    def found(specs: list[str]) -> dict[str, str]:
        return model.solved([forge], specs, build.platform, machine)

    assert found(kernels["build"])[f"cuda-nvcc_{build.platform}"].startswith(f"{build.cuda}.")
    tools = found(operators["build"])
    assert not any(tool.startswith("cuda") for tool in tools)
    if platform.windows:
        assert {"vs2022_win-64", "vs_win-64"} <= tools.keys()
    else:
        assert tools[f"sysroot_{build.platform}"].startswith(f"{platform.glibc} ")
    host = [f"python {python}.* *_cpython", *operators["host"][1:]]
    run = [spec for spec in operators["run"] if isinstance(spec, str)]
    for specs in (host, run):
        if (build.platform, build.torch_series) in pytorches:
            taken = found(specs)["pytorch"].split()[0]
            # Operators by LibTorch's stable ABI run beside any later PyTorch, too.
            later = build.stable_abi and specs is run and Version(taken) > Version(build.torch_series)
            assert later or taken.startswith(f"{build.torch_series}.")
        else:
            with pytest.raises(SolverError, match=rf"pytorch {build.torch_series}\.\*"):
                found(specs)


def test_the_table_says_which_pytorch_conda_forge_has(pytorches: Pytorches) -> None:
    for torch in (one for one in matrix.load().pytorch.values() if not one.release):
        for platform in matrix.load().platforms:
            there = pytorches.get((platform, torch.version.rpartition(".")[0]), set())
            assert {cuda.split(".")[0] for cuda in there - {"cpu"}} == set(torch.conda_forge), (torch.version, platform)


# Using.


def installed(channels: list[str], platform: str, driver: str | None, *specs: str) -> tuple[str, str]:
    """The CUDA of the kernels, and what the PyTorch beside them is for."""
    found = model.solved(channels, ["sageattention", *specs], platform, model.machine(platform, driver))
    ours, torch = found["sageattention"].split()[1], found["pytorch"]
    assert ours.startswith((f"torch{torch.split('.')[0]}{torch.split('.')[1]}", "torch29on_"))
    cuda = ours.split("_")[1]
    assert found["sageattention-cubins"].split()[1].startswith(f"{cuda}_")
    return f"{cuda[2:-1]}.{cuda[-1]}", cudas(torch.split()[1])


def expected(
    builds: Sequence[Build], pytorches: Pytorches, platform: str, driver: str | None, series: str
) -> tuple[str, str] | None:
    """The newest CUDA that the driver runs and that this PyTorch is there for, and that PyTorch."""

    def key(cuda: str) -> tuple[int, ...]:
        return tuple(map(int, cuda.split(".")))

    there = pytorches.get((platform, series), set()) - {"cpu"}
    majors = {key(cuda)[0] for cuda in there if driver is None or key(cuda)[0] <= key(driver)[0]}
    mine = [build for build in builds if build.package == "sageattention" and build.platform == platform]
    pinned = {build.cuda for build in mine if build.torch_series == series and not build.stable_abi}
    ours = pinned or {build.cuda for build in mine if build.stable_abi and Version(build.torch_series) <= Version(series)}
    fitting = sorted((cuda for cuda in ours if key(cuda)[0] in majors), key=key)
    if not fitting:
        return None
    beside = [cuda for cuda in there if key(cuda)[0] == key(fitting[-1])[0]]
    return fitting[-1], max(beside, key=key) if driver else "cpu"


@pytest.mark.parametrize("offered", ["channels", "released"])
def test_a_user_gets_the_newest_cuda_that_fits_driver_and_pytorch(
    offered: str, pytorches: Pytorches, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """`conda install sageattention pytorch=X` on machines with each driver and with none: where all is, and what is released."""
    channels: list[str] = request.getfixturevalue(offered)
    builds = emitted.released() if offered == "released" else emitted.builds()
    series = list(dict.fromkeys(build.torch_series for build in emitted.builds("sageattention")))
    lines = [f"{'platform':14} {'driver':7}" + "".join(f"{'PyTorch ' + torch:15}" for torch in series)]
    wrong = []
    for platform in matrix.load().platforms:
        for driver in DRIVERS:
            cells = []
            for torch in series:
                try:
                    got: tuple[str, str] | None = installed(channels, platform, driver, f"pytorch {torch}.*")
                except SolverError:
                    got = None
                cells.append(" / ".join(got) if got else "–")
                if got != (wanted := expected(builds, pytorches, platform, driver, torch)):
                    wrong.append(f"{platform}, driver {driver}, PyTorch {torch}: {got} instead of {wanted}")
            lines.append(f"{platform:14} {driver or 'none':7}" + "".join(f"{cell:15}" for cell in cells))
    with capsys.disabled():
        print(f"\nsageattention ({offered}) beside conda-forge's PyTorch: CUDA of the kernels / of PyTorch")
        print("\n".join(lines))
    assert wrong == []


@pytest.mark.parametrize(
    ("platform", "driver", "kernels"),
    [("linux-64", "13.0", "13.0"), ("linux-64", "12.9", "12.9"), ("win-64", "12.8", "12.9"), ("linux-aarch64", None, "13.0")],
)
def test_who_names_no_pytorch_gets_the_newest_there_is(
    channels: list[str], platform: str, driver: str | None, kernels: str
) -> None:
    found = model.solved(channels, ["sageattention"], platform, model.machine(platform, driver))
    assert found["pytorch"].startswith("2.13.")
    assert installed(channels, platform, driver)[0] == kernels


@pytest.mark.parametrize("beside", [[], ["sageattention"]])
@pytest.mark.parametrize(("driver", "kernels"), [("12.9", "cu129"), (None, "cu129")])
def test_sageattn3_alone_and_beside_sageattention(
    channels: list[str], beside: list[str], driver: str | None, kernels: str
) -> None:
    """conda-forge has PyTorch 2.9 for CUDA 12."""
    found = model.solved(channels, ["sageattn3", *beside], "linux-64", model.machine("linux-64", driver))
    assert found["sageattn3"].split()[1].startswith(f"torch290_{kernels}_")
    assert found["sageattn3-cubins"].split()[1].startswith(f"{kernels}_")
    assert found["pytorch"].startswith("2.9.")
    assert {name for name in found if name.startswith("sageattention")} == {*beside, *(f"{name}-cubins" for name in beside)}


@pytest.mark.parametrize("platform", ["linux-64", "win-64"])
@pytest.mark.parametrize("driver", ["12.8", "13.0"])
@pytest.mark.parametrize("specs", [["sageattention"], ["sageattn3"], ["sageattention", "sageattn3"]])
def test_what_is_released_brings_a_driver_a_pytorch_for_it(
    released: list[str], specs: list[str], driver: str, platform: str
) -> None:
    """Whoever names no PyTorch has to get one for their GPU."""
    found = model.solved(released, specs, platform, model.machine(platform, driver))
    assert cudas(found["pytorch"].split()[1]) != "cpu", found


def test_every_python_that_conda_forge_has_that_pytorch_for(channels: list[str]) -> None:
    there = {(r["version"].rpartition(".")[0], r["build"].split("_py")[1].split("_")[0]) for r in model.records()
             if r["name"] == "pytorch"}  # fmt: skip
    for torch in {series for series, _ in there}:
        for python in ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14"):
            specs = f"pytorch {torch}.*", f"python {python}.*"
            if (torch, python.replace(".", "")) in there:
                assert installed(channels, "linux-64", "12.9", *specs) == installed(channels, "linux-64", "12.9", specs[0])
            else:
                with pytest.raises(SolverError):
                    installed(channels, "linux-64", "12.9", *specs)


@pytest.mark.parametrize(
    ("specs", "driver", "said"),
    [
        (["pytorch 2.5.*"], None, "pytorch"),
        (["pytorch 2.13.*"], "11.8", "__cuda"),
        (["sageattention * *cu130*"], "12.9", "__cuda"),
        (["sageattention * torch280*", "pytorch 2.9.*"], None, "pytorch"),
        (["sageattention * *cu129*", "cuda-version 13.*"], "13.0", "cuda-version"),
        (["sageattention * torch2150*"], "13.2", "pytorch 2.15"),  # conda-forge has none yet
    ],
)
def test_what_cannot_work_is_refused(channels: list[str], specs: list[str], driver: str | None, said: str) -> None:
    with pytest.raises(SolverError, match=said):
        installed(channels, "linux-64", driver, *specs)


def test_a_cuda_that_is_asked_for_is_what_one_gets(channels: list[str]) -> None:
    assert installed(channels, "linux-64", "12.9", "sageattention * *cu128*", "pytorch 2.8.*") == ("12.8", "12.9")
    assert installed(channels, "win-64", "12.9", "cuda-version 12.8.*", "pytorch 2.8.*") == ("12.8", "12.8")
    assert installed(channels, "linux-64", "13.0", "cuda-version 12.*", "pytorch 2.13.*") == ("12.9", "12.9")
