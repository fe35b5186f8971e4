"""Draws what `bench.py` measured: `plot.py bench/results/NAME.json` writes NAME.svg beside it. Others begin and end plots by it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot


def subplots(*numbers: int, **options: Any) -> Any:
    """A figure and its axes."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "sageattention"  # the same numbers give the same bytes
    return pyplot.subplots(*numbers, layout="constrained", **options)


def save(figure: Any, path: Path) -> None:
    """As a file; of when it was made it says nothing."""
    figure.savefig(path, metadata={"Date": None})


def lines(result: dict[str, Any], head_dim: int, causal: bool) -> dict[str, list[tuple[int, float]]]:
    """TFLOPS over tokens, by method: batch 2, 32 heads."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in result["speed"]:
        shape = row["shape"]
        if (shape["batch"], shape["heads"], shape["head_dim"], shape["causal"]) != (2, 32, head_dim, causal):
            continue
        for name, tflops in row["tflops"].items():
            found.setdefault(name, []).append((shape["tokens"], tflops))
    return found


def by_spread(result: dict[str, Any], head_dim: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Ratio to the baseline over the scores' standard deviation, by method and dtype."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in result.get("inputs", ()):
        if row["shape"]["head_dim"] == head_dim:
            for name, ratio in row["ratio"].items():
                found.setdefault((name, row["dtype"]), []).append((row["spread"] ** 2, ratio))
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed at head_dim 128 and 64, causal or not, and error, over the sequence's length; speed over how far apart scores lie."""
    figure, axes = subplots(1, 5, figsize=(22.5, 4.5))
    for axis, (head_dim, causal) in zip(axes, ((128, False), (128, True), (64, False)), strict=False):
        for name, points in lines(result, head_dim, causal).items():
            axis.plot(
                *zip(*points, strict=True), marker="o", markersize=4, label=name, linewidth=2.5 if name == "sageattn" else 1.2
            )
        axis.set_title(f"head_dim {head_dim}" + (", causal" if causal else ""))
        axis.set_ylabel("TFLOPS, end to end")
        axis.set_ylim(bottom=0)
    errors: dict[str, list[tuple[int, float]]] = {}
    for row in result["error"]:
        if row["inputs"] == "randn":
            for name, value in row["relative_l1"].items():
                errors.setdefault(name, []).append((row["tokens"], value))
    for name, points in errors.items():
        axes[3].plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes[3].set_title("error, randn, head_dim 128")
    axes[3].set_ylabel("relative L1 against float64")
    axes[3].set_yscale("log")
    colours = {line.get_label(): line.get_color() for line in axes[0].lines}
    for (name, dtype), spreads in by_spread(result, 128).items():
        if name.startswith(("sageattn", "mma.sync")):
            style = "-" if dtype == "bfloat16" else "--"
            axes[4].plot(
                *zip(*spreads, strict=True), style, color=colours.get(name), marker="o", markersize=4, label=f"{name}, {dtype}"
            )
    axes[4].axhline(1.0, color="gray", linewidth=1)
    axes[4].set_title("head_dim 128, 4096 tokens: wider scores")
    axes[4].set_ylabel("ratio to cuDNN with the same inputs")
    axes[4].set_ylim(bottom=0)
    if len(axes[4].lines) > 1:
        axes[4].legend(fontsize=8)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens" if axis is not axes[4] else "standard deviation of the scores, as powers of e")
        axis.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(fontsize=8)
    environment = result["environment"]
    figure.suptitle(
        f"{environment['gpu']}, PyTorch {environment['torch']}, {environment['kernels']}; batch 2, 32 heads (errors: 4), bf16 or as said"
    )
    save(figure, path)


def main() -> None:
    """Draw one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="what bench.py has written")
    path = parser.parse_args().result
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"{path} cannot be read: {error}")
    if not {"speed", "inputs", "error"} <= result.keys():
        parser.error(f"{path} is no result of bench.py: the other benchmarks draw theirs themselves")
    draw(result, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
