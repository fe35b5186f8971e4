"""GitHub, by its command line."""

from __future__ import annotations

import subprocess

from sage_factory import ROOT, FactoryError


class GhError(FactoryError):
    """gh did not do as it was asked; the message is gh's own."""


def gh(*command: str) -> str:
    """What gh says in this checkout, as git does, wherever it is asked; GhError if it fails or is not there."""
    try:
        done = subprocess.run(
            ["gh", *command], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
        )
    except FileNotFoundError as error:
        where = "pixi's environments `release` and `lock` have it; without pixi, install it"
        raise GhError(f"`gh`, GitHub's command line, is not installed: {where}") from error
    if done.returncode:
        raise GhError(f"`gh {' '.join(command[:2])}` failed: {done.stderr.strip()}. Run it again to go on")
    return done.stdout.strip()
