"""A small `nvcc` over NVRTC: device-only sources to a cubin or PTX, with the options that csrc/kernels uses.

PyPI has no nvcc front end for CUDA 12, but its NVRTC wheel is that release's whole device compiler. The channel made from PyPI wraps
this file as its `nvcc`. Standard library only, so that any Python runs it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Other spellings that nvcc takes.
ALIASES = {
    "--output-file": "-o", "--include-path": "-I", "-isystem": "-I", "--system-include": "-I",
    "--define-macro": "-D", "--undefine-macro": "-U", "--cubin": "-cubin", "--ptx": "-ptx",
    "-MMD": "-MD", "--generate-dependencies-with-compile": "-MD", "--dependency-output": "-MF",
    "--gpu-architecture": "-arch", "--ptxas-options": "-Xptxas", "--compiler-options": "-Xcompiler",
    "--compiler-bindir": "-ccbin", "--generate-line-info": "-lineinfo",
    "--std": "-std", "--maxrregcount": "-maxrregcount", "--ftz": "-ftz", "--prec-div": "-prec-div",
    "--prec-sqrt": "-prec-sqrt", "--fmad": "-fmad", "--diag-suppress": "-diag-suppress",
    "--use_fast_math": "-use_fast_math", "--restrict": "-restrict",
    "--expt-relaxed-constexpr": "-expt-relaxed-constexpr",
}  # fmt: skip
# Options with a value and without, with NVRTC's name for each.
VALUED = {
    "-std": "--std", "-arch": "--gpu-architecture", "-maxrregcount": "--maxrregcount", "-ftz": "--ftz",
    "-prec-div": "--prec-div", "-prec-sqrt": "--prec-sqrt", "-fmad": "--fmad", "-Xptxas": "--ptxas-options",
    "-diag-suppress": "--diag-suppress",
}  # fmt: skip
FLAGS = {"-use_fast_math": "--use_fast_math", "-lineinfo": "--generate-line-info", "-restrict": "--restrict"}
# NVRTC optimises fully always; no host compiler takes part; and what nvcc allows on request is in ALWAYS below.
IGNORED = ("-O3", "-c", "-w", "-x=cu", "-expt-relaxed-constexpr")
IGNORED_VALUED = ("-ccbin", "-Xcompiler", "-x", "-MT", "-MQ")
OURS = ("-o", "-I", "-D", "-U", "-MF")
# What nvcc allows and NVRTC does not by itself: functions without annotation (here meant for the device, since there is
# no host code), and the macro that nvcc's own math headers bring.
ALWAYS = ("--device-as-default-execution-space", "-DINFINITY=__int_as_float(0x7f800000)")


class UsageError(ValueError):
    """Options that this nvcc does not know or that do not go together."""


@dataclass(frozen=True)
class Job:
    source: Path
    output: Path
    architecture: str
    ptx: bool
    depfile: Path | None
    includes: Sequence[Path]
    options: Sequence[str]


def split(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The command line as options with their values, in one spelling each; sources have the empty option."""
    found, unknown, rest = [], [], iter(arguments)
    for argument in rest:
        spelt, equals, attached = argument.partition("=")
        name = ALIASES.get(spelt, spelt)
        if name in VALUED or name in OURS or name in IGNORED_VALUED:
            value = attached if equals else next(rest, "")
            if not value:
                raise UsageError(f"{spelt} needs a value")
            found.append((name, value))
        elif argument[:2] in OURS:
            found.append((argument[:2], argument[2:]))
        elif name in FLAGS or name in IGNORED or name in ("-cubin", "-ptx", "-MD"):
            found.append((name, ""))
        elif argument.startswith("-"):
            unknown.append(argument)
        else:
            found.append(("", argument))
    if unknown:
        known = " ".join(sorted({*VALUED, *FLAGS, *IGNORED, *IGNORED_VALUED, *OURS, "-cubin", "-ptx", "-MD"}))
        raise UsageError(f"unknown option {' '.join(unknown)}; this nvcc (NVRTC) knows {known}")
    return found


def parse(arguments: Sequence[str]) -> Job:
    """What to compile, from what, to what."""
    options = split(arguments)
    last = dict(options)
    sources = [value for name, value in options if not name]
    kinds = {name for name, _ in options} & {"-cubin", "-ptx"}
    if len(sources) != 1:
        raise UsageError(f"expected one source file, got {len(sources)}: {' '.join(sources)}")
    if len(kinds) != 1:
        raise UsageError("expected one of -cubin and -ptx: this nvcc (NVRTC) compiles device code only")
    kind, source, architecture = kinds.pop(), Path(sources[0]), last.get("-arch", "")
    if not re.fullmatch(r"sm_\d+[af]?" if kind == "-cubin" else r"(sm|compute)_\d+[af]?", architecture):
        wanted = "-arch=sm_XX" if kind == "-cubin" else "-arch=compute_XX"
        raise UsageError(f"{kind} needs {wanted}, got {architecture or 'none'}")
    output = Path(last.get("-o") or source.with_suffix("." + kind[1:]).name)
    return Job(
        source=source,
        output=output,
        architecture=architecture,
        ptx=kind == "-ptx",
        depfile=Path(last.get("-MF") or output.with_suffix(".d")) if "-MD" in last else None,
        includes=[Path(value) for name, value in options if name == "-I"],
        options=[
            *(f"{VALUED[name]}={value}" for name, value in options if name in VALUED),
            *(name + value for name, value in options if name in ("-D", "-U")),
            *(FLAGS[name] for name, _ in options if name in FLAGS),
        ],
    )


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
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def run(toolkit: Path, release: str, arguments: Sequence[str]) -> int:
    library = next(iter(sorted((toolkit / "nvidia/cuda_nvrtc/lib").glob("libnvrtc.so.*"))), None)
    if library is None:
        raise UsageError(f"no NVRTC in {toolkit}: lay the channel again")
    if arguments in (["--version"], ["-V"]):
        print(f"nvcc: NVRTC {release} under nvcc's options")
        print(f"Cuda compilation tools, release {release.rpartition('.')[0]}, V{release}")
        return 0
    job = parse(arguments)
    nvrtc = Nvrtc(library)
    if not release.startswith(nvrtc.version() + "."):
        raise UsageError(f"{library.name} is CUDA {nvrtc.version()}, but CUDA {release} was promised: lay the channel again")
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
    # The wrapper gives the first two: where the wheels lie and which release they are.
    toolkit, release, *arguments = sys.argv[1:]
    try:
        return run(Path(toolkit), release, arguments)
    except (UsageError, OSError, RuntimeError) as error:
        print(f"nvcc (NVRTC {release}): {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
