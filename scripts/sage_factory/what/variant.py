"""What rattler-build is told of a build: recipe/recipe.yaml's variables, from variants.yaml."""

from __future__ import annotations

from sage_factory.what import matrix
from sage_factory.what.build import Build
from sage_factory.what.table import Matrix


def of(
    build: Build,
    *,
    python_pin: str,
    gcc: str | None = None,
    table: Matrix | None = None,
) -> dict[str, list[str]]:
    """rattler-build's variant configuration of one build, but for the digests of what goes in: every key has one value, so that
    one package comes of it.

    `gcc` replaces the table's compiler where the channel forwards to the system's.
    """
    table = table or matrix.load()
    platform = table.platforms[build.platform]
    values = {
        "target_platform": build.platform,
        "python": python_pin,
        "pytorch": build.torch_series + ".*",
        "pytorch_run": build.conda_torch,
        "pytorch_version": build.torch,
        "pytorch_tag": build.torch_tag,
        "c_compiler": platform.c,
        "cxx_compiler": platform.cxx,
        "cuda_compiler": "cuda-nvcc",
        "cuda_compiler_version": build.cuda,
        "sage_package": build.package,
        "sage_version": build.version,
        "sage_number": str(number(build, table)),
        "sage_build": str(build.number),
        "sage_project": table.packages[build.package].project,
        "cuda_architectures": ";".join(build.architectures),
        "cuda_ptx": ";".join(build.ptx),
    }
    if not platform.windows:
        compiler = gcc or table.gcc
        values |= {"c_compiler_version": compiler, "cxx_compiler_version": compiler}
        values |= {"c_stdlib": "sysroot", "c_stdlib_version": str(platform.glibc)}
    else:
        values |= {"c_stdlib": "vs"}
    return {key: [value] for key, value in values.items()}


def number(build: Build, table: Matrix) -> int:
    """The build number, by which a solver chooses among builds of one version: the newest PyTorch, then the newest CUDA.

    But what conda-forge has that PyTorch for comes first: else a solver would give a machine with a GPU kernels for a newer
    CUDA, and beside them a PyTorch without any. PyTorch 2.9, which it has for CUDA 12, with kernels of 12.9: 209_1_129_00, of 13.1:
    209_0_131_00. Operators for every PyTorch from 2.9 on come after those for one of them, and before 2.8's: 208_9_130_00. The last
    two digits count repairs.
    """
    major, minor = map(int, build.torch_series.split("."))
    cuda = int(build.cuda.replace(".", ""))
    if build.stable_abi:
        return ((major * 100 + minor - 1) * 10_000 + 9000 + cuda) * 100 + build.number
    there = build.cuda.split(".")[0] in table.pytorch[build.torch].conda_forge
    return ((major * 100 + minor) * 10_000 + there * 1000 + cuda) * 100 + build.number
