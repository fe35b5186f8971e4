"""The kernels alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sage_factory.make import kernels


def test_kernels_are_not_compiled_by_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("SAGEATTENTION_CHANNEL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert kernels.compiler("12.8")[0] == str(nvcc)
    with pytest.raises(kernels.KernelsError, match=r"is CUDA 12\.8, not 13\.0: run `pixi run -e cu130 kernels --cuda 13\.0`"):
        kernels.compiler("13.0")
