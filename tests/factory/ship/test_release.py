"""Releases: the tag, the notes made of what was built, the sums; on GitHub all of it or, until then, a draft."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import github_stand_in
import pytest
import samples

from sage_factory import ROOT, commands
from sage_factory.files import put, sha256
from sage_factory.make import wheels
from sage_factory.ship import collect, release
from sage_factory.what import matrix

PROFILE, BUILDS = samples.PROFILE, samples.BUILDS
URL = "https://example.github.io/ours"
pytestmark = pytest.mark.usefixtures("sample_profile")


@pytest.mark.parametrize("name", ["v2.3.0", "2.2.0", "v2.2.0-build.0", "v2.2.0-build", "v2.2.0rc1"])
def test_a_tag_of_another_version_is_refused(dist: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dist, name) == 1
    assert f"tag {name} is not one of sageattention 2.2.0, which variants.yaml states" in capsys.readouterr().err
    assert not (dist / "release").exists()


# Notes and sums.


def run(dist: Path, name: str = "v2.2.0", *more: str) -> int:
    to = ["--profile", PROFILE, "--dist", str(dist), "--index-url", URL, "--channel-url", "https://prefix.dev/ours"]
    return commands.main(["release", "--tag", name, *to, *more])


def test_notes_and_sums_say_what_was_built(dist: Path) -> None:
    assert run(dist) == 0
    notes = (dist / "release" / "NOTES.md").read_text(encoding="utf-8")
    promised = matrix.load().cuda[samples.CUDA]
    code = ", ".join([*matrix.targets(promised.architectures), *(f"compute_{a.replace('.', '')}" for a in promised.ptx)])
    assert f"| 2.8 | 12.8 | 3.11, 3.12 | linux-64 | `2.2.0+torch2.8.cu128` | `cu12`, `cu128-torch28` | {code} |" in notes
    assert f"pip install --upgrade sageattention --index-url {URL}/cu12/  # PyTorch for CUDA 12\n" in notes
    assert f"pip install sageattention==2.2.0+torch2.8.cu128 --index-url {URL}/cu12/  # this one, whatever was there\n" in notes
    assert "gh attestation" not in notes, "of a repository that nobody named"
    assert "conda install -c https://prefix.dev/ours -c conda-forge sageattention=2.2.0" in notes
    assert "c" * 40 in notes
    sums = (dist / "release" / "SHA256SUMS").read_text(encoding="utf-8")
    bill = dist / "release" / "sageattention-2.2.0.cdx.json"
    offered = [dist / "release" / "index" / build.index_name for build in BUILDS]
    described = [path.with_name(f"{path.name}.metadata") for path in offered]
    files = [*collect.collect(dist, PROFILE).files, *offered, *described]
    parts = json.loads(bill.read_text())["metadata"]["component"]["components"]
    assert {part["name"] for part in parts} == {path.name for path in files}
    assert dict(line.split("  ")[::-1] for line in sums.splitlines()) == {
        path.name: sha256(path.read_bytes()) for path in (*files, bill)
    }
    assert [wheels.index_url(path) for path in offered] == [f"{URL}/"] * 2


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            True,
            "of conda-forge or of its own index for CUDA 12.6 (`uv pip install 'torch==2.6.*' --torch-backend cu126`), not beside PyPI's",
        ),
        (False, "of PyPI alone"),
    ],
)
def test_notes_say_which_pytorch_2_6_to_take(new: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.Release, "_code", lambda *_: "")  # of kernels that are not there
    build = matrix.builds(platform="linux-64", torch="2.6.0", cuda="12.6", python="3.12")[0]
    group = samples.a_group("linux-64")
    group = dataclasses.replace(group, builds=(build,))
    group.__dict__["made"] = {"commit": "c" * 40, "cxx11_abi": new}
    assert said in release.prepare("v2.2.0", collect.Collection((group,), ()), URL).notes()
    other = samples.a_group("linux-64")
    other.__dict__["made"] = group.made
    assert "C++ ABI" not in release.prepare("v2.2.0", collect.Collection((other,), ()), URL).notes()


def test_a_folder_of_indexes_has_the_files_of_the_release(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again for the same address, or given as the release has them, whatever address is told."""
    assert run(dist) == 0
    released = {path.name: path.read_bytes() for path in (dist / "release" / "index").glob("*.whl")}
    made = ["publish", "--profile", PROFILE, "--dist", str(dist), "--index", str(dist / "made"), "--index-url", URL]
    assert commands.main(made) == 0
    monkeypatch.setenv("INDEX_URL", "https://example.com/another")
    given = [str(path) for path in (dist / "release" / "index").glob("*.whl")]
    assert commands.main(["index", *given, "--output", str(dist / "given")]) == 0
    for folder in ("made", "given"):
        assert {path.name: path.read_bytes() for path in (dist / folder).rglob("*.whl")} == released


