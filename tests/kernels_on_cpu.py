"""The kernels' own source on the CPU: tests/on_cpu/ stands in for what they use of CUDA, and the host's code is csrc/torch/ as it is.

`Kernels.attention` and `attention_varlen` take what the operators that `sageattention._ops` calls take, and can stand in their place. Outputs and workspace
are NaN before, shared memory too. A wrong access to shared memory, or threads that wait for ever, are a RuntimeError.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fuzz
import ptx_to_cpp
import pytest
import tensors
import torch
from fuzz_bounds import Exact
from fuzz_inputs import Problem
from torch.utils import cpp_extension

from sage_factory.what import matrix
from sage_factory.with_what import nvrtc_nvcc, venvs
from sageattention import _ops, reference

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
# Of queries and keys, so many packed sequences that a block of threads takes several spans, some of them past a sequence's end.
MANY = [3, *[0] * 400, 2, 70], [700, *[0] * 400, 130, 333]
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


class Case:
    """Inputs of a call, [batch, heads, tokens, head_dim] or packed [tokens, heads, head_dim], and its options."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
        self.tensors = (q, k, v)
        self.options = {
            "is_causal": False,
            "sm_scale": q.shape[-1] ** -0.5,
            "smooth_k": True,
            "smooth_v": True,
            "per_block_mean": True,
            "attn_mask": None,
            "cu_seqlens": None,
            "out_turned": False,
            **options,
        }

    def expected(self, kernel: str) -> Result:
        """The reference's answer."""
        options = dict(self.options)
        cu_seqlens = options.pop("cu_seqlens")
        del options["out_turned"]
        if cu_seqlens is None:
            return reference.attention(*self.tensors, kernel=kernel, **options)
        del options["attn_mask"], options["per_block_mean"]
        return reference.attention_varlen(*self.tensors, *cu_seqlens, kernel=kernel, **options)

    def run(self, kernels: Kernels, kernel: str, *, seed: int = 0) -> Result:
        """The kernel's answer."""
        o = self.options
        mean, turned = o["per_block_mean"], o["out_turned"]
        options = _ops.number_of(
            kernel, o["cu_seqlens"] is None, o["is_causal"], o["smooth_k"], o["smooth_v"], True, mean, out_turned=turned
        )
        if o["cu_seqlens"] is not None:
            return kernels.attention_varlen(*self.tensors, *o["cu_seqlens"], o["sm_scale"], options, seed=seed)
        out, lse = kernels.attention(*self.tensors, o["attn_mask"], o["sm_scale"], options, seed=seed)
        assert (out.transpose(1, 2) if turned else out).is_contiguous()
        return out, lse

    def check(
        self, kernels: Kernels, kernel: str, largest: float = 1e-3, *, largest_lse: float = 0.02, seed: int = 0
    ) -> Result:
        """The kernel's answer, held to the reference's: a relative L1 distance, and a largest difference in log-sum-exp.

        Sums in another order now and then make a mean's element its neighbour, and with it a number's code.
        """
        (out, lse), (expected, expected_lse) = self.run(kernels, kernel, seed=seed), self.expected(kernel)
        seen, finite = expected.isfinite(), expected_lse.isfinite()
        assert torch.equal(out.isfinite(), seen)
        assert torch.equal(lse.isfinite(), finite)
        x, y = out[seen].double(), expected[seen].double()
        assert (x - y).abs().sum() <= largest * y.abs().sum(), f"differs by {float((x - y).abs().sum() / y.abs().sum()):.5f}"
        assert not finite.any() or (lse - expected_lse)[finite].abs().max() <= largest_lse
        return out, lse

    def check_orders(self, kernels: Kernels, kernel: str, *seeds: int) -> None:
        """Hold the kernel to the same bits in each of these orders of threads."""
        in_order = self.run(kernels, kernel)
        for seed in seeds:
            for one, other in zip(self.run(kernels, kernel, seed=seed), in_order, strict=True):
                assert torch.equal(fuzz.bits(one), fuzz.bits(other)), seed


