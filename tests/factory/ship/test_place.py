"""dist/: all of a build's files with their index, or none."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import samples

from sage_factory.ship import place
from sage_factory.what import matrix

HERE = matrix.host_platform()


def listing(folder: Path) -> dict[str, str]:
    """Every file below, hidden ones too but the lock, with its content's hash."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# dist/.


def ready(folder: Path, digest: str, torch: str = "280", *, kernels: str | None = None) -> list[Path]:
    cubins = f"cu128_h{kernels or digest}_0"
    wheel = folder / f"sageattention-2.2.0-{torch}.128-cp312-cp312-linux_x86_64.whl"
    needs = [f"sageattention-cubins ==2.2.0 {cubins}"]
    packages = [
        samples.assembled(folder, "sageattention-cubins", cubins),
        samples.assembled(folder, "sageattention", f"torch{torch}_cu128_h{digest}_0", depends=needs),
    ]
    wheel.write_bytes(digest.encode())
    return [*packages, wheel]


def test_places_everything_with_an_index_and_removes_what_it_replaces(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    place.place(ready(tmp_path / "one", "aaaa"), dist)
    place.place(ready(tmp_path / "two", "bbbb"), dist)
    assert set(listing(dist)) == {
        "conda/noarch/repodata.json", f"conda/{HERE}/repodata.json",
        "conda/noarch/sageattention-cubins-2.2.0-cu128_hbbbb_0.conda",
        f"conda/{HERE}/sageattention-2.2.0-torch280_cu128_hbbbb_0.conda",
        "wheels/sageattention-2.2.0-280.128-cp312-cp312-linux_x86_64.whl",
    }  # fmt: skip
    index = (dist / "conda" / HERE / "repodata.json").read_text()
    assert "hbbbb" in index
    assert "haaaa_0.conda" not in index


def test_wheels_of_older_sources_go_whatever_their_python(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    name = "sageattention-2.2.0-{torch}.128-{python}-linux_x86_64.whl"
    place.place(ready(tmp_path / "one", "aaaa"), dist)
    stays = [name.format(torch="270", python="cp311-cp311"), name.format(torch="280.1", python="cp311-cp311"),
             name.format(torch="280", python="cp311-cp311").replace("linux_x86_64", "win_amd64")]  # fmt: skip
    for other in (*stays, name.format(torch="280", python="cp311-cp311")):
        (dist / "wheels" / other).touch()
    before = {path.name for path in dist.glob("wheels/*")}
    place.place(ready(tmp_path / "again", "aaaa"), dist)
    assert {path.name for path in dist.glob("wheels/*")} == before, "of the same sources"
    place.place(ready(tmp_path / "two", "bbbb"), dist)
    assert {path.name for path in dist.glob("wheels/*")} == {*stays, name.format(torch="280", python="cp312-cp312")}


def test_kernels_that_another_package_asks_for_stay(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    place.place(ready(tmp_path / "one", "aaaa", "270"), dist)
    place.place(ready(tmp_path / "two", "bbbb", "280"), dist)
    assert {p.name.split("_h")[1][:4] for p in (dist / "conda" / "noarch").glob("*.conda")} == {"aaaa", "bbbb"}


@pytest.mark.skipif(os.name != "posix", reason="there anybody may who may write to the folder")
def test_whoever_may_put_files_there_may_take_the_lock(tmp_path: Path) -> None:
    """Another user's build into the same folder would fail, not wait."""
    before = os.umask(0o077)
    try:
        place.place(ready(tmp_path / "one", "aaaa"), tmp_path / "dist")
    finally:
        os.umask(before)
    assert (tmp_path / "dist" / ".lock").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("failing", ["copy", "index"])
def test_a_full_disk_leaves_dist_as_it_was(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = tmp_path / "dist"
    place.place(ready(tmp_path / "one", "aaaa"), dist)
    before = listing(dist)
    copies = 0

    def full(source: Path, target: Path) -> None:
        nonlocal copies
        copies += 1
        if copies == 3:
            target.write_bytes(source.read_bytes()[:10])
            raise OSError(28, "No space left on device", str(target))
        target.write_bytes(source.read_bytes())

    async def cannot(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "copy":
        monkeypatch.setattr(shutil, "copyfile", full)
    else:
        monkeypatch.setattr(place, "index_fs", cannot)
    with pytest.raises(OSError, match="No space left"):
        place.place(ready(tmp_path / "two", "bbbb"), dist)
    assert listing(dist) == before
