"""Wheels: what is in a wheel, and that the same inputs give the same bytes."""

from __future__ import annotations

import dataclasses
import email
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import samples
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from sage_factory.files import sha256
from sage_factory.inspect import verify
from sage_factory.make import wheels
from sage_factory.what import matrix


def test_name_states_torch_cuda_and_python(wheel_path: Path) -> None:
    assert wheel_path.name == "sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl"
    _, version, build, tags = parse_wheel_filename(wheel_path.name)
    assert (str(version), build, [str(tag) for tag in tags]) == ("2.2.0", (280, ".128"), ["cp312-cp312-linux_x86_64"])


def test_holds_both_packages_and_nothing_of_the_installation(wheel_path: Path) -> None:
    files = samples.contents(wheel_path)
    assert {"sageattention/__init__.py", "sageattention/_C.so", "sageattention/cubins/manifest.json"} <= files.keys()
    assert files["sageattention/cubins/sm_90a/quant_k_int8-d64-fp16.cubin"] == samples.cubin(90)
    assert f"{samples.DIST_INFO}/licenses/LICENSE" in files
    assert f"{samples.DIST_INFO}/INSTALLER" not in files


def test_metadata_pins_torch_and_python_and_keeps_the_description(wheel_path: Path) -> None:
    metadata = email.message_from_bytes(samples.contents(wheel_path)[f"{samples.DIST_INFO}/METADATA"])
    assert metadata.get_all("Requires-Dist") == ["torch==2.8.*"]
    assert metadata["Requires-Python"] == ">=3.9", "the tags say which it is for; Poetry reads one wheel's for all"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert "8 bit" in str(metadata["Summary"])
    assert "Read me." in str(metadata.get_payload())


def test_an_index_has_it_by_a_local_version(wheel_path: Path, tmp_path: Path) -> None:
    build = samples.build()
    made = wheels.for_index(wheel_path, build=build, out_dir=tmp_path / "index", index_url="https://example.org/ours")
    assert made.name == "sageattention-2.2.0+torch2.8.cu128-cp312-cp312-manylinux_2_28_x86_64.linux_x86_64.whl"
    assert verify.verify_wheel(made) == []
    assert wheels.index_url(made) == "https://example.org/ours/"
    assert wheels.index_url(wheel_path) == ""
    new, described = samples.contents(made), "sageattention-2.2.0+torch2.8.cu128.dist-info"
    assert {k: v for k, v in new.items() if described not in k} == {
        k: v for k, v in samples.contents(wheel_path).items() if samples.DIST_INFO not in k
    }
    metadata = email.message_from_bytes(new[f"{described}/METADATA"])
    assert metadata["Version"] == "2.2.0+torch2.8.cu128"
    assert "Read me." in str(metadata.get_payload())
    assert email.message_from_bytes(new[f"{described}/WHEEL"])["Build"] is None


def test_a_bill_of_what_is_in_it(wheel_path: Path, tmp_path: Path) -> None:
    made = wheels.for_index(wheel_path, build=samples.build(), out_dir=tmp_path / "index")
    for path, version in ((wheel_path, "2.2.0"), (made, "2.2.0+torch2.8.cu128")):
        files = samples.contents(path)
        bill = json.loads(files[f"sageattention-{version}.dist-info/sboms/sageattention.cdx.json"])
        own = bill["metadata"]["component"]
        assert (bill["specVersion"], own["name"], own["version"]) == ("1.6", "sageattention", version)
        assert {part["name"]: part["hashes"][0]["content"] for part in own["components"]} == {
            name: sha256(files[name]) for name in ("sageattention/_C.so", "sageattention/cubins/manifest.json")
        }
        needs = {(one["name"], one["version"], one["scope"]) for one in bill["components"]}
        assert needs == {
            ("torch", "2.8.0", "required"),
            ("CUDA toolkit", "12.8", "excluded"),
            ("C++ compiler", "GNU 13.3.0", "excluded"),
        }
    other = samples.contents(wheel_path) | {"sageattention/_C.so": b""}
    assert any("is not the bill" in fault for fault in verify.verify_wheel(samples.rewrite(wheel_path, other)))


