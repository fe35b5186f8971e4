"""The page to choose on, in a real browser where there is one, and that real pip and uv take the lines that it gives."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import loopback
import pytest
import samples
import tools
from packaging.utils import parse_wheel_filename

from sage_factory.ship import chooser, indexes
from sage_factory.what import matrix

PACKAGES = tuple(matrix.load().packages)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[loopback.Server]:
    folder = tmp_path_factory.mktemp("site")
    wheels = tmp_path_factory.mktemp("wheels")
    indexes.add([samples.a_wheel(wheels, python, package) for package in PACKAGES for python in ("3.11", "3.12")], folder)
    with loopback.offering(folder) as server:
        yield server


def offers(profile: str) -> list[chooser.Offer]:
    return [
        chooser.Offer(build.index_name, f"https://example.org/{build.index_name}", build.index_folder, build.index_major, "00")
        for build in matrix.builds(profile)
    ]


def test_every_pytorch_and_system_of_a_release_can_be_chosen() -> None:
    found = [one for offer in offers("release") for one in chooser.described(offer)]
    assert {one["os"] for one in found} == {"Linux x86-64", "Windows"}
    series = {".".join(version.split(".")[:2]) for version in matrix.load().pytorch if not version.endswith("+")}
    for system in ("Linux x86-64", "Windows"):
        assert {one["torch"] for one in found if one["os"] == system} == series
    by_line = {(one["version"], one["index"]) for one in found}
    assert by_line == {(build.index_version, build.index_major) for build in matrix.builds("release")}
    # The wheel for every later PyTorch is offered to each with the Pythons that this one has.
    newest = {one["python"] for one in found if one["torch"] == "2.15"}
    assert newest == set(matrix.load().pytorch["2.15.0"].python)
    assert {one["version"] for one in found if one["torch"] == "2.15"} == {
        "2.2.0+torch2.9.abi.cu128",
        "2.2.0+torch2.9.abi.cu130",
    }


def test_what_else_is_to_be_known_is_asked_of_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a release is made of may be called otherwise, and a wheel be of a row that is released no more."""
    given = [offer for offer in offers("release") if offer.folder in ("cu126-torch26", "cu128-torch27")]
    table = dataclasses.replace(matrix.load(), profiles={})
    monkeypatch.setattr(matrix, "load", lambda: table)
    chooser._note.cache_clear()
    notes = {(one["torch"], one["os"]): one["note"] for offer in given for one in chooser.described(offer)}
    assert [key for key, note in notes.items() if note] == [("2.6", "Linux x86-64")]
    assert "not beside PyPI's" in notes["2.6", "Linux x86-64"]


def test_the_page_is_one_file_and_lists_the_indexes() -> None:
    page = chooser.page(offers("release"), ["cu12", "cu128-torch27"])
    assert not re.search(r"(src|href)=\"(https?:)?//", page.partition("<script")[0]), "something from elsewhere"
    assert '<a href="cu128-torch27/">' in page
    data = re.search(r'<script type="application/json" id="wheels">(.*?)</script>', page, re.S)
    assert data
    assert json.loads(data[1])[-1]["torch"] == "2.15"
    assert not set(PACKAGES) & set(re.findall(r"[\w-]+", page.partition(data[0])[2])), "what a line installs is what was chosen"
    hostile = chooser.page([offers("release")[0]._replace(url="</script><script>alert(1)")], [])
    assert hostile.count("</script>") == page.count("</script>")


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_for_the_same_the_newest_is_offered(order: int) -> None:
    build = matrix.builds(torch="2.9.0", cuda="12.8", platform="linux-64", python="3.12", package=PACKAGES[0])[0]
    forever = matrix.builds("stable-abi", cuda="12.8", platform="linux-64")[0]
    newer = [dataclasses.replace(build, version="2.10.0", number=number) for number in (0, 9, 10)]
    there = [build, dataclasses.replace(build, number=11), *newer, forever][::order]
    given = [chooser.Offer(one.index_name, "", one.index_folder, one.index_major, "00") for one in there]
    data = re.search(r'<script type="application/json" id="wheels">(.*?)</script>', chooser.page(given, []), re.S)
    assert data
    found = [one["version"] for one in json.loads(data[1]) if (one["torch"], one["python"]) == ("2.9", "3.12")]
    assert found == [newer[-1].index_version]


def test_the_first_package_is_the_one_that_is_chosen_at_first() -> None:
    page = chooser.page([*offers("release"), *offers("sage3-release")], [])
    data = re.search(r'<script type="application/json" id="wheels">(.*?)</script>', page, re.S)
    assert data
    wheels = json.loads(data[1])
    assert wheels[-1]["package"] == PACKAGES[0]
    for one in wheels:
        assert one["name"].startswith(f"{one['package']}-{one['version']}-"), "the line asks for the file's own package"
    assert {one["package"] for one in wheels} == set(PACKAGES)