def test_the_same_files_make_the_same_release(dist: Path) -> None:
    contents = []
    for _ in range(2):
        assert run(dist) == 0
        contents.append({path.name: path.read_bytes() for path in (dist / "release").rglob("*") if path.is_file()})
    assert contents[0] == contents[1]


def test_two_at_once_take_turns(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    def written(path: Path, content: bytes) -> None:
        held.append(samples.locked(dist / "release"))
        put(path, content)

    monkeypatch.setattr(release, "put", written)
    assert run(dist) == 0
    assert len(held) > 1
    assert all(held)


def test_the_index_is_githubs_pages_unless_told(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "Someone/ours")
    assert commands.main(["release", "--tag", "v2.2.0", "--profile", PROFILE, "--dist", str(dist)]) == 0
    notes = (dist / "release" / "NOTES.md").read_text(encoding="utf-8")
    assert "--index-url https://someone.github.io/ours/cu12/" in notes
    assert "`gh attestation verify FILE --repo Someone/ours`" in notes
    assert "OWNER/REPO" not in notes
    assert "conda install" not in notes, "no channel was named"


@pytest.mark.parametrize("told", ["", "pages.example.org/ours"])
def test_what_is_no_address_of_the_indexes_is_refused(told: str, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Notes would have it, and wheels, which nothing replaces."""
    assert run(dist, "v2.2.0", "--index-url", told) == 1
    assert "say where pip's indexes are, by a whole address, https://…" in capsys.readouterr().err
    assert not (dist / "release").exists()


@pytest.mark.parametrize(
    ("commit", "said"),
    [("c" * 40 + "+", r"sources that were not committed \(c{40}\+\): commit, and build again"), ("", r"no commit \(none\)")],
)
def test_what_nobody_could_build_again_is_not_released(
    commit: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(samples.a_dist(tmp_path, commit=commit)) == 1
    assert re.search(said, capsys.readouterr().err)


def test_half_a_profile_is_not_released(dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dist / "wheels" / BUILDS[0].wheel_name).unlink()
    assert run(dist) == 1
    assert f"wheels/{BUILDS[0].wheel_name} is missing" in capsys.readouterr().err


# GitHub.


def test_a_release_is_a_draft_until_all_of_it_is_there(
    dist: Path, github: github_stand_in.GitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    github.refuse.write_text(BUILDS[1].wheel_name)
    assert run(dist, "v2.2.0", "--publish") == 1
    assert "`gh release upload` failed: HTTP 500. Run it again to go on" in capsys.readouterr().err
    (there,) = github.releases
    assert (there["draft"], len(there["assets"])) == (True, 3)
    github.refuse.write_text("")
    assert run(dist, "v2.2.0", "--publish") == 0
    assert "release v2.2.0 is public: 7 files new, 10 in all" in capsys.readouterr().out
    (there,) = github.releases
    names = (
        {path.name for path in collect.collect(dist, PROFILE).files}
        | {"SHA256SUMS", "sageattention-2.2.0.cdx.json", *(f"{build.index_name}.metadata" for build in BUILDS)}
        | {build.index_name for build in BUILDS}
    )
    assert (there["draft"], {asset["name"] for asset in there["assets"]}) == (False, names)
    assert run(dist, "v2.2.0", "--publish") == 0
    assert "0 files new, 10 in all" in capsys.readouterr().out
    assert (github.asked("release create"), github.asked("release edit"), github.asked("release upload")) == (1, 1, 11)


def test_github_is_asked_of_this_checkout_wherever_one_stands(
    dist: Path, github: github_stand_in.GitHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dist.parent)
    assert run(Path(dist.name), "v2.2.0", "--publish") == 0
    assert github.where == ROOT


def test_what_was_signed_for_is_what_is_published(
    dist: Path, github: github_stand_in.GitHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another Python's zlib would pack the indexes' wheels otherwise: as another level does here."""
    assert run(dist) == 0
    built = (dist / "release" / "BUILT").read_text(encoding="utf-8")
    signed = {path.name: path.read_bytes() for path in (dist / "release" / "index").glob("*.whl")}
    monkeypatch.setattr(wheels, "LEVEL", 1)
    assert run(dist, "v2.2.0", "--publish") == 0
    assert (dist / "release" / "BUILT").read_text(encoding="utf-8") == built
    assert {path.name: path.read_bytes() for path in (dist / "release" / "index").glob("*.whl")} == signed
    published = {asset["name"]: asset["digest"] for asset in github.releases[0]["assets"]}
    assert all(published[name] == f"sha256:{digest}" for digest, name in map(str.split, built.splitlines()))


def test_what_was_not_signed_for_is_not_published(
    dist: Path, github: github_stand_in.GitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dist) == 0
    built = (dist / "release" / "BUILT").read_bytes()
    for _ in range(2):
        assert run(dist, "v2.2.0", "--publish", "--index-url", "https://example.com/another") == 1
        said = capsys.readouterr().err
        assert "an earlier run has made v2.2.0 ready with other content" in said
        assert BUILDS[0].index_name in said
        assert "the --index-url that it was told, https://example.com/another here" in said
        assert (dist / "release" / "BUILT").read_bytes() == built
    assert github.releases == []
    assert run(dist, "v2.2.0", "--publish") == 0


def test_an_upload_whose_answer_was_lost_is_done(dist: Path, github: github_stand_in.GitHub) -> None:
    github.lost.write_text(BUILDS[1].wheel_name)
    assert run(dist, "v2.2.0", "--publish") == 0
    (there,) = github.releases
    assert (there["draft"], len(there["assets"])) == (False, 10)


def test_a_withdrawn_release_is_yanked_and_offered_again(
    dist: Path, github: github_stand_in.GitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    def page() -> str:
        assert commands.main(["index", "--releases", "someone/ours", "--output", str(dist / "site")]) == 0
        return (dist / "site" / "cu12" / "sageattention" / "index.html").read_text(encoding="utf-8")

    assert run(dist, "v2.2.0", "--publish") == 0
    notes = github.releases[0]["body"]
    assert "data-yanked" not in page()
    for reason in ('wrong kernels for "8.9"', "worse"):
        assert commands.main(["withdraw", "--tag", "v2.2.0", "--reason", reason]) == 0
        assert github.releases[0]["body"] == f"Withdrawn: {reason}\n\n{notes}"
        assert page().count(f'data-yanked="{html.escape(reason)}"') == len(BUILDS)
    assert run(dist, "v2.2.0-build.1", "--publish") == 0
    assert "data-yanked" not in page(), "another release has the same files, and is good"
    assert commands.main(["withdraw", "--tag", "v2.2.0"]) == 0
    assert github.releases[1]["body"] == notes
    edits = github.asked("release edit")
    capsys.readouterr()
    assert commands.main(["withdraw", "--tag", "v2.2.0", "--reason", " "]) == 0
    assert capsys.readouterr().out == "v2.2.0 is offered already\n"
    assert github.asked("release edit") == edits, "there was nothing to do"
    assert commands.main(["withdraw", "--tag", "v9"]) == 1


def change(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda there: there["assets"][0].update({key: value})


def test_an_upload_that_was_cut_off_is_made_again(dist: Path, github: github_stand_in.GitHub) -> None:
    assert run(dist, "v2.2.0", "--publish") == 0
    (there,) = github.releases
    there["draft"] = True
    there["assets"][0]["state"] = "starter"
    github.set([there])
    assert run(dist, "v2.2.0", "--publish") == 0
    (there,) = github.releases
    assert (there["draft"], {asset["state"] for asset in there["assets"]}) == (False, {"uploaded"})


def test_a_draft_is_made_what_this_run_has(dist: Path, github: github_stand_in.GitHub) -> None:
    """Nobody has taken anything from it: an earlier run may have made files otherwise, or others."""
    assert run(dist, "v2.2.0", "--publish") == 0
    (whole,) = github.releases
    (there,) = github.releases
    there |= {"draft": True, "body": "of another run"}
    there["assets"][0]["digest"] = "sha256:0"
    there["assets"].append({"name": "stray", "state": "uploaded", "digest": "sha256:0"})
    github.set([there])
    assert run(dist, "v2.2.0", "--publish") == 0

    def shown(one: dict[str, Any]) -> object:
        return one["draft"], one["body"], {asset["name"]: asset["digest"] for asset in one["assets"]}

    assert [shown(one) for one in github.releases] == [shown(whole)]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lambda there: there["assets"][0].update(digest="sha256:0"),
            "published files are never replaced, and release v2.2.0 has other",
        ),
        (
            lambda there: there["assets"].append({"name": "x", "state": "uploaded", "digest": ""}),
            "has files that this one has not: x",
        ),
        (lambda there: there["assets"].pop(), "is public already and lacks SHA256SUMS: release a new build"),
    ],
)
def test_what_is_public_stays_as_it_is(
    harm: Callable[[dict[str, Any]], None],
    said: str,
    dist: Path,
    github: github_stand_in.GitHub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(dist, "v2.2.0", "--publish") == 0
    (there,) = github.releases
    harm(there)
    github.set([there])
    assert run(dist, "v2.2.0", "--publish") == 1
    assert said in capsys.readouterr().err
    assert github.releases == [there]


def test_a_second_build_has_the_wheels_of_the_first_or_none(
    dist: Path, github: github_stand_in.GitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dist, "v2.2.0", "--publish") == 0
    assert run(dist, "v2.2.0-build.1", "--publish") == 0
    first, second = github.releases[1], github.releases[0]
    assert (second["tag_name"], second["draft"]) == ("v2.2.0-build.1", False)
    packed = [[a for a in one["assets"] if a["name"].endswith((".whl", ".conda"))] for one in (first, second)]
    assert packed[0] == packed[1]
    assert len(packed[0]) == 6
    (wheel,) = [asset for asset in first["assets"] if asset["name"] == BUILDS[0].wheel_name]
    wheel["digest"] = "sha256:0"
    github.set([first])
    capsys.readouterr()
    assert run(dist, "v2.2.0-build.1", "--publish") == 1
    assert f"{BUILDS[0].wheel_name} was released as v2.2.0 with other content" in capsys.readouterr().err
    assert github.releases == [first]


# What only several platforms can do to each other.


def test_platforms_are_of_one_commit_and_have_names_of_their_own() -> None:
    apart = samples.a_group("win-64", operators="torch280_cu128_h3_0", commit="d" * 40)
    with pytest.raises(release.ReleaseError, match=r"built of different sources: \S+_h2_0\.conda of c+, \S+_h3_0\.conda of d+"):
        release.prepare("v2.2.0", collect.Collection((samples.a_group("linux-64"), apart), ()), URL)
    with pytest.raises(
        release.ReleaseError, match=r"two files of one name.*: sageattention-2\.2\.0-torch280_cu128_h2_0\.conda"
    ):
        release.prepare("v2.2.0", collect.Collection((samples.a_group("linux-64"), samples.a_group("win-64")), ()), URL)
