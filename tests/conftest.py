"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
import samples


@pytest.fixture
def wheel_path(tmp_path: Path) -> Path:
    """A good wheel, for a test to break."""
    return samples.a_wheel(tmp_path)
