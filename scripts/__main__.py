"""The front door of the factory's commands: `python scripts COMMAND [OPTION ...]`."""

from __future__ import annotations

import signal
from types import FrameType

from sage_factory import text
from sage_factory.commands import leave, main


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """What is asked to end tidies up as it does after Ctrl-C. Who asks again, as an impatient user does, does not break into that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    text.utf8()
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell tells what it starts in the background
        signal.signal(signal.SIGINT, interrupt)
    leave(main())