def large_channels(case: Case) -> Case:
    """Changed to: two channels of K that turn from key to key, so that their mean is nothing, in one of which Q is small."""
    q, k, _ = case.tensors
    tokens = torch.arange(k.shape[-2] if k.dim() == 4 else k.shape[0]).float()
    turned = torch.stack([60 * torch.cos(0.7 * tokens), 25 * torch.sin(0.4 * tokens)], dim=-1)
    k[..., [5, 17]] += (turned if k.dim() == 4 else turned[:, None]).to(k.dtype)
    q[..., 5] *= 0.05
    assert rotation(case).applies.all()
    return case


def large_in_q(case: Case) -> Case:
    """Changed to: a channel in which all of Q is large, and one in which all is somewhat."""
    q, _, _ = case.tensors
    q[..., 7] += 24
    q[..., 20] -= 6
    assert rotation(case).applies.all()
    return case


def infinite_in_q(case: Case) -> Case:
    """Changed to: two rows of Q hold an infinity, in a channel in which all of K has one sign."""
    q, k, _ = case.tensors
    k[..., 5] = k[..., 5].abs() + 1
    q[0, 0, 3, 5], q[0, 1, 4, 5] = math.inf, -math.inf
    return case


def rotation(case: Case) -> reference.Rotation:
    """As the reference finds it, of packed sequences for the last."""
    q, k, _ = case.tensors
    if case.options["cu_seqlens"] is not None:
        (first_q, end_q), (first_k, end_k) = (ends[-2:].tolist() for ends in case.options["cu_seqlens"])
        q, k = q[None, first_q:end_q].transpose(1, 2), k[None, first_k:end_k].transpose(1, 2)
    return reference.find_rotation(q, reference.sampled_mean(k.float())[1])


class Form(NamedTuple):
    """What hides keys of 333 from 70 queries of two batch elements and heads."""

    mask: torch.Tensor
    is_causal: bool = False

    def seen(self) -> torch.Tensor:
        """Which keys some query sees: [2, 333] bool."""
        seen = reference.seen_keys(reference.without_far_keys(self.mask, is_causal=self.is_causal), 2, 333)
        assert seen is not None
        return seen & (torch.arange(333) < 70) if self.is_causal else seen


def check_unseen(kernels: Kernels, kernel: str, form: Form, v_hidden: float) -> None:
    """Hold the kernel to the same bits whatever keys, and values, no query sees; and to the reference, in K a bias."""
    q, k, v = (x.half() for x in inputs(2, 2, 1, 70, 333, 64, 64))
    k[..., 3] += 10
    unseen = ~form.seen()[:, None, :, None]
    options = {"attn_mask": form.mask, "is_causal": form.is_causal}
    zeros = Case(q, k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0), **options)
    numbers = Case(q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, v_hidden), **options)
    for one, other in zip(zeros.check(kernels, kernel), numbers.run(kernels, kernel), strict=True):
        assert torch.equal(fuzz.bits(one), fuzz.bits(other))


