"""Speed and accuracy of `sageattn` beside PyTorch's own attention, in one run on one GPU.

    python bench/run.py [--output bench/results/NAME.json] [--quick]

Speed is end to end: the call a user makes, quantisation included. The methods take turns, round after round, each running
long enough to reach the clocks it can sustain, timed with CUDA events; a row gives the median TFLOPS and the median over
rounds of the ratio to cuDNN bf16. TFLOPS counts
4 * batch * heads * N^2 * head_dim, half of it when causal. Accuracy is the relative L1 error against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import sageattention

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from accuracy import exact, relative_l1

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Any]
BASELINE = "cuDNN bf16"
ROUNDS = 3
# A method runs this long before and while it is timed: a card that has just been idle runs above its sustained clocks.
SECONDS = 0.25


class Shape(NamedTuple):
    """One row of the table."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool


def shapes(quick: bool) -> list[Shape]:
    """Batch 2, 32 heads over the lengths; a video model's; a short and ragged one; one head of a long text."""
    lengths = (1024, 4096, 16384) if quick else (1024, 2048, 4096, 8192, 16384, 32768)
    table = [Shape(2, 32, n, d, causal) for d in (128, 64) for causal in (False, True) for n in lengths]
    others = (Shape(1, 24, 32760, 128, False), Shape(8, 16, 333, 128, False), Shape(1, 1, 131072, 128, False))
    return [*table, *others]


def sdpa(backend: SDPBackend) -> Attention:
    """PyTorch's attention on one backend."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def ours(kernel: str) -> Attention:
    """`sageattn` on a kernel of our choosing."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        operator = torch.ops.sageattention.attention
        return operator(q, k, v, None, "HND", causal, q.shape[-1] ** -0.5, True, False, False, kernel)[0]

    return attention


def methods() -> dict[str, Attention]:
    """What is measured; the first is the baseline."""
    return {
        BASELINE: sdpa(SDPBackend.CUDNN_ATTENTION),
        "FlashAttention-2 bf16": sdpa(SDPBackend.FLASH_ATTENTION),
        "sageattn": lambda q, k, v, causal: sageattention.sageattn(q, k, v, is_causal=causal),
        "its mma.sync kernel": ours("sm80_qk_int8_pv_f16"),
    }


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """GPU time of one call, averaged over `repeats` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def measure_speed(shape: Shape) -> dict[str, Any]:
    """Median TFLOPS of each method and its ratio to the baseline."""
    q, k, v = (
        torch.randn(shape.batch, shape.heads, shape.tokens, shape.head_dim, device="cuda").to(torch.bfloat16) for _ in range(3)
    )
    operations = 4 * shape.batch * shape.heads * shape.tokens**2 * shape.head_dim / (2 if shape.causal else 1)
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        times = {}
        for name, attention in methods().items():
            call = partial(attention, q, k, v, shape.causal)
            repeats = max(2, int(SECONDS * 1000 / milliseconds(call, 2)))
            milliseconds(call, repeats // 2)
            times[name] = milliseconds(call, repeats)
        rounds.append(times)
    return {
        "shape": shape._asdict(),
        "tflops": {n: statistics.median(operations / r[n] / 1e9 for r in rounds) for n in methods()},
        "ratio": {n: statistics.median(r[BASELINE] / r[n] for r in rounds) for n in methods()},
    }


def measure_error() -> list[dict[str, Any]]:
    """Relative L1 error at N=4096, head_dim 128: randn, and with per-channel offsets on K and V."""
    rows = []
    for inputs in ("randn", "K and V offset by 8 randn", "every 16th channel of Q and K times 30"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 4096, 128, device="cuda") for _ in range(3))
        if "offset" in inputs:
            k, v = (x + 8 * torch.randn(1, 4, 1, 128, device="cuda") for x in (k, v))
        elif "30" in inputs:
            q[..., ::16] *= 30
            k[..., ::16] *= 30
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        expected, _ = exact(q, k, v)
        rows.append(
            {"inputs": inputs, "relative_l1": {n: relative_l1(f(q, k, v, False), expected) for n, f in methods().items()}}
        )
    return rows


def environment() -> dict[str, str]:
    """What the numbers hold for."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.split()[0],
        "torch": torch.__version__,
        "sageattention": sageattention.__version__,
        "kernels": f"CUDA {sageattention._library.build.cuda}, {torch.ops.sageattention.kernel_architecture(0)}",
        "command": "python bench/run.py" + (" --quick" if "--quick" in sys.argv else ""),
    }


def report(result: dict[str, Any]) -> Table:
    """The speed table: TFLOPS, and in brackets the ratio to the baseline."""
    table = Table(title=" · ".join(f"{k} {v}" for k, v in result["environment"].items() if k != "command"))
    names = list(methods())
    for column in ("batch", "heads", "N", "head_dim", "causal", *names):
        table.add_column(column, justify="right")
    for row in result["speed"]:
        shape = row["shape"]
        table.add_row(
            *(str(shape[key]) for key in ("batch", "heads", "tokens", "head_dim")),
            "yes" if shape["causal"] else "",
            *(f"{row['tflops'][n]:.0f} ({row['ratio'][n]:.2f})" for n in names),
        )
    table.add_section()
    for row in result["error"]:
        table.add_row("2", "4", "4096", "128", "", *(f"{row['relative_l1'][n]:.4f}" for n in names), end_section=True)
    table.caption = "TFLOPS (ratio to cuDNN bf16); last rows: relative L1 error against float64 for " + ", ".join(
        row["inputs"] for row in result["error"]
    )
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the numbers as JSON")
    parser.add_argument("--quick", action="store_true", help="leave out the longest sequences")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench: needs an NVIDIA GPU, and PyTorch sees none here")
    console = Console(width=140)
    speed = [measure_speed(s) for s in track(shapes(arguments.quick), "speed", console=Console(stderr=True))]
    result = {"environment": environment(), "speed": speed, "error": measure_error()}
    console.print(report(result))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
