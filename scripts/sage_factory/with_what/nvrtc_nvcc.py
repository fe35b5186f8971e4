"""A small `nvcc` over NVRTC: a device-only source to a cubin or PTX, with the options that are in use and no others.

PyPI has no nvcc front end for CUDA 12, but its NVRTC wheel is that release's whole device compiler. The channel made from PyPI wraps
this file as its `nvcc`: csrc/kernels/CMakeLists.txt calls it, make/kernels.py asks its version. Standard library only, so that any
Python runs it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What is made, with the first part of the architecture that it is made for. A build has PTX made, tests/test_predict.py cubins.
KINDS = {"-ptx": "compute", "-cubin": "sm"}
# Each with its value in the same word, as NVRTC takes them too.
HANDED_ON = ("-arch=", "-std=", "-I", "-D")
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
    options: Sequence[str]


def parse(arguments: Sequence[str]) -> Job:
    """What to compile, from what, to what."""
    kinds: list[str] = []
    options: list[str] = []
    sources: list[str] = []
    unknown: list[str] = []
    output = ""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-o":
            output = next(rest, "")
        elif argument in KINDS:
            kinds.append(argument)
        elif argument.startswith(HANDED_ON) and argument not in HANDED_ON:
            options.append(argument)
        elif argument.startswith("-"):
            unknown.append(argument)
        else:
            sources.append(argument)
    if unknown:
        known = " ".join([*KINDS, *(f"{option}..." for option in HANDED_ON), "-o FILE"])
        raise UsageError(f"unknown option {' '.join(unknown)}; this nvcc (NVRTC) knows {known}")
    if len(sources) != 1:
        raise UsageError(f"expected one source file, got {len(sources)}: {' '.join(sources)}")
    if len(kinds) != 1:
        raise UsageError("expected one of -cubin and -ptx: this nvcc (NVRTC) compiles device code only")
    if not output:
        raise UsageError("-o needs a file: it says where to write")
    (kind,) = kinds
    architecture = next((option.removeprefix("-arch=") for option in options if option.startswith("-arch=")), "none")
    if not re.fullmatch(rf"{KINDS[kind]}_\d+a?", architecture):
        raise UsageError(f"{kind} needs -arch={KINDS[kind]}_XX, got {architecture}")
    return Job(Path(sources[0]), Path(output), architecture, kind == "-ptx", options)


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
    if arguments == ["--version"]:
        print(f"nvcc: NVRTC {release} under nvcc's options")
        print(f"Cuda compilation tools, release {release.rpartition('.')[0]}, V{release}")
        return 0
    job = parse(arguments)
    nvrtc = Nvrtc(library)
    if not release.startswith(nvrtc.version() + "."):
        raise UsageError(f"{library.name} is CUDA {nvrtc.version()}, but CUDA {release} was promised: lay the channel again")
    toolkit_headers = [f"-I{toolkit / 'nvidia' / wheel / 'include'}" for wheel in ("cuda_runtime", "cuda_cccl")]
    # The source goes in under its bare name, so that no path of this machine is written into line tables or __FILE__.
    options = [*ALWAYS, f"-I{job.source.parent}", *job.options, *toolkit_headers]
    binary, log = nvrtc.compile(job.source.read_bytes(), job.source.name, options, job.ptx)
    if log:
        print(log, file=sys.stderr)
    if binary is None:
        print(f"nvcc (NVRTC {release}): {job.source} does not compile for {job.architecture}", file=sys.stderr)
        return 1
    write(job.output, binary)
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
