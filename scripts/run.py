"""Run a task of pixi.toml where pixi or conda-forge is not to be had: `python3 scripts/run.py TASK [ARGUMENT ...]`.

Standard library only, as all that it imports: whatever else a task needs is set up here.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there by itself under PYTHONSAFEPATH
from sage_factory.with_what.tasks import main

if __name__ == "__main__":
    sys.exit(main())
