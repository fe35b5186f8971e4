"""Channels that packages are published to, and publishing: what is there already is left alone, and never replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rattler import Gateway, SourceConfig
from rattler.exceptions import CacheDirError, GatewayError
from rattler.index import index_fs
from rattler.networking import Client
from rattler_build import RattlerBuildError
from rattler_build.upload import upload_package_to_anaconda, upload_package_to_prefix

from sage_factory import FactoryError, alone
from sage_factory.files import put, sha256, sweep
from sage_factory.ship import collect, indexes
from sage_factory.ship.place import shadowed
from sage_factory.what import matrix

WAITS = (0, 5, 20)  # seconds before a server is asked again what it has
Row = tuple[str, str, bool]  # a file, where it goes, whether it is new there


class PublishError(FactoryError):
    """Something cannot be published; the message says what and why."""


class Channel(Protocol):
    """A place for conda packages."""

    @property
    def name(self) -> str:
        """The place, as the reader knows it."""

    def there(self) -> Mapping[str, str]:
        """SHA-256 of each package of ours, by `subdir/file`."""

    def put(self, packages: Sequence[Path]) -> None:
        """Add packages, none of which is there yet."""

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """One publisher at a time, where others could be kept out."""


@dataclass(frozen=True)
class Folder:
    """A channel that any web server can offer."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def there(self) -> Mapping[str, str]:
        # The files, not the index: a run that was killed may have ended between the two.
        packages = self.path.glob("*/*.conda")
        return {f"{path.parent.name}/{path.name}": sha256(path.read_bytes()) for path in packages if path.is_file()}

    def put(self, packages: Sequence[Path]) -> None:
        sweep(self.path, "*")
        for path in packages:
            put(self.path / place(path), path.read_bytes())
        # But for links to nothing.
        there = [path for kind in ("conda", "tar.bz2") for path in self.path.glob(f"*/*.{kind}") if path.is_file()]
        for old in self.path.glob(".index-*"):  # of a run that was killed
            shutil.rmtree(old, ignore_errors=True)
        # Apart, then by renaming: whoever reads the channel meanwhile finds the old index or the new one.
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".index-") as name:
            shadow = shadowed(there, Path(name))
            # The old index too: it knows since when each package is there.
            for path in self.path.glob("*/repodata.json"):
                (shadow / path.parent.name).mkdir(exist_ok=True)
                shutil.copyfile(path, shadow / place(path))
            try:
                asyncio.run(index_fs(shadow, write_shards=False))
            except CacheDirError as error:
                raise PublishError(f"{self.path} holds a package that cannot be indexed: {error}") from error
            # Indexes of other kinds, which other programs made, would hide what is new from who prefers them.
            for kind in ("repodata?*", "current_repodata*"):
                for path in self.path.glob(f"*/{kind}"):
                    if path.is_file() and not (shadow / place(path)).exists():
                        path.unlink()
            for path in shadow.glob("*/repodata*"):
                put(self.path / place(path), path.read_bytes())

    def lock(self) -> contextlib.AbstractContextManager[None]:
        what = f"another process that publishes to {self.name}"
        return alone.alone(self.path / ".lock", what)