def stand_in(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put these in the operators' place. Threads of each call go on in another order."""
    seeds = itertools.count()
    monkeypatch.setattr(_ops, "_attention", lambda *arguments: kernels.attention(*arguments, seed=next(seeds)))
    monkeypatch.setattr(_ops, "_attention_varlen", lambda *arguments: kernels.attention_varlen(*arguments, seed=next(seeds)))


def check_random_calls(first: int, problems: int, wanted: Callable[[fuzz.Call, Problem], bool]) -> int:
    """Hold calls of the fuzz's problems, from the seed `first` on, to its limits: those that are wanted, whose number is returned."""
    calls = 0

    def run(call: fuzz.Call, problem: Problem, exact: Exact) -> torch.Tensor:
        nonlocal calls
        if not wanted(call, problem):
            return torch.zeros(len(fuzz.FIGURES) + 1, dtype=torch.float64)
        calls += 1
        return fuzz.one(call, problem, exact)

    failures = [failure for seed in range(first, first + problems) for failure in fuzz.solve(seed, "cpu", run).failures]
    assert not failures, "\n".join(fuzz.report(failure, "cpu") for failure in failures)
    return calls


randn = partial(tensors.randn, dtype=torch.float32)  # the same on every device


def inputs(
    batch: int, q_heads: int, kv_heads: int, qo_len: int, kv_len: int, head_dim: int, v_head_dim: int
) -> list[torch.Tensor]:
    """q, k and v in float32, with offsets that smoothing takes off."""
    return [
        randn(batch, q_heads, qo_len, head_dim) + randn(1, q_heads, 1, head_dim, seed=3),
        randn(batch, kv_heads, kv_len, head_dim, seed=1) + 2 * randn(1, kv_heads, 1, head_dim, seed=4),
        randn(batch, kv_heads, kv_len, v_head_dim, seed=2) + randn(1, kv_heads, 1, v_head_dim, seed=5),
    ]


def _forms() -> dict[str, Form]:
    """They leave a part, some keys in the middle, few or none."""
    key = torch.arange(333)
    some = key < 150
    others = (key >= 130) & (key < 300) & (randn(333, seed=8) > 0)
    scores = randn(2, 2, 70, 333, seed=9)
    return {
        "keys": Form(torch.stack([some, others])[:, None, None]),
        "keys of all": Form(others[None]),
        "all but the first keys": Form((key >= 10)[None]),
        "few keys, far apart": Form(((key - 13).abs().minimum((key - 303).abs()) < 4)[None]),
        "no key": Form(torch.stack([some, some & False])[:, None, None]),
        "scores": Form((scores[0, 0] > 0.5) & some),
        "scores of heads": Form((scores > 0.5) & torch.stack([some, others])[:, None, None]),
        "added": Form(scores[:, :1].masked_fill(~some, -math.inf).half()),
        "added to keys": Form(randn(333).half().masked_fill(~others, -65504.0)[None]),
        "far keys": Form(torch.where(others, 0.5, -1e4).half()[None]),
        "far keys, or all": Form(torch.where(torch.stack([others, others & False])[:, None, None], 0.0, -1e4).half()),
        "keys, causal": Form((key >= 20)[None], is_causal=True),
        "added, causal": Form(scores[:, :1].half(), is_causal=True),
    }


FORMS = _forms()


def packed(
    lengths_q: list[int],
    lengths_k: list[int],
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    kv_heads: int = 1,
    **options: Any,
) -> Case:
    """Sequences one after the other, two heads to a key head."""
    cu_seqlens = tuple(torch.tensor([0, *some]).cumsum(0).int() for some in (lengths_q, lengths_k))
    tensors = inputs(1, 2 * kv_heads, kv_heads, sum(lengths_q), sum(lengths_k), head_dim, v_head_dim)
    return Case(*(x[0].transpose(0, 1).to(dtype) for x in tensors), cu_seqlens=cu_seqlens, **options)


# Where sequences of 200 tokens do not start: they do not rise from 0 to 200.
WRONG_STARTS = [[200, 200, 200], [900, 900, 900], [-5, 100, 200], [0, 900, 100], [150, 20, 170], [500, 600, 700]]


def check_wrong_starts(kernels: Kernels, kernel: str, dtype: torch.dtype, tokens: int = 200) -> None:
    """Hold the kernels to no wild access, and to waiting for each other, where cu_seqlens is wrong, which nobody looks at: results may be anything.

    tokens: a multiple of 200.
    """
    tensors = [x[0].transpose(0, 1).to(dtype) for x in inputs(1, 2, 1, tokens, tokens, 64, 64)]
    large = large_channels(packed([tokens], [tokens], 64, 64, dtype)).tensors
    for starts in WRONG_STARTS:
        cu_seqlens = torch.tensor(starts).int() * (tokens // 200)
        for some in (tensors, large):
            Case(*some, cu_seqlens=(cu_seqlens, cu_seqlens)).run(kernels, kernel)
