"""Loads the compiled operators and names the kernels they launch.

Everything that can be wrong with an installation is said here, in words: another PyTorch than the one built for, a
missing library, a missing or damaged kernel manifest.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

PACKAGE = Path(__file__).parent


class Build(NamedTuple):
    """What this installation was built for, from `_build.json`."""

    version: str
    torch: str  # 2.8.0, or 2.9+ for every release from 2.9 on, by LibTorch's stable ABI
    cuda: str
    package: str = "sageattention"  # its name to pip and conda
    namespace: str = "sageattention"  # the operators are torch.ops.<namespace>
    cxx11_abi: bool = True
    commit: str = ""
    compiler: str = ""

    @property
    def stable_abi(self) -> bool:
        """Whether the operators are for every later PyTorch, too."""
        return self.torch.endswith("+")


def read_build(path: Path) -> Build:
    """Read `_build.json`.

    Raises:
        ImportError: the file is missing or unreadable.
    """
    try:
        return Build(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = (
            f"{__package__}: {path} is missing or damaged ({error}). A checkout is not an installation, and hides one from a Python "
            "that is started in it: start it in another folder. Where none is installed, build a wheel with "
            f"`python3 scripts/run.py build --package {__package__} --cuda 12.8` and install that, or reinstall the package."
        )
        raise ImportError(message) from error


def source_of(build: Build, series: str, cuda: str) -> str:
    """Where the build of this package for another PyTorch is to be had, as far as this installation tells where it came from."""
    try:
        this = distribution(PACKAGE.name)
        urls, installer = this.metadata.get_all("Project-URL") or [], (this.read_text("INSTALLER") or "").strip()
    except PackageNotFoundError:
        urls, installer = [], ""
    if installer == "conda":
        return f"`conda install {build.package} pytorch={series}`"
    # The wheels of an index state its address.
    for address in (url.partition(", ")[2] for url in urls if url.startswith("Index, ")):
        return f"`pip install --upgrade {build.package} --index-url {address}cu{cuda.partition('.')[0]}/`"
    return (
        "from the index that this one was installed from, if it was, or in a checkout, where "
        f"`python3 scripts/run.py matrix --package {build.package} --torch {series}.0` lists what can be built for it"
    )


def check_torch(build: Build, installed: str) -> None:
    """Refuse a PyTorch whose C++ interface is not the one the operators were compiled against.

    Raises:
        ImportError: names both versions and what to install.
    """
    want, have = (".".join(version.rstrip("+").split(".")[:2]) for version in (build.torch, installed))
    # As pip has it: what comes before a release, which may lack some of its stable ABI, is not among those from it on.
    if TorchVersion(installed) >= want if build.stable_abi else want == have:
        return
    pin = f"torch>={want}" if build.stable_abi else f"torch=={want}.*"
    message = (
        f"{build.package} {build.version} here was built for PyTorch {want}{' and later' if build.stable_abi else ''} (CUDA "
        f"{build.cuda}), but PyTorch {installed} is installed. Install the build for PyTorch {have}: "
        f"{source_of(build, have, torch.version.cuda or build.cuda)}; or take PyTorch {want}: `pip install '{pin}'`."
    )
    raise ImportError(message)


def check_abi(build: Build, installed: str, cxx11_abi: bool) -> None:
    """Refuse a PyTorch of the right version but of another ABI of libstdc++: for a while PyPI's wheels had the old one.

    Raises:
        ImportError: says which PyTorch this build is for.
    """
    if build.cxx11_abi == cxx11_abi:
        return
    wanted, there = ("new", "old") if build.cxx11_abi else ("old", "new")
    own = f"`uv pip install torch=={build.torch} --torch-backend cu{build.cuda.replace('.', '')}`"
    source = f"PyTorch's own index ({own}) or conda-forge" if build.cxx11_abi else f"PyPI (`pip install torch=={build.torch}`)"
    message = (
        f"{build.package} {build.version} here was built for a PyTorch {build.torch} with libstdc++'s {wanted} C++ ABI, but "
        f"PyTorch {installed} here has the {there} one. Take PyTorch from {source}, or another build of {build.package}."
    )
    raise ImportError(message)


# Of keys: the same to all rows. csrc/torch/mask.h has the same order.
MASKS = ("none", "bool of keys", "bool", "numbers of keys", "numbers", "numbers of each head")


class Library:
    """`_C`: what it exports, called through `ctypes`. No text goes through LibTorch's stable ABI of 2.9, so these are no operators."""

    def __init__(self, package: Path) -> None:
        """Open the library of a package.

        Raises:
            ImportError: it is missing or does not load.
        """
        self.path = package / ("_C.dll" if sys.platform == "win32" else "_C.so")
        try:
            self._c = ctypes.CDLL(str(self.path))
            for name in (
                "register_operators",
                "set_kernel_directory",
                "kernel_architecture",
                "kernel_name",
                "faster_in_16_bits",
            ):
                getattr(self._c, f"sage_{name}").restype = ctypes.c_char_p
            self._c.sage_faster_in_16_bits.argtypes = [
                *[ctypes.c_int] * 9,
                ctypes.c_bool,
                ctypes.c_int,
                ctypes.POINTER(ctypes.c_bool),
            ]
        except (OSError, AttributeError) as error:
            message = f"{__package__}: {self.path} cannot be loaded ({error}); reinstall the package"
            raise ImportError(message) from error
        # The attention kernels by name, and the number by which operators are told which.
        self.kernels: dict[str, int] = {}
        while name := self._c.sage_kernel_name(len(self.kernels)):
            self.kernels[name.decode()] = len(self.kernels)

    def register(self, namespace: str) -> Any:
        """Register the operators.

        Returns:
            `torch.ops.<namespace>`.

        Raises:
            ImportError: another library has registered the namespace.
        """
        failure: bytes | None = self._c.sage_register_operators(namespace.encode())
        if failure is not None:
            message = (
                f"{__package__}: {self.path} cannot register torch.ops.{namespace}, which another copy of the package in this "
                "process has most likely done already: import one of them only, or build one with a namespace of its own; or this one "
                "has, and was taken out of sys.modules since: start the process anew "
                f"({failure.decode(errors='replace').splitlines()[0]})"
            )
            raise ImportError(message)
        return getattr(torch.ops, namespace)

    def set_kernel_directory(self, directory: str, folders: list[str]) -> None:
        """Name the kernel set, and the folders in it. What was loaded of another is forgotten."""
        encoded = (ctypes.c_char_p * len(folders))(*map(os.fsencode, folders))
        self._check(self._c.sage_set_kernel_directory(os.fsencode(directory), encoded, len(folders)))

    def kernel_architecture(self, device: int) -> str:
        """The folder whose kernels a device runs.

        Raises:
            RuntimeError: there is no driver or no such device, or none of the folders runs on it.
        """
        folder = ctypes.c_char_p()
        self._check(self._c.sage_kernel_architecture(device, ctypes.byref(folder)))
        return (folder.value or b"").decode()

    def faster_in_16_bits(
        self, kernel: str, multiprocessors: int, sizes: tuple[int, ...], is_causal: bool, mask: str = "none"
    ) -> bool:
        """Whether Hopper's kernel in 16 bits is expected to be faster, as the operator decides it.

        Args:
            kernel: than which.
            multiprocessors: of the GPU.
            sizes: batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim: each at least 1, below 2^31; head_dims at most 256.
            is_causal: as of the functions.
            mask: one of `MASKS`, as far as an attn_mask's strides tell it.

        Raises:
            RuntimeError: a size is out of that range, or no grid is as large.
        """
        faster = ctypes.c_bool()
        arguments = (self.kernels[kernel], multiprocessors, *sizes, is_causal, MASKS.index(mask))
        self._check(self._c.sage_faster_in_16_bits(*arguments, ctypes.byref(faster)))
        return faster.value

    @staticmethod
    def _check(failure: bytes | None) -> None:
        if failure is not None:
            raise RuntimeError(failure.decode(errors="replace"))