def test_a_local_version_rises_with_pytorch_and_cuda() -> None:
    """So that `--upgrade` goes on, from 2.9 to 2.10 too."""
    builds = [build for build in matrix.builds(package="sageattention") if not build.stable_abi]
    builds.sort(key=lambda build: (Version(build.torch), Version(build.cuda)))
    versions = [Version(build.index_version) for build in builds]
    assert versions == sorted(versions)
    (every,) = {Version(b.index_version) for b in matrix.builds(torch="2.9+", cuda="12.8")}
    eights, nines = ([Version(b.index_version) for b in builds if b.torch_series == series] for series in ("2.8", "2.9"))
    assert max(eights) < every < min(nines), "one for every later PyTorch comes after those for one alone, as in conda"
    assert len(set(versions)) == len({(build.torch, build.cuda) for build in builds})


def test_is_a_function_of_its_inputs(tmp_path: Path) -> None:
    first = samples.a_wheel(tmp_path / "first").read_bytes()
    time.sleep(2.1)  # a zip states times in steps of two seconds
    assert samples.a_wheel(tmp_path / "second").read_bytes() == first


def test_entries_have_one_time_and_plain_modes(wheel_path: Path) -> None:
    with zipfile.ZipFile(wheel_path) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        modes = {member.filename: member.external_attr >> 16 for member in archive.infolist()}
        assert archive.namelist()[-1].startswith(samples.DIST_INFO)
    assert modes["sageattention/_C.so"] == 0o100755
    assert modes["sageattention/__init__.py"] == 0o100644


def test_another_python_changes_the_tag_alone(tmp_path: Path) -> None:
    old, new = samples.contents(samples.a_wheel(tmp_path)), samples.contents(samples.a_wheel(tmp_path, "3.11"))
    changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    assert changed == {f"{samples.DIST_INFO}/{name}" for name in ("WHEEL", "RECORD")}


@pytest.mark.parametrize(("field", "value"), [("cuda", "12.9"), ("torch", "2.7.0"), ("version", "2.2.1")])
def test_refuses_packages_of_another_build(tmp_path: Path, field: str, value: str) -> None:
    changed: Any = {field: value}
    other = dataclasses.replace(samples.build(), **changed)
    with pytest.raises(wheels.WheelError, match="was asked for") as caught:
        wheels.emit(
            samples.operators_conda(tmp_path),
            samples.cubins_conda(tmp_path),
            build=other,
            out_dir=tmp_path,
        )
    assert value in str(caught.value)
    assert not list(tmp_path.glob("*.whl"))


def test_refuses_kernels_of_another_cuda(tmp_path: Path) -> None:
    files = samples.cubin_set()
    files["manifest.json"] = json.dumps({**json.loads(files["manifest.json"]), "cuda": "12.9"}).encode()
    packages = samples.operators_conda(tmp_path), samples.cubins_conda(tmp_path, files)
    with pytest.raises(wheels.WheelError, match=r"holds kernels of CUDA 12\.9, but a wheel for CUDA 12\.8 was asked for"):
        wheels.emit(*packages, build=samples.build(), out_dir=tmp_path)
    assert not list(tmp_path.glob("*.whl"))


def test_what_python_compiled_is_not_packed(tmp_path: Path) -> None:
    files = samples.operators() | {"site-packages/sageattention/__pycache__/core.cpython-312.pyc": b"of another machine"}
    packages = samples.operators_conda(tmp_path, files), samples.cubins_conda(tmp_path)
    wheel = wheels.emit(*packages, build=samples.build(), out_dir=tmp_path / "out")
    assert wheel.read_bytes() == samples.a_wheel(tmp_path).read_bytes()


def test_refuses_the_packages_in_the_wrong_order(tmp_path: Path) -> None:
    with pytest.raises(wheels.WheelError, match=r"does not hold _build\.json"):
        wheels.emit(
            samples.cubins_conda(tmp_path),
            samples.operators_conda(tmp_path),
            build=samples.build(),
            out_dir=tmp_path,
        )


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operators, cubins = samples.operators_conda(tmp_path), samples.cubins_conda(tmp_path)

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as handle:
            handle.write(data[:100])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        wheels.emit(operators, cubins, build=samples.build(), out_dir=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
