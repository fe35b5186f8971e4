"""verify: conda packages that are not as `seal` leaves them, and metadata that the recipe does not make."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import samples
import zstandard

from sage_factory.inspect import verify
from sage_factory.make import archives, seal

Members = list[tuple[tarfile.TarInfo, bytes]]
Change = Callable[[Members], None]


def changed(path: Path, change: Change) -> Path:
    """A conda package whose archives were changed after it was sealed."""
    members = samples.contents(path)
    for name in (name for name in members if name.endswith(".tar.zst")):
        with tarfile.open(fileobj=io.BytesIO(archives.decompressed(members[name]))) as old:
            found = [(one, source.read()) for one in old if (source := old.extractfile(one))]
        change(found)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
            for one, data in found:
                one.size = len(data)
                new.addfile(one, io.BytesIO(data))
        members[name] = zstandard.ZstdCompressor().compress(packed.getvalue())
    return samples.archive(path, members)


def each(**attributes: object) -> Change:
    def change(found: Members) -> None:
        for one, _ in found:
            for key, value in attributes.items():
                setattr(one, key, value)

    return change


def says(document: str, **keys: object) -> Change:
    """Other keys in a document of the metadata, which otherwise is as it was sealed; None for those that go."""

    def change(found: Members) -> None:
        for i, (one, data) in enumerate(found):
            if one.name == f"info/{document}":
                new = {key: value for key, value in {**json.loads(data), **keys}.items() if value is not None}
                found[i] = one, json.dumps(new, indent=2, sort_keys=True).encode() + b"\n"

    return change


def put(name: str, content: bytes | None) -> Change:
    """Another content of a file of the metadata, or None for no such file."""

    def change(found: Members) -> None:
        if not any(one.name == "info/index.json" for one, _ in found):
            return  # the archive of what is installed
        found[:] = [(one, data) for one, data in found if one.name != name]
        if content is not None:
            one = tarfile.TarInfo(name)
            one.mtime = samples.SECONDS
            found.append((one, content))
            found.sort(key=lambda pair: pair[0].name)

    return change


EITHER: dict[str, tuple[Change, str]] = {
    "for its owner alone": (each(mode=0o600), "INSTALLER is of mode 600, expected 644 or 755; so are 6 more"),
    "set-user-ID": (each(mode=0o4777), "is of mode 4777, expected 644 or 755"),
    "somebody's by number": (each(uid=1000, gid=100), "is of owner 1000:100::, expected 0:0 without names"),
    "somebody's by name": (each(uname="me"), "is of owner 0:0:me:, expected 0:0"),
    "of another time": (each(mtime=5), "is of 5 s since 1970, expected 1600000000 as info/index.json says"),
    "another order": (list.reverse, ".tar.zst is not as it was sealed"),
    "a header that nobody looks at": (each(pax_headers={"comment": "me"}), ".tar.zst is not as it was sealed"),
    "no licence": (put("info/licenses/LICENSE", None), "info/licenses/LICENSE is missing or empty"),
    "an empty licence": (put("info/licenses/LICENSE", b""), "info/licenses/LICENSE is missing or empty"),
    "no about.json": (put("info/about.json", None), "info/about.json is missing"),
    "an empty about.json": (put("info/about.json", b"{}\n"), "info/about.json says license None, expected 'Apache-2.0'"),
    "another licence": (says("about.json", license="GPL"), "info/about.json says license 'GPL', expected 'Apache-2.0'"),
    "a channel": (says("about.json", channels=["file:///home/me"]), "info/about.json says channels ['file:///home/me'], expected no such key"),
    "another licence to a solver": (says("index.json", license=None), "info/index.json says license None, expected 'Apache-2.0'"),
    "features": (says("index.json", track_features="x"), "info/index.json says track_features x, expected no such key"),
    "no timestamp": (says("index.json", timestamp=None), "info/index.json says timestamp None, expected that of a commit"),
    "half a second": (says("index.json", timestamp=1_600_000_000_500), "says timestamp 1600000000500, expected that of a commit"),
    "a timestamp of another day": (says("index.json", timestamp=1_500_000_000_000), "is of 1600000000 s since 1970, expected 1500000000"),
    "run_exports": (put("info/run_exports.json", b"{}"), "info/run_exports.json is not of the metadata that a package of this"),
    "what the recipe was told": (put("info/hash_input.json", b"{}"), "info/hash_input.json is not of the metadata"),
    "a recipe": (put("info/recipe/recipe.yaml", b"{}"), "info/recipe/recipe.yaml is not of the metadata"),
}  # fmt: skip
OPERATORS: dict[str, tuple[Change, str]] = {
    "no link.json": (put("info/link.json", None), "info/link.json is missing"),
    "a command": (says("link.json", noarch={"type": "python", "entry_points": ["sage = os:abort"]}), "info/link.json says {'noarch': {'entry_points'"),
}  # fmt: skip
KERNELS: dict[str, tuple[Change, str]] = {
    "a link.json": (put("info/link.json", b'{"noarch": {"type": "python"}}'), "info/link.json is not of the metadata"),
}
CASES = [(samples.operators_conda, case) for case in EITHER | OPERATORS] + [(samples.cubins_conda, case) for case in KERNELS]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_package_that_was_not_sealed_so_is_named(kind: Callable[[Path], Path], case: str, tmp_path: Path) -> None:
    change, message = (EITHER | OPERATORS | KERNELS)[case]
    faults = verify.verify(changed(kind(tmp_path), change))
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize("kind", [samples.operators_conda, samples.cubins_conda])
def test_what_is_sealed_is_good(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    path = changed(kind(tmp_path), lambda found: None)
    assert verify.verify(path) == []
    path = changed(path, each(mode=0o600, uid=1000, mtime=5))
    assert verify.verify(path) != []
    seal.seal(path, samples.SECONDS)
    assert verify.verify(path) == []


def test_the_python_of_the_build_makes_no_other_package(tmp_path: Path) -> None:
    """It is not in the name."""
    made = []
    for python in ("3.11.*", "3.12.* *_cpython"):
        told = put("info/hash_input.json", json.dumps({"python": python}).encode())
        made.append(changed(samples.operators_conda(tmp_path / python[:4]), told))
    assert made[0].read_bytes() != made[1].read_bytes()
    for path in made:
        seal.seal(path, samples.SECONDS)
        assert verify.verify(path) == []
    assert made[0].read_bytes() == made[1].read_bytes()


def test_a_zip_of_another_time_is_named(tmp_path: Path) -> None:
    path = samples.operators_conda(tmp_path)
    members = [(name, 0o644, data) for name, data in samples.contents(path).items()]
    path.write_bytes(archives.zipped(members, (2021, 1, 1, 0, 0, 0)))
    faults = verify.verify(path)
    assert len(faults) == 3
    assert all(fault.endswith("is of another time than info/index.json says") for fault in faults)
