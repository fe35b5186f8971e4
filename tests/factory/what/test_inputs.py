"""What a package is made of: the same digest for the same content, wherever and whenever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sage_factory.what import inputs


def test_digest_is_of_content_not_of_place_or_time(tmp_path: Path) -> None:
    digests: list[str] = []
    for name in ("a", "b"):
        root = tmp_path / name
        (root / "src").mkdir(parents=True)
        (root / "src" / "k.cu").write_text("kernel")
        os.utime(root / "src" / "k.cu", (len(digests), len(digests)))
        (root / "src" / "__pycache__").mkdir()
        (root / "src" / "__pycache__" / name).write_text(name)
        digests.append(inputs.digest(["src"], ["12.8"], root))
    assert digests[0] == digests[1]
    assert inputs.digest(["src"], ["12.9"], tmp_path / "a") != digests[0]
    (tmp_path / "a" / "src" / "k.cu").write_text("another kernel")
    assert inputs.digest(["src"], ["12.8"], tmp_path / "a") != digests[0]
    (tmp_path / "b" / "src" / "k.cu").rename(tmp_path / "b" / "src" / "l.cu")
    assert inputs.digest(["src"], ["12.8"], tmp_path / "b") != digests[0]


def test_inputs_are_sorted_alike_on_every_platform(tmp_path: Path) -> None:
    names = ["B", "a-b", "a/b", "c"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in inputs.files(["c", "a", "a-b", "B"], tmp_path)] == names


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="an input of the build is missing"):
        inputs.files(["csrc"], tmp_path)
