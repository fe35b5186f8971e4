"""sageattn3's files go the way of sageattention's: packed, inspected, collected, released, published, built again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import samples

from sage_factory import commands
from sage_factory.files import sha256
from sage_factory.inspect import content, verify
from sage_factory.make import wheels
from sage_factory.ship import collect, indexes, reproduce
from sage_factory.what import inputs, matrix

NAME = "sageattn3"
WHEEL = "sageattn3-1.0.0+cu128torch2.8.0-cp312-cp312-linux_x86_64.whl"
INFO = "sageattn3-1.0.0+cu128torch2.8.0.dist-info"


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like dist/ that holds a profile of two wheels, and sageattention's files beside them."""
    folder = samples.a_dist(tmp_path / "dist")
    packages = (
        samples.operators_conda(folder / "conda" / "linux-64", package=NAME),
        samples.cubins_conda(folder / "conda" / "noarch", package=NAME),
    )
    builds = tuple(samples.build(python, package=NAME) for python in ("3.11", "3.12"))
    for one in builds:
        wheels.emit(*packages, build=one, out_dir=folder / "wheels")
    known = matrix.builds
    monkeypatch.setattr(matrix, "builds", lambda *a, **k: builds if a[:1] == ("sample",) else known(*a, **k))
    return folder


def test_the_wheel(dist: Path) -> None:
    path = dist / "wheels" / WHEEL
    assert verify.verify(path) == []
    files = samples.contents(path)
    metadata, wheel = (files[f"{INFO}/{name}"].decode() for name in ("METADATA", "WHEEL"))
    assert "\nVersion: 1.0.0+cu128torch2.8.0\n" in metadata
    assert "\nRequires-Dist: torch==2.8.*\n" in metadata
    assert "Build:" not in wheel
    assert {name.split("/")[0] for name in files} == {NAME, INFO}
    assert f"{NAME}/cubins/sm_120a/mask_tiles.cubin" in files


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (f"{INFO}/METADATA", b"+cu128torch2.8.0", b"", "METADATA says Version 1.0.0, expected 1.0.0+cu128torch2.8.0"),
        (
            f"{INFO}/METADATA",
            b"torch==2.8.*",
            b"torch",
            "expected torch==2.8.* alone as the version 1.0.0+cu128torch2.8.0 says",
        ),
        (f"{INFO}/WHEEL", b"Tag:", b"Build: 280.128\nTag:", "WHEEL says Build 280.128, expected nothing"),
        (f"{NAME}/_build.json", b"1.0.0", b"2.2.0", "_build.json says version '2.2.0', expected '1.0.0'"),
    ],
)
def test_a_fault_of_the_wheel(dist: Path, name: str, old: bytes, new: bytes, said: str) -> None:
    path = dist / "wheels" / WHEEL
    files = samples.contents(path)
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    record = f"{INFO}/RECORD"
    del files[record]
    files[record] = wheels._record(files, record)
    path.write_bytes(wheels._zipped(files, last=f"{INFO}/"))
    assert said in "\n".join(verify.verify(path))


def test_a_kernel_that_is_missing_is_missed(tmp_path: Path) -> None:
    files = samples.cubin_set(package=NAME)
    gone = "sm_120a/sm120_qk_fp4_pv_fp4-d128-bf16.cubin"
    del files[gone]
    files["manifest.json"] = samples.manifest(files, list(content.instances("12.8", NAME)), NAME)
    (fault,) = verify.verify(samples.cubins_conda(tmp_path / "noarch", files, NAME))
    assert fault == f"cubins/{gone} is missing: variants.yaml promises sm_120a for CUDA 12.8"


def test_each_package_has_its_own_kernels() -> None:
    mine, others = (set(content.instances("12.9", package)) for package in (NAME, "sageattention"))
    assert mine & others == {"mask_tiles", "seen_keys"}
    assert {name.partition("-")[0] for name in mine} == {
        "mask_tiles",
        "seen_keys",
        "means",
        "quant_kv_fp4",
        "sm120_qk_fp4_pv_fp4",
    }
    assert not any("fp4" in name for name in others)


def test_it_is_collected_apart_from_what_lies_beside_it(dist: Path) -> None:
    found = collect.collect(dist, "sample")
    assert {path.name for path in found.files} == {
        *(build.wheel_name for build in found.builds),
        "sageattn3-1.0.0-torch280_cu128_h2_0.conda",
        "sageattn3-cubins-1.0.0-cu128_h1_0.conda",
    }
    assert all(path.name.startswith("sageattention-") for path in found.others)
    (dist / "conda" / "noarch" / "sageattn3-cubins-1.0.0-cu128_h1_0.conda").unlink()
    with pytest.raises(collect.CollectError, match=r"sageattn3-cubins-1\.0\.0-cu128_h1_0\.conda is missing, which sageattn3-1"):
        collect.collect(dist, "sample")


