"""Attention as models call it: time of PyTorch's fastest backend over that of `sageattn`, in one run on one GPU.

    python bench/models.py [--output FILE.json]

Each shape is a layer of a model, named with it. PyTorch's cuDNN, FlashAttention-2 and memory-efficient backends and its own choice are
tried; the fastest counts. Times are medians: between events around each call, as a program sees them that does nothing else, launching
included; and of a CUDA graph of the call, replayed; of a card under load. Short calls are several in a graph, since the host takes longer
to start one than the GPU for it, and are measured in turns, since a host that others use is slow for seconds at a time. Where few queries
read many keys these are a cache, of which a model has one in each layer: graphs have a call with each of ten, so
that they are read from memory, not from what the L2 cache kept of the call before. Beside the JSON file a plot of the same name is drawn.
Ctrl-C ends the measuring, not the command: what was measured is printed, written and drawn.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import each, environment, parser_of, replayed, tried
from plot import save, subplots
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import sageattention

SECONDS = 0.1  # that a call is repeated for, each time, after half as long: a card that has just been idle runs above its sustained clocks
GRAPH = 0.2  # milliseconds that a graph takes at least, if TOGETHER calls do
TOGETHER = 10  # calls of a graph, at most
SHORT = 0.2  # milliseconds of a call up to which the methods take TURNS turns
TURNS = 5
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Mask = Callable[["Layer"], torch.Tensor]


class Layer(NamedTuple):
    """An attention layer, in bfloat16."""

    name: str
    kind: str
    batch: int
    q_heads: int
    kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int
    causal: bool = False
    mask: Mask | None = None

    @property
    def reads_cache(self) -> bool:
        """Its keys are many beside its queries."""
        return self.qo_len * 16 <= self.kv_len

    @property
    def words(self) -> str:
        """Its shape."""
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        tokens = f"{self.qo_len}" if self.qo_len == self.kv_len else f"{self.qo_len}×{self.kv_len}"
        more = (", causal" if self.causal else "") + (f", {self.mask.__name__.replace('_', ' ')}" if self.mask else "")
        return f"{self.batch}×{heads}×{tokens}, D={self.head_dim}{more}"


def first_keys(layer: Layer, count: int) -> torch.Tensor:
    """That all queries see."""
    keys = torch.arange(layer.kv_len, device="cuda") < count
    return keys.expand(layer.batch, 1, 1, layer.kv_len).contiguous()


def padding(layer: Layer) -> torch.Tensor:
    """The last tenth of the keys."""
    return first_keys(layer, layer.kv_len - layer.kv_len // 10)


def first_quarter(layer: Layer) -> torch.Tensor:
    """Of the keys: a cache with room for more."""
    return first_keys(layer, layer.kv_len // 4)


def window(layer: Layer) -> torch.Tensor:
    """Each query sees itself and the half as many keys before it."""
    rows = torch.ones(layer.qo_len, layer.kv_len, dtype=torch.bool, device="cuda").tril()
    return rows.triu(-layer.kv_len // 2)


def last_rows(layer: Layer) -> torch.Tensor:
    """The queries are the last of the keys, causal: a chunk of a prompt."""
    return torch.ones(layer.qo_len, layer.kv_len, dtype=torch.bool, device="cuda").tril(layer.kv_len - layer.qo_len)


def added(layer: Layer) -> torch.Tensor:
    """A number for each score, the same in all heads."""
    return torch.randn(1, 1, layer.qo_len, layer.kv_len, device="cuda", dtype=torch.bfloat16)


def added_a_head(layer: Layer) -> torch.Tensor:
    """A number for each score and head."""
    return torch.randn(1, layer.q_heads, layer.qo_len, layer.kv_len, device="cuda", dtype=torch.bfloat16)


def half_of_all(layer: Layer) -> torch.Tensor:
    """At random."""
    return torch.rand(1, 1, layer.qo_len, layer.kv_len, device="cuda") < 0.5


LAYERS = (
    Layer("SD 1.5 self, 64²", "image", 2, 8, 8, 4096, 4096, 40),
    Layer("SD 1.5 self, 32²", "image", 2, 8, 8, 1024, 1024, 80),
    Layer("SD 1.5 self, 16²", "image", 2, 8, 8, 256, 256, 160),
    Layer("SD 1.5 cross", "image", 2, 8, 8, 4096, 77, 40),
    Layer("SDXL self, 64²", "image", 2, 10, 10, 4096, 4096, 64),
    Layer("SDXL self, 32²", "image", 2, 20, 20, 1024, 1024, 64),
    Layer("SDXL cross, 64²", "image", 2, 10, 10, 4096, 77, 64),
    Layer("SDXL cross, 32²", "image", 2, 20, 20, 1024, 77, 64),
    Layer("SD 3.5 Medium, 1024²", "image", 2, 24, 24, 4429, 4429, 64),
    Layer("Flux.1, 1024²", "image", 1, 24, 24, 4608, 4608, 128),
    Layer("Flux.1, 512²", "image", 1, 24, 24, 1536, 1536, 128),
    Layer("Qwen-Image, padded prompt", "image", 2, 24, 24, 4608, 4608, 128, mask=padding),
    Layer("HiDream-I1", "image", 1, 20, 20, 4480, 4480, 128),
    Layer("Hunyuan-DiT", "image", 2, 16, 16, 4096, 4096, 88),
    Layer("PixArt-Σ cross", "image", 2, 16, 16, 4096, 300, 72, mask=padding),
    Layer("Wan 2.1 14B, 480p", "video", 1, 40, 40, 32760, 32760, 128),
    Layer("Wan 2.1 14B cross", "video", 1, 40, 40, 32760, 512, 128),
    Layer("Wan 2.1 1.3B, 480p", "video", 1, 12, 12, 32760, 32760, 128),
    Layer("Wan 2.1, padded", "video", 1, 40, 40, 16384, 16384, 128, mask=padding),
    Layer("HunyuanVideo, 544p", "video", 1, 24, 24, 46800, 46800, 128),
    Layer("CogVideoX-5B", "video", 2, 48, 48, 17776, 17776, 64),
    Layer("LTX-Video", "video", 2, 32, 32, 4992, 4992, 64),
    Layer("Mochi 1", "video", 1, 24, 24, 44520, 44520, 128),
    Layer("AnimateDiff, over time", "video", 8192, 8, 8, 16, 16, 40),
    Layer("AnimateDiff, over time, 32²", "video", 2048, 8, 8, 16, 16, 80),
    Layer("Stable Video Diffusion, over time", "video", 18432, 5, 5, 25, 25, 64),
    Layer("random sparse, all heads", "video", 1, 4, 4, 16384, 16384, 128, mask=half_of_all),
    Layer("Whisper large, encoder", "audio", 8, 20, 20, 1500, 1500, 64),
    Layer("Stable Audio Open", "audio", 2, 24, 24, 1024, 1024, 64),
    Layer("F5-TTS", "audio", 2, 16, 16, 1600, 1600, 64),
    Layer("Llama 3.1 8B, prompt", "language", 1, 32, 8, 2048, 2048, 128, causal=True),
    Layer("Llama 3.1 8B, prompt", "language", 1, 32, 8, 8192, 8192, 128, causal=True),
    Layer("Llama 3.1 8B, prompt", "language", 1, 32, 8, 32768, 32768, 128, causal=True),
    Layer("Llama 3.1 8B, chunk of a prompt", "language", 1, 32, 8, 2048, 8192, 128, mask=last_rows),
    Layer("Llama 3.1 8B, one token", "language", 8, 32, 8, 1, 4096, 128),
    Layer("Llama 3.1 8B, one token, a server's batch", "language", 256, 32, 8, 1, 500, 128),
    Layer("Llama 3.1 8B, one token, padded", "language", 8, 32, 8, 1, 4096, 128, mask=padding),
    Layer("Llama 3.1 8B, one token, cache not full", "language", 8, 32, 8, 1, 4096, 128, mask=first_quarter),
    Layer("Llama 3.1 8B, four drafted tokens", "language", 1, 32, 8, 4, 4096, 128, mask=last_rows),
    Layer("Qwen 2.5 7B, prompt", "language", 1, 28, 4, 4096, 4096, 128, causal=True),
    Layer("Mistral 7B, window", "language", 1, 32, 8, 8192, 8192, 128, mask=window),
    Layer("Gemma 2 9B, prompt", "language", 1, 16, 8, 4096, 4096, 256, causal=True),
    Layer("Gemma 2 9B, one token", "language", 4, 16, 8, 1, 4096, 256),
    Layer("Gemma 2 9B, one token, a server's batch", "language", 128, 16, 8, 1, 500, 256),
    Layer("BERT large, padded", "language", 32, 16, 16, 512, 512, 64, mask=padding),
    Layer("CLIP ViT-L/14 text", "language", 2, 12, 12, 77, 77, 64, causal=True),
    Layer("T5-XXL encoder", "language", 1, 64, 64, 512, 512, 64, mask=added_a_head),
    Layer("ViT-L/14, 336²", "vision", 32, 16, 16, 577, 577, 64),
    Layer("SigLIP so400m", "vision", 16, 16, 16, 729, 729, 72),
    Layer("DINOv2 giant, 518²", "vision", 8, 24, 24, 1370, 1370, 64),
    Layer("pair bias, all heads", "other", 1, 24, 24, 4096, 4096, 128, mask=added),
    Layer("pair bias, long", "other", 1, 4, 4, 16384, 16384, 128, mask=added),
    Layer("one short sequence", "other", 1, 8, 8, 1024, 1024, 128),
    Layer("batch of short sequences", "other", 8, 16, 16, 256, 256, 128),
    Layer("batch of short sequences", "other", 8, 16, 16, 600, 600, 128),
    Layer("as measured everywhere", "other", 2, 32, 32, 1024, 1024, 128),
    Layer("as measured everywhere", "other", 2, 32, 32, 4096, 4096, 128),
    Layer("as measured everywhere", "other", 2, 32, 32, 16384, 16384, 128),
    Layer("as measured everywhere", "other", 2, 32, 32, 4096, 4096, 128, causal=True),
)


def between_events(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, events before and after each."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return statistics.median(float(a.elapsed_time(b)) for a, b in itertools.pairwise(events))


def milliseconds(call: Callable[[], object], *, all_caches: bool) -> tuple[float, float]:
    """By events, and in replayed graphs, of all caches there are or of as many calls as take some time."""
    call()
    torch.cuda.synchronize()
    once = max(between_events(call, 2), 1e-3)
    together = TOGETHER if all_caches else min(max(1, round(GRAPH / once)), TOGETHER)
    times = []
    for repeated, count in ((call, 1), (replayed(call, together), together)):
        repeats = max(4, min(2000, int(SECONDS * 1000 / (once * count))))
        between_events(repeated, max(2, repeats // 2))
        times.append(between_events(repeated, repeats) / count)
    return times[0], times[1]


def calls(layer: Layer) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ours, then PyTorch's that can do it."""
    q = torch.randn(layer.batch, layer.q_heads, layer.qo_len, layer.head_dim, device="cuda", dtype=torch.bfloat16)
    size = layer.batch, layer.kv_heads, layer.kv_len, layer.head_dim
    caches = [[torch.randn(size, device="cuda").to(q.dtype) for _ in "kv"] for _ in range(TOGETHER if layer.reads_cache else 1)]
    kv = itertools.cycle(caches)
    mask = None if layer.mask is None else layer.mask(layer)
    gqa = {"enable_gqa": True} if layer.q_heads != layer.kv_heads else {}

    def ours() -> object:
        k, v = next(kv)
        return sageattention.sageattn(q, k, v, is_causal=layer.causal, attn_mask=mask)

    yield "sageattn", ours
    for name, backend in {**BACKENDS, "PyTorch's choice": None}.items():

        def call(backend: SDPBackend | None = backend) -> object:
            k, v = next(kv)
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=layer.causal, **gqa)

        yield name, call


