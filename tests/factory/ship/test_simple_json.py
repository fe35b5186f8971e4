"""The indexes as JSON (PEP 691), and the metadata beside wheels (PEP 658)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import loopback
import pytest
import samples
from packaging.version import Version

from sage_factory.files import sha256
from sage_factory.ship import indexes

JSON = "application/vnd.pypi.simple.v1+json"
BUILD = samples.build("3.12")


class Negotiating(loopback.Server):
    """A server that answers with JSON whom it suits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.RequestHandlerClass = functools.partial(Answers, directory=str(folder))


class Answers(loopback.Handler):
    def do_GET(self) -> None:  # noqa: N802 - the base class names it so
        page = Path(self.translate_path(self.path)) / "index.json"
        if JSON in self.headers.get("accept", "") and page.is_file():
            self.send_response(200)
            self.send_header("content-type", JSON)
            self.end_headers()
            self.wfile.write(page.read_bytes())
            self.path += "index.json"
            self.log_message("given as JSON")
        else:
            super().do_GET()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    wheel = samples.a_wheel(tmp_path_factory.mktemp("wheel"), "3.12")
    indexes.add([wheel], folder)
    return folder


def page(site: Path, folder: str = "cu12") -> tuple[str, dict[str, Any]]:
    """A project's page as HTML and as JSON."""
    place = site / folder / "sageattention"
    return (place / "index.html").read_text(encoding="utf-8"), json.loads((place / "index.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", ["cu12", "cu128-torch28"])
def test_both_forms_say_the_same_and_what_is_true(site: Path, folder: str) -> None:
    text, content = page(site, folder)
    assert content["meta"] == {"api-version": "1.0"}
    assert content["name"] == "sageattention"
    (one,) = content["files"]
    href, attributes = re.findall(r'<a href="([^"]+)"(.*)>', text)[0]
    assert href == f"{one['url']}#sha256={one['hashes']['sha256']}"
    path = (site / folder / "sageattention" / one["url"].replace("%2B", "+")).resolve()
    assert path.name == one["filename"] == BUILD.index_name
    assert one["hashes"] == {"sha256": sha256(path.read_bytes())}
    metadata = path.with_name(f"{path.name}.metadata").read_bytes()
    assert one["core-metadata"] == {"sha256": sha256(metadata)}
    assert f'data-core-metadata="sha256={sha256(metadata)}"' in attributes
    assert f"Requires-Python: {one['requires-python']}".encode() in metadata
    assert one["yanked"] is False


def test_pip_takes_json_where_a_server_gives_it(site: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    with loopback.offering(site, Negotiating) as server:
        command = [sys.executable, "-m", "pip", "--no-cache-dir", "-v", "download", "sageattention", "--no-deps", "--python-version=3.12",
                   "--platform=manylinux_2_28_x86_64", "--only-binary=:all:", "--dest", str(tmp_path), "--index-url", f"{server.url}/cu12/"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert "/cu12/sageattention/index.json" in server.asked
        # By the key's name of PEP 714, which pip knows from 23.2 on.
        knows = Version(importlib.metadata.version("pip")) >= Version("23.2")
        assert any(path.endswith(".metadata") for path in server.asked) == knows
    assert [path.name for path in tmp_path.iterdir()] == [BUILD.index_name]


def test_of_a_release_what_lies_beside_a_wheel_is_found() -> None:
    def asset(name: str, digest: str) -> dict[str, str]:
        return {"name": name, "browser_download_url": f"https://example.org/v1/{name}", "digest": f"sha256:{digest}"}

    name = BUILD.index_name
    assets = [asset(name, "00"), asset(f"{name}.metadata", "11")]
    (link,) = indexes.links([{"tag_name": "v2.2.0", "draft": False, "body": "", "assets": assets}])
    assert (link.sha256, link.metadata_sha256) == ("00", "11")
    (bare,) = indexes.links([{"tag_name": "v2.2.0", "draft": False, "body": "", "assets": assets[:1]}])
    assert bare.metadata_sha256 is None


def test_a_yanked_wheel_is_yanked_in_both_forms() -> None:
    link = indexes.describe(BUILD.index_name, f"https://example.org/{BUILD.index_name}", "00")
    for why, told in (("it was wrong", "it was wrong"), ("", True)):
        found = indexes.pages([dataclasses.replace(link, yanked=why)])
        assert json.loads(found["cu12/sageattention/index.json"])["files"][0]["yanked"] == told
        assert f'data-yanked="{why}"' in found["cu12/sageattention/index.html"]
        assert BUILD.index_name not in found["index.html"], "nobody is offered it"
