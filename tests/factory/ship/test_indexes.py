"""pip's indexes: that pip, asked over HTTP, takes the wheel for the PyTorch and Python at hand, or says why there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import loopback
import pytest
import samples

from sage_factory import commands
from sage_factory.files import put, sha256
from sage_factory.inspect import verify
from sage_factory.make import wheels as packed
from sage_factory.ship import indexes
from sage_factory.what import matrix


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheels of one PyTorch and CUDA for three Pythons."""
    folder = tmp_path_factory.mktemp("wheels")
    return [samples.a_wheel(folder, python) for python in ("3.11", "3.12", "3.13")]


@pytest.fixture(scope="module")
def site(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[loopback.Server]:
    """With the other package's, too."""
    folder = tmp_path_factory.mktemp("site")
    indexes.add([*wheels, *(samples.a_wheel(folder, python, "sageattn3") for python in ("3.11", "3.12", "3.13"))], folder)
    with loopback.offering(folder) as server:
        yield server


def pip(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """pip without the settings of this machine, and with the packages in `path`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(path or "")}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def beside_torch(folder: Path, version: str) -> Path:
    """A folder in which pip finds PyTorch installed, and an old sageattention, whatever else it finds further on."""
    for name, one in (("torch", version), ("sageattention", "0.0.1")):
        info = folder / f"{name}-{one}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {one}\n", encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
        (info / "RECORD").write_text("", encoding="utf-8")
    return folder


@pytest.mark.parametrize("oldest", ["3.10", "3.11"])
def test_one_index_for_each_cuda_and_pytorch_series(oldest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.9 may be for other Pythons than what is for every PyTorch from 2.9 on: a link says what METADATA says."""
    table = matrix.load()
    nine = dataclasses.replace(table.pytorch["2.9.0"], python=(oldest, "3.12"))
    table = dataclasses.replace(table, pytorch={**table.pytorch, "2.9.0": nine})
    monkeypatch.setattr(matrix, "load", lambda: table)
    names = {build.index_name: build for build in matrix.builds()}
    for name, build in names.items():
        link = indexes.describe(name, name, "0")
        assert (link.major, link.folder) == (build.index_major, build.index_folder)
        later = "-or-later" if build.stable_abi else ""
        assert link.folder == f"cu{build.cuda.replace('.', '')}-torch{build.torch_series.replace('.', '')}{later}"
        assert (link.project, link.requires_python) == (build.package, f">={table.pytorch[build.torch].python[0]}")
        assert link.requires_python == build.requires_python
    found = indexes.pages(indexes.describe(name, name, "0") for name in names)
    offered: Counter[str] = Counter()
    for path, text in found.items():
        if path.count("/") == 2:
            offered[path.split("/")[0]] += text.count(".whl</a>")
    majors = {name for name in offered if "torch" not in name}
    assert majors == {"cu12", "cu13"}
    assert sum(count for name, count in offered.items() if name in majors) == len(names)
    assert sum(count for name, count in offered.items() if name not in majors) == len(names)
    assert set(offered) - majors == {indexes.describe(name, name, "0").folder for name in names}


@pytest.mark.parametrize("package", matrix.load().packages)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pip_takes_the_wheel_for_its_python(site: loopback.Server, python: str, package: str, tmp_path: Path) -> None:
    # As that Python's pip would, on any machine.
    asked = ["--only-binary=:all:", f"--python-version={python}", "--platform=linux_x86_64", "--no-deps"]
    url = f"{site.url}/cu128-torch28/"
    done = pip("download", package, "--index-url", url, *asked, "--dest", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [samples.build(python, package=package).index_name]


@pytest.mark.parametrize("python", ["3.10", "3.15"])
def test_pip_takes_the_stable_abis_wheel_for_any_python(python: str, tmp_path: Path) -> None:
    (build,) = matrix.builds("stable-abi", platform="linux-64", cuda=samples.CUDA)
    wheel = samples.a_stable_wheel(tmp_path)
    assert (wheel.name, verify.verify_wheel(wheel)) == (build.wheel_name, [])
    indexes.add([wheel], tmp_path / "site")
    asked = ["--only-binary=:all:", f"--python-version={python}", "--platform=linux_x86_64", "--no-deps"]
    with loopback.offering(tmp_path / "site") as server:
        url = f"{server.url}/cu128-torch29-or-later/"
        done = pip("download", "sageattention", "--index-url", url, *asked, "--dest", str(tmp_path / "taken"))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [build.index_name]


@pytest.mark.skipif(sys.version_info[:2] not in [(3, 11), (3, 12), (3, 13)], reason="no wheel here for this Python")
@pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the samples are for linux-64")
def test_pip_installs_beside_the_right_pytorch(site: loopback.Server, tmp_path: Path) -> None:
    torch = beside_torch(tmp_path / "torch", "2.8.1+cu128")
    target = tmp_path / "report.json"
    url = f"{site.url}/cu128-torch28/"
    done = pip("install", "--dry-run", "--report", str(target), "sageattention>=1", "--index-url", url, path=torch)
    assert done.returncode == 0, done.stderr
    (chosen,) = json.loads(target.read_text(encoding="utf-8"))["install"]
    build = samples.build(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert chosen["download_info"]["url"].endswith(f"/cu128-torch28/sageattention/{quote(build.index_name)}")
    assert any(path.endswith(".metadata") for path in site.asked), "the metadata is read without the wheel"


@pytest.mark.skipif(matrix.host_platform() != "linux-64", reason="the samples are for linux-64")
def test_pip_refuses_beside_another_pytorch_and_says_which_is_needed(site: loopback.Server, tmp_path: Path) -> None:
    torch = beside_torch(tmp_path / "torch", "2.7.1+cu128")
    done = pip("install", "--dry-run", "sageattention>=1", "--index-url", f"{site.url}/cu128-torch28/", path=torch)
    assert done.returncode != 0
    assert "torch==2.8.*" in done.stderr


def test_pip_refuses_a_python_that_no_wheel_is_for(site: loopback.Server, tmp_path: Path) -> None:
    asked = ["--only-binary=:all:", "--python-version=3.9", "--platform=linux_x86_64", "--no-deps"]
    done = pip("download", "sageattention", "--index-url", f"{site.url}/cu128-torch28/", *asked, "--dest", str(tmp_path))
    assert done.returncode != 0
    assert "No matching distribution found for sageattention" in done.stderr


def test_pip_refuses_a_file_that_was_changed(wheels: list[Path], tmp_path: Path) -> None:
    indexes.add(wheels, tmp_path / "site")
    path = indexes.target(wheels[0], tmp_path / "site")
    path.write_bytes(path.read_bytes() + b"\0")
    with loopback.offering(tmp_path / "site") as server:
        asked = ["--only-binary=:all:", "--python-version=3.11", "--platform=linux_x86_64", "--no-deps"]
        url = f"{server.url}/cu128-torch28/"
        done = pip("download", "sageattention", "--index-url", url, *asked, "--dest", str(tmp_path / "out"))
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


# Adding to a folder.


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256(p.read_bytes()) for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_adding_again_changes_nothing(wheels: list[Path], tmp_path: Path) -> None:
    assert indexes.add(wheels[:2], tmp_path) == wheels[:2]
    before = files(tmp_path)
    assert indexes.add(wheels[:2], tmp_path) == []
    assert files(tmp_path) == before
    assert indexes.add(wheels, tmp_path) == wheels[2:]
    offered = [indexes.target(path, tmp_path) for path in wheels]
    for index in ("cu12", "cu128-torch28"):
        page = (tmp_path / index / "sageattention" / "index.html").read_text(encoding="utf-8")
        assert [page.count(f'/{quote(path.name)}#sha256={sha256(path.read_bytes())}"') for path in offered] == [1, 1, 1]


def test_a_wheel_that_another_zlib_packed_stays_as_it_was_published(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another level does."""
    indexes.add(wheels[:2], tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(packed, "LEVEL", 1)
    other = packed.for_index(wheels[0], build=indexes.build_of(wheels[0]), out_dir=tmp_path.with_name("other"))
    assert other.read_bytes() != indexes.target(wheels[0], tmp_path).read_bytes()
    assert indexes.missing(wheels, tmp_path) == wheels[2:]
    assert indexes.add(wheels[:2], tmp_path) == []
    assert files(tmp_path) == before
    damaged = indexes.target(wheels[0], tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(indexes.SiteError, match=f"never replaced.*{re.escape(damaged.name)}"):
        indexes.add(wheels[:2], tmp_path)


def test_what_is_no_wheel_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(indexes.SiteError, match=r"README\.md is no build of variants\.yaml"):
        indexes.add([tmp_path / "README.md"], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_published_wheel_is_never_replaced(wheels: list[Path], tmp_path: Path) -> None:
    indexes.add(wheels[:1], tmp_path / "site")
    before = files(tmp_path / "site")
    other = samples.rewrite(tmp_path / wheels[0].name, samples.contents(wheels[0]) | {"sageattention/__init__.py": b"# other"})
    with pytest.raises(indexes.SiteError, match=f"never replaced.*{re.escape(indexes.target(other, tmp_path).name)}"):
        indexes.add([*wheels[1:], other], tmp_path / "site")
    assert files(tmp_path / "site") == before, "nothing else is added either"


@pytest.mark.parametrize("package", ["sageattention", "sageattn3"])
@pytest.mark.parametrize(("published", "now"), [("https://example.org/a", ""), ("", "https://example.org/b/")])
def test_where_the_address_alone_differs_it_is_said(package: str, published: str, now: str, tmp_path: Path) -> None:
    given = [samples.a_wheel(tmp_path, python, package) for python in ("3.11", "3.12")]
    indexes.add(given, tmp_path / "site", published)
    address = f"{published}/" if published else ""
    with pytest.raises(indexes.SiteError, match=f"the address of the indexes alone: .* --index-url '{address}'$"):
        indexes.missing(given, tmp_path / "site", now)
    one, other = given
    changed = samples.rewrite(one, samples.contents(one) | {f"{package}/__init__.py": b"# other"})
    damaged = indexes.target(other, tmp_path / "site")
    for wheels in [changed], [changed, other]:
        with pytest.raises(indexes.SiteError, match=r"other content: [^:]*\.whl$"):
            indexes.missing(wheels, tmp_path / "site", now)
    damaged.write_bytes(b"")
    with pytest.raises(indexes.SiteError, match=r"other content: [^:]*\.whl$"):
        indexes.missing([other], tmp_path / "site", now)


def test_what_a_killed_run_left_is_finished(wheels: list[Path], tmp_path: Path) -> None:
    indexes.add(wheels, tmp_path)
    whole = files(tmp_path)
    first, second, _ = (indexes.target(wheel, tmp_path) for wheel in wheels)
    first.unlink()
    first.with_name(f".{first.name}.1.partial").write_bytes(b"half")
    (tmp_path / ".index.html.1.partial").write_bytes(b"half")
    second.with_name(f"{second.name}.metadata").unlink()
    for page in tmp_path.rglob("index.html"):
        page.unlink()
    indexes.add(wheels, tmp_path)
    assert files(tmp_path) == whole


def test_a_wheel_of_one_name_in_both_forms_states_the_address_once(tmp_path: Path) -> None:
    plain = samples.a_wheel(tmp_path, "3.11", "sageattn3")
    for url, wheel in (("https://example.org/", plain), ("", indexes.target(plain, tmp_path / "https://example.org/"))):
        site = tmp_path / (url or "again")
        indexes.add([wheel], site, url)
        assert packed.index_url(indexes.target(plain, site)) == "https://example.org/"


# From GitHub's releases.


def release(tag: str, *assets: Mapping[str, str], draft: bool = False) -> dict[str, object]:
    return {"tag_name": tag, "draft": draft, "assets": list(assets)}


def asset(name: str, tag: str = "v2.2.0", digest: str = "sha256:00") -> dict[str, str]:
    return {"name": name, "browser_download_url": f"https://example.org/{tag}/{name}", "digest": digest}


def test_links_to_the_wheels_of_every_release() -> None:
    old, new = (samples.build(python).index_name for python in ("3.11", "3.12"))
    found = indexes.links(
        [
            release("v2.2.0-build.1", asset(new, "v2.2.0-build.1"), asset(old, "v2.2.0-build.1")),
            release("v2.2.0", asset(old), asset(samples.build("3.11").wheel_name), asset("SHA256SUMS")),
            release("v3", asset(samples.build("3.13").index_name), draft=True),
        ]
    )
    assert {link.name for link in found} == {old, new}
    page = indexes.pages(found)["cu128-torch28/sageattention/index.html"]
    assert f'href="https://example.org/v2.2.0-build.1/{new}#sha256=00" data-requires-python="&gt;=3.9"' in page
    assert indexes.pages(found)["cu12/sageattention/index.html"].count("<a ") == 2


def test_addresses_stay_as_github_writes_them() -> None:
    name = samples.build("3.12").index_name
    assert "+" in name
    written = {**asset(name), "browser_download_url": f"https://example.org/v2.2.0/{name.replace('+', '%2B')}"}
    pages = indexes.pages(indexes.links([release("v2.2.0", written)]))
    for page in ("index.html", "cu12/sageattention/index.html", "cu12/sageattention/index.json"):
        assert written["browser_download_url"] in pages[page]
        assert "%252B" not in pages[page]


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_withdrawn_release_alone_holds_is_yanked(order: int) -> None:
    both, alone = (samples.build(python).index_name for python in ("3.11", "3.12"))
    good = release("v2.2.0-build.1", asset(both, "v2.2.0-build.1"))
    withdrawn = release("v2.2.0", asset(both), asset(alone)) | {"body": "Withdrawn: too <slow>\n\nNotes."}
    found = indexes.links([good, withdrawn][::order])
    assert {link.name: link.yanked for link in found} == {both: None, alone: "too <slow>"}
    pages = indexes.pages(found)
    page = pages["cu12/sageattention/index.html"]
    assert page.count("data-yanked") == page.count('data-yanked="too &lt;slow&gt;"') == 1
    assert f'href="https://example.org/v2.2.0-build.1/{both}#' in page, "taken of the good one"
    assert (both in pages["index.html"], alone in pages["index.html"]) == (True, False), "nobody is offered what is yanked"


def test_a_release_for_a_pytorch_that_is_built_no_more_stays_listed() -> None:
    name = "sageattention-2.1.0+torch2.5.cu124-cp312-cp312-linux_x86_64.whl"
    page = indexes.pages(indexes.links([release("v2.1.0", asset(name))]))["cu124-torch25/sageattention/index.html"]
    assert f'href="https://example.org/v2.2.0/{name}#sha256=00">{name}</a>' in page


def test_wheels_of_other_projects_are_passed_by() -> None:
    """Which somebody attached to a release by hand."""
    ours = samples.build("3.12").index_name
    found = indexes.links([release("v2.2.0", asset(ours), asset("flash_attn-2.8+cu12-cp312-cp312-linux_x86_64.whl"))])
    assert [link.name for link in found] == [ours]


def test_releases_that_contradict_each_other() -> None:
    name = samples.build("3.11").index_name
    with pytest.raises(indexes.SiteError, match="in two releases with other content"):
        indexes.links([release("v2.2.0", asset(name)), release("v2.2.0-build.1", asset(name, digest="sha256:11"))])
    with pytest.raises(indexes.SiteError, match="gives no SHA-256"):
        indexes.links([release("v2.2.0", asset(name, digest=""))])


def test_releases_are_asked_of_gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.main(["index", "--releases", "someone/something", "--output", str(tmp_path / "site")]) == 1
    assert "`gh`, GitHub's command line, is not installed" in capsys.readouterr().err
    name = samples.build("3.11").index_name
    answer = json.dumps([[release("v2.2.0", asset(name))]])
    program = tmp_path / "gh"
    program.write_text(f"#!/bin/sh\ncase \"$*\" in *repos/someone/something/releases*) echo '{answer}';; *) exit 3;; esac\n")
    program.chmod(0o755)
    assert commands.main(["index", "--releases", "someone/something", "--output", str(tmp_path / "site")]) == 0
    assert name in (tmp_path / "site" / "cu128-torch28" / "sageattention" / "index.html").read_text(encoding="utf-8")


def test_who_lists_releases_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes last has seen the newest list, too."""
    held: list[bool] = []

    def listed(_repository: str) -> list[object]:
        held.append(samples.locked(tmp_path))
        return [release("v2.2.0", asset(samples.build("3.11").index_name))]

    def written(path: Path, content: bytes) -> None:
        held.append(samples.locked(tmp_path))
        put(path, content)

    monkeypatch.setattr(indexes, "releases", listed)
    monkeypatch.setattr(indexes, "put", written)
    assert commands.main(["index", "--releases", "someone/something", "--output", str(tmp_path)]) == 0
    assert len(held) > 1
    assert all(held)
    assert not samples.locked(tmp_path)


@pytest.mark.parametrize("name", ["sageattention-2.2.0.whl", "sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl"])
def test_a_name_that_says_too_little(name: str) -> None:
    with pytest.raises(indexes.SiteError, match=re.escape(name)):
        indexes.describe(name, name, "0")


@pytest.mark.parametrize(
    ("repository", "told", "address"),
    [
        ("Someone/ours", "", "https://someone.github.io/ours"),
        ("Someone/someone.github.io", "", "https://someone.github.io/"),
        ("Someone/Someone.github.io", "", "https://someone.github.io/"),
        ("Someone/ours", "https://example.org/", "https://example.org/"),
        ("", "", ""),
    ],
)
def test_where_github_serves_them(monkeypatch: pytest.MonkeyPatch, repository: str, told: str, address: str) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    monkeypatch.setenv("INDEX_URL", told)
    assert indexes.address() == address
