"""PyTorch without CUDA's libraries, a tenth of the whole: what operators are compiled against, and what tests run beside on a
machine without a driver.

PyPI's PyTorch for Linux is linked with libtorch_cuda and, through that, with 4 GB of libraries of wheels of their own. Operators
are linked with none of them. So the wheel is unpacked without its CUDA part, those wheels are not fetched, and in their places lie
libraries that hold the names which the rest refers to and do nothing (`stand_ins`). What is left is PyTorch's own: its headers,
c10, torch_cpu, its Python. It sees no GPU. Standard library only, as what `run.py` uses has to be.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from sage_factory.with_what import venvs

# Wheels that PyTorch on a CPU does without, and members of its own.
GPU_WHEELS = ("nvidia-", "cuda-", "triton")
REQUIRES_GPU_WHEELS = re.compile(rf"^Requires-Dist: ({'|'.join(GPU_WHEELS)}).*\n", re.M)
GPU_MEMBERS = re.compile(r"torch/(lib/lib(torch_cuda|torch_nvshmem|caffe2_nvrtc)|bin/protoc)")
# Imports what takes up operators' CUDA kernels when PyTorch (from 2.15 on) is imported, to put others in front of them. torch.compile
# imports some of that by itself.
OVERRIDES = "torch/_native/ops/__init__.py"
# The name that a library is found by, for another library's symbols that no wheel at hand has.
CUDA_PART = "libtorch_cuda.so"

# Whether there is a GPU, what can be used on it, and an error of CUDA's, whose text PyTorch puts into its own.
TRIED = """
import torch
assert not torch.cuda.is_available()
x = torch.empty(1, 1, 1, 1)
asked = torch.backends.cuda.SDPAParams(x, x, x, None, 0.0, False, False)
assert not torch.backends.cuda.can_use_flash_attention(asked) and not torch.backends.cuda.can_use_efficient_attention(asked)
try:
    torch.cuda.is_current_stream_capturing()
except RuntimeError:
    pass
"""


class StandInError(venvs.SetupError):
    """The libraries that stand for CUDA's cannot be made; the message says why."""


def folder(lock: str) -> str:
    """Its environment's name: the whole one's, that of its lock, where that is there already."""
    return lock if venvs.complete(lock) else f"{lock}-cpu"


def ensure(lock: str) -> str:
    """Make the environment of the PyTorch of that lock, such as torch-2.8.0, if need be, and return its name."""
    if (name := folder(lock)) != lock:
        path = venvs.lock_file(lock)
        made_of = hashlib.sha256(venvs.digest(path).encode() + Path(__file__).read_bytes()).hexdigest()
        venvs.keep(name, made_of, lambda: _fill(name, path))
    return name


def _fill(name: str, lock: Path) -> None:
    cc = c_compiler()  # or none, said before anything is fetched
    venvs.empty(name, lock)
    pins = dict(venvs.pins_of(lock.read_text(encoding="utf-8")))
    cudnn = re.search(r"^nvidia-cudnn-cu\d+==(\d+)\.(\d+)\.(\d+)", "".join(pins.values()), re.M)
    torch, others = venvs.VENVS / name / "torch.txt", venvs.VENVS / name / "others.txt"
    torch.write_text(pins.pop("torch"), encoding="utf-8")
    others.write_text("".join(pin for of, pin in pins.items() if not of.startswith(GPU_WHEELS)), encoding="utf-8")
    venvs.pip(name, "install", others, "--no-deps")
    fetched = venvs.VENVS / name / "wheel"
    venvs.pip(name, "download", torch, "--no-deps", "--dest", str(fetched))  # which compares its hash
    (wheel,) = fetched.iterdir()
    unpack(wheel, venvs.site_packages(name))
    wheel.unlink()
    stand_ins(venvs.site_packages(name) / "torch" / "lib", cc, cudnn.groups() if cudnn else ())
    # The test of the above; and what a test of a package imports is compiled once.
    venvs.run(name, "-c", TRIED)


def c_compiler() -> str:
    """Any, since it compiles tables of names."""
    found = os.environ.get("CC") or next(
        filter(None, map(shutil.which, ("gcc", "cc", *(f"gcc-{n}" for n in range(20, 8, -1))))), None
    )
    if found is None:
        raise StandInError("no C compiler found (looked for gcc and cc): install it, or name one in CC")
    return found