@dataclass(frozen=True)
class Remote:
    """A channel on a server: prefix.dev (or one of its kind), anaconda.org, or an S3 bucket (s3://BUCKET/CHANNEL)."""

    url: str

    @property
    def name(self) -> str:
        return self.url

    def there(self) -> Mapping[str, str]:
        async def ask() -> dict[str, str]:
            subdirs: list[Any] = ["noarch", *matrix.load().platforms]
            names = [name for package in matrix.load().packages.values() for name in (package.name, package.cubins)]
            # Not from a cache: what is there now decides what is uploaded.
            gateway = Gateway(default_config=SourceConfig(cache_action="no-cache"), client=Client.default_client())
            found = await gateway.query([read_at(self.url)], subdirs, names, recursive=False)
            records = [record for records in found for record in records]
            return {f"{r.subdir}/{r.file_name}": r.sha256.hex() if r.sha256 else "" for r in records}

        try:
            return asyncio.run(ask())
        except GatewayError as error:
            if self.url.startswith("s3:") and "could not find subdir" in str(error):
                return {}  # the first packages make the channel
            raise PublishError(f"the channel {self.url} cannot be read: {error}. It is made on its server first") from error

    def put(self, packages: Sequence[Path]) -> None:
        for path in packages:  # one by one: what is done is done if the next one fails
            try:
                self._upload(path)
            except (RattlerBuildError, PublishError) as error:
                # An answer that was lost, or another run that was faster: what counts is what is there.
                if not self._has(path):
                    raise PublishError(f"{path.name} was not accepted by {self.url}: {error}") from error
            print(f"published {place(path)}", flush=True)

    def _upload(self, path: Path) -> None:
        where = urlsplit(self.url)
        if where.scheme == "s3":
            self._s3(path)
        elif where.hostname in ("anaconda.org", "conda.anaconda.org"):
            upload_package_to_anaconda([str(path)], where.path.strip("/"))
        else:
            # A workflow that may ask for its identity signs what it publishes (CEP 27), and the server keeps that beside it.
            signs = "ACTIONS_ID_TOKEN_REQUEST_URL" in os.environ
            server, name = f"{where.scheme}://{where.netloc}", where.path.strip("/")
            upload_package_to_prefix([str(path)], server, name, generate_attestation=signs)

    def _has(self, path: Path) -> bool:
        """Whether this very package is there; PublishError if it is another of that name. A server may index it a little later."""
        for seconds in WAITS:
            time.sleep(seconds)
            if not missing([path], self):
                return True
        return False

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _s3(self, path: Path) -> None:
        program = shutil.which("rattler-build")
        if program is None:
            raise PublishError("`rattler-build`, which publishes to S3, is not installed: `pixi run publish` brings it")
        command = [program, "publish", str(path), "--to", self.url]
        done = subprocess.run(command, check=False, capture_output=True, text=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise PublishError(done.stderr.strip())


def place(package: Path) -> Path:
    """Where a package lies in any channel."""
    return Path(package.parent.name, package.name)


def read_at(url: str) -> str:
    """Where a channel's packages are read: anaconda.org takes uploads, and offers what it has elsewhere."""
    return url.replace("//anaconda.org/", "//conda.anaconda.org/")


def channel(destination: str) -> Channel:
    """The channel that a destination names: an URL, or a folder."""
    scheme = urlsplit(destination).scheme
    if scheme in ("https", "http", "s3"):
        return Remote(destination.rstrip("/"))
    if scheme == "file":
        return Folder(Path(url2pathname(urlsplit(destination).path)))
    if "://" in destination:
        raise PublishError(f"{destination} is no destination: expected https://, s3://, file:// or a folder")
    return Folder(Path(destination).resolve())


def missing(packages: Sequence[Path], to: Channel) -> list[Path]:
    """What the channel lacks; PublishError if it has a package with other content."""
    there = to.there()
    other = []
    for path in packages:
        published, mine = there.get(place(path).as_posix()), sha256(path.read_bytes())
        if published not in (None, mine):
            other.append(f"  {place(path)} has sha256 {published} there, {mine} here")
    if other:
        raise PublishError(f"published files are never replaced, and {to.name} has other content:\n" + "\n".join(other))
    return [path for path in packages if place(path).as_posix() not in there]


def publish(
    found: collect.Collection,
    to: Channel | None,
    site: Path | None,
    show: Callable[[Sequence[Row]], None],
    *,
    dry_run: bool,
    index_url: str = "",
) -> int:
    """Show what goes where, then bring the channel and the indexes up to date; the number of files that are new."""
    with to.lock() if to and not dry_run else contextlib.nullcontext():
        packages = missing(found.packages, to) if to else []
        wheels = indexes.missing(found.wheels, site, index_url) if site else []
        rows = [(path.name, f"{to.name}/{path.parent.name}", path in packages) for path in found.packages] if to else []
        rows += [(path.name, str(indexes.target(path, site).parent), path in wheels) for path in found.wheels] if site else []
        show(rows)
        if to and not dry_run:
            to.put(packages)
        if site and not dry_run:
            indexes.add(found.wheels, site, index_url)
    return len(packages) + len(wheels)
