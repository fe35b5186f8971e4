"""`python -m` and the package's name: what is installed, whether it works, and what to do where it does not."""

from __future__ import annotations

import sys

from .doctor import main

if __name__ == "__main__":
    sys.exit(main())
