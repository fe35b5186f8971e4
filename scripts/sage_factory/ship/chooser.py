"""The page on which somebody picks a package, Python, PyTorch, CUDA and system, and copies the line that installs the wheel for them.

One file without anything from elsewhere, so that whatever serves the indexes serves it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from sage_factory.what import matrix, offers
from sage_factory.what.build import series_of

TEMPLATE = Path(__file__).with_suffix(".html")
SYSTEMS = {"linux_x86_64": "Linux x86-64", "linux_aarch64": "Linux ARM", "win_amd64": "Windows"}
PICKED = ("package", "os", "python", "torch", "cuda")


class Offer(NamedTuple):
    """A wheel of an index."""

    name: str
    url: str  # as the page links to it
    folder: str  # of its index, below the page, as cu128-torch28
    major: str  # of the index of its CUDA's major version
    sha256: str


def described(offer: Offer) -> Iterator[dict[str, str]]:
    """What is picked from of a wheel, and what is shown of it: once for each Python and PyTorch that it is for."""
    package, version, _, tags = parse_wheel_filename(offer.name)
    platforms = sorted(tag.platform for tag in tags)
    system = next((SYSTEMS[name] for name in platforms if name in SYSTEMS), platforms[-1])
    # cu128-torch28: of CUDA the last digit is the minor version, of PyTorch all but the first.
    cuda, torch = re.findall(r"\d+", offer.folder)
    first = f"{torch[0]}.{torch[1:]}"
    python = re.fullmatch(r"cp(\d)(\d+)", next(iter(tags)).interpreter)
    for series, pythons in _pairs(first) if python is None else [(first, (f"{python[1]}.{python[2]}",))]:
        for one in pythons:
            yield {"package": package, "os": system, "python": one, "torch": series, "cuda": f"{cuda[:-1]}.{cuda[-1]}",
                   "name": offer.name, "url": offer.url, "index": offer.major, "version": str(version), "sha256": offer.sha256,
                   "note": _note(first, f"{cuda[:-1]}.{cuda[-1]}", system)}  # fmt: skip


@cache
def _note(series: str, cuda: str, system: str) -> str:
    """What else is to be known: the one sentence of a release's notes, which here ends without Markdown."""
    builds = [build for build in matrix.load().all_builds if (build.torch_series, build.cuda) == (series, cuda)]
    return "" if system == SYSTEMS["win_amd64"] else offers.abi(builds).replace("`", "")


def _pairs(first: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each PyTorch of variants.yaml from `first` on, with its Pythons."""
    for torch in matrix.load().pytorch.values():
        if not torch.stable_abi and Version(torch.version) >= Version(first):
            yield series_of(torch.version), torch.python


def page(offers: Iterable[Offer], folders: Iterable[str]) -> str:
    """The page for these wheels, with links to all indexes for who has no JavaScript."""
    every = sorted((one for offer in offers for one in described(offer)), key=lambda one: Version(one["version"]))
    # Of what is for the same, as after a repair, the newest.
    wheels = list({tuple(one[key] for key in PICKED): one for one in every}.values())
    # The last is chosen at first.
    first = next(iter(matrix.load().packages))
    versions = ("torch", "cuda", "python")
    wheels.sort(
        key=lambda w: (w["package"] == first, w["os"] == SYSTEMS["linux_x86_64"], *(Version(w[key]) for key in versions))
    )
    # A script ends at the next "</", whatever it holds.
    data = json.dumps(wheels, indent=1).replace("</", "<\\/")
    links = "\n".join(f'<li><a href="{html.escape(name)}/">{html.escape(name)}</a></li>' for name in folders)
    return TEMPLATE.read_text(encoding="utf-8").replace("INDEXES", links).replace("WHEELS</script>", f"{data}</script>")