def measured(layer: Layer) -> dict[str, Any]:
    """Microseconds of each method, and ratios of PyTorch's fastest to ours: by events, and in graphs."""
    methods, turns = dict(calls(layer)), {}
    for name, call in methods.items():
        with warnings.catch_warnings(action="ignore"):  # why a backend cannot do it
            first = tried(name, partial(milliseconds, call, all_caches=layer.reads_cache))
        if first is not None:
            turns[name] = [first]
    for _ in range(TURNS - 1):
        for name, done in turns.items():
            if done[0][0] <= SHORT:
                done.append(milliseconds(methods[name], all_caches=layer.reads_cache))
    times = {name: [statistics.median(kind) for kind in zip(*done, strict=True)] for name, done in turns.items()}
    ours, others = times["sageattn"], {name: time for name, time in times.items() if name != "sageattn"}
    best = [min(others, key=lambda name: others[name][i]) for i in range(2)]
    return {
        "model": layer.name,
        "kind": layer.kind,
        "shape": layer.words,
        "microseconds": {name: [round(x * 1000, 1) for x in time] for name, time in times.items()},
        "fastest": best,
        "ratio": [round(others[name][i] / ours[i], 3) for i, name in enumerate(best)],
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar a layer."""
    rows = result["layers"][::-1]
    figure, axis = subplots(figsize=(10, 0.27 * len(rows) + 1.5))
    places = range(len(rows))
    for i, (label, shift) in enumerate((("events", 0.2), ("graphs", -0.2))):
        axis.barh([place + shift for place in places], [row["ratio"][i] for row in rows], height=0.38, label=label)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(places, [f"{row['model']}: {row['shape']}" for row in rows], fontsize=7)
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("time of PyTorch's fastest backend / time of sageattn")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
    axis.set_title(f"{result['environment']['gpu']}, PyTorch {result['environment']['torch']}, bf16", fontsize=10)
    save(figure, path)


def main() -> None:
    """Measure, print, write and draw."""
    arguments = parser_of("models", __doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("models: needs an NVIDIA GPU, and PyTorch sees none here")
    where = environment("python bench/models.py")
    found, missing = each({"layers": [partial(measured, layer) for layer in LAYERS]})
    result = {"environment": where, **found, "missing": missing}
    table = Table("model", "shape", "events", "graphs", "µs", "fastest of PyTorch's")
    for row in result["layers"]:
        ours = row["microseconds"]["sageattn"]
        table.add_row(
            row["model"], row["shape"], *(f"{x:.2f}" for x in row["ratio"]), f"{ours[0]:.0f} / {ours[1]:.0f}", row["fastest"][1]
        )
    Console(width=160).print(table)
    arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(result, arguments.output.with_suffix(".svg"))
    if missing:
        sys.exit("models: not all was measured: " + "; ".join(missing))


if __name__ == "__main__":
    main()
