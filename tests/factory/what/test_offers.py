"""What is documented is what a release publishes: names of indexes, versions, commands."""

from __future__ import annotations

import re

import pytest

from sage_factory import ROOT
from sage_factory.what import matrix, offers

RELEASED = matrix.builds("release")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_list_is_the_one_of_the_profile_that_a_tag_releases() -> None:
    text = (ROOT / "docs" / "packaging.md").read_text(encoding="utf-8")
    assert text.count(offers.START) == text.count(offers.END) == 1
    assert offers.with_offers(text, RELEASED) == text, "run `python3 scripts/run.py lock`"
    for build in RELEASED:
        assert f"`{build.index_version}`" in text
        assert f"`{build.index_folder}`" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_document_names_an_index_that_no_release_makes(page: str) -> None:
    """It was cu128-torch28, while the release made cu129-torch28."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"--index-url \S*?/(cu[\w.-]+)/", text))
    every = [build for package in matrix.load().packages.values() for build in matrix.builds(package.profile)]
    assert named <= {name for build in every for name in (build.index_folder, build.index_major)}


def test_packaging_names_files_of_a_release_alone() -> None:
    text = (ROOT / "docs" / "packaging.md").read_text(encoding="utf-8")
    named = set(re.findall(r"sageattention-[\w.+-]+\.whl", text))
    assert named
    assert named <= {name for build in RELEASED for name in (build.wheel_name, build.index_name)}


def test_every_command_is_of_a_build_that_there_is() -> None:
    lines = offers.commands(RELEASED, "https://example.org")
    majors = {build.index_major for build in RELEASED}
    assert {re.findall(r"/(cu\d+)/", line)[0] for line in lines[:-1]} == majors
    exact = re.fullmatch(r"pip install sageattention==(\S+) --index-url https://example\.org/(cu\d+)/  # .*", lines[-1])
    assert exact
    assert exact.group(1, 2) in {(build.index_version, build.index_major) for build in RELEASED}
    assert all(line.index("#") == lines[0].index("#") for line in lines[:-1])