def unpack(wheel: Path, site: Path) -> None:
    """PyTorch's wheel but for what is of use on a GPU alone, and for its word that it needs that."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename == OVERRIDES:
                (site / OVERRIDES).parent.mkdir(parents=True, exist_ok=True)
                (site / OVERRIDES).touch()
            elif not GPU_MEMBERS.match(member.filename):
                path = Path(archive.extract(member, site))
                if member.external_attr >> 16 & 0o111 and path.is_file():
                    path.chmod(0o755)
    for path in site.glob("torch-*.dist-info/METADATA"):  # pip would not install what requires PyTorch beside it
        path.write_text(REQUIRES_GPU_WHEELS.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")


def stand_ins(folder: Path, cc: str, cudnn: Sequence[str] = ()) -> None:
    """Write a library for each that those in `folder` are linked with and that is neither there nor the system's.

    That of cuDNN says the version `cudnn` (major, minor, patch): PyTorch compares it on a CPU, too.
    """
    present = sorted(folder.glob("*.so*"))
    wanted = set(re.findall(r"\(NEEDED\).*\[(.*)\]", _said("readelf", "-dW", *present))) - {path.name for path in present}
    # The compiler knows the system's by a path.
    system = {name: Path(_said(cc, f"-print-file-name={name}").strip()) for name in wanted}
    absent = sorted(name for name, path in system.items() if not path.is_absolute())
    if not absent:
        return
    there = [*present, *(path for path in system.values() if path.is_absolute())]
    defined = {line.partition(" ")[0].partition("@")[0] for line in _said("nm", "-DP", "--defined-only", *there).splitlines()}
    symbols: dict[str, list[str]] = defaultdict(list)
    for line in sorted(set(_said("nm", "-DP", "--undefined-only", *present).splitlines())):
        symbol, _, kind = line.partition(" ")
        name, _, version = symbol.partition("@")
        # Python's own are in the interpreter.
        if kind.startswith("U") and name not in defined and not name.startswith(("Py", "_Py")):
            # Libraries of CUDA call the version of their symbols by their own name, or have none.
            symbols[version.lstrip("@") if version.lstrip("@") in absent else CUDA_PART].append(name)
    for library in absent:
        _compile(folder / library, symbols[library], cc, cudnn)


def _compile(library: Path, names: Iterable[str], cc: str, cudnn: Sequence[str]) -> None:
    source, versions = library.with_name("stand_in.c"), library.with_name("stand_in.map")
    lines = [
        # Whose address is false where a bool is asked for, of its lowest byte: nothing can be used.
        "static char room[4096] __attribute__((aligned(4096)));",
        'extern char type_info[] __asm__("_ZTVN10__cxxabiv117__class_type_infoE");',
        "static void *none(void) { return room; }",
        'static const void *const type[2] = {type_info + 16, "8stand_in"};',
        f"static const void *const table[66] = {{0, type, {'none, ' * 64}}};",  # an object's: offset, class, virtual functions
    ]
    for i, name in enumerate(names):
        if name.startswith("_ZTI"):  # types are compared by their names
            lines.append(f'const void *const s{i}[2] __asm__("{name}") = {{type_info + 16, "{name[4:]}"}};')
        elif name.startswith("_ZTV"):
            lines.append(f'char s{i}[1024] __asm__("{name}");')
        elif re.match(r"_ZN.*7OptionsC[12]E", name):  # whose class Python's bindings look up when they are loaded
            lines.append(
                f'void s{i}(const void **self) __asm__("{name}"); void s{i}(const void **self) {{ *self = table + 2; }}'
            )
        elif name.startswith("_Z"):  # what returns a reference is written to when libraries are loaded
            lines.append(f'void *s{i}(void) __asm__("{name}"); void *s{i}(void) {{ return room; }}')
        elif name == "cudnnGetProperty" and cudnn:
            lines.append(f"int {name}(int part, int *value) {{ *value = (int[]){{{', '.join(cudnn)}}}[part]; return 0; }}")
        elif name.endswith(("ErrorString", "ErrorName")):  # whose text PyTorch puts into its own error
            lines.append(f'const char *{name}(int error) {{ return "no CUDA: a stand-in of its library"; }}')
        else:  # C interfaces: cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE
            lines.append(f'int s{i}(void) __asm__("{name}"); int s{i}(void) {{ return 100; }}')
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    versions.write_text(f"{library.name} {{ *; }};\n", encoding="utf-8")
    script = [] if library.name == CUDA_PART else [f"-Wl,--version-script={versions}"]
    _said(cc, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *script, "-o", library, source, "-lstdc++")
    source.unlink()
    versions.unlink()


def _said(*command: str | Path) -> str:
    try:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        told = str(getattr(error, "stderr", "") or error).strip().splitlines()[0]
        raise StandInError(f"`{command[0]}`, of the compiler's package, failed over PyTorch's libraries: {told}") from error
