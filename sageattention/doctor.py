"""The report of `python -m sageattention`, and of any package that has this module.

Nothing of this package is imported before it is known to be sound: the report is for installations that are not.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import io
import json
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from .kernels import Gpu

PACKAGE = Path(__file__).parent
NAME = str(__package__)
# Why the package could not be imported, where this report was asked for nevertheless. A second import of what failed may say less.
import_failure: Exception | None = None
# With dependencies PyTorch would be replaced, or looked for in an index that has none.
REINSTALL = (
    "reinstall the package: pip install --force-reinstall --no-deps with the wheel's file or its exact version, "
    "or conda install --force-reinstall"
)


def is_asked_for() -> bool:
    """Whether this is `python -m` and the package's name, which imports the package before the report that says what is wrong with it.

    Until Python runs the module, sys.argv[0] is "-m"; which module, Python 3.9 does not tell.
    """
    # (-c, -W and -X have a value.)
    words = " ".join(getattr(sys, "orig_argv", [])[1:])
    module = re.match(r"(?:\S+ )*?-[A-VYZabd-z]*?m ?(\S+)", words)
    return sys.argv[:1] == ["-m"] and (module is None or module[1] == NAME)


class Problem(NamedTuple):
    """Something that is wrong, and what to do about it."""

    what: str
    remedy: str


class Report:
    """Lines as they become known, printed at once, and the problems found on the way."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def say(self, name: str, value: str) -> None:
        """Print a fact."""
        print(f"{name:<15} {value}", flush=True)

    def problem(self, what: str, remedy: str) -> None:
        """Note something wrong."""
        self.problems.append(Problem(what, remedy))

    def end(self) -> int:
        """Print the problems; returns the exit status."""
        print()
        if not self.problems:
            print("No problem found.")
            return 0
        for number, problem in enumerate(self.problems, 1):
            print(f"Problem {number}: {problem.what}\n  To do: {problem.remedy}")
        return 1


def main() -> int:
    """Print the report. Returns 1 where a problem was found, else 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be of the terminal's letters
    report = Report()
    made = versions(report)
    if pytorch(report):
        driver(report, made)
        if package(report):
            kernel_files(report)
            gpus(report)
    return report.end()


def versions(report: Report) -> dict[str, Any]:
    """This package's and Python's; returns `_build.json`, empty where it cannot be read."""
    made: dict[str, Any] = {}
    try:
        made = dict(json.loads((PACKAGE / "_build.json").read_text(encoding="utf-8")))
        report.say(NAME, "{version}, built for PyTorch {torch} and CUDA {cuda}".format(**made))
    except (OSError, ValueError, TypeError, KeyError):
        report.say(NAME, "of unknown version")
    report.say("  installed in", str(PACKAGE))
    report.say("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    return made


def pytorch(report: Report) -> bool:
    """PyTorch's version; whether it can be imported."""
    try:
        import torch

        report.say("PyTorch", f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}")
    except Exception as error:  # noqa: BLE001 - whatever a broken one raises
        report.say("PyTorch", "cannot be imported")
        first = f"; at first: {import_failure}" if import_failure is not None and str(import_failure) != str(error) else ""
        report.problem(f"import torch fails: {error}{first}", "install PyTorch: https://pytorch.org/get-started/locally")
        return False
    return True


def driver(report: Report, made: dict[str, Any]) -> None:
    """The NVIDIA driver, and whether PyTorch and the kernels can use it."""
    import torch

    try:
        found = driver_cuda()
    except RuntimeError as error:
        report.say("driver", "cannot be asked")
        report.problem(str(error), "let the driver's own library be found first, or give the container the driver's libraries")
        return
    if found is None:
        report.say("driver", "no NVIDIA driver: on CPU tensors the reference runs, which is slow")
        return
    report.say("driver", "for CUDA {}.{}".format(*found))
    if torch.version.cuda is None:
        report.problem(
            "there is an NVIDIA driver, but this PyTorch was built without CUDA",
            "install PyTorch for CUDA: https://pytorch.org/get-started/locally",
        )
        return
    for name, wanted in (("PyTorch", torch.version.cuda), (NAME, made.get("cuda"))):
        if wanted and int(str(wanted).split(".")[0]) > found[0]:
            report.problem(
                f"{name} wants a driver for CUDA {wanted}, this one is for {found[0]}.{found[1]}", "update the driver"
            )
    if not torch.cuda.is_available():
        report.problem("PyTorch finds no GPU", "see whether nvidia-smi lists one, and whether CUDA_VISIBLE_DEVICES hides it")


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version of the driver; None without one.

    Raises:
        RuntimeError: there is a driver, and its library is missing or does not answer.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        if Path("/proc/driver/nvidia/version").exists():
            raise RuntimeError(f"there is an NVIDIA driver, but not its library: {error}") from None
        return None
    code = library.cuDriverGetVersion(ctypes.byref(version)) if hasattr(library, "cuDriverGetVersion") else 34
    if code != 0:
        stub = ": it is the stub that programs are linked with" if code == 34 else ""  # CUDA_ERROR_STUB_LIBRARY
        raise RuntimeError(f"{name} does not say the driver's version (error {code}){stub}")
    return version.value // 1000, version.value % 1000 // 10


