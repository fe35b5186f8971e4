"""One build at a time in a checkout: the second waits, and says for whom."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


@contextlib.contextmanager
def alone(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`. The operating system frees it if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        if sys.platform == "win32":
            msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
        else:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                other = handle.read().strip() or "unknown"
                report(f"waiting for another build in this checkout (process {other}); Ctrl-C gives up")
                fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield
