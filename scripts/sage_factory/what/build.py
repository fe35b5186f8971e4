"""A build, and what all that comes of it is called."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

CUBINS = "-cubins"  # what the name of a package's kernels ends in


@dataclass(frozen=True)
class Build:
    """One Python × PyTorch × CUDA × platform: one wheel; with its Python left out, one conda package.

    PyTorch `2.9+` is every one from 2.9 on, and `python` then the oldest.
    """

    package: str
    version: str
    platform: str
    cuda: str
    torch: str
    python: str
    architectures: tuple[str, ...]
    ptx: tuple[str, ...]
    wheel_platform: str
    local_version: bool = False
    number: int = 0  # how often what was released of it was repaired since
    index_platforms: tuple[str, ...] = ()
    conda_first: str = ""  # the first PyTorch of the table that the conda package stands beside
    requires_python: str = ""  # what a wheel requires

    @property
    def stable_abi(self) -> bool:
        """Whether the operators know no PyTorch in particular."""
        return self.torch.endswith("+")

    @property
    def torch_series(self) -> str:
        """The release series a binary is good for, or the first of them."""
        return series_of(self.torch)

    @property
    def torch_tag(self) -> str:
        """PyTorch in the name of a conda package: 2.8.0 → 280, 2.9+ → 29on."""
        return self.torch.replace(".", "").replace("+", "on")

    @property
    def conda_torch(self) -> str:
        """What a conda package requires of PyTorch: 2.8.*, or of 2.9+ from `conda_first` on."""
        return f">={self.conda_first.rpartition('.')[0]}" if self.stable_abi else f"{self.torch_series}.*"

    @property
    def conda_constrains(self) -> list[str]:
        """What a conda package is constrained by: where there is a driver, or a PyTorch with CUDA, it runs what the kernels are."""
        major = int(self.cuda.split(".")[0])
        return [f"__cuda >={major}", f"cuda-version >={self.cuda},<{major + 1}"]

    @property
    def requires_torch(self) -> str:
        """What a wheel requires."""
        return f"torch>={self.torch_series}" if self.stable_abi else f"torch=={self.torch_series}.*"

    @property
    def wheel_version(self) -> str:
        """2.2.0, or with PyTorch and CUDA in it 1.0.0+cu128torch2.9.0; 1.0.0+cu128torch2.9.0.1 where that was repaired. 2.9+ is
        1.0.0+cu128torch2.9.abi, below the build for 2.9 alone.
        """
        torch = f"{self.torch_series}.abi" if self.stable_abi else self.torch
        local = f"+{cuda_tag(self.cuda)}torch{torch}{self._repaired}"
        return self.version + local if self.local_version else self.version

    @property
    def build_tag(self) -> str:
        """PyTorch 2.8.0 with CUDA 12.8 → 280.128, the wheel's build tag; 2.9+ → 29.128; 280.128.1 where that was repaired; empty
        where the version says all that.
        """
        tag = f"{self.torch.rstrip('+').replace('.', '')}.{self.cuda.replace('.', '')}{self._repaired}"
        return "" if self.local_version else tag

    @property
    def wheel_tag(self) -> str:
        """cp312-cp312-linux_x86_64; of operators for every PyTorch, which know no Python either, py3-none-linux_x86_64."""
        return f"{self._python_tag}-{self.wheel_platform}"

    @property
    def index_tags(self) -> tuple[str, ...]:
        """The same in pip's indexes: there on Linux also by the glibc that is promised."""
        return tuple(f"{self._python_tag}-{platform}" for platform in self.index_platforms)

    @property
    def _python_tag(self) -> str:
        python = "cp" + self.python.replace(".", "")
        return "py3-none" if self.stable_abi else f"{python}-{python}"

    @property
    def wheel_name(self) -> str:
        return "-".join(filter(None, [self.package, self.wheel_version, self.build_tag, self.wheel_tag])) + ".whl"

    @property
    def dist_info(self) -> str:
        """The folder of a wheel's metadata."""
        return f"{self.package}-{self.wheel_version}.dist-info"

    @property
    def cubins(self) -> str:
        """The kernels' conda package."""
        return f"{self.package}{CUBINS}"

    @property
    def index_version(self) -> str:
        """The version by which pip's indexes have this build, a local one (PEP 440): 2.2.0+torch2.8.cu128, which is below
        2.2.0+torch2.10.cu128; 2.9+ is 2.2.0+torch2.9.abi.cu128, below the builds for 2.9 alone. Build tags would not do: of equal
        versions pip keeps the one that is installed. A wheel whose own version is a local one is there as it is.
        """
        if self.local_version:
            return self.wheel_version
        abi = ".abi" if self.stable_abi else ""
        return f"{self.version}+torch{self.torch_series}{abi}.{cuda_tag(self.cuda)}{self._repaired}"

    @property
    def _repaired(self) -> str:
        return f".{self.number}" if self.number else ""

    @property
    def index_folder(self) -> str:
        """The index of its CUDA × PyTorch: cu128-torch28, cu128-torch29-or-later."""
        later = "-or-later" if self.stable_abi else ""
        return f"{cuda_tag(self.cuda)}-torch{self.torch_series.replace('.', '')}{later}"

    @property
    def index_major(self) -> str:
        """The index of its CUDA's major version, whose drivers run it: cu12."""
        return f"cu{self.cuda.split('.')[0]}"

    @property
    def index_name(self) -> str:
        """The wheel's file name there."""
        if self.local_version:
            return self.wheel_name
        return f"{self.package}-{self.index_version}-{self._python_tag}-{'.'.join(self.index_platforms)}.whl"

    @property
    def cubins_stem(self) -> str:
        """What the name of the kernels' conda package begins with, up to its digest."""
        return f"{self.cubins}-{self.version}-{cuda_tag(self.cuda)}_h"

    @property
    def operators_stem(self) -> str:
        """What the name of the operators' conda package begins with, up to its digest."""
        return f"{self.package}-{self.version}-torch{self.torch_tag}_{cuda_tag(self.cuda)}_h"

    def has(self, name: str) -> bool:
        """Whether a file of this name is its wheel, in either form, or its operators' conda package."""
        conda = name.startswith(self.operators_stem) and name.endswith(f"_{self.number}.conda")
        return conda or name in (self.wheel_name, self.index_name)


def package_of_kernels(name: str) -> str:
    """The package whose kernels a conda package, or a file of one, by this name holds; empty where it holds none."""
    package, found, version = name.partition(CUBINS)
    return package if found and (not version or version.startswith("-")) else ""


def cuda_tag(cuda: str) -> str:
    """CUDA in the names of packages, versions and indexes: 12.8 → cu128."""
    return f"cu{cuda.replace('.', '')}"


def series_of(torch: str) -> str:
    """The release series of a PyTorch: 2.8.0 → 2.8, 2.9+ → 2.9."""
    return ".".join(torch.rstrip("+").split(".")[:2])


def release_order(torch: str) -> Version:
    """What PyTorch's names are sorted by: 2.9+ comes after the last of 2.9."""
    return Version(torch.replace("+", ".999"))
