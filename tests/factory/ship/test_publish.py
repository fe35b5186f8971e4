"""Publishing: the whole profile or nothing, each file once, finished by the next run; and what clients make of the channel."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loopback
import pytest
import samples
from rattler import Gateway, SourceConfig
from rattler.index import index_fs

from sage_factory import ROOT, commands
from sage_factory.files import sha256
from sage_factory.make import wheels
from sage_factory.ship import collect, publish

PROFILE, BUILDS = samples.PROFILE, samples.BUILDS
pytestmark = pytest.mark.usefixtures("sample_profile")


def files(folder: Path) -> dict[str, str]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): sha256(p.read_bytes()) for p in found}


def first(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[0]


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda dist: first(dist, pattern).unlink()


def truncate(pattern: str) -> Callable[[Path], object]:
    return lambda dist: first(dist, pattern).write_bytes(first(dist, pattern).read_bytes()[:-100])


def second_build(dist: Path) -> None:
    samples.conda(dist / "conda" / "linux-64", {}, {**samples.index("sageattention"), "build": "torch280_cu128_h9_0"})


def packed_of_others(dist: Path) -> None:
    """A wheel that is good in itself, of other sources than the conda package."""
    content = {**samples.operators(), "site-packages/sageattention/__init__.py": b"# newer\n"}
    operators = samples.operators_conda(dist / "elsewhere", content)
    kernels = first(dist, "conda/noarch/*.conda")
    wheels.emit(operators, kernels, build=BUILDS[1], out_dir=dist / "wheels")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (shutil.rmtree, "holds neither wheels nor conda packages: there is nothing to publish"),
        (remove("wheels/*cp312*"), f"not the whole of profile sample, which has 2 builds:\n  wheels/{BUILDS[1].wheel_name} is missing"),
        (remove("conda/linux-64/*"), "conda/linux-64/sageattention-2.2.0-torch280_cu128_h…_0.conda is missing"),
        (remove("conda/noarch/*"), "conda/noarch/sageattention-cubins-2.2.0-cu128_h1_0.conda is missing, which"),
        (truncate("wheels/*cp311*"), f"{BUILDS[0].wheel_name}: {BUILDS[0].wheel_name} is not a whole zip archive"),
        (truncate("conda/noarch/*"), "sageattention-cubins-2.2.0-cu128_h1_0.conda is not a whole zip archive"),
        (second_build, "there are 2 builds of the same package: sageattention-2.2.0-torch280_cu128_h2_0.conda, "),
        (packed_of_others, f"{BUILDS[1].wheel_name} was not packed from sageattention-2.2.0-torch280_cu128_h2_0.conda"),
    ],
    ids=["nothing", "no wheel", "no operators", "no kernels", "broken wheel", "broken package", "two builds", "other sources"],
)  # fmt: skip
def test_nothing_is_published_of_a_folder_with_a_fault(
    harm: Callable[[Path], object], said: str, dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(dist)
    to = ["--channel", str(tmp_path / "channel"), "--index", str(tmp_path / "site")]
    assert commands.main(["publish", "--profile", PROFILE, "--dist", str(dist), *to]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "channel").exists()
    assert not (tmp_path / "site").exists()


# A folder as the channel.


def run(dist: Path, folder: Path, *more: str) -> int:
    to = ["--channel", str(folder / "channel"), "--index", str(folder / "site")]
    return commands.main(["publish", "--profile", PROFILE, "--dist", str(dist), *to, *more])


def test_a_dry_run_shows_and_changes_nothing(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dist, tmp_path / "out", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "4 would be new, 4 files of profile sample in all" in said
    for path in (*dist.glob("wheels/*"), *dist.glob("conda/*/*.conda")):
        assert path.name in said
    assert not (tmp_path / "out").exists()


def test_publishing_again_changes_nothing(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dist, tmp_path / "out") == 0
    assert "4 new, 4 files" in capsys.readouterr().out
    before = files(tmp_path / "out")
    assert {"channel/noarch/repodata.json", "channel/linux-64/repodata.json", "site/index.html"} <= before.keys()
    assert run(dist, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "0 new, 4 files" in said
    assert said.count("there already") == 4
    assert files(tmp_path / "out") == before


def test_a_published_package_is_never_replaced(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dist, tmp_path / "out") == 0
    published = first(tmp_path / "out" / "channel", "noarch/*.conda")
    published.write_bytes(published.read_bytes() + b"\0")
    before = files(tmp_path / "out")
    assert run(dist, tmp_path / "out") == 1
    assert (
        f"published files are never replaced, and {tmp_path / 'out' / 'channel'} has other content" in capsys.readouterr().err
    )
    assert files(tmp_path / "out") == before


def test_a_channel_with_a_package_of_no_use(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = {key: value for key, value in samples.index("sageattention").items() if key != "build_number"}
    samples.conda(tmp_path / "out" / "channel" / "linux-64", {}, described | {"build": "torch270_cu128_h0_0"})
    assert run(dist, tmp_path / "out") == 1
    assert re.search("holds a package that cannot be indexed: .*build_number", capsys.readouterr().err)


def old_form(folder: Path, name: str) -> None:
    """A package of somebody else's, as conda made them at first."""
    about = {"name": name, "version": "1.0", "build": "0", "build_number": 0, "depends": [], "subdir": folder.name}
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{name}-1.0-0.tar.bz2", "w:bz2") as archive:
        for member, content in (
            ("info/index.json", json.dumps(about)),
            ("info/paths.json", '{"paths": [], "paths_version": 1}'),
        ):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content.encode()))


