"""The factory's house: imports run one way, and none of its names is another project's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from sage_factory import ROOT

SCRIPTS = ROOT / "scripts"
# In the order in which data goes through them; what lies beside these folders is the ground that all stand on.
STAGES = ("what", "with_what", "make", "inspect", "ship", "commands")
MODULES = {
    ".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (SCRIPTS / "sage_factory").rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by dots, which hide the direction"
            found |= {name if (name := f"{node.module}.{alias.name}") in MODULES else str(node.module) for alias in node.names}
    return found


def floor(module: str) -> int:
    """The number of a module's stage; of the ground 0."""
    stage = [*module.split("."), ""][1]
    return STAGES.index(stage) + 1 if stage in STAGES else 0


def test_every_folder_is_a_stage() -> None:
    folders = {path.parent.name for path in MODULES.values()}
    assert folders == {"sage_factory", *STAGES}
    tested = {path.parent.name for path in (ROOT / "tests" / "factory").rglob("*.py")}
    assert tested == {"factory", *STAGES}, "the tests lie in the same rooms"
    assert floor("sage_factory") == floor("sage_factory.alone") == 0
    assert floor("sage_factory.what") == floor("sage_factory.what.matrix") == 1
    assert floor("sage_factory.commands.build") == len(STAGES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downstream(module: str) -> None:
    """A stage stands on those before it, and knows none of those after it."""
    up = {name for name in imported(MODULES[module]) if name in MODULES and floor(name) > floor(module)}
    assert not up, f"{module} imports {', '.join(sorted(up))}, which comes after it"


def test_nothing_is_imported_in_a_circle() -> None:
    graph = {name: {other for other in imported(path) if other in MODULES} - {name} for name, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_what_lies_on_the_import_path_is_named_as_nothing_else_is() -> None:
    """setuptools imports `wheel`: a module of ours must not answer."""
    names = {path.stem for path in SCRIPTS.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names == {"__main__", "run", "sage_factory"}
    others = {name for name, projects in packages_distributions().items() if projects != ["sageattention"]}
    assert not names & ({*sys.stdlib_module_names, *others} - {"__main__"})


def reached(path: Path) -> dict[str, Path]:
    """All of ours that a file imports, directly or not."""
    found: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        for name in imported(waiting.pop()):
            for one in (name.rpartition(".")[0], name):  # a package comes with its modules
                if one in MODULES and one not in found:
                    found[one] = MODULES[one]
                    waiting.append(MODULES[one])
    return found


def test_run_py_begins_with_the_standard_library_alone() -> None:
    start = reached(SCRIPTS / "run.py")
    assert {"sage_factory", "sage_factory.with_what.tasks", "sage_factory.with_what.venvs"} <= start.keys()
    for name, path in start.items():
        others = {one.split(".")[0] for one in imported(path)} - {*sys.stdlib_module_names, "sage_factory"}
        assert not others, f"{name} imports {', '.join(sorted(others))}"
    # -S: without the packages that are installed.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-S", str(SCRIPTS / "run.py")]
    assert "build-cu128" in subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_run_py_finds_its_own_modules_under_safe_path() -> None:
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(SCRIPTS / "run.py")]
    assert "build-cu128" in subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
