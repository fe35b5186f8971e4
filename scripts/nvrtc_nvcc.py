"""A small `nvcc` over NVRTC: device-only sources to a cubin or PTX with the options that csrc/kernels uses.

PyPI has no nvcc front end for CUDA 12, but its NVRTC wheel is that release's whole device compiler. scripts/channel.py
wraps this file as the `nvcc` of a channel made from PyPI. Standard library only, so that any Python runs it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Options with a value, as nvcc spells them (either spelling), and what NVRTC calls them.
VALUED = {
    "-std": "--std", "--std": "--std",
    "-arch": "--gpu-architecture", "--gpu-architecture": "--gpu-architecture",
    "-maxrregcount": "--maxrregcount", "--maxrregcount": "--maxrregcount",
    "-ftz": "--ftz", "--ftz": "--ftz",
    "-prec-div": "--prec-div", "--prec-div": "--prec-div",
    "-prec-sqrt": "--prec-sqrt", "--prec-sqrt": "--prec-sqrt",
    "-fmad": "--fmad", "--fmad": "--fmad",
    "-Xptxas": "--ptxas-options", "--ptxas-options": "--ptxas-options",
    "-diag-suppress": "--diag-suppress", "--diag-suppress": "--diag-suppress",
}  # fmt: skip
FLAGS = {
    "-use_fast_math": "--use_fast_math", "--use_fast_math": "--use_fast_math",
    "-lineinfo": "--generate-line-info", "--generate-line-info": "--generate-line-info",
    "-extra-device-vectorization": "--extra-device-vectorization",
    "--extra-device-vectorization": "--extra-device-vectorization",
    "-restrict": "--restrict", "--restrict": "--restrict",
}  # fmt: skip
# What nvcc allows and NVRTC does not by itself: functions without annotation (here meant for the device, since there is
# no host code), and the macro that nvcc's own math headers bring.
ALWAYS = ("--device-as-default-execution-space", "-DINFINITY=__builtin_huge_valf()")
# NVRTC optimises fully always; the host compiler does not take part.
IGNORED = {
    "-O3",
    "-c",
    "-expt-relaxed-constexpr",
    "--expt-relaxed-constexpr",
    "-dc",
    "--device-c",
    "-w",
    "--disable-warnings",
    "-x=cu",
}
IGNORED_VALUED = {"-ccbin", "--compiler-bindir", "-Xcompiler", "--compiler-options", "-x"}


class UsageError(ValueError):
    """Options that this nvcc does not know or that do not go together."""


@dataclass
class Job:
    source: Path = Path()
    output: Path = Path()
    architecture: str = ""
    ptx: bool = False
    depfile: Path | None = None
    includes: list[Path] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> Job:
    job, kind, sources, unknown, wants_dependencies = Job(), "", [], [], False
    rest = iter(arguments)

    def value(option: str, attached: str | None) -> str:
        found = attached if attached is not None else next(rest, None)
        if not found:
            raise UsageError(f"{option} needs a value")
        return found

    for argument in rest:
        name, equals, after = argument.partition("=")
        attached = after if equals else None
        short = argument[2:] or None
        if argument in ("-cubin", "--cubin", "-ptx", "--ptx"):
            kind = argument.lstrip("-")
        elif argument in ("-MD", "-MMD", "--generate-dependencies-with-compile"):
            wants_dependencies = True
        elif argument in ("-MT", "-MQ"):
            value(argument, None)
        elif name in ("-MF", "--dependency-output"):
            job.depfile = Path(value(name, attached))
        elif name in ("-o", "--output-file"):
            job.output = Path(value(name, attached))
        elif name in ("-I", "-isystem", "--include-path", "--system-include"):
            job.includes.append(Path(value(name, attached)))
        elif name in ("-D", "-U", "--define-macro", "--undefine-macro") and (argument == name or name.startswith("--")):
            letter = "U" if "undefine" in name or name == "-U" else "D"
            job.options.append(f"-{letter}{value(name, attached)}")
        elif argument.startswith("-I"):
            job.includes.append(Path(value("-I", short)))
        elif argument.startswith(("-D", "-U")):
            job.options.append(argument)
        elif argument in IGNORED:
            continue
        elif name in IGNORED_VALUED:
            value(name, attached)
        elif argument in FLAGS:
            job.options.append(FLAGS[argument])
        elif name in VALUED:
            text = value(name, attached)
            if VALUED[name] == "--gpu-architecture":
                job.architecture = text
            job.options.append(f"{VALUED[name]}={text}")
        elif argument.startswith("-"):
            unknown.append(argument)
        else:
            sources.append(argument)

    if unknown:
        known = sorted(
            {*VALUED, *FLAGS, *IGNORED, *IGNORED_VALUED, "-cubin", "-ptx", "-o", "-I", "-D", "-U", "-MD", "-MF"}
        )
        raise UsageError(f"unknown option {' '.join(unknown)}; this nvcc (NVRTC) knows {' '.join(known)}")
    if len(sources) != 1:
        raise UsageError(f"expected one source file, got {len(sources)}: {' '.join(sources)}")
    if kind not in ("cubin", "ptx"):
        raise UsageError("expected -cubin or -ptx: this nvcc (NVRTC) compiles device code only")
    if not re.fullmatch(r"sm_\d+[af]?" if kind == "cubin" else r"(sm|compute)_\d+[af]?", job.architecture):
        wanted = "-arch=sm_XX" if kind == "cubin" else "-arch=compute_XX"
        raise UsageError(f"-{kind} needs {wanted}, got {job.architecture or 'none'}")
    job.source, job.ptx = Path(sources[0]), kind == "ptx"
    if job.output == Path():
        job.output = Path(job.source.with_suffix(f".{kind}").name)
    if not wants_dependencies:
        job.depfile = None
    elif job.depfile is None:
        job.depfile = job.output.with_suffix(".d")
    return job


class Nvrtc:
    """The three dozen lines of NVRTC's C interface that compiling takes."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(status).decode()}")

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, text: bytes, name: str, options: Sequence[str], ptx: bool) -> tuple[bytes | None, str]:
        """The binary (None if it does not compile) and the compiler's log."""
        program = ctypes.c_void_p()
        encoded = [o.encode() for o in options]
        vector = (ctypes.c_char_p * len(encoded))(*encoded)
        self.call("nvrtcCreateProgram", ctypes.byref(program), text, name.encode(), 0, None, None)
        try:
            status = self.library.nvrtcCompileProgram(program, len(encoded), vector)
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if status:
                return None, log or self.library.nvrtcGetErrorString(status).decode()
            binary = self._bytes("PTX" if ptx else "CUBIN", program)
            return (binary.rstrip(b"\0") if ptx else binary), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]