def offered(channel: Path) -> dict[str, set[str]]:
    """What clients find, those that prefer an index in shards and those that do not: names by whether they do."""

    async def ask(url: str, *, sharded: bool) -> set[str]:
        gateway = Gateway(default_config=SourceConfig(cache_action="no-cache", sharded_enabled=sharded))
        found = await gateway.query([url], ["noarch", "linux-64"], ["other", "linked", "sageattention"], recursive=False)
        return {record.name.normalized for records in found for record in records}

    with loopback.offering(channel) as server:
        return {kind: asyncio.run(ask(server.url, sharded=kind == "sharded")) for kind in ("sharded", "plain")}


def test_beside_packages_of_others_all_are_found(dist: Path, tmp_path: Path) -> None:
    """Whatever form they have, and whoever made which indexes before."""
    channel = tmp_path / "out" / "channel"
    old_form(channel / "linux-64", "other")
    old_form(tmp_path / "elsewhere" / "linux-64", "linked")
    (channel / "linux-64" / "linked-1.0-0.tar.bz2").symlink_to(tmp_path / "elsewhere" / "linux-64" / "linked-1.0-0.tar.bz2")
    asyncio.run(index_fs(channel))
    (channel / "linux-64" / "gone-1.0-0.conda").symlink_to(tmp_path / "nowhere")
    (channel / "linux-64" / "current_repodata.json").write_text("{}")
    assert offered(channel)["sharded"] == {"other"}, "rattler's indexer passes by links"
    assert run(dist, tmp_path / "out") == 0
    assert offered(channel) == {kind: {"other", "linked", "sageattention"} for kind in ("sharded", "plain")}
    assert not (channel / "linux-64" / "current_repodata.json").exists()


COMMAND = """
import sys; sys.path[:0] = [{scripts!r}, {tests!r}]
import samples
from sage_factory import commands
from sage_factory.what import matrix
matrix.builds = samples.chosen
commands.leave(commands.main(["publish", *sys.argv[1:]]))
"""


def command(*arguments: str) -> list[str]:
    """`publish` in a process of its own, with the samples' profile."""
    code = COMMAND.format(scripts=str(ROOT / "scripts"), tests=str(ROOT / "tests"))
    return [sys.executable, "-c", code, "--profile", PROFILE, *arguments]


