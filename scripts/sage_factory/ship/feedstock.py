"""Our recipe as conda-forge takes one: of a released archive, with the variables of its pinning, build numbers and maintainers."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sage_factory import ROOT, FactoryError
from sage_factory.files import put
from sage_factory.make import engine
from sage_factory.what import matrix
from sage_factory.what.table import Matrix

PACKAGE = "sageattention"
FILES = ("build_cubins.sh", "build_operators.sh", "test_cpu.py")
# What conda-forge's pinning has where a job is for CUDA; jobs that are not have "None".
CUDA = "cuda_compiler_version"
TAG = f'cuda${{{{ {CUDA} | replace(".", "") }}}}'


class FeedstockError(FactoryError):
    """conda-forge's recipe cannot be made; the message says why."""


@dataclass(frozen=True)
class Source:
    """What is built: the archive of a tag."""

    repository: str  # its page
    url: str
    sha256: str
    commit: str


def recipe(source: Source, maintainers: Sequence[str]) -> dict[str, Any]:
    """recipe/recipe.yaml, changed in what conda-forge does otherwise."""
    if not maintainers:
        raise FeedstockError("conda-forge asks for maintainers, by their names on GitHub: say who with --maintainer")
    ours = yaml.safe_load(engine.RECIPE.read_text(encoding="utf-8"))
    table = matrix.load()
    package = table.packages[PACKAGE]
    version = package.version
    return {
        "schema_version": 1,
        "context": {"name": package.name, "cubins": package.cubins, "version": version, "build": 0},
        "recipe": ours["recipe"],
        "source": {"url": source.url.replace(version, "${{ version }}"), "sha256": source.sha256},
        # Kernels are one package for all platforms, compiled on Linux: elsewhere nothing can be built before they are published.
        "build": {"number": "${{ build }}", "skip": [f'{CUDA} in (undefined, "None")', "not linux"]},
        "outputs": [_output(copy.deepcopy(output), source, table) for output in ours["outputs"]],
        "about": {
            "homepage": source.repository,
            "repository": source.repository,
            "documentation": f"{source.repository}/blob/{package.tags}{version}/README.md",
            "license": "Apache-2.0",
            "license_file": "LICENSE",
            "summary": "Quantised attention for PyTorch on NVIDIA GPUs",
        },
        "extra": {"recipe-maintainers": list(maintainers)},
    }


def _output(output: dict[str, Any], source: Source, table: Matrix) -> dict[str, Any]:
    build, needs, script = output["build"], output["requirements"], output["build"]["script"]
    del output["source"]  # the whole archive
    # By digests `build` finds what is built already; conda-forge has its own ways.
    build["number"] = "${{ build }}"
    build["string"] = f"{TAG}_h${{{{ hash }}}}_${{{{ build }}}}"
    script["env"]["SAGE_CUDA_VERSION"] = f"${{{{ {CUDA} }}}}"
    if output["package"]["name"] == "${{ cubins }}":
        script["env"] |= {"SAGE_ARCHITECTURES": _of_cuda(table, "architectures"), "SAGE_PTX": _of_cuda(table, "ptx")}
        needs["build"].append('${{ stdlib("c") }}')  # asked for beside every compiler
        for test in output["tests"]:  # there is PTX of this package
            files = test["package_contents"]["files"]
            test["package_contents"]["files"] = [one if isinstance(one, str) else one["then"] for one in files]
    else:
        script["file"] = "build_operators.sh"
        script["env"] |= {
            "SAGE_PROJECT": table.packages[PACKAGE].project,
            "SAGE_COMMIT": source.commit,
            "SAGE_TORCH_RELEASE": "${{ pytorch }}.0",
        }
        needs["host"], needs["run"] = (_pinned(needs[when]) for when in ("host", "run"))
        # conda-forge's linter renders recipes with nothing but their own context.
        major = f'(({CUDA} or "0") | split("."))[0]'
        needs["run_constraints"] = [
            f"__cuda >=${{{{ {major} }}}}",
            f"cuda-version >=${{{{ {CUDA} }}}},<${{{{ {major} | int + 1 }}}}",
        ]
        for test in output["tests"]:
            if "python" in test:
                test["python"]["python_version"] = ["${{ python_min }}.*", "*"]
            if files := test.get("package_contents"):
                files["site_packages"] = [re.sub(r"(?<=_C\.).*", "so", name) for name in files["site_packages"]]
    said = output["about"]["summary"]
    output["about"]["summary"] = said.replace("{{ cuda }}", f"{{{{ {CUDA} }}}}").replace(
        "{{ pytorch_version }}", "{{ pytorch }}"
    )
    return {"package": output["package"] | {"version": "${{ version }}"}, **{k: v for k, v in output.items() if k != "package"}}


def _pinned(needs: list[Any]) -> list[Any]:
    """As the pinning has it: PyTorch's series, the oldest Python. The glibc comes of stdlib's own run_exports."""
    pinned = {"pytorch": "pytorch ${{ pytorch }}.*", "python": "python >=${{ python_min }}"}
    plain = [need for need in needs if isinstance(need, str)]
    return [pinned.get(need.split()[0], need) if " " in need else need for need in plain]


def _of_cuda(table: Matrix, what: str) -> str:
    """A list that depends on the CUDA version, as an expression; the newest CUDA's stands for those that variants.yaml has not."""
    lists: dict[str, str] = {}
    for cuda in table.cuda.values():
        lists[cuda.version] = ";".join(getattr(cuda, what))
    newest = list(lists.values())[-1]
    others = {version: value for version, value in lists.items() if value != newest}
    if not others:
        return newest
    choices = " ".join(f'"{value}" if {CUDA} == "{version}" else' for version, value in others.items())
    return f'${{{{ {choices} "{newest}" }}}}'


def write(source: Source, maintainers: Sequence[str], folder: Path) -> list[Path]:
    """The folder that goes into staged-recipes' `recipes/`; its files."""
    text = yaml.safe_dump(recipe(source, maintainers), sort_keys=False, allow_unicode=True, width=200)
    put(folder / "recipe.yaml", text.encode())
    for name in FILES:
        put(folder / name, (ROOT / "recipe" / name).read_bytes())
    return [folder / name for name in ("recipe.yaml", *FILES)]
