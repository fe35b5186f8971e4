"""The front door of the factory's commands: `python scripts COMMAND [OPTION ...]`."""

from __future__ import annotations

from sage_factory import interrupts, text
from sage_factory.commands import leave, main

if __name__ == "__main__":
    text.utf8()
    interrupts.once(lambda _: KeyboardInterrupt())  # SIGTERM, too: it tidies up as it does after Ctrl-C
    leave(main())
