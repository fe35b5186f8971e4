"""GitHub, by a `gh` that keeps its releases in a file and what is uploaded in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GH = """#!{python}
import hashlib, json, pathlib, sys
state = pathlib.Path({state!r})
releases = json.loads(state.read_text())
arguments = sys.argv[1:]
pathlib.Path({state!r} + ".where").write_text(str(pathlib.Path.cwd()))
with open({state!r} + ".log", "a") as log:
    log.write(" ".join(arguments[:2]) + "\\n")
if arguments[0] == "api":
    assert "/releases" in arguments[-1]
    print(json.dumps([releases]))
    sys.exit()
kind, tag = arguments[1:3]
mine = [one for one in releases if one["tag_name"] == tag]
if kind == "create":
    assert "--draft" in arguments and "--verify-tag" in arguments
    body = pathlib.Path(arguments[arguments.index("--notes-file") + 1]).read_text()
    releases.insert(0, {{"tag_name": tag, "draft": True, "body": body, "assets": []}})
elif kind == "upload":
    path = pathlib.Path(arguments[3])
    if path.name in pathlib.Path({state!r} + ".refuse").read_text().split():
        sys.exit("HTTP 500")
    assert path.name not in [asset["name"] for asset in mine[0]["assets"]]
    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    mine[0]["assets"].append({{"name": path.name, "digest": digest, "state": "uploaded", "browser_download_url": path.as_uri()}})
    files = pathlib.Path({state!r} + ".files", tag)
    files.mkdir(parents=True, exist_ok=True)
    files.joinpath(path.name).write_bytes(path.read_bytes())
    if path.name in pathlib.Path({state!r} + ".lost").read_text().split():
        state.write_text(json.dumps(releases))
        sys.exit("HTTP 502")
elif kind == "download":
    name, folder = arguments[arguments.index("--pattern") + 1], arguments[arguments.index("--dir") + 1]
    pathlib.Path(folder, name).write_bytes(pathlib.Path({state!r} + ".files", tag, name).read_bytes())
elif kind == "delete-asset":
    mine[0]["assets"] = [asset for asset in mine[0]["assets"] if asset["name"] != arguments[3]]
elif kind == "edit":
    mine[0]["body"] = pathlib.Path(arguments[arguments.index("--notes-file") + 1]).read_text()
    mine[0]["draft"] = mine[0]["draft"] and "--draft=false" not in arguments
else:
    sys.exit("unknown " + kind)
state.write_text(json.dumps(releases))
"""


class GitHub:
    """The state of the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "releases.json"
        self.refuse = folder / "releases.json.refuse"
        self.lost = folder / "releases.json.lost"
        self.refuse.write_text("")
        self.lost.write_text("")
        self.set([])
        program = folder / "bin" / "gh"
        program.parent.mkdir()
        program.write_text(GH.format(python=sys.executable, state=str(self.state)))
        program.chmod(0o755)

    def set(self, releases: list[dict[str, Any]]) -> None:
        self.state.write_text(json.dumps(releases))

    @property
    def releases(self) -> list[dict[str, Any]]:
        return list(json.loads(self.state.read_text()))

    def asked(self, what: str) -> int:
        return Path(f"{self.state}.log").read_text().splitlines().count(what)

    @property
    def where(self) -> Path:
        """The folder in which it was asked last."""
        return Path(Path(f"{self.state}.where").read_text())

    def files(self, tag: str) -> Path:
        """What was uploaded to a release."""
        return Path(f"{self.state}.files", tag)
