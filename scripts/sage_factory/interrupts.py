"""Being asked to end, by Ctrl-C or SIGTERM. Standard library only: run.py uses it too."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


def once(ending: Callable[[int], BaseException]) -> None:
    """Have what a signal's number stands for raised where the process is asked to end, so that it tidies up. Who asks again, as an
    impatient user does, does not break into that. SIGINT stays ignored where it is, as a shell tells what it starts in the background.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        raise ending(number)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