def dependencies(source: Path, includes: Sequence[Path]) -> Iterator[Path]:
    """The files that a source includes from the project's own folders, found by reading: NVRTC lists none."""
    seen, waiting = {source}, [source]
    while waiting:
        current = waiting.pop()
        for match in re.finditer(r'^\s*#\s*include\s*["<]([^">]+)[">]', current.read_text(errors="replace"), re.M):
            for folder in (current.parent, *includes):
                path = Path(os.path.normpath(folder / match.group(1)))
                if path.is_file() and path not in seen:
                    seen.add(path)
                    waiting.append(path)
                    yield path
                if path in seen:
                    break


def write(path: Path, content: bytes) -> None:
    """Whole or not at all: an interrupted compile leaves nothing that a build tool takes for finished."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def run(toolkit: Path, release: str, arguments: Sequence[str]) -> int:
    library = next(iter(sorted((toolkit / "nvidia/cuda_nvrtc/lib").glob("libnvrtc.so.*"))), None)
    if library is None:
        raise UsageError(f"no NVRTC in {toolkit}: lay the channel again (scripts/channel.py)")
    if arguments in (["--version"], ["-V"]):
        print(
            f"nvcc: NVRTC {release} under nvcc's options\nCuda compilation tools, release {'.'.join(release.split('.')[:2])}, V{release}"
        )
        return 0
    job = parse(arguments)
    nvrtc = Nvrtc(library)
    if not release.startswith(nvrtc.version() + "."):
        raise UsageError(
            f"{library.name} is CUDA {nvrtc.version()}, but CUDA {release} was promised: lay the channel again"
        )
    toolkit_headers = [toolkit / "nvidia/cuda_runtime/include", toolkit / "nvidia/cuda_cccl/include"]
    # The source goes in under its bare name, so that no path of this machine is written into line tables or __FILE__.
    folders = [job.source.parent, *job.includes, *toolkit_headers]
    options = [*ALWAYS, *job.options, *(f"--include-path={folder}" for folder in folders)]
    binary, log = nvrtc.compile(job.source.read_bytes(), job.source.name, options, job.ptx)
    if log:
        print(log, file=sys.stderr)
    if binary is None:
        print(f"nvcc (NVRTC {release}): {job.source} does not compile for {job.architecture}", file=sys.stderr)
        return 1
    write(job.output, binary)
    if job.depfile:
        needed = [job.source, *dependencies(job.source, job.includes)]
        write(
            job.depfile,
            (f"{job.output}: " + " \\\n  ".join(str(p).replace(" ", "\\ ") for p in needed) + "\n").encode(),
        )
    return 0


def main() -> int:
    # The wrapper that channel.py writes gives the first two: where the wheels lie and which release they are.
    toolkit, release, *arguments = sys.argv[1:]
    try:
        return run(Path(toolkit), release, arguments)
    except (UsageError, OSError, RuntimeError) as error:
        print(f"nvcc (NVRTC {release}): {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
