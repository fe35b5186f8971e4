"""Check style and types of the whole repository: ruff check, ruff format --check, mypy."""

from __future__ import annotations

import shutil
import subprocess
import sys

from sage_factory import ROOT

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
)


def main() -> int:
    if missing := {check[0] for check in CHECKS if shutil.which(check[0]) is None}:
        print(f"error: no {' and no '.join(sorted(missing))} here: run `python3 scripts/run.py lint`", file=sys.stderr)
        return 1
    # All of them, whatever the first says: the reader wants every fault at once.
    failed = [check for check in CHECKS if subprocess.run(check, cwd=ROOT, check=False).returncode]
    for check in failed:
        print(f"error: `{' '.join(check)}` found faults", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
