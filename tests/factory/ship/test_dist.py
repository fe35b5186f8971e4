"""The wheels that lie in dist/: the operators of each are loaded beside the PyTorch they were built for."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from sage_factory import ROOT
from sage_factory.what import matrix
from sage_factory.with_what import venvs

WHEELS = sorted((ROOT / "dist" / "wheels").glob("*.whl"))
# Of one build for every Python the operators are the same bytes: what is loaded in one Python is loaded for all.
CODE = """
import ctypes, sys, torch
assert not ctypes.CDLL(sys.argv[1]).sage_register_operators(sys.argv[2].encode())
print(torch.__version__, *(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{sys.argv[2]}::")))
"""


def distinct() -> dict[str, list[Path]]:
    """Wheels by the operators in them, named after the first."""
    by_content: dict[str, list[Path]] = {}
    for path in WHEELS:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.split("/")[1:] in (["_C.so"], ["_C.dll"])]
            by_content.setdefault(hashlib.sha256(archive.read(names[0])).hexdigest(), []).append(path)
    return {paths[0].name: paths for paths in by_content.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", distinct())
def test_operators_load_beside_their_pytorch(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(ROOT / "dist" / "wheels" / name) as archive:
        package = name.partition("-")[0]
        torch = matrix.load().pytorch[json.loads(archive.read(f"{package}/_build.json"))["torch"]].compiled_with
        library = archive.extract(f"{package}/_C.so", tmp_path)
    # The whole one, or what a build makes of it.
    names = [name for name in (f"torch-{torch}", f"torch-{torch}-cpu") if (venvs.VENVS / name / venvs.STAMP).is_file()]
    if not names:
        pytest.skip(f"no PyTorch {torch} from PyPI here: a build of it brings it")
    python = venvs.python_of(names[0])
    done = subprocess.run([python, "-W", "ignore", "-c", CODE, library, package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, *operators = done.stdout.split()
    assert found.startswith(torch)
    assert set(operators) == {f"{package}::attention", f"{package}::attention_varlen"}
