"""Another build of a version: what was released stays byte for byte, what is new or repaired is built, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import github_stand_in
import pytest
import samples

from sage_factory import commands
from sage_factory.files import sha256
from sage_factory.make import wheels
from sage_factory.ship import collect, earlier, indexes, tag
from sage_factory.what import matrix, variant
from sage_factory.what.build import Build
from sage_factory.what.table import MatrixError

PROFILE, BUILDS = samples.PROFILE, samples.BUILDS
OURS = matrix.load().packages["sageattention"]
NEW = samples.build("3.13")
pytestmark = pytest.mark.usefixtures("sample_profile")


def release(dist: Path, tag: str) -> int:
    to = ["--dist", str(dist), "--index-url", "https://example.org", "--repository", "someone/ours"]
    return commands.main(["release", "--tag", tag, "--profile", PROFILE, *to, "--publish"])


def promise(builds: tuple[Build, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile has these builds from now on."""
    monkeypatch.setattr(samples, "BUILDS", builds)
    rest = tuple(b for b in matrix.load().all_builds if b.wheel_name not in {one.wheel_name for one in builds})
    samples.promise((*builds, *rest), monkeypatch)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()) for path in folder.rglob("*") if path.suffix in (".whl", ".conda")}


def test_what_is_new_is_built_and_the_rest_taken_as_it_is(
    dist: Path,
    github: github_stand_in.GitHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert release(dist, "v2.2.0") == 0
    before = digests(github.files("v2.2.0"))
    promise((*BUILDS, NEW), monkeypatch)
    there = earlier.published(github.releases, OURS, "v2.2.0-build.1")
    assert earlier.left(samples.BUILDS, there) == (NEW,)
    # The job that builds finds the packages, and so makes a wheel of the very same operators. Wheels are packed otherwise meanwhile.
    real = wheels._metadata
    monkeypatch.setattr(wheels, "_metadata", lambda *given: real(*given).replace(b"Read me.", b"Read me now."))
    second = tmp_path / "second"
    fetched = earlier.fetch(earlier.wanted(there, samples.BUILDS), second / "conda", "someone/ours")
    assert {path.relative_to(second / "conda").parts[0] for path in fetched} == {"noarch", "linux-64"}
    operators, kernels = sorted(fetched, key=lambda path: path.parent.name)
    wheels.emit(operators, kernels, build=NEW, out_dir=second / "wheels")
    assert commands.main(["earlier", "--tag", "v2.2.0-build.1", "--profile", PROFILE, "--dist", str(second)]) == 0
    assert "4 files of earlier releases, which have 6" in capsys.readouterr().out, (
        "two wheels in both forms; the packages are here"
    )
    assert release(second, "v2.2.0-build.1") == 0
    after = digests(github.files("v2.2.0-build.1"))
    assert after.items() >= before.items()
    assert after.keys() - before.keys() == {NEW.wheel_name, NEW.index_name}
    signed = (second / "release" / "BUILT").read_text().split()[1::2]
    assert set(signed) == {
        NEW.wheel_name,
        NEW.index_name,
        f"{NEW.index_name}.metadata",
        "sageattention-2.2.0-build.1.cdx.json",
    }, "this run built nothing else, and says so"
    links = indexes.links(github.releases)
    assert {link.name for link in links if link.metadata_sha256} == {build.index_name for build in samples.BUILDS}


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_repair_changes_packing_alone_and_has_a_number_of_its_own(
    withdrawn: bool, dist: Path, github: github_stand_in.GitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert release(dist, "v2.2.0") == 0
    if withdrawn:
        assert commands.main(["withdraw", "--tag", "v2.2.0", "--reason", "worse"]) == 0
    repaired = tuple(dataclasses.replace(build, number=1) for build in BUILDS)
    promise(repaired, monkeypatch)
    there = earlier.published(github.releases, OURS, "v2.2.0-build.1")
    assert earlier.left(repaired, there) == repaired
    earlier.refuse_withdrawn(github.releases, repaired, "v2.2.0-build.1")
    assert {file.name.split("-")[1] for file in earlier.wanted(there, repaired)} == {"cubins"}, (
        "of the faulty ones none is taken"
    )
    second = tmp_path / "second"
    earlier.fetch(earlier.wanted(there, repaired), second / "conda", "someone/ours")
    (kernels,) = second.rglob("*.conda")
    described = samples.index("sageattention") | {
        "build": "torch280_cu128_h2_1",
        "build_number": variant.number(repaired[0], matrix.load()),
    }
    operators = samples.conda(second / "conda" / "linux-64", samples.operators(), described)
    made = [wheels.emit(operators, kernels, build=build, out_dir=second / "wheels") for build in repaired]
    assert [path.name for path in made] == [f"sageattention-2.2.0-280.128.1-cp31{n}-cp31{n}-linux_x86_64.whl" for n in (1, 2)]
    assert b"\nBuild: 280.128.1\n" in samples.contents(made[0])[f"{samples.DIST_INFO}/WHEEL"]
    assert commands.main(["earlier", "--tag", "v2.2.0-build.1", "--profile", PROFILE, "--dist", str(second)]) == 0
    assert release(second, "v2.2.0-build.1") == 0
    assert f"{repaired[0].package}-2.2.0+torch2.8.cu128.1-cp311-cp311-manylinux_2_28_x86_64.linux_x86_64.whl" in digests(
        github.files("v2.2.0-build.1")
    )


def test_numbers_rise_with_a_repair_and_never_beyond_a_newer_pytorch() -> None:
    table, build = matrix.load(), samples.build()
    again = dataclasses.replace(build, number=1)
    newer = next(b for b in table.all_builds if b.torch == "2.8.0" and b.cuda == "12.9")
    numbers = [variant.number(one, table) for one in (build, again, dataclasses.replace(build, number=99), newer)]
    assert numbers == sorted(set(numbers))
    assert numbers[1] - numbers[0] == 1


@pytest.mark.parametrize("number", [-1, 100, "1", True, 1.0])
def test_a_number_that_is_none(number: Any, tmp_path: Path) -> None:
    text = matrix.TABLE.read_text(encoding="utf-8")
    row = '{pytorch: 2.8.0, cuda: "12.8"}'
    assert row in text
    path = tmp_path / "variants.yaml"
    path.write_text(text.replace(row, f'{{pytorch: 2.8.0, cuda: "12.8", build: {json.dumps(number)}}}'))
    with pytest.raises(MatrixError, match="expected a number from 0"):
        matrix.load(path)
    path.write_text(text.replace(row, '{pytorch: 2.8.0, cuda: "12.8", build: 2}'))
    built = [b for b in matrix.load(path).all_builds if (b.package, b.torch, b.cuda) == ("sageattention", "2.8.0", "12.8")]
    assert {b.number for b in built} == {2}


def test_what_was_released_with_other_content_stops_it(
    dist: Path, github: github_stand_in.GitHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = Path(shutil.copytree(dist, tmp_path / "second"))
    assert release(dist, "v2.2.0") == 0
    wheel = second / "wheels" / BUILDS[0].wheel_name
    samples.rewrite(wheel, samples.contents(wheel) | {"sageattention/__init__.py": b"# other\n"})
    assert commands.main(["earlier", "--tag", "v2.2.0-build.1", "--profile", PROFILE, "--dist", str(second)]) == 1
    assert f"{wheel.name} was released as v2.2.0 with other content" in capsys.readouterr().err
    (kernels,) = second.rglob("*-cubins-*.conda")
    kernels.write_bytes(kernels.read_bytes() + b"\0")
    assert commands.main(["earlier", "--tag", "v2.2.0-build.1", "--profile", PROFILE, "--dist", str(second)]) == 1
    said = capsys.readouterr().err
    assert f"{kernels.name} was released as v2.2.0 with other content" in said
    assert "`earlier --packages` fetches that one" in said, "no number of a row is in its name"


def test_a_download_is_what_github_says_or_nothing(
    dist: Path, github: github_stand_in.GitHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release(dist, "v2.2.0") == 0
    path = github.files("v2.2.0") / BUILDS[0].wheel_name
    path.write_bytes(path.read_bytes() + b"\0")
    assert commands.main(["earlier", "--tag", "v2.2.0-build.1", "--profile", PROFILE, "--dist", str(tmp_path / "second")]) == 1
    assert f"{path.name} of release v2.2.0 is not the file whose SHA-256 GitHub states" in capsys.readouterr().err


def test_whose_files_are_taken() -> None:
    def one(tag: str, **more: Any) -> dict[str, Any]:
        name = {"name": f"{tag}.whl", "digest": "sha256:0"}
        return {"tag_name": tag, "draft": False, "body": "", "assets": [name, {"name": "SHA256SUMS"}], **more}

    releases = [
        one("v2.2.0"),
        one("v2.2.0-build.1", body="Withdrawn: wrong kernels\n\n| PyTorch |"),
        one("v2.2.0-build.2", draft=True),
        one("v2.2.0-build.3"),
        one("v2.2.01"),
        one("v2.1.0"),
        one("sageattn3-v2.2.0"),
    ]
    assert earlier.published(releases, OURS, "v2.2.0-build.3").keys() == {"v2.2.0.whl"}
    kernels, operators = (f"{stem}h1_0.conda" for stem in (BUILDS[0].cubins_stem, BUILDS[0].operators_stem))
    gone = one("v2.2.0", body="Withdrawn: x")
    gone["assets"] += [{"name": name, "digest": "sha256:0"} for name in (kernels, operators)]
    assert earlier.published([gone], OURS, "v2.2.0-build.1").keys() == {kernels}
    new = (dataclasses.replace(BUILDS[0], python="3.14"),)
    with pytest.raises(earlier.EarlierError, match=f"{operators} cannot be released again: the withdrawn v2.2.0 has"):
        earlier.refuse_withdrawn([gone], new, "v2.2.0-build.1")
    earlier.refuse_withdrawn([gone], [dataclasses.replace(new[0], number=1)], "v2.2.0-build.1")
    with pytest.raises(earlier.EarlierError, match="have every wheel of the profile: add a row"):
        earlier.left(BUILDS, {build.wheel_name: earlier.File("v2.2.0", build.wheel_name, "") for build in BUILDS})


def test_what_lies_in_dist_and_is_said_to_be_released_is_looked_at(dist: Path) -> None:
    wheel = dist / "wheels" / BUILDS[0].wheel_name
    (dist / earlier.LIST).write_text(f"{sha256(wheel.read_bytes())}  wheels/{wheel.name}\n")
    assert collect.collect(dist, PROFILE).earlier == {wheel.name}
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(earlier.EarlierError, match="not the released ones: wheels/sageattention-"):
        collect.collect(dist, PROFILE)


def test_the_plan_of_a_tag_leaves_out_what_is_there(
    github: github_stand_in.GitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = matrix.builds("release")
    gone = {builds[0].wheel_name, builds[-1].wheel_name}
    assets = [{"name": build.wheel_name, "digest": "sha256:0"} for build in builds if build.wheel_name not in gone]
    github.set([{"tag_name": "v2.2.0", "draft": False, "body": "", "assets": assets}])
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "out"))
    checked: list[str] = []
    monkeypatch.setattr(tag, "check", checked.append)
    asked = ["plan", "--event", "push", "--ref", "refs/tags/v2.2.0-build.1", "--releases", "someone/ours"]
    assert commands.main(asked) == 0
    assert checked == ["v2.2.0-build.1"]
    told = dict(line.split("=", 1) for line in (tmp_path / "out").read_text().splitlines())
    (tmp_path / "out").unlink()
    bad = {
        "tag_name": "v2.1.0",
        "draft": False,
        "body": "Withdrawn: x",
        "assets": [{"name": builds[0].index_name, "digest": None}],
    }
    github.set([*github.releases, bad])
    assert commands.main(asked) == 2, "before anything is built, not when all is"
    assert f"{builds[0].index_name} cannot be released again: the withdrawn v2.1.0 has" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    jobs = json.loads(told["jobs"])["include"]
    assert [(job["torch"], job["platform"], job["pythons"]) for job in jobs] == [
        (build.torch, build.platform, build.python) for build in (builds[0], builds[-1])
    ]
    assert [job["cuda"] for job in json.loads(told["kernels"])["include"]] == sorted({builds[0].cuda, builds[-1].cuda})
