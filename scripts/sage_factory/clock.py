"""How long the steps of a build take."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Clock:
    """How long each kind of step took: seconds that passed, and of processors, all child processes included."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        start, cpu = time.monotonic(), processor_seconds()
        try:
            yield
        finally:
            wall, used = self.seconds.get(name, (0.0, 0.0))
            self.seconds[name] = wall + time.monotonic() - start, used + processor_seconds() - cpu


def processor_seconds() -> float:
    """Seconds of processors that this process and its ended children have used. (Windows does not count children.)"""
    return sum(os.times()[:4])
