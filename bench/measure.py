"""Time of attention on a GPU, and its error against float64."""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cards.shape import Shape
from methods import BASELINE, KERNELS, methods, packed_methods
from rich.console import Console
from rich.progress import track

import sageattention

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from accuracy import exact as exact  # others here take these too  # noqa: PLC0414
from accuracy import relative_l1 as relative_l1  # noqa: PLC0414

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
SECONDS = 0.25  # that a method is timed for
ROWS = 256  # of the output, evenly spread, whose error is looked at


def parser_of(script: str, description: str | None) -> argparse.ArgumentParser:
    """What a benchmark is told: where its numbers go, by default below build/ by its name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    file = f"build/{script}.json"
    parser.add_argument("--output", type=result_file, default=str(ROOT / file), help=f"default: {file}")
    return parser


def result_file(name: str) -> Path:
    """Where a command's numbers are to go as JSON; beside it a plot of the same name may go, as SVG."""
    path = Path(name)
    if path.suffix == ".svg" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{name}: expected a file for JSON; a plot goes beside it, as .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def environment(command: str, device: str = "cuda") -> dict[str, str]:
    """What the numbers of a command hold for."""
    where = {"torch": torch.__version__, "sageattention": sageattention.__version__}
    if torch.device(device).type == "cpu" or not torch.cuda.is_available():
        return {"gpu": "none: CPU", **where, "kernels": "the CPU's references", "command": command}
    asks = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asks, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):  # containers may lack it
        driver = "unknown"
    kernels = f"CUDA {sageattention._library.build.cuda}, {sageattention._library.library.kernel_architecture(0)}"
    gpu = {"gpu": torch.cuda.get_device_name(), "driver": driver}
    return {**gpu, **where, "kernels": kernels, "command": command}


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, which would end a CUDA graph's capture in the middle; pressed again it ends the program."""
    pressed = False

    def note(_number: int, _frame: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def each(parts: dict[str, Sequence[partial[Any]]]) -> tuple[dict[str, list[Any]], list[str]]:
    """What the calls of each part return, and which are missing and why: they do not fit into the GPU's memory, or Ctrl-C was pressed."""
    found: dict[str, list[Any]] = {name: [] for name in parts}
    missing: list[str] = []
    console = Console(stderr=True)
    with noted_interrupt() as interrupted:
        for name, calls in parts.items():
            for call in track(calls, name, console=console):
                if interrupted():
                    short = [
                        f"{part}: {len(found[part])} of {len(all_)}"
                        for part, all_ in parts.items()
                        if len(found[part]) < len(all_)
                    ]
                    return found, [*missing, f"interrupted, with {', '.join(short)}"]
                try:
                    found[name].append(call())
                except torch.OutOfMemoryError:
                    missing.append(f"{name}: out of memory at {', '.join(map(str, call.args))}")
                    console.print(missing[-1])
                torch.cuda.empty_cache()
    return found, missing


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """GPU time of one call, averaged over `repeats` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def replayed(call: Callable[[], object], times: int = 1) -> Callable[[], object]:
    """Replays a CUDA graph of so many calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    replay: Callable[[], object] = graph.replay
    return replay


def under_load(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of one call, repeated for so long after half as long: a card that has just been idle runs above its sustained clocks."""
    repeats = max(2, int(seconds * 1000 / milliseconds(call, 2)))
    milliseconds(call, repeats // 2)
    return milliseconds(call, repeats)


def tried(name: str, call: Callable[[], Any]) -> Any:
    """What a method returns; None where a peer cannot do it, whose backend this PyTorch or card lacks. That ours fails is an error."""
    try:
        return call()
    except RuntimeError:
        if name.startswith("sageattn") or name in KERNELS:
            raise
        return None


def rounds(calls: dict[str, Callable[[], object]]) -> list[dict[str, float]]:
    """Milliseconds of each call, the calls taking turns. A peer that cannot do it is left out."""
    able = {name: call for name, call in calls.items() if tried(name, call) is not None}
    table = []
    for _ in range(ROUNDS):
        table.append({name: under_load(call, SECONDS) for name, call in able.items()})
    return table


def summary(times: list[dict[str, float]], operations: float, baseline: str) -> dict[str, Any]:
    """Median TFLOPS of each method, and its ratio to the baseline in the same round."""
    return {
        "tflops": {n: statistics.median(operations / r[n] / 1e9 for r in times) for n in times[0]},
        "ratio": {n: statistics.median(r[baseline] / r[n] for r in times) for n in times[0] if baseline in times[0]},
    }


def bf16(*size: int) -> torch.Tensor:
    """Standard normal, on the GPU."""
    return torch.randn(*size, device="cuda").to(torch.bfloat16)


def speed(shape: Shape, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> dict[str, Any]:
    """Of every method at one shape: 4 * batch * heads * N^2 * head_dim operations, half of them when causal.

    `spread` is the standard deviation of Q's and K's numbers. That of the scores, whose unit is e, is its square.
    """
    size = shape.batch, shape.heads, shape.tokens, shape.head_dim
    q, k, v = ((torch.randn(*size, device="cuda") * x).to(dtype) for x in (spread, spread, 1.0))
    times = rounds({name: partial(attention, q, k, v, shape.causal) for name, attention in methods().items()})
    inputs = {"dtype": str(dtype).removeprefix("torch."), "spread": spread}
    return {"shape": shape._asdict(), **inputs, **summary(times, shape.operations, BASELINE)}


def packed_speed(causal: bool) -> dict[str, Any]:
    """256 sequences of 16 to 8192 tokens, their logarithms evenly distributed; 16 heads, head_dim 128."""
    lengths = (
        torch.exp2(torch.linspace(4, 13, 256)).round().int()[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    )
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]).cuda()
    q, k, v = (bf16(int(lengths.sum()), 16, 128) for _ in range(3))
    operations = 4 * 16 * float(lengths.double().square().sum()) * 128 / (2 if causal else 1)
    longest = int(lengths.max())
    table = packed_methods()
    times = rounds({name: partial(attention, q, k, v, cu_seqlens, longest, causal) for name, attention in table.items()})
    return {"shape": {"packed": "256 x 16..8192", "causal": causal}, **summary(times, operations, next(iter(table)))}


def error(tokens: int, inputs: str = "randn") -> dict[str, Any]:
    """Relative L1 error of every method on some rows: 4 heads, head_dim 128."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, tokens, 128, device="cuda") for _ in range(3))
    if inputs == "K and V offset by 8 randn":
        k, v = (x + 8 * torch.randn(1, 4, 1, 128, device="cuda") for x in (k, v))
    elif inputs == "every 16th channel of Q and K times 30":
        q[..., ::16] *= 30
        k[..., ::16] *= 30
    elif inputs.startswith("Q and K times "):
        q, k = (x * float(inputs.removeprefix("Q and K times ")) for x in (q, k))
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    rows = torch.linspace(0, tokens - 1, min(ROWS, tokens), device="cuda").long()
    expected = torch.cat([exact(q[:, i : i + 1, rows], k[:, i : i + 1], v[:, i : i + 1])[0] for i in range(4)], dim=1)
    found = {}
    for name, attention in methods().items():
        out = tried(name, partial(attention, q, k, v, False))
        if out is not None:
            found[name] = relative_l1(out[:, :, rows], expected)
    return {"tokens": tokens, "inputs": inputs, "relative_l1": found}
