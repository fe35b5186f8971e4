"""The factory: from variants.yaml to conda packages, to wheels, to where users get them.

A folder for each stage, in the order in which data goes through them: `what` is built, `with_what`; `make` it, `inspect` it,
`ship` it. A stage imports from those before it and never from one after it, `commands` from all of them. The modules beside
the folders are what every stage uses.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - this line is for the reader who has an older one
    sys.exit(
        f"error: what is in scripts/ needs Python 3.11 or newer, this is {sys.version.split()[0]}. Run it as python3.11 or newer"
    )

ROOT = Path(__file__).resolve().parents[2]


class FactoryError(Exception):
    """Something cannot be done as it was asked for; the message says why and what to do."""


def task(words: str) -> str:
    """How a message names a task: by the front door that this process came through, pixi or run.py. A machine may have one alone."""
    return f"`{'pixi run' if 'PIXI_ENVIRONMENT_NAME' in os.environ else 'python3 scripts/run.py'} {words}`"
