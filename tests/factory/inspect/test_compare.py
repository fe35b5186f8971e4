"""Where two artifacts differ, in sentences."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import samples

from sage_factory import commands
from sage_factory.inspect import compare
from sage_factory.make import seal


def test_the_same_file_is_identical(tmp_path: Path) -> None:
    one, other = samples.a_wheel(tmp_path / "one"), samples.a_wheel(tmp_path / "other")
    assert compare.differences(one, other) == []
    assert commands.main(["compare", str(one), str(other)]) == 0


def put(name: str, data: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: files | {name: data}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("sageattention/more.py", b"x = 1\n"), r"sageattention/more\.py is in .* alone"),
        (lambda files: {k: v for k, v in files.items() if not k.endswith("_C.so")}, r"sageattention/_C\.so is not in "),
        (put("sageattention/__init__.py", b"# one\n"), r"sageattention/__init__\.py: line 1 is '' and '# one'"),
        (put("sageattention/_build.json", b'{"version": "2.2.0", "torch": "2.8.0", "cuda": "12.8", "compiler": "GNU 14.2.0"}'),
         r'_build\.json: compiler is "GNU 13\.3\.0" and "GNU 14\.2\.0"'),
        (put("sageattention/_C.so", samples.library(source="int sage_one(void) { return 2; }")),
         r"sageattention/_C\.so: \d+ and \d+ bytes, the first that differs is \d+"),
    ],
)  # fmt: skip
def test_where_two_wheels_differ(change: Callable[[dict[str, bytes]], dict[str, bytes]], said: str, tmp_path: Path) -> None:
    one, other = samples.a_wheel(tmp_path / "one"), samples.a_wheel(tmp_path / "other")
    samples.rewrite(other, change(samples.contents(other)))
    found = compare.differences(one, other)
    assert any(re.search(said, line) for line in found), found
    assert any("RECORD" in line for line in found)


def test_two_packages_with_the_same_content(tmp_path: Path) -> None:
    one, other = samples.operators_conda(tmp_path / "one"), samples.operators_conda(tmp_path / "other")
    seal.seal(other, 1_700_000_000)
    assert any(
        "info/index.json: timestamp is 1600000000000 and 1700000000000" in line for line in compare.differences(one, other)
    )
    seal.seal(one, 1_700_000_000)
    assert compare.differences(one, other) == []
    wheel, other = samples.a_wheel(tmp_path / "one"), samples.a_wheel(tmp_path / "other")
    with zipfile.ZipFile(other, "w") as archive:
        for name, data in reversed(samples.contents(wheel).items()):
            archive.writestr(name, data)
    (said,) = compare.differences(wheel, other)
    assert said.endswith("entries are the same, the archives are not: order, times, modes or compression differ")