def package(report: Report) -> bool:
    """Whether this package imports: its messages say what to do where it does not."""
    try:
        for name in ("._library", ".core"):
            importlib.import_module(name, __package__)
    except (ImportError, OSError) as error:
        report.problem(f"import {NAME} fails: {error}", "as the message says")
        return False
    except Exception as error:  # noqa: BLE001 - of a file that is not whole, say
        report.problem(f"import {NAME} fails: {type(error).__name__}: {error}", REINSTALL)
        return False
    return True


def kernel_files(report: Report) -> None:
    """Whether every file of the kernel set is there and whole."""
    from . import _library

    directory = _library.kernel_set(_library.KERNEL_DIRECTORIES)
    manifest = directory / "manifest.json"
    if not manifest.is_file():
        places = " or ".join(map(str, _library.KERNEL_DIRECTORIES))
        report.say("kernels", "none")
        report.problem(f"there are no kernels in {places}", f"{REINSTALL} {_library.build.package}-cubins")
        return
    files: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    report.say("kernels", f"{len(files)} files in {directory}: {', '.join(sorted(_library.kernels))}")
    for name, wanted in files.items():
        path = directory / name
        if not path.is_file():
            report.problem(f"the kernel file {path} is missing", REINSTALL)
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            report.problem(f"the kernel file {path} is damaged", REINSTALL)


def gpus(report: Report) -> None:
    """Each GPU: what it runs, and whether that is right and fast. Without one, the CPU's references."""
    import torch

    from . import dispatch

    if not torch.cuda.is_available():
        self_test(report, "cpu", dispatch.CPU, frozenset(dispatch.KERNELS))
        return
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        report.say(f"GPU {index}", "{}, compute capability {}.{}".format(name, *capability))
        try:
            gpu, present = dispatch.gpu_of("cuda", index)
            folder = dispatch.kernel_folder(index)
            chosen = dispatch.choose(dispatch.Request(dispatch.FIRST), gpu, present)
        except (RuntimeError, ValueError) as error:
            remedy = f"install the build for this GPU's architecture, or {dispatch.ELSEWHERE}"
            report.problem(f"GPU {index}: {str(error).splitlines()[0]}", remedy)
            continue
        report.say("  runs", f"{folder}; {dispatch.FIRST} takes {chosen.kernel}: {chosen.reason}")
        if failure := failure_of_pytorch(f"cuda:{index}"):
            report.problem(
                f"PyTorch itself computes nothing on GPU {index}: {failure}", "install a PyTorch that was built for this GPU"
            )
            continue
        self_test(report, f"cuda:{index}", gpu, present or frozenset())


def failure_of_pytorch(device: str) -> str:
    """What PyTorch says where not even an addition runs; else nothing."""
    import torch

    try:
        (torch.ones(1, device=device) + 1).item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def self_test(report: Report, device: str, gpu: Gpu, present: frozenset[str]) -> None:
    """Error against float64, of `FORMS`, and speed of every kernel that is there for the device."""
    from . import dispatch

    cpu = device == "cpu"
    columns = f"{'error':>8}{'masked':>8}{'packed':>8}{'causal':>8}{'at most':>9}{'ms':>9}{'TFLOPS':>8}"
    print(f"\n{'kernel (CPU reference)' if cpu else 'kernel':<34}{columns}")
    errors = {
        name: kernel.error for name, kernel in dispatch.KERNELS.items() if name in present and dispatch.GPUS[kernel.gpus](gpu)
    }
    few = dispatch.FEW_TOKENS
    if few is not None and few.name in present and not cpu:
        errors.update(dict.fromkeys(sorted(few.kernels(shared=few.short in present)), few.error))
    for name, known in errors.items():
        try:
            errors_of = {form: error_of(name, device, form) for form in FORMS if form in OF_ANY or name in dispatch.KERNELS}
            milliseconds, flops = (None, 0.0) if cpu else speed_of(name, device)
        except (RuntimeError, TypeError, ValueError) as failure:
            report.problem(
                f"{name} fails on {device}: {str(failure).splitlines()[0]}", "free memory if it is that; else " + REINSTALL
            )
            continue
        speed = f"{'-':>9}{'-':>8}" if milliseconds is None else f"{milliseconds:9.3f}{flops / milliseconds / 1e9:8.0f}"
        limit = known * 1.1  # few numbers scatter more than the many that `error` was measured on
        shown = "".join(f"{errors_of[form]:8.4f}" if form in errors_of else f"{'-':>8}" for form in FORMS)
        print(f"{name:<34}{shown}{limit:9.4f}{speed}", flush=True)
        for form, error in errors_of.items():
            if not error <= limit:  # NaN too
                report.problem(
                    f"{name} on {device} is {error:.4f} off exact attention{FORMS[form]}, at most {limit:.4f} is right",
                    "do not use it: report this output and the GPU's name as an issue",
                )
    print()


