"""The kernels' own source on the CPU: tests/on_cpu/ stands in for what they use of CUDA, and the host's code is csrc/torch/ as it is.

`Kernels.attention` and `attention_varlen` take what the operators that `sageattention._ops` calls take, and can stand in their place. Outputs and workspace
are NaN before, shared memory too. A wrong access to shared memory, or threads that wait for ever, are a RuntimeError.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ptx_to_cpp
import pytest
import torch
from torch.utils import cpp_extension

from sage_factory.what import matrix
from sage_factory.with_what import nvrtc_nvcc, venvs
from sageattention import _ops

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
SOURCES = {Path(one["source"]).stem: one for one in json.loads((CSRC / "kernels" / "kernels.json").read_text(encoding="utf-8"))}
# What is launched before each attention kernel.
BEFORE = {
    "sm80_qk_int8_pv_f16": ("quant_k_int8",),
    "sm80_qk_int8_pv_f16_accum_f16": ("quant_k_int8", "quant_v_f16"),
    "sm89_qk_int8_pv_f8": ("quant_k_int8", "quant_v_f8"),
    "sm89_qk_int8_pv_f8_accum_f16": ("quant_k_int8", "quant_v_f8"),
    "sm90_qk_f16_pv_f16": (),
    "sm90_qk_int8_pv_f16": ("quant_k_int8",),
    "sm120_qk_fp4_pv_fp4": ("means", "quant_kv_fp4"),
}
# The first alone; or one of the next two, and what adds parts up.
FEW_TOKENS = (
    "sm80_qk_f16_pv_f16",
    "sm80_qk_f16_pv_f16_split_kv",
    "sm80_qk_f16_pv_f16_split_kv_staged",
    "sm80_combine_split_kv",
)
# What a call may launch first.
FIRST = {
    "mask_tiles",
    *FEW_TOKENS[:3],
    *(before[0] if before else kernel for kernel, before in BEFORE.items()),
    *(f"{kernel}_masked" for kernel, before in BEFORE.items() if not before),
}
# Of a kernel's source: where it waits for the kernels before it, and what waits when the thread has done all else.
WAIT = "  ptx::grid_dependency_wait();"
WAIT_AT_END = "  struct AtEnd { __device__ ~AtEnd() { ptx::grid_dependency_wait(); } } at_end;"
# Attention's is dynamic, mask's kernels have none; in quant/ variables are one for all threads.
SHARED = {"attention": "", "quant": "static", "mask": ""}
TYPES = {torch.float16: ("fp16", "__half"), torch.bfloat16: ("bf16", "__nv_bfloat16")}
Result = tuple[torch.Tensor, torch.Tensor]


def compile_for_cpu(source: Path, target: Path, options: list[str], *, races: bool = False) -> None:
    """Make a library of a file of tests/on_cpu/, which with `races` is races.h's. The test is skipped where there is no compiler that can.

    Raises:
        RuntimeError: the source is faulty; the compiler's words.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here: install it")
    # Multiplications and additions are fused, as nvcc does it. jmp_buf's fortified functions take a fiber's stack for a broken one.
    general = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=fast", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-shared"]
    if races:
        # With the first option, what the last two call is not taken from the compiler's library. Of -g lines are enough.
        general += ["-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-g1", "-DSAGE_RACES"]
        general += ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
    command = [compiler, *general, "-DSAGE_EMULATE_FP4", f"-I{TESTS / 'on_cpu'}", str(source), *options, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in done.stderr:
        pytest.skip("this g++ has no _Float16: install version 13 or later")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def ptx_of(source: str, virtual: str, definitions: list[str], csrc: Path, target: Path) -> str:
    """What NVRTC makes of a kernel's source, as packages are built here: the test is skipped where there is none."""
    cuda = matrix.load().development_cuda
    toolkit = venvs.site_packages(f"cuda-{cuda}")
    if not (toolkit / "nvidia" / "cuda_nvrtc").is_dir():
        pytest.skip(f"no CUDA {cuda} from PyPI here: `python3 scripts/run.py build-cu128` brings it")
    options = ["-ptx", f"-arch={virtual}", "-std=c++17", f"-I{csrc}", *definitions, "-o", str(target)]
    path = str(csrc / "kernels" / source)
    if nvrtc_nvcc.run(toolkit, matrix.load().cuda[cuda].pypi["nvidia-cuda-nvrtc-cu12"], [*options, path]) != 0:
        raise RuntimeError(f"{path} does not compile for {virtual}")
    return target.read_text(encoding="utf-8")


def compile_ptx(ptx: str, kernel: str, architecture: str, target: Path) -> None:
    """Make a kernel's library, as Kernels has it, of its PTX. architecture: what `__CUDA_ARCH__` is."""
    source = target.with_suffix(".cpp")
    source.write_text(ptx_to_cpp.translate(ptx, kernel), encoding="utf-8")
    given = {"__CUDA_ARCH__": architecture, "KERNEL": kernel, "KERNEL_SOURCE": f'"{source}"', "__shared__": ""}
    # PTX says itself what is fused. Of so many lines, to optimise them takes longer than to run them.
    options = ["-fvisibility=hidden", "-ffp-contract=off", "-O0", f"-I{CSRC}"]
    compile_for_cpu(
        TESTS / "on_cpu" / "launch.cpp", target, [*options, *(f"-D{name}={value}" for name, value in given.items())]
    )


def compile_once(source: str, target: Path, options: list[str], csrc: Path, *, races: bool = False) -> None:
    """The same, or a copy of what some test of this run has made of the same sources: conftest.py has where."""
    path, options = TESTS / "on_cpu" / source, [f"-I{csrc}", *options]
    if (shared := os.environ.get("SAGEATTENTION_SHARED")) is None:
        compile_for_cpu(path, target, options, races=races)
        return
    folder = Path(shared)
    if source == "launch.cpp":  # what all kernels include takes a quarter of the compilation
        options = [*options, f"-include{precompiled(folder, races=races)}"]
    digest = hashlib.sha256(json.dumps([source, options, races]).encode())
    for root in (TESTS / "on_cpu", csrc):
        for one in sorted(root.rglob("*.*")):
            if one.is_file():
                digest.update(b"\0".join((os.fsencode(one.relative_to(root)), one.read_bytes())))
    made = folder / f"{digest.hexdigest()}.so"
    if not made.is_file():
        with whole(made) as unfinished:
            compile_for_cpu(path, unfinished, options, races=races)
    shutil.copyfile(made, target)


def precompiled(folder: Path, *, races: bool) -> Path:
    """A header beside which the compiler finds itself compiled."""
    header = folder / f"first-{int(races)}.h"
    made = header.with_name(f"{header.name}.gch")
    if not made.is_file():
        with whole(header) as path:
            path.write_text("#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n", encoding="utf-8")
        with whole(made) as path:
            compile_for_cpu(header, path, ["-fvisibility=hidden"], races=races)
    return header


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what is to lie at `path`, whole from the first: others of the run may be about to make it too."""
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        yield Path(own) / path.name
        (Path(own) / path.name).replace(path)


class Operators(NamedTuple):
    """csrc/torch/ for CPU tensors."""

    library: ctypes.CDLL
    namespace: Any  # of torch.ops

    def choose(self, folder: Path, architecture: str, seed: int) -> Any:
        """The operators, which from now on run these kernels, in this order of threads, and say which they launch."""
        self.library.launches.restype = ctypes.c_char_p
        self.library.launches()
        self.library.sage_set_kernel_directory(os.fsencode(folder), (ctypes.c_char_p * 1)(architecture.encode()), 1)
        self.library.set_order_of_threads(seed)
        return self.namespace


@functools.cache
def operators(*, stable_abi: bool) -> Operators:
    """One for each of PyTorch's interfaces, of which a process has one."""
    if not any((Path(path) / "torch" / "library.h").is_file() for path in cpp_extension.include_paths()):
        pytest.skip("this PyTorch came without its C++ headers: install PyPI's")
    abi = "-DSAGE_STABLE_ABI" if stable_abi else f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    places = [f"-I{path}" for path in cpp_extension.include_paths()] + [f"-L{path}" for path in cpp_extension.library_paths()]
    given = ['-DSAGE_PACKAGE="on_cpu"', '-DSAGE_DEVICE="CPU"']
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "operators.so"
        compile_once("operators.cpp", path, ["-std=c++20", abi, *given, *places, "-ltorch_cpu", "-lc10"], CSRC)
        library = ctypes.CDLL(str(path))
    library.sage_register_operators.restype = ctypes.c_char_p
    name = "sage_on_cpu_by_stable_abi" if stable_abi else "sage_on_cpu"
    failure = library.sage_register_operators(name.encode())
    if failure is not None:
        raise RuntimeError(failure.decode())
    return Operators(library, getattr(torch.ops, name))


class Kernels:
    """Those of one architecture, compiled when they are first asked for.

    folder: for what is compiled. architecture: sm_NN, whose `__CUDA_ARCH__` the sources see. csrc: where those are; the host's code is
    this checkout's in any case. races: accesses to shared memory that no barrier orders are errors too (tests/on_cpu/races.h), and
    a call takes twenty times as long. stable_abi: the host's code speaks to PyTorch by that, and outputs and workspace are not NaN before.
    from_ptx: what runs is the PTX that NVIDIA's compiler makes of the sources, by ptx_to_cpp.py, which knows neither Hopper's own instructions nor
    races; so all tests of these modules do where SAGEATTENTION_FROM_PTX is in the environment.
    """

    def __init__(
        self,
        folder: Path,
        architecture: str,
        csrc: Path = CSRC,
        *,
        races: bool = False,
        stable_abi: bool = False,
        from_ptx: bool = "SAGEATTENTION_FROM_PTX" in os.environ,
    ) -> None:
        self.folder, self.architecture, self.csrc, self.races, self.stable_abi = folder, architecture, csrc, races, stable_abi
        self.from_ptx = from_ptx and not races

    def compile(
        self,
        kernel: str,
        head_dim: int,
        dtype: torch.dtype,
        *,
        masked: bool = False,
        packed: bool = False,
        or_16_bit: bool = False,
    ) -> None:
        """What a call of an attention kernel launches, or one that is for the 16-bit kernel."""
        other = f"{kernel}_masked" if masked else f"{kernel}_packed" if packed else kernel
        variant = other if other in SOURCES else kernel
        suffix, element = TYPES[dtype]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            waited_for: list[Future[Any]] = [pool.submit(operators, stable_abi=self.stable_abi)]
            for stem in (
                FEW_TOKENS
                if or_16_bit
                else [variant, *BEFORE[kernel], *(["mask_tiles", "seen_keys"] if masked and BEFORE[kernel] else [])]
            ):
                own = next((one for one in SOURCES[stem].get("head_dim", ()) if head_dim <= one), 0)
                instance = f"{stem}-d{own}-{suffix}" if own else stem
                path = self.folder / self.architecture / f"{instance}.so"
                if path.is_file():
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                source = SOURCES[stem]["source"]
                given = {
                    "__CUDA_ARCH__": f"{self.architecture[3:].rstrip('a')}0",
                    "__CUDACC_VER_MAJOR__": "12",
                    "SAGE_HEAD_DIM": own or 64,
                    "SAGE_DTYPE": element,
                    "KERNEL": stem,
                    "KERNEL_SOURCE": f'"kernels/{source}"',
                    "__shared__": SHARED[source.split("/")[0]],
                }
                if self.from_ptx:
                    waited_for.append(pool.submit(self._compile_ptx, stem, path, given))
                    continue
                options = ["-fvisibility=hidden", *(f"-D{name}={value}" for name, value in given.items())]
                waited_for.append(pool.submit(compile_once, "launch.cpp", path, options, self.csrc, races=self.races))
            for done in waited_for:
                done.result()

    def _compile_ptx(self, stem: str, path: Path, given: dict[str, Any]) -> None:
        entry = SOURCES[stem]
        alone = f"{self.architecture}a" in entry.get("architectures", ())  # with instructions that only 12.0 and its like have
        virtual = f"compute_{self.architecture[3:]}{'a' if alone else ''}"
        instance = [f"-D{name}={given[name]}" for name in ("SAGE_HEAD_DIM", "SAGE_DTYPE")]
        ptx = ptx_of(entry["source"], virtual, instance, self.csrc, path.with_suffix(".ptx"))
        compile_ptx(ptx, stem, given["__CUDA_ARCH__"], path)

    def copy(self, folder: Path, *but: str) -> Kernels:
        """The same kernels in another folder, and a copy of their sources for the test to change, of which kernels `but` are compiled anew."""
        others = shutil.ignore_patterns(*(f"{kernel}*" for kernel in but))
        shutil.copytree(self.folder / self.architecture, folder / self.architecture, ignore=others)
        return Kernels(
            folder, self.architecture, shutil.copytree(self.csrc, folder / "csrc"), races=self.races, from_ptx=self.from_ptx
        )

    def change(self, file: str, text: str, other: str) -> None:
        """Of a source below kernels/ that has the text once."""
        path = self.csrc / "kernels" / file
        source = path.read_text(encoding="utf-8")
        assert source.count(text) == 1
        path.write_text(source.replace(text, other), encoding="utf-8")

    def _ready(
        self, options: int, q: torch.Tensor, v: torch.Tensor, *, seed: int, masked: bool = False, packed: bool = False
    ) -> Any:
        """The operators, for the kernel that is asked for."""
        asked = _ops.options_of(options)
        head_dim = max(q.shape[-1], v.shape[-1])
        self.compile(asked.kernel, head_dim, q.dtype, masked=masked, packed=packed, or_16_bit=asked.or_16_bit)
        return operators(stable_abi=self.stable_abi).choose(self.folder, self.architecture, seed)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        sm_scale: float,
        options: int,
        *,
        seed: int = 0,
    ) -> Result:
        """csrc/torch/attention.h. seed: other than 0, threads go on in random order."""
        ops = self._ready(options, q, v, masked=attn_mask is not None, seed=seed)
        asked = _ops.options_of(options)
        one_key = (
            asked.is_causal and q.shape[2 if asked.heads_first else 1] == 1
        )  # that is seen: a mask is cut to it, and may be copied
        with Poisoned(), Late(self.stable_abi, q, k, v, None if one_key else attn_mask), torch.no_grad():
            return ops.attention(q, k, v, attn_mask, sm_scale, options)  # type: ignore[no-any-return]

    def launches(self) -> list[tuple[str, int, int, int]]:
        """Of the last call: kernels, blocks of threads, threads of one and blocks of a cluster."""
        lines = operators(stable_abi=self.stable_abi).library.launches().decode().splitlines()
        launches = (line.split() for line in lines)
        return [(name, int(blocks), int(threads), int(cluster)) for name, blocks, threads, cluster in launches]

    def attention_varlen(self, *arguments: Any, seed: int = 0) -> Result:
        """The same for packed sequences."""
        q, k, v, *cu_seqlens, _, options = arguments
        ops = self._ready(options, q, v, packed=True, seed=seed)
        with Poisoned(), Late(self.stable_abi, q, k, v, *cu_seqlens), torch.no_grad():
            return ops.attention_varlen(*arguments)  # type: ignore[no-any-return]


