"""One at a time: a process that comes second waits, and says for whom."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# Windows keeps others from reading the byte that is locked: one far behind what is written.
LOCKED_BYTE = 2**30
# Open files of the locks that this process holds. Children are given them too: where this process is killed, its locks
# last until what it had started has ended as well.
held: list[int] = []


def say(text: str) -> None:
    """Where a process says what it waits for, unless told otherwise."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def alone(path: Path, what: str, report: Callable[[str], None] = say) -> Iterator[None]:
    """Hold the lock file `path`, which the operating system frees if this process dies. `what` is what others may be at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        if not _locked(handle):
            handle.seek(0)
            report(f"waiting for {what} (process {handle.read().strip() or 'unknown'}); Ctrl-C gives up")
            while not _locked(handle):
                time.sleep(0.2)
        with contextlib.suppress(OSError):  # which is for others' message alone: a disk may be full
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), str(os.getpid()).encode())
        held.append(handle.fileno())
        try:
            yield
        finally:
            held.remove(handle.fileno())
            _unlock(handle)


def _locked(handle: TextIO) -> bool:
    """Take the lock if it is free. An error of another kind, as where a file system has no locks, is not another's lock."""
    try:
        if sys.platform == "win32":
            handle.seek(LOCKED_BYTE)
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            raise
        return False
    return True


def _unlock(handle: TextIO) -> None:
    """Free the lock for good: a child that outlives its purpose does not keep it."""
    if sys.platform == "win32":
        handle.seek(LOCKED_BYTE)
        msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)
