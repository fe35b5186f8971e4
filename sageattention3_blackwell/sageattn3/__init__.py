"""FP4 attention for Blackwell GPUs: `sageattn3_blackwell(q, k, v)`."""

from __future__ import annotations

try:
    from ._library import build
    from .core import sageattn3_blackwell, sageattn3_varlen
    from .dispatch import explain

    __version__ = build.version
except Exception as error:
    from . import doctor

    if not doctor.is_asked_for():
        raise
    doctor.import_failure = error

__all__ = ["__version__", "explain", "sageattn3_blackwell", "sageattn3_varlen"]
