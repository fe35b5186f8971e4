"""Speed and accuracy of `sageattn` beside PyTorch's own attention and installed peers, in one run on one GPU.

    python bench/bench.py [--output FILE.json] [--quick]

Speed is end to end: the call a user makes, quantisation included. The methods take turns, round after round, each running
long enough to reach the clocks it can sustain, timed with CUDA events; a row gives the median TFLOPS and the median over
rounds of the ratio to cuDNN bf16. Beside the JSON file a plot of the same name is drawn (plot.py). On a card that
bench/cards knows, what its model predicts is shown beside what was measured. Ctrl-C ends the measuring, not the command.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cards import model
from cards.cubin import CubinError
from cards.gpus import Card, card_of
from cards.shape import Shape
from measure import each, environment, error, packed_speed, result_file, speed
from methods import KERNELS, methods
from predict import installed_cubins
from rich.console import Console
from rich.table import Table

import sageattention
from sageattention import _library

ROOT = Path(__file__).resolve().parent.parent
AT_HAND = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")  # GPUs whose results are in bench/results


def shapes(quick: bool) -> list[Shape]:
    """Batch 2, 32 heads over the lengths; a video model's; a short and ragged one; one head of a long text."""
    lengths = (1024, 4096, 16384) if quick else (1024, 2048, 4096, 8192, 16384, 32768)
    table = [Shape(2, 32, n, d, causal) for d in (128, 64) for causal in (False, True) for n in lengths]
    wide = [Shape(2, 32, n, 256, causal) for causal in (False, True) for n in (1024, 4096, 16384)]
    others = (Shape(1, 24, 32760, 128, False), Shape(8, 16, 333, 128, False), Shape(1, 1, 131072, 128, False))
    return [*table, *wide, *others]


def kinds_of_inputs() -> list[tuple[Shape, torch.dtype, float]]:
    """Both dtypes, and scores that lie as close together as `randn`'s or are four and sixteen times as far apart."""
    return [
        (Shape(2, 32, 4096, d, False), dtype, spread)
        for d in (128, 64)
        for dtype in (torch.bfloat16, torch.float16)
        for spread in (1.0, 2.0, 4.0)
    ]


def speeds(row: dict[str, Any], names: list[str]) -> list[str]:
    """Of each method TFLOPS, with the ratio to the baseline in brackets."""
    return [f"{row['tflops'][n]:.0f} ({row['ratio'].get(n, 0):.2f})" if n in row["tflops"] else "" for n in names]


def by_inputs(rows: list[dict[str, Any]]) -> Table:
    """TFLOPS with the ratio to the baseline, which has the same inputs, in brackets."""
    names = list(methods())
    table = Table(title="by inputs: batch 2, 32 heads, N=4096; ratio to cuDNN of the same dtype and inputs")
    for column in ("head_dim", "dtype", "scores' spread", *names):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row["shape"]["head_dim"]), row["dtype"], f"{row['spread'] ** 2:.0f}", *speeds(row, names))
    return table


def report(result: dict[str, Any]) -> tuple[Table, ...]:
    """TFLOPS with the ratio to the baseline in brackets; the same by kinds of inputs; and relative L1 errors."""
    names = list(methods())
    table = Table(title=" · ".join(f"{k} {v}" for k, v in result["environment"].items() if k != "command"))
    for column in ("batch", "heads", "N", "head_dim", "causal", *names):
        table.add_column(column, justify="right")
    for row in result["speed"]:
        shape = row["shape"]
        table.add_row(
            *(str(shape[key]) for key in ("batch", "heads", "tokens", "head_dim")),
            "yes" if shape["causal"] else "",
            *speeds(row, names),
        )
    packed = [
        ("causal " if row["shape"]["causal"] else "") + cell
        for row in result["packed"]
        for cell in speeds(row, ["sageattn_varlen"])
    ]
    table.caption = (
        "TFLOPS (ratio to cuDNN bf16); 256 packed sequences of 16 to 8192 tokens, 16 heads, head_dim 128 "
        f"(ratio to FlashAttention-2): {', '.join(packed) or 'not measured'}"
    )
    errors = Table(title="relative L1 error against float64: 4 heads, head_dim 128, bf16")
    for column in ("inputs", "N", *names):
        errors.add_column(column, justify="right")
    for row in result["error"]:
        errors.add_row(
            row["inputs"],
            str(row["tokens"]),
            *(f"{row['relative_l1'][n]:.4f}" if n in row["relative_l1"] else "" for n in names),
        )
    return table, by_inputs(result["inputs"]), errors