def test_a_killed_run_is_finished_by_the_next(dist: Path, tmp_path: Path) -> None:
    assert run(dist, tmp_path / "whole") == 0
    whole = files(tmp_path / "whole")
    to = ["--dist", str(dist), "--channel", str(tmp_path / "out" / "channel"), "--index", str(tmp_path / "out" / "site")]
    begun = 0
    for moment in range(4):
        with subprocess.Popen(command(*to), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            # Early ones die while importing, so wait for the first file and then a little.
            while not (tmp_path / "out" / "channel").exists() and process.poll() is None:
                time.sleep(0.005)
            time.sleep(0.004 * moment)
            begun += process.poll() is None
            process.send_signal(signal.SIGKILL)
        for name, digest in files(tmp_path / "out").items():
            if name.endswith((".conda", ".whl")) and not Path(name).name.startswith("."):
                assert ".index-" in name or whole[name] == digest, f"{name} is there, but not whole"
    assert begun > 0, "none was killed while it published"
    assert run(dist, tmp_path / "out") == 0
    # conda's index says since when each package is there.
    left, whole = ({k: v for k, v in found.items() if "repodata" not in k} for found in (files(tmp_path / "out"), whole))
    assert left == whole
    for subdir, count in (("noarch", 1), ("linux-64", 1)):
        content = json.loads((tmp_path / "out" / "channel" / subdir / "repodata.json").read_text(encoding="utf-8"))
        assert len(content["packages.conda"]) == count


def test_what_killed_runs_left_in_a_channel_goes(dist: Path, tmp_path: Path) -> None:
    """Whenever they were killed: copies that were being written, and an index that was being made."""
    channel = tmp_path / "channel"
    (channel / ".index-killed" / "noarch").mkdir(parents=True)
    (channel / "linux-64").mkdir()
    left = channel / "linux-64" / ".sageattention-2.2.0-torch280_cu128_h2_0.conda.1.partial"
    left.write_bytes(b"half")
    publish.Folder(channel).put(collect.collect(dist, PROFILE).packages)
    assert not left.exists()
    assert {path.name for path in channel.iterdir()} == {"noarch", "linux-64"}


# A server as the channel.


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package server's folder; its address is in `address`."""
    folder = tmp_path / "server"
    for subdir in ("noarch", "linux-64"):
        (folder / "channel" / subdir).mkdir(parents=True)
    asyncio.run(index_fs(folder / "channel"))
    serve = (
        "import loopback, pathlib; s = loopback.PackageServer(pathlib.Path({!r})); print(s.url, flush=True); s.serve_forever()"
    )
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "tests")])
    with subprocess.Popen(
        [sys.executable, "-c", serve.format(str(folder))],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        (folder / "address").write_text(process.stdout.readline().strip())
        (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"BearerToken": "secret"}}))
        monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
        monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
        yield folder
        process.kill()


def upload(dist: Path, server: Path, *more: str) -> subprocess.CompletedProcess[str]:
    to = ["--dist", str(dist), "--channel", (server / "address").read_text() + "/channel", *more]
    return subprocess.run(command(*to), capture_output=True, text=True, check=False)


def log(server: Path) -> list[str]:
    return (server / "log").read_text().splitlines() if (server / "log").exists() else []


def test_uploads_are_resumed_and_not_repeated(dist: Path, remote: Path) -> None:
    dry = upload(dist, remote, "--dry-run")
    assert (dry.returncode, log(remote)) == (0, [])
    assert "2 would be new" in dry.stdout
    (remote / "refuse").write_text("torch280")
    failed = upload(dist, remote)
    assert failed.returncode == 1
    assert "sageattention-2.2.0-torch280_cu128_h2_0.conda was not accepted by http://127.0.0.1:" in failed.stderr
    (remote / "refuse").unlink()
    assert "1 new, 4 files" in upload(dist, remote).stdout
    assert "0 new, 4 files" in upload(dist, remote).stdout
    names = [line.split()[1] for line in log(remote) if line.endswith(" 201")]
    assert names == ["sageattention-cubins-2.2.0-cu128_h1_0.conda", "sageattention-2.2.0-torch280_cu128_h2_0.conda"]
    assert {line.split()[0] for line in log(remote)} == {"/api/v1/upload/channel"}


def test_an_upload_whose_answer_was_lost_is_done(dist: Path, remote: Path) -> None:
    (remote / "lost").write_text("cubins")
    done = upload(dist, remote)
    assert done.returncode == 0, done.stderr
    assert "2 new, 4 files" in done.stdout
    assert {line.split()[2] for line in log(remote) if "cubins" in line} <= {"500", "409"}, (
        "no upload of it was answered with success"
    )
    for path in dist.glob("conda/*/*.conda"):
        assert (remote / "channel" / publish.place(path)).read_bytes() == path.read_bytes()