def test_it_is_released_under_its_own_tag(dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--profile", "sample", "--dist", str(dist), "--index-url", "https://x/simple", "--channel-url", "https://y/ours"]
    assert commands.main(["release", "--tag", "sageattn3-v1.0.0", *to]) == 0
    notes = (dist / "release" / "NOTES.md").read_text(encoding="utf-8")
    assert "pip install --upgrade sageattn3 --index-url https://x/simple/cu12/  # PyTorch for CUDA 12\n" in notes
    assert "pip install sageattn3==1.0.0+cu128torch2.8.0 --index-url https://x/simple/cu12/  # this one" in notes
    assert "conda install -c https://y/ours -c conda-forge sageattn3=1.0.0" in notes
    assert "| 2.8 | 12.8 | 3.11, 3.12 | linux-64 | `1.0.0+cu128torch2.8.0` | `cu12`, `cu128-torch28` | sm_120a |" in notes
    bill = json.loads((dist / "release" / "sageattn3-1.0.0.cdx.json").read_text(encoding="utf-8"))["metadata"]["component"]
    names = {path.name for path in collect.collect(dist, "sample").files}
    beside = {f"{name}.metadata" for name in names if name.endswith(".whl")}
    assert (bill["name"], {part["name"] for part in bill["components"]}) == (NAME, names | beside), (
        "each wheel once: indexes have the same"
    )
    offered = dist / "release" / "index" / WHEEL
    assert wheels.index_url(offered) == "https://x/simple/", "which the import error names"
    assert verify.verify(offered) == []
    part = next(part for part in bill["components"] if part["name"] == WHEEL)
    assert part["hashes"][0]["content"] == sha256(offered.read_bytes()), "of a name there is one file in a release"
    # Built again, or taken back to where no address is known, it is what was built.
    again = wheels.for_index(offered, build=samples.build("3.12", package=NAME), out_dir=dist / "again")
    assert again.read_bytes() == (dist / "wheels" / WHEEL).read_bytes()
    capsys.readouterr()
    assert commands.main(["release", "--tag", "v1.0.0", *to]) == 1
    assert "expected sageattn3-v1.0.0 or sageattn3-v1.0.0-build.N" in capsys.readouterr().err


def test_two_packages_are_no_release(dist: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    both = [samples.build("3.12", package=package) for package in ("sageattention", NAME)]
    monkeypatch.setattr(matrix, "builds", lambda *_a, **_k: tuple(both))
    to = ["--profile", "sample", "--dist", str(dist), "--index-url", "https://x/simple"]
    assert commands.main(["release", "--tag", "v2.2.0", *to]) == 1
    assert "a release is of one package: this is of sageattention and of sageattn3" in capsys.readouterr().err


def test_it_is_published_to_the_same_index_and_channel(dist: Path, tmp_path: Path) -> None:
    to = ["--dist", str(dist), "--profile", "sample", "--channel", str(tmp_path / "conda"), "--index", str(tmp_path / "simple")]
    assert commands.main(["publish", *to]) == 0
    assert (tmp_path / "conda" / "noarch" / "sageattn3-cubins-1.0.0-cu128_h1_0.conda").is_file()
    page = (tmp_path / "simple" / "cu128-torch28" / "sageattn3" / "index.html").read_text(encoding="utf-8")
    assert "sageattn3-1.0.0%2Bcu128torch2.8.0-cp312-cp312-linux_x86_64.whl#sha256=" in page
    assert commands.main(["publish", *to]) == 0, "again, and nothing is new"


def test_a_repaired_one_has_a_version_of_its_own() -> None:
    build = samples.build(package=NAME)
    again = dataclasses.replace(build, number=1)
    assert again.wheel_name == again.index_name == WHEEL.replace("torch2.8.0", "torch2.8.0.1")
    assert indexes.describe(again.index_name, "", "").folder == build.index_folder == "cu128-torch28"


def test_a_name_that_is_no_builds_has_no_index() -> None:
    with pytest.raises(indexes.SiteError, match="does not say for which PyTorch and CUDA it is"):
        indexes.describe("sageattn3-1.0.0+local-cp312-cp312-linux_x86_64.whl", "", "")


def test_how_it_was_made(tmp_path: Path) -> None:
    """`reproduce` names the package to `build`; of sageattention it does not, whose older checkouts know no such option."""
    for package, named in ((NAME, ("--package", NAME)), ("sageattention", ())):
        path = samples.a_wheel(tmp_path / package, package=package)
        made = reproduce.origin(path)
        assert made.arguments == (*named, "--cuda", "12.8", "--torch", "2.8.0", "--python", "3.12")
        assert made.tag == {NAME: "sageattn3-v1.0.0", "sageattention": "v2.2.0"}[package]
        assert made.inputs == inputs.operators(package)


def test_what_goes_into_each() -> None:
    """Another sentence in sageattn3's README is no other sageattention."""
    mine, others = (inputs.operators(package) for package in (NAME, "sageattention"))
    assert {*mine} - {*others} == {"sageattention3_blackwell"}
    assert {*others} - {*mine} == {"pyproject.toml", "README.md"}
    for path in (*mine, *others):
        assert (Path(samples.__file__).parents[1] / path).exists(), path
