"""Say what is installed, whether it works, and what to do where it does not."""

from __future__ import annotations

import argparse
import signal
import sys

from .doctor import NAME, main

if __name__ == "__main__":
    argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__).parse_args()
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without a word once nobody reads on, as in `| head`
    sys.exit(main())
