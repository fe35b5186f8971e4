"""The page on which somebody picks Python, PyTorch, CUDA and system, and copies the line that installs the wheel for them.

One file without anything from elsewhere, so that whatever serves the indexes serves it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_wheel_filename
from packaging.version import Version

TEMPLATE = Path(__file__).with_suffix(".html")
SYSTEMS = {"linux_x86_64": "Linux x86-64", "linux_aarch64": "Linux ARM", "win_amd64": "Windows"}


class Offer(NamedTuple):
    """A wheel of an index."""

    name: str
    url: str  # as the page links to it
    folder: str  # of its index, below the page, as cu128-torch28
    major: str  # of the index of its CUDA's major version
    sha256: str


def described(offer: Offer) -> dict[str, str]:
    """What is picked from of a wheel, and what is shown of it."""
    tags = parse_wheel_filename(offer.name)[3]
    python = re.sub(r"cp(\d)(\d+)", r"\1.\2", next(iter(tags)).interpreter)
    system = next(said for platform, said in SYSTEMS.items() if platform in {tag.platform for tag in tags})
    # cu128-torch28; of CUDA the last digit is the minor version, of PyTorch all but the first.
    cuda, torch = re.findall(r"\d+", offer.folder)
    return {
        "os": system,
        "python": python,
        "torch": f"{torch[0]}.{torch[1:]}",
        "cuda": f"{cuda[:-1]}.{cuda[-1]}",
        "name": offer.name,
        "url": offer.url,
        "index": offer.major,
        "version": str(parse_wheel_filename(offer.name)[1]),
        "sha256": offer.sha256,
    }


def page(offers: Iterable[Offer], folders: Iterable[str]) -> str:
    """The page for these wheels, with links to all indexes for who has no JavaScript."""
    wheels = [described(offer) for offer in offers]
    wheels.sort(key=lambda w: (w["os"] == SYSTEMS["linux_x86_64"], *(Version(w[key]) for key in ("torch", "cuda", "python"))))
    # A script ends at the next "</", whatever it holds.
    data = json.dumps(wheels, indent=1).replace("</", "<\\/")
    links = "\n".join(f'<li><a href="{html.escape(name)}/">{html.escape(name)}</a></li>' for name in folders)
    return TEMPLATE.read_text(encoding="utf-8").replace("INDEXES", links).replace("WHEELS</script>", f"{data}</script>")
