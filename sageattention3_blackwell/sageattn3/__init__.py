"""FP4 attention for Blackwell GPUs: `sageattn3_blackwell(q, k, v)`."""

from __future__ import annotations

import sys

try:
    from ._library import build
    from .core import sageattn3_blackwell, sageattn3_varlen
    from .dispatch import explain

    __version__ = build.version
except (ImportError, OSError):
    # As in sageattention: `python -m sageattn3` imports the package before the report runs that says what is wrong with it.
    if sys.argv[:1] != ["-m"] or __name__ not in getattr(sys, "orig_argv", [__name__]):
        raise

__all__ = ["__version__", "explain", "sageattn3_blackwell", "sageattn3_varlen"]
