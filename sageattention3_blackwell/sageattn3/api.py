"""Where SageAttention3 has its function, which programs import from there."""

from __future__ import annotations

from .core import sageattn3_blackwell

__all__ = ["sageattn3_blackwell"]