# Kinds of calls, which kernels of their own may serve, and how a message says them.
FORMS = {
    "plain": "",
    "masked": " under a mask",
    "packed": " of packed sequences",
    "causal": " of a causal call in float16 with offsets in K and V",
}
OF_ANY = {"plain", "masked"}  # the kernels for few tokens are asked for these alone


class Sizes(NamedTuple):
    """Of a call."""

    batch: int
    heads: int
    qo_len: int
    kv_len: int
    head_dim: int

    def tensors(self, device: str) -> list[torch.Tensor]:
        """q, k and v of normally distributed numbers."""
        lengths = (self.qo_len, self.kv_len, self.kv_len)
        return [
            randn(self.batch, self.heads, tokens, self.head_dim, seed=seed, device=device)
            for seed, tokens in enumerate(lengths)
        ]


def sizes_of(kernel: str, *, few: Sizes, others: Sizes) -> Sizes:
    """Sizes for a kernel: of few tokens, of one query over many keys, or of the kernels that quantise."""
    from . import dispatch

    if dispatch.FEW_TOKENS is None:
        return others
    return {dispatch.FEW_TOKENS.name: few, dispatch.FEW_TOKENS.over_many_keys: Sizes(8, 32, 1, 4096, 128)}.get(kernel, others)


def error_of(kernel: str, device: str, form: str) -> float:
    """Relative L1 error of the output: 256 queries, 4096 keys, head_dim 128, or 16 tokens, head_dim 64, or one query; bfloat16.

    form: of FORMS. Masked, the last quarter of the keys is hidden from all queries, and half of the others at random from each. Packed,
    the first 100 queries see the first half of the keys, and the others the second. Causal, 500 tokens of head_dim 64 are float16,
    channels of K and V have an offset, which of V is no part of what the error is relative to, and V's mean is subtracted.
    """
    import torch

    causal = form == "causal"
    others = Sizes(1, 2, 500, 500, 64) if causal else Sizes(1, 2, 256, 4096, 128)
    sizes = sizes_of(kernel, few=Sizes(64, 8, 16, 16, 64), others=others)
    q, k, v = sizes.tensors(device)
    offset = 2.0 if causal else 0.0  # of V
    if causal:
        q, k, v = q.half(), k.half() + 2 * randn(sizes.head_dim, seed=4, device=device).half(), v.half() + offset
    scores = q.double() @ k.double().transpose(2, 3) * sizes.head_dim**-0.5
    seen = None
    if form == "masked":
        seen = randn(sizes.qo_len, sizes.kv_len, seed=3, device=device) > 0
        seen[:, sizes.kv_len * 3 // 4 :] = False
        seen[:, 0] = True
    starts = [0, 100, sizes.qo_len], [0, sizes.kv_len // 2, sizes.kv_len]
    if form == "packed":
        of_query, of_key = (torch.arange(end[-1], device=device) >= end[1] for end in starts)
        seen = of_query[:, None] == of_key
    if causal:
        seen = torch.ones(sizes.qo_len, sizes.kv_len, dtype=torch.bool, device=device).tril()
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    expected = torch.softmax(scores, dim=-1) @ v.double()
    mask = None if causal else seen
    out = call_packed(kernel, q, k, v, *starts) if form == "packed" else call(kernel, q, k, v, mask, causal=causal)
    return float((out.double() - expected).abs().sum() / (expected - offset).abs().sum())


def speed_of(kernel: str, device: str) -> tuple[float, float]:
    """Milliseconds of a call, quantisation included, and its floating point operations: 32 heads of 4096 tokens, or 32768 of 16, or
    256 of one query and 4096 keys."""
    import torch

    sizes = sizes_of(kernel, few=Sizes(4096, 8, 16, 16, 64), others=Sizes(1, 32, 4096, 4096, 128))
    q, k, v = sizes.tensors(device)
    rounds = 20
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        for _ in range(rounds):
            call(kernel, q, k, v)
        start.record()
        for _ in range(rounds):
            call(kernel, q, k, v)
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / rounds, 4.0 * sizes.batch * sizes.heads * sizes.qo_len * sizes.kv_len * sizes.head_dim


def call(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False
) -> torch.Tensor:
    """Attention on a kernel of our choosing. Causal, V's mean is subtracted where the kernel can."""
    from . import _ops, dispatch

    few = kernel not in _ops.NUMBERS
    kernel = next(iter(dispatch.KERNELS)) if few else kernel  # which the others come before
    out: torch.Tensor = _ops.attention(
        q, k, v, mask, "HND", causal, q.shape[-1] ** -0.5, True, causal, False, kernel, or_16_bit=few
    )[0]
    return out


def call_packed(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: list[int], starts_k: list[int]
) -> torch.Tensor:
    """The same of sequences that lie one after the other in a batch element."""
    import torch

    from . import _ops

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(starts, dtype=torch.int32, device=q.device) for starts in (starts_q, starts_k))
    scale = q.shape[-1] ** -0.5
    out = _ops.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, False, scale, True, False, False, kernel)[0]
    return out.transpose(0, 1)[None]


def randn(*shape: int, seed: int, device: str) -> torch.Tensor:
    """bfloat16, the same numbers on every device of a kind."""
    import torch

    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(torch.bfloat16)
