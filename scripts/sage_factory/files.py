"""Files that are written whole or not at all, and named by their content."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path


def sha256(content: bytes) -> str:
    """The hexadecimal digest that manifests, indexes and sums state."""
    return hashlib.sha256(content).hexdigest()


def put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; one that is there as it should be is left alone."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # another process may be writing the same
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sweep(folder: Path, *below: str) -> None:
    """Remove what killed processes have left of files that they were writing; for who is alone there."""
    for where in below:
        for left in folder.glob(f"{where}/.*.partial"):
            left.unlink(missing_ok=True)