def predict(card: Card, shape: Shape) -> dict[str, float]:
    """TFLOPS that the model gives ours, by name, where the kernels' machine code is at hand; none of Hopper's calls in 16 bits."""
    cubins = installed_cubins() / card.architecture
    q = torch.empty(1, 1, shape.tokens, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    quantises = sageattention.explain(q, q, q).kernel
    sizes = (shape.batch, *(shape.heads,) * 2, *(shape.tokens,) * 2, *(shape.head_dim,) * 2)
    in_16_bits = _library.library.faster_in_16_bits(quantises, card.multiprocessors, sizes, shape.causal)
    found = {}
    for name, kernel in {**({} if in_16_bits else {"sageattn": quantises}), **KERNELS}.items():
        path = cubins / f"{kernel}-d{shape.head_dim}-bf16.cubin"
        if path.is_file():
            found[name] = shape.operations / model.call_seconds(model.read_kernel(path, shape.head_dim), card, shape) / 1e12
    return found


def comparison(result: dict[str, Any]) -> Table:
    """Measured TFLOPS and what they are of those predicted."""
    names = ["sageattn", *KERNELS]
    table = Table(title="measured TFLOPS / those that bench/predict.py predicts")
    for column in ("batch", "heads", "N", "head_dim", "causal", *names):
        table.add_column(column, justify="right")
    for row in result["speed"]:
        measured, predicted = row["tflops"], row["predicted"]
        cells = [
            f"{measured[n]:.0f} / {predicted[n]:.0f} = {measured[n] / predicted[n]:.2f}"
            if n in measured and n in predicted
            else ""
            for n in names
        ]
        shape = row["shape"]
        causal = "yes" if shape["causal"] else ""
        table.add_row(*(str(shape[key]) for key in ("batch", "heads", "tokens", "head_dim")), causal, *cells)
    return table


def main() -> None:
    """Measure, print the tables, write the JSON and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        type=result_file,
        default=str(ROOT / "build" / "bench.json"),
        help="where to write the numbers as JSON, and beside them the plot (default: build/bench.json)",
    )
    parser.add_argument("--quick", action="store_true", help="leave out some lengths")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench: needs an NVIDIA GPU, and PyTorch sees none here")
    where = environment("python bench/bench.py" + (" --quick" if arguments.quick else ""))
    measured, missing = each(
        {
            "speed": [partial(speed, shape) for shape in shapes(arguments.quick)],
            "inputs": [partial(speed, *kind) for kind in kinds_of_inputs()],
            "packed": [partial(packed_speed, causal) for causal in (False, True)],
            "error": [
                *(partial(error, tokens) for tokens in (1024, 4096, 16384, 65536, 131072)),
                partial(error, 4096, "K and V offset by 8 randn"),
                partial(error, 4096, "every 16th channel of Q and K times 30"),
                partial(error, 4096, "Q and K times 2"),
                partial(error, 4096, "Q and K times 4"),
            ],
        }
    )
    result: dict[str, Any] = {"environment": where, **measured, "missing": missing}
    console = Console(width=160)
    for table in report(result):
        console.print(table)
    if card := card_of(result["environment"]["gpu"]):
        try:
            for row in result["speed"]:
                row["predicted"] = predict(card, Shape(**row["shape"]))
        except (CubinError, ValueError) as fault:  # what was measured is not to be lost for it
            console.print(f"no prediction: {fault}")
        else:
            console.print(comparison(result))
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    try:
        from plot import draw
    except ImportError:
        console.print(f"no plot: matplotlib is not installed; later: python bench/plot.py {arguments.output}")
    else:
        draw(result, arguments.output.with_suffix(".svg"))
    if result["environment"]["gpu"] not in AT_HAND:
        console.print(
            f"Nobody here has an {result['environment']['gpu']}: what was promised for it is calculated. Please open an issue with "
            f"{arguments.output} attached, whatever it says."
        )
    if missing:
        sys.exit("bench: not all was measured: " + "; ".join(missing))


if __name__ == "__main__":
    main()