class Poisoned:
    """Has PyTorch fill what it allocates with NaN, or bytes 255."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(self.before)


def may_be_copied(tensor: torch.Tensor) -> bool:
    """Whether PyTorch may have to copy an input of a call first (`copied` of csrc/torch/call.h, and of masks)."""
    if tensor.dtype in (torch.bool, torch.int32):
        return False
    if tensor.dim() > 0 and tensor.shape[-1] == 1:  # a mask, the same for all keys
        return True
    rows = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    uneven = any(size > 1 and (stride == 0 or stride * tensor.itemsize % 16 != 0) for stride, size in rows)
    return tensor.dim() < 2 or tensor.stride(-1) != 1 or tensor.data_ptr() % 16 != 0 or uneven


class Late:
    """A call's inputs are there once its kernels have waited for the caller's, which write them; before, their bytes are 255.

    But for those that are copied first: on a GPU the copy waits by itself.
    """

    def __init__(self, stable_abi: bool, *tensors: torch.Tensor | None) -> None:
        self.library = operators(stable_abi=stable_abi).library
        given = [tensor for tensor in tensors if tensor is not None]
        bytes_at = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in given}
        copied = {x.untyped_storage().data_ptr() for x in given if may_be_copied(x)}
        self.late = [(place, count) for place, count in bytes_at.items() if place not in copied]

    def __enter__(self) -> None:
        for place, count in self.late:
            self.library.written_late(ctypes.c_void_p(place), ctypes.c_size_t(count))

    def __exit__(self, *error: object) -> None:
        self.library.end_callers()
