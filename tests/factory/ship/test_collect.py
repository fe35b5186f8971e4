"""What is released and published: all of a profile, without fault."""

from __future__ import annotations

from pathlib import Path

import samples

from sage_factory.ship import collect


def test_platforms_share_their_kernels() -> None:
    same = collect.Collection((samples.a_group("linux-64"), samples.a_group("win-64", operators="torch280_cu128_h3_0")), ())
    assert list(collect.kernels_once(same)) == []
    assert len(same.packages) == 3, "the kernels once"
    other = collect.Collection((samples.a_group("linux-64"), samples.a_group("win-64", kernels="cu128_h9_0")), ())
    (fault,) = collect.kernels_once(other)
    assert "the packages for CUDA 12.8 need 2 kernel sets, expected one" in fault


def test_a_whole_profile_is_collected_dependencies_first(dist: Path) -> None:
    stray = samples.conda(dist / "conda" / "linux-64", {}, {**samples.index("sageattention"), "build": "torch270_cu128_h3_0"})
    found = collect.collect(dist, samples.PROFILE)
    assert [path.name for path in found.packages] == [
        "sageattention-cubins-2.2.0-cu128_h1_0.conda",
        "sageattention-2.2.0-torch280_cu128_h2_0.conda",
    ]
    assert [path.name for path in found.wheels] == [build.wheel_name for build in samples.BUILDS]
    assert found.others == (stray,)
    assert found.groups[0].made["commit"] == "c" * 40


def test_a_repair_of_a_build_is_another_package(dist: Path) -> None:
    """Which may lie beside it, as where its row has been given a number."""
    repair = samples.conda(dist / "conda" / "linux-64", {}, {**samples.index("sageattention"), "build": "torch280_cu128_h3_1"})
    found = collect.collect(dist, samples.PROFILE)
    assert found.others == (repair,)
    assert [group.operators.name for group in found.groups] == ["sageattention-2.2.0-torch280_cu128_h2_0.conda"]
