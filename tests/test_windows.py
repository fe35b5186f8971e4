"""csrc/runtime and csrc/torch as a Windows compiler's front end takes them: clang from PyPI, LLP64, no POSIX headers.

Headers of the C library are mingw-w64's and PyTorch's are those installed here, so this finds what is wrong with our
files: a `long` that is too short, a branch for `_WIN32` that does not compile, GNU extensions. docs/building.md says what
else was tried with Microsoft's own headers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from sage_factory import ROOT

CSRC = ROOT / "csrc"
SOURCES = sorted(path for folder in ("runtime", "torch") for path in (CSRC / folder).glob("*.cpp") if path.stem != "glibc")
# What libc++'s own build would write into its __config_site.
LIBCXX = {"ABI_VERSION": "1", "ABI_NAMESPACE": "__1", "HAS_THREAD_API_PTHREAD": "0", "HAS_THREAD_API_EXTERNAL": "0",
          "HARDENING_MODE_DEFAULT": "_LIBCPP_HARDENING_MODE_NONE", "HAS_VENDOR_AVAILABILITY_ANNOTATIONS": "0",
          "ASSERTION_SEMANTIC_DEFAULT": "_LIBCPP_ASSERTION_SEMANTIC_IGNORE", "HAS_TIME_ZONE_DATABASE": "0",
          "HAS_MUSL_LIBC": "0", "INSTRUMENTED_WITH_ASAN": "0", "HAS_THREAD_API_C11": "0",
          **dict.fromkeys(("HAS_THREADS", "HAS_MONOTONIC_CLOCK", "HAS_TERMINAL", "HAS_THREAD_API_WIN32", "HAS_FILESYSTEM",
                           "HAS_RANDOM_DEVICE", "HAS_LOCALIZATION", "HAS_UNICODE", "HAS_WIDE_CHARACTERS"), "1")}  # fmt: skip


def compile_for_windows(source: Path, *options: str, target: str = "x86_64-w64-windows-gnu") -> str:
    """What the compiler says of a file; nothing if it is content."""
    zig = importlib.util.find_spec("ziglang")
    if zig is None or zig.origin is None:
        pytest.skip("no clang for Windows here: `pip install ziglang`")
    home = Path(zig.origin).parent
    includes = ["libcxx/include", "libcxxabi/include", "include", "libc/include/any-windows-any"]
    command = [str(home / "zig"), "clang", "--driver-mode=g++", f"--target={target}", "-fsyntax-only"]
    command += [
        "-nostdinc",
        "-Wno-unused-command-line-argument",
        "-nostdinc++",
        *(f"-isystem{home / 'lib' / path}" for path in includes),
    ]
    command.append('-DSAGE_PACKAGE="sageattention"')
    command += [f"-D_LIBCPP_{key}={value}" for key, value in LIBCXX.items()]
    command += ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-DNOMINMAX", f"-I{CSRC}", *options, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    "option",
    ["-std=c++17", "-std=c++20", "-DSAGE_STABLE_ABI"],  # which of them depends on PyTorch: csrc/torch/CMakeLists.txt
)
def test_host_code_compiles_for_windows(option: str, tmp_path: Path) -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("no PyTorch here to take the headers of")
    include = Path(torch.origin).parent / "include"
    options = [option, f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
    # Static, because its thread-local variables cannot be imported from a DLL in mingw's ABI; and __COUNTER__ is fine.
    options += ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-Wno-unknown-warning-option", "-Wno-c2y-extensions"]
    everything = tmp_path / "everything.cpp"  # as one, which csrc/torch/CMakeLists.txt has them compiled as
    everything.write_text(
        "".join(f'#include "{source.relative_to(CSRC).as_posix()}"\n' for source in SOURCES), encoding="utf-8"
    )
    assert compile_for_windows(everything, *options) == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("static_assert(sizeof(long) == 8);", "static assertion failed"),
        ("#include <dlfcn.h>", "file not found"),
        ("struct A { int x; }; A a{.x = 1};", "designated initializers are a C++20 extension"),
        ("struct A { int n; char rest[0]; };", "zero size arrays are an extension"),
        ("int f(int n) { char c[n]; return sizeof c; }", "variable length arrays"),
    ],
)
def test_what_windows_compilers_reject_is_found(code: str, said: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "a.cpp")
        source.write_text(code + "\n", encoding="utf-8")
        assert said in compile_for_windows(source)


def test_parameters_have_the_same_layout_as_on_linux(tmp_path: Path) -> None:
    """One cubin serves both: what the host writes there must lie where the kernel reads it."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler of this system to compare with")
    sources = [Path(entry["source"]) for entry in json.loads((CSRC / "kernels" / "kernels.json").read_text(encoding="utf-8"))]
    headers = "".join(f'#include "kernels/{path.with_suffix(".h").as_posix()}"\n' for path in sources)
    structs = ["".join(part.capitalize() for part in path.stem.split("_")) for path in sources]
    types = [f"sage::{name}::Params" for name in structs]
    source = tmp_path / "layout.cpp"
    lines = [f'std::printf("%zu %zu\\n", sizeof({name}), alignof({name}));' for name in types]
    source.write_text(f"{headers}#include <cstdio>\nint main() {{ {' '.join(lines)} }}\n", encoding="utf-8")
    subprocess.run([compiler, "-std=c++17", f"-I{CSRC}", str(source), "-o", str(tmp_path / "layout")], check=True)
    said = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(types) > 0
    asserts = []
    for name, line in zip(types, said, strict=True):
        size, alignment = line.split()
        asserts.append(f"static_assert(sizeof({name}) == {size} && alignof({name}) == {alignment});\n")
        asserts.append(f"static_assert(std::is_trivially_copyable_v<{name}>);\n")
    source.write_text(f"{headers}#include <type_traits>\n{''.join(asserts)}", encoding="utf-8")
    # MSVC's own layout: mingw's is that of Linux.
    assert compile_for_windows(source, "-D_LIBCPP_NO_VCRUNTIME", "-D_UCRT", target="x86_64-pc-windows-msvc") == ""


def test_attributes_are_standard_ones() -> None:
    """MSVC knows no __attribute__, no __builtin_ and no alternative tokens unless told; glibc.cpp is for Linux alone."""
    for path in [*CSRC.glob("runtime/*"), *CSRC.glob("torch/*.cpp"), *CSRC.glob("torch/**/*.h"), *CSRC.glob("kernels/**/*.h")]:
        if path.stem != "glibc":
            text = path.read_text(encoding="utf-8")
            for token in ("__attribute__", "__builtin_", "__int128", "ssize_t", "unistd.h", "__PRETTY_FUNCTION__"):
                assert token not in text, f"{path.name} has {token}, which MSVC rejects"
