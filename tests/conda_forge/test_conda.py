"""Real conda, where there is one, with the model of conda-forge in the place of conda-forge. Nothing is installed here.

conda's old solver, `classic`, is not asked: it ignores what packages say of a machine they exclude (`__cuda >=13` as a constraint),
conda-forge's own included.
"""

from __future__ import annotations

import pytest

from conda_forge import conda

SOLVERS = ["libmamba", "rattler"]


@pytest.fixture(scope="module", params=SOLVERS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> conda.Conda:
    return conda.installed(tmp_path_factory.mktemp("home"), request.param)


def create(client: conda.Conda, channels: list[str], *specs: str, driver: str = "") -> dict[str, object]:
    sources = [word for channel in channels for word in ("--channel", channel)]
    return client("create", "--dry-run", "--name", "new", "--override-channels", *sources, *specs, driver=driver, check=False)


@pytest.mark.parametrize(
    ("driver", "specs", "kernels", "torch"),
    [
        ("", ["pytorch=2.10"], "cu130", "2.10.0 cpu"),
        ("12.8", ["pytorch=2.10"], "cu129", "2.10.0 cuda129"),
        ("13.0", ["pytorch=2.10"], "cu130", "2.10.0 cuda130"),
        ("13.0", ["pytorch=2.9"], "cu129", "2.9.1 cuda129"),
        ("13.0", [], "cu130", "2.13.0 cuda130"),
        ("12.9", ["python=3.9"], "cu128", "2.7.1 cuda129"),
    ],
)
def test_a_new_environment_gets_the_right_build(
    client: conda.Conda, channels: list[str], driver: str, specs: list[str], kernels: str, torch: str
) -> None:
    found = conda.linked(create(client, channels, "sageattention", *specs, driver=driver))
    assert found["pytorch"].startswith(f"{torch}_")
    assert found["sageattention"].split()[1].split("_")[1] == kernels


@pytest.mark.parametrize(
    ("driver", "specs"),
    [
        ("11.8", []),
        ("", ["pytorch=2.5"]),
        ("12.9", ["sageattention=*=*cu130*"]),
        ("", ["sageattention=*=torch280*", "pytorch=2.9"]),
    ],
)
def test_what_cannot_work_is_refused_or_runs_on_the_cpu(
    client: conda.Conda, channels: list[str], driver: str, specs: list[str]
) -> None:
    answer = create(client, channels, "sageattention", *specs, driver=driver)
    if answer["returncode"] == 0:
        # conda-libmamba-solver 26.6 hears what a package excludes of a machine (`__cuda >=13` as a constraint) only if another
        # asks for that, as PyTorch with CUDA does.
        assert client.solver == "libmamba"
        assert driver
        assert conda.linked(answer)["pytorch"].split()[1].startswith("cpu_")
        return
    assert any(kind in str(answer["exception_name"]) for kind in ("Unsatisfiable", "PackagesNotFound"))
