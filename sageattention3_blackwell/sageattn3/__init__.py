"""FP4 attention for Blackwell GPUs: `sageattn3_blackwell(q, k, v)`."""

from __future__ import annotations

try:
    from ._library import build
    from .core import sageattn3_blackwell, sageattn3_varlen
    from .dispatch import explain

    __version__ = build.version
except (ImportError, OSError):
    from .doctor import is_asked_for

    if not is_asked_for():
        raise

__all__ = ["__version__", "explain", "sageattn3_blackwell", "sageattn3_varlen"]
