"""Sealing: a .conda is a function of its content."""

from __future__ import annotations

import zipfile
from pathlib import Path

import samples

from sage_factory.make import seal


def test_sealed_packages_of_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    packages = [
        samples.assembled(tmp_path / str(year), "sageattention", "torch280_cu128_habc_0", year=year) for year in (2021, 2022)
    ]
    assert packages[0].read_bytes() != packages[1].read_bytes()
    for path in packages:
        seal.seal(path, 1_600_000_000)
    assert packages[0].read_bytes() == packages[1].read_bytes()
    with zipfile.ZipFile(packages[0]) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2020, 9, 13, 12, 26, 40)}
