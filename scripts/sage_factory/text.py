"""Text between programs is UTF-8, whatever the system's own encoding: of a pipe on Windows it is cp1252, which has no ▶ and no ╭."""

from __future__ import annotations

import io
import sys


def utf8() -> None:
    """Let this process print anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
