"""The front door of the factory's commands: `python scripts COMMAND [OPTION ...]`."""

from __future__ import annotations

import importlib
import sys

MAINS = {"build": "make.packages", "kernels": "make.kernels", "_package": "make.engine", "wheel": "make.wheels",
         "verify": "inspect.verify", "compare": "inspect.compare", "with-wheel": "inspect.installed",
         "matrix": "what.matrix", "plan": "what.plan", "channel": "with_what.channel", "lock": "with_what.locks",
         "release": "ship.release", "publish": "ship.publish", "index": "ship.indexes", "reproduce": "ship.reproduce",
         "summary": "ship.summary", "tag": "ship.tag", "lint": "commands.lint"}  # fmt: skip

if __name__ == "__main__":
    name = sys.argv.pop(1)
    sys.exit(importlib.import_module(f"sage_factory.{MAINS[name]}").main())
