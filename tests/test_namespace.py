"""Copies of the package beside an installed one: operators in a namespace of their own, imports by no name, no shared symbols."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sageattention import _library

TRY = """
import torch
q, k, v = (torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))
"""


def copied(folder: Path, name: str, namespace: str) -> Path:
    """The installed package under another name, with another namespace in its record."""
    package = folder / name
    shutil.copytree(_library.PACKAGE, package, ignore=shutil.ignore_patterns("cubins", "__pycache__"))
    record = package / "_build.json"
    record.write_text(json.dumps({**json.loads(record.read_text(encoding="utf-8")), "namespace": namespace}), encoding="utf-8")
    return package


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-P", "-c", TRY + code], capture_output=True, text=True, env=environment, check=False
    )


def test_two_copies_in_one_process(tmp_path: Path) -> None:
    """Each has its operators, its kernels and its errors; torch.compile takes the copy's too."""
    copied(tmp_path, "other", "other_operators")
    done = run(
        """
import sageattention, other
assert other.__file__ != sageattention.__file__
expected = sageattention.sageattn(q, k, v, is_causal=True)
assert torch.equal(other.sageattn(q, k, v, is_causal=True), expected)
assert torch.equal(torch.compile(other.sageattn, fullgraph=True, backend="eager")(q, k, v, is_causal=True), expected)
assert other._ops.ATTENTION == torch.ops.other_operators.attention.default.name()
assert sageattention._ops.ATTENTION == torch.ops.sageattention.attention.default.name()
try:
    other.sageattn(q.requires_grad_(), k, v).float().sum().backward()
except RuntimeError as error:
    assert "derivative for other_operators::attention is not implemented" in str(error), error
else:
    raise AssertionError("gradients out of nothing")
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_alone(tmp_path: Path) -> None:
    """No module of it imports `sageattention`, under whatever name it lies."""
    package = copied(tmp_path, "other", "other_operators")
    modules = [path.stem for path in package.glob("*.py") if path.stem != "__main__"]
    done = run(
        f"""
import importlib, sys
sys.modules["sageattention"] = None  # an import of it fails
for name in {modules!r}:
    importlib.import_module(f"other.{{name}}")
import other.__main__
assert other.sageattn(q, k, v).isfinite().all()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_namespace_that_is_taken(tmp_path: Path) -> None:
    """An error to be caught, where PyTorch would end the process; the first copy goes on working."""
    copied(tmp_path, "other", "sageattention")
    done = run(
        """
import sageattention
try:
    import other
except ImportError as error:
    print(error)
assert sageattention.sageattn(q, k, v).isfinite().all()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "_C." in done.stdout
    assert "cannot register torch.ops.sageattention, which another copy of the package in this process has" in done.stdout
