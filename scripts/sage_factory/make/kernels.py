"""Compile the kernels alone, for working on them: only what changed, straight into build/kernels-cuXYZ/cubins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from sage_factory import ROOT, FactoryError, alone, task
from sage_factory.files import put
from sage_factory.what import check, matrix
from sage_factory.what.build import cuda_tag
from sage_factory.what.table import known
from sage_factory.with_what import channel, venvs


class KernelsError(FactoryError):
    """The kernels cannot be compiled; the message says why."""


def compiler(cuda: str) -> tuple[str, dict[str, str]]:
    """nvcc of that release and the environment that cmake and ninja are found in."""
    if os.environ.get("SAGEATTENTION_CHANNEL") != "pypi":
        found = shutil.which("nvcc")
        release = _release(found) if found else None
        if found is None or release != cuda:
            there = f"nvcc on PATH is CUDA {release}, not {cuda}" if found else "no nvcc on PATH"
            tag = cuda_tag(cuda)
            raise KernelsError(
                f"{there}: run `pixi run -e {tag} kernels --cuda {cuda}`, where pixi.toml has that environment, "
                f"or `python3 scripts/run.py kernels --cuda {cuda}`"
            )
        return found, dict(os.environ)
    venvs.ensure("tools")
    package = channel.nvcc(matrix.load().cuda[cuda], matrix.host_platform(), channel.compiler(), alone.say)
    folder = ROOT / "build" / f"nvcc-{cuda}"
    with alone.alone(folder.with_name(f"{folder.name}.lock"), "another process that lays this compiler"):
        for place, text in package.texts.items():
            # What CMake compares is the wrapper: it changes with the toolkit behind it, whose paths do not, and then alone.
            stamped = text.replace("\n", f"\n# {package.digest()}\n", 1) if place.startswith("bin/") else text
            put(folder / place, os.fsencode(stamped))
            (folder / place).chmod(0o755)
    commands = os.pathsep.join([str(venvs.bin_dir("tools")), os.environ["PATH"]])
    return str(folder / "bin" / "nvcc"), os.environ | {"PATH": commands}


def _release(nvcc: str) -> str:
    """The CUDA version that a compiler says it is of."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", said)
    return match[1] if match else "of no known version"


def compile_kernels(package: str, cuda: str, architectures: list[str], *, proof: bool = False) -> Path:
    """Compile for these architectures with Ninja's own progress; the folder of the cubins. `proof`: all that can run there."""
    table = matrix.load()
    one = known("package", package, table.packages)
    compiled, ptx = table.compiled(one, known("CUDA version", cuda, table.cuda))
    # Who asks for 9.0 means 9.0a, where kernels are for that alone.
    spelled = [next((a for a in (*compiled, *table.architectures) if a.rstrip("a") == name), name) for name in architectures]
    wanted = spelled or list(compiled)
    for name in wanted:
        check.architecture(table, cuda, name)
    targets = [name.removeprefix("sm_") for name in matrix.targets(wanted)]
    nvcc, environment = compiler(cuda)
    whose = "" if package == next(iter(table.packages)) else f"{package}-"
    output = ROOT / "build" / f"{whose}kernels-{cuda_tag(cuda)}{'-proof' if proof else ''}"
    configure = ["cmake", "-S", "csrc/kernels", "-B", str(output), "-G", "Ninja", "--log-level=WARNING",
                 f"-DSAGE_NVCC={nvcc}", f"-DSAGE_CUDA_VERSION={cuda}", f"-DSAGE_VERSION={one.version}",
                 f"-DSAGE_PACKAGE={package}", f"-DSAGE_PROOF={'ON' if proof else 'OFF'}",
                 f"-DSAGE_ARCHITECTURES={';'.join(targets)}", f"-DSAGE_PTX={';'.join(ptx) if not architectures else ''}"]  # fmt: skip
    with alone.alone(output.with_name(f"{output.name}.lock"), "another process that compiles these kernels"):
        for command in (configure, ["cmake", "--build", str(output)]):
            try:
                # Where this process is killed, ninja goes on for a while: others wait for it.
                held = alone.held if os.name == "posix" else ()
                status = subprocess.run(command, cwd=ROOT, env=environment, pass_fds=held, check=False).returncode
            except FileNotFoundError as error:
                raise KernelsError(f"{command[0]} is not on PATH: run {task('kernels')}") from error
            if status:
                raise KernelsError(f"the kernels did not compile (exit status {status}): the compiler's own words are above")
    return output / "cubins"