def test_an_upload_that_meets_anothers_file_fails(dist: Path, remote: Path, tmp_path: Path) -> None:
    other = samples.conda(tmp_path / "other", {"other": b"content"}, samples.index("sageattention-cubins"))
    (remote / "other").write_bytes(other.read_bytes())
    done = upload(dist, remote)
    assert done.returncode == 1
    assert "published files are never replaced" in done.stderr
    assert "sageattention-cubins-2.2.0-cu128_h1_0.conda has sha256" in done.stderr
    assert not list((remote / "channel" / "linux-64").glob("*.conda")), "and nothing follows"


def test_a_server_that_has_other_content_gets_nothing(dist: Path, remote: Path) -> None:
    samples.conda(remote / "channel" / "noarch", {"other": b"content"}, samples.index("sageattention-cubins"))
    asyncio.run(index_fs(remote / "channel", force=True))
    done = upload(dist, remote)
    assert done.returncode == 1
    assert "published files are never replaced" in done.stderr
    assert log(remote) == []


def test_a_channel_that_is_not_there(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loopback.offering(tmp_path) as server:
        assert commands.main(["publish", "--profile", PROFILE, "--dist", str(dist), "--channel", f"{server.url}/none"]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("destination", "kind"),
    [("https://prefix.dev/ours", publish.Remote), ("s3://bucket/ours", publish.Remote), ("dist/channel", publish.Folder),
     ("file:///srv/ours", publish.Folder)],
)  # fmt: skip
def test_destinations(destination: str, kind: type) -> None:
    assert isinstance(publish.channel(destination), kind)


def test_an_address_of_a_folder_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "our channel"
    assert publish.channel(folder.as_uri()) == publish.channel(str(folder))


def test_a_destination_of_no_kind() -> None:
    with pytest.raises(publish.PublishError, match="ftp://somewhere is no destination"):
        publish.channel("ftp://somewhere")


def test_a_bucket_is_read_with_its_credentials(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(dist, tmp_path / "out") == 0
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    (tmp_path / "out" / "channel").rename(tmp_path / "s3" / "bucket" / "ours")
    with loopback.offering(tmp_path / "s3") as server:
        for name, value in (("ENDPOINT_URL", server.url), ("REGION", "x"), ("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", "y")):
            monkeypatch.setenv(f"AWS_{name}", value)
        there = publish.Remote("s3://bucket/ours").there()
        assert any("Credential=me" in path for path in server.asked)
        assert publish.Remote("s3://bucket/new").there() == {}
    assert set(there) == {publish.place(path).as_posix() for path in collect.collect(dist, PROFILE).packages}


@pytest.mark.parametrize("identity", [True, False])
def test_a_workflow_that_has_an_identity_signs_packages(identity: bool, dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(publish, "upload_package_to_prefix", lambda *given, **more: asked.append((*given, more)))
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_URL", raising=False)
    if identity:
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", "https://example.org")
    packages = collect.collect(dist, PROFILE).packages
    publish.Remote("https://prefix.dev/ours").put(packages)
    assert asked == [([str(path)], "https://prefix.dev", "ours", {"generate_attestation": identity}) for path in packages]


def test_anaconda_and_s3_get_their_own_uploads(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(publish, "upload_package_to_anaconda", lambda files, owner: asked.append((files, owner)))
    packages = collect.collect(dist, PROFILE).packages
    for server in ("anaconda.org", "conda.anaconda.org"):  # where its packages are read, too
        publish.Remote(f"https://{server}/someone").put(packages)
    assert asked == [([str(path)], "someone") for path in packages] * 2
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(publish.Remote, "there", lambda self: {})
    monkeypatch.setattr(publish, "WAITS", (0,))
    with pytest.raises(publish.PublishError, match="`rattler-build`, which publishes to S3, is not installed"):
        publish.Remote("s3://bucket/ours").put(packages)
    program = tmp_path / "rattler-build"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(0o755)
    publish.Remote("s3://bucket/ours").put(packages)
    assert (tmp_path / "asked").read_text().splitlines() == [f"publish {path} --to s3://bucket/ours" for path in packages]