def shown(url: str, profile: Path, **choice: str) -> dict[str, str]:
    """What the page says by its ids, in a browser, once a choice was made (in the address, as the page itself writes it)."""
    if BROWSER is None:
        pytest.skip("there is no Chromium here: what the page does is not tried")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-proxy-server",
        f"--user-data-dir={profile}",
        "--dump-dom",
    ]
    done = subprocess.run([*command, f"{url}/#{urlencode(choice)}"], capture_output=True, text=True, check=True, timeout=120)
    texts = re.findall(r'<(\w+)[^>]* id="(said|pip|uv|wheel|sha256)"[^>]*>(.*?)</\1>', done.stdout, re.S)
    checked = re.findall(r'<label class="(none)?"><input type="radio" name="(\w+)" value="([^"]*)"', done.stdout)
    struck = " ".join(f"{name}={value}" for none, name, value in checked if none)
    return {name: html.unescape(text) for _, name, text in texts} | {"struck": struck}


@pytest.mark.parametrize(("package", "python"), [(PACKAGES[0], "3.11"), (PACKAGES[0], "3.12"), (PACKAGES[1], "3.12")])
def test_in_a_browser_a_choice_gives_the_line_that_pip_and_uv_take(
    site: loopback.Server, package: str, python: str, tmp_path: Path
) -> None:
    build = samples.build(python, package=package)
    said = shown(site.url, tmp_path / "profile", package=package, os="Linux x86-64", python=python, torch="2.8", cuda="12.8")
    assert said["said"] == ""
    assert said["wheel"] == build.index_name
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "UV_"))} | {
        "NO_PROXY": "127.0.0.1"
    }
    _, _, _, install, *rest = shlex.split(said["pip"])  # python -m pip install …
    target = ["--no-deps", f"--python-version={python}", "--only-binary=:all:"]
    asked = [sys.executable, "-m", "pip", "--no-cache-dir", install, *rest]
    # Every tag of a compressed set is one that pip takes.
    for platform in sorted({tag.platform for tag in parse_wheel_filename(build.index_name)[3]}):
        done = subprocess.run(
            [*asked, *target, f"--platform={platform}", "--target", str(tmp_path / platform)],
            capture_output=True, text=True, check=False, env=environment | {"PIP_CONFIG_FILE": os.devnull},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert (tmp_path / platform / f"{package}-{build.index_version}.dist-info").is_dir()
    uv = tools.beside("uv")
    if uv is None:
        pytest.skip("there is no uv here")
    words = [uv, *shlex.split(said["uv"])[1:], "--no-deps", "--no-cache", "--target", str(tmp_path / "uv")]
    # uv reads the glibc from the platform that it is told of.
    words += [f"--python-version={python}", "--python-platform=x86_64-manylinux_2_28", "--only-binary=:all:"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "uv" / f"{package}-{build.index_version}.dist-info").is_dir()


def test_in_a_browser_what_there_is_not_is_struck_through(site: loopback.Server, tmp_path: Path) -> None:
    page = chooser.page(offers("release"), [])
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    with loopback.offering(tmp_path) as server:
        said = shown(server.url, tmp_path / "profile", os="Linux x86-64", python="3.9", torch="2.15", cuda="13.0")
    assert said["said"].startswith("There is no such wheel")
    assert {"python=3.9", "torch=2.15"} <= set(said["struck"].split())
    assert "python=3.12" not in said["struck"]


@pytest.mark.parametrize(
    ("clicked", "line", "note"),
    [
        ('torch"][value="2.8', "+torch2.8.cu129", ""),
        ('torch"][value="2.6', "+torch2.6.cu126", "On Linux the wheels for PyTorch 2.6 load beside that of conda-forge"),
        ('python"][value="3.9', "+torch2.8.cu128", ""),
        ('os"][value="Windows', "+torch2.9.abi.cu130", ""),
    ],
)
def test_in_a_browser_the_rest_of_a_choice_follows(clicked: str, line: str, note: str, tmp_path: Path) -> None:
    """To the newest wheel that has most of it: from 2.15 and CUDA 13.0, which most do not go with."""
    page = chooser.page(offers("release"), [])
    click = f"<script>document.querySelector('input[name=\"{clicked}\"]').click()</script>"
    (tmp_path / "index.html").write_text(page.replace("</body>", click + "</body>"), encoding="utf-8")
    with loopback.offering(tmp_path) as server:
        said = shown(server.url, tmp_path / "profile")
    assert f'{line}"' in said["pip"]
    assert said["said"].startswith(note)
    assert bool(said["said"]) == bool(note)