def kernel_set(directories: tuple[Path, ...]) -> Path:
    """The first folder that holds kernels; the first of all where none does."""
    return next((d for d in directories if (d / "manifest.json").is_file()), directories[0])


def name_kernels(directories: tuple[Path, ...]) -> dict[str, frozenset[str]]:
    """Tell the runtime where the kernels are. None at all is no error until a GPU asks for one.

    Returns:
        The kernels of each folder: {"sm_80": {"quant_k_int8", "sm80_qk_int8_pv_f16"}}.

    Raises:
        ImportError: a manifest is there but damaged, or of another version.
    """
    directory = kernel_set(directories)
    architectures: list[str] = []
    kernels: dict[str, frozenset[str]] = {}
    manifest = directory / "manifest.json"
    if manifest.is_file():
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            found = str(content["version"])
            architectures = list(content["architectures"])
            files = [name.split("/") for name in content["files"]]
            kernels = {a: frozenset(name.split("-")[0] for folder, name in files if folder == a) for a in architectures}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{__package__}: the kernel manifest {manifest} is damaged ({error}); reinstall the package"
            raise ImportError(message) from error
        if found != build.version:  # what a launch passes to a kernel is no other version's
            message = (
                f"{build.package} {build.version} found kernels of version {found} in {directory}: reinstall the package"
                f"{'' if directory == directories[0] else ', and ' + build.package + '-cubins with it'}"
            )
            raise ImportError(message)
    library.set_kernel_directory(str(directory), architectures)
    return kernels


build = read_build(PACKAGE / "_build.json")
check_torch(build, torch.__version__)
if sys.platform == "linux":
    check_abi(build, torch.__version__, torch.compiled_with_cxx11_abi())
# A wheel carries the kernels in the package; conda installs them as a package of their own, in the environment that a virtual one may see.
_PREFIXES = dict.fromkeys((sys.prefix, sys.base_prefix))
KERNEL_DIRECTORIES = (PACKAGE / "cubins", *(Path(prefix) / "share" / build.package / "cubins" for prefix in _PREFIXES))
library = Library(PACKAGE)
kernels = name_kernels(KERNEL_DIRECTORIES)
# Last, since it cannot be done twice: an import that failed is tried again by the report, and has to fail by the same.
operators = library.register(build.namespace)
