"""A small language model trained on the spot: what each attention kernel does to its loss, and to each layer's output.

    python bench/language_model.py [--out bench/results/NAME.json] [--seconds 130] [--device cpu --steps 20 --small]

The text is Python's own standard library, a token a byte, each context beginning with a token of its own (BOS); one file in twenty is
held out. A GPT (RoPE, no normalisation of Q and K) is trained in bfloat16 with PyTorch's attention, long enough to have attention
sinks: heads that put most of their weight on the first token. Then the same network computes the loss of held-out text with other
attentions: exact ones in float32, PyTorch's in bfloat16, and every function and kernel of ours; where `sageattn3` is installed, on a CPU
or a GPU that it serves, in FP4 too: in all layers, and in all but the first and the last, which take `sageattn`. Errors are relative L1
of a layer's attention output against float64 attention of the same Q, K and V; the sink mass is the mean weight of the first token,
over all queries but the first 64.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import environment, result_file
from methods import Attention, fp4_kernel, ours
from torch import nn
from torch.nn import functional as F

import sageattention
from sageattention import dispatch

BOS = 256
FIRST_QUERIES = 64  # see few keys, so that a large weight on the first says nothing
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Size(NamedTuple):
    """Of the network, of a step of its training, and of what is evaluated."""

    layers: int = 6
    heads: int = 4
    head_dim: int = 128
    context: int = 512
    batch: int = 32
    rate: float = 2e-3  # of learning, at most
    held_out: int = 64  # contexts whose loss is computed
    looked_at: int = 4  # contexts of which each layer's error is


SMALL = Size(layers=4, heads=2, head_dim=64, context=256, batch=8, rate=1e-3, held_out=32, looked_at=4)


def text(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's sources: to train with, and held out."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" not in name:
            parts[zlib.crc32(name.encode()) % 20 == 0].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(some)), dtype=torch.uint8).to(device) for some in parts)
    return train, held_out


def contexts(data: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """[contexts, length + 1] tokens: BOS and the bytes from each start on."""
    body = data[starts[:, None] + torch.arange(length, device=data.device)].long()
    return F.pad(body, (1, 0), value=BOS)


class Layer(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention and an MLP, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.heads = size.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = attend(rotated(q, *turn), rotated(k, *turn), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:]))))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE: each pair of channels turned by the token's place."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Model(nn.Module):  # type: ignore[misc, unused-ignore]
    """From tokens to the logits of the next."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.embedding = nn.Embedding(257, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(width, 256, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angle = torch.arange(size.context)[:, None] * frequencies
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        x, turn = self.embedding(tokens), (self.cos, self.sin)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.head(F.rms_norm(x, x.shape[-1:]))


def losses(model: Model, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Of each context, in nats a byte."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1], attend)
    return F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention, causal."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def weights(q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal softmax of the scores: [contexts, heads, queries, keys]."""
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same in float32, a context at a time."""
    with torch.autocast(q.device.type, enabled=False):
        some = [weights(q[i : i + 1], k[i : i + 1], torch.float32) @ v[i : i + 1].float() for i in range(q.shape[0])]
    return torch.cat(some).to(q.dtype)


def causal(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One of bench/methods.py's, causal."""
    out: torch.Tensor = attention(q, k, v, True)
    return out


def methods(device: str, size: Size) -> dict[str, tuple[str, Attend]]:
    """Ours, by name, with the kernel that serves each: public functions with each of their sums, then kernels that none of them takes."""
    q = torch.empty(1, 1, size.context, size.head_dim, dtype=torch.bfloat16, device=device)
    found: dict[str, tuple[str, Attend]] = {}
    for function, sums in dispatch.ACCUMULATORS.items():
        for which in sums or (None,):
            try:
                explained = sageattention.explain(q, q, q, is_causal=True, function=function, pv_accum_dtype=which)
            except ValueError:  # not on this GPU
                continue
            kernel = explained.kernel
            options = {"is_causal": True, **({"pv_accum_dtype": which} if which else {})}
            if kernel not in [served for served, _ in list(found.values())[1:]]:  # after sageattn, each kernel once
                found[f"{function} {which or ''}".strip()] = (kernel, partial(getattr(sageattention, function), **options))
    _, present = dispatch.gpu_of(device, None)
    for name in dispatch.KERNELS:
        if (present is None or name in present) and name not in [served for served, _ in found.values()]:
            found[name] = (name, partial(causal, ours(name)))
    return found


def mixed(ends: Attend, middle: Attend, layers: int) -> Attend:
    """`middle`, but in the first and the last layer `ends`. A model's layers call in their order."""
    turns = cycle([ends, *[middle] * (layers - 2), ends])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return next(turns)(q, k, v)

    return attend


def fp4_methods(device: str, size: Size) -> dict[str, tuple[str, Attend]]:
    """Those of sageattn3, by name, with the kernel; none where it is not installed, or the GPU is not one that it serves."""
    kernel = fp4_kernel(torch.empty(1, 1, size.context, size.head_dim, dtype=torch.bfloat16, device=device))
    if kernel is None:
        return {}
    import sageattn3

    fp4: Attend = partial(sageattn3.sageattn3_blackwell, is_causal=True)
    ends: Attend = partial(sageattention.sageattn, is_causal=True)
    return {
        "sageattn3_blackwell": (kernel, fp4),
        "sageattn3_blackwell, first and last layer sageattn": (kernel, mixed(ends, fp4, size.layers)),
    }


def train(model: Model, data: torch.Tensor, size: Size, seconds: float, steps: int) -> dict[str, float]:
    """Until so many seconds or steps are over; the rate of learning rises over a twentieth of them and falls to zero."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimiser = torch.optim.AdamW(matrices, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=data.is_cuda)
    generator = torch.Generator(data.device).manual_seed(0)
    start, done, step, shown = time.time(), 0.0, 0, 0.0
    loss = torch.zeros(())
    while done < 1.0:
        rate = size.rate * min(1.0, (done + 1e-3) / 0.05) * min(1.0, (1.0 - done) / 0.5)
        for group in optimiser.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(data) - size.context, (size.batch,), generator=generator, device=data.device)
        loss = losses(model, contexts(data, starts, size.context), sdpa).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(matrices, 1.0)
        optimiser.step()
        step += 1
        if step % 10 == 0 and data.is_cuda:
            torch.cuda.synchronize()  # so that the seconds are those of work done
        done = max(step / steps if steps else 0.0, (time.time() - start) / seconds)
        if time.time() - shown > 10:
            shown = time.time()
            print(f"step {step}, {done:.0%}, loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    return {
        "steps": step,
        "seconds": round(time.time() - start, 1),
        "tokens": step * size.batch * size.context,
        "loss": float(loss.detach()),
    }


def spread(size: Size, data: torch.Tensor, count: int) -> torch.Tensor:
    """Contexts evenly spread over the data."""
    return contexts(data, torch.linspace(0, len(data) - size.context - 1, count, device=data.device).long(), size.context)


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def held_out_losses(model: Model, size: Size, data: torch.Tensor, table: dict[str, tuple[str, Attend]]) -> list[dict[str, Any]]:
    """A row for each attention: loss, and its difference to exact attention's with the standard error of that, a context being a sample."""
    tokens = spread(size, data, size.held_out)
    attentions = {"exact, float32": ("", exact), "PyTorch bf16": ("", sdpa), **table}
    found = {}
    for name, (_, attend) in attentions.items():
        print(f"held-out loss: {name}", file=sys.stderr, flush=True)
        found[name] = torch.cat([losses(model, some, attend) for some in tokens.split(8)]).double()
    rows = []
    for name, (kernel, _) in attentions.items():
        more = found[name] - found["exact, float32"]
        error = more.std() / len(more) ** 0.5
        rows.append({"attention": name, "kernel": kernel, "loss": float(found[name].mean()), "more": float(more.mean()),
                     "standard_error": float(error), "perplexity_ratio": math.exp(float(more.mean()))})  # fmt: skip
    return rows


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def layer_errors(model: Model, size: Size, data: torch.Tensor, table: dict[str, tuple[str, Attend]]) -> list[dict[str, Any]]:
    """A row for each layer: weight of the first token and error of each attention, head by head and together."""
    rows: list[dict[str, Any]] = []
    attentions = {"PyTorch bf16": ("", sdpa), **table}

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            p = weights(q, k, torch.float64)
            expected = p @ v.double()
            mass = p[:, :, FIRST_QUERIES:, 0].mean(dim=(0, 2))
            row: dict[str, Any] = {
                "sink_mass": float(mass.mean()),
                "largest_sink_mass": float(mass.max()),
                "heads": mass.tolist(),
            }
            row["relative_l1"], row["relative_l1_of_heads"] = {}, {}
            for name, (_, attend) in attentions.items():
                error, scale = ((attend(q, k, v).double() - expected).abs(), expected.abs())
                row["relative_l1"][name] = float(error.sum() / scale.sum())
                row["relative_l1_of_heads"][name] = (error.sum(dim=(0, 2, 3)) / scale.sum(dim=(0, 2, 3))).tolist()
            rows.append(row)
            print(f"errors of layer {len(rows)} of {size.layers}", file=sys.stderr, flush=True)
            return expected.to(q.dtype)

    losses(model, spread(size, data, size.looked_at), look)
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Two tables: the loss with each attention, and each layer's sink and errors."""
    lines = [
        "| attention | kernel | held-out loss | more than exact, ± standard error | perplexity ratio | error, mean of layers | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["loss"]:
        errors = [layer["relative_l1"].get(row["attention"], 0.0) for layer in result["layers"]]
        more = f"{row['more']:+.5f} ± {row['standard_error']:.5f}"
        error = f"{sum(errors) / len(errors):.4f} | {max(errors):.4f}" if any(errors) else " | "
        lines.append(
            f"| {row['attention']} | {row['kernel']} | {row['loss']:.5f} | {more} | {row['perplexity_ratio']:.5f} | {error} |"
        )
    names = list(result["layers"][0]["relative_l1"])
    lines += ["", "| layer | sink mass | of the head with most | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for i, layer in enumerate(result["layers"]):
        found = " | ".join(f"{layer['relative_l1'][name]:.4f}" for name in names)
        lines.append(f"| {i} | {layer['sink_mass']:.2f} | {layer['largest_sink_mass']:.2f} | {found} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Error over sink mass: a point for each head of each layer."""
    from plot import save, subplots

    figure, axis = subplots(figsize=(7, 4.5))
    for name in result["layers"][0]["relative_l1"]:
        points = [
            (m, e) for row in result["layers"] for m, e in zip(row["heads"], row["relative_l1_of_heads"][name], strict=True)
        ]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, linestyle="", label=name)
    axis.set_xlabel("mean weight of the first token")
    axis.set_ylabel("relative L1 against float64")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    where = result["environment"]
    axis.set_title(f"every head of a small language model; {where['gpu']}, PyTorch {where['torch']}", fontsize=9)
    save(figure, path)


def main() -> None:
    """Train, evaluate, print the tables, write the JSON and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, help="where to write the numbers as JSON, and beside them the plot")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=130.0, help="of training")
    parser.add_argument("--steps", type=int, default=0, help="of training, if fewer than fit the seconds")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128), help="with twice the heads if 64")
    parser.add_argument("--small", action="store_true", help="a network that a CPU trains: to try the script")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "language_model: needs an NVIDIA GPU, and PyTorch sees none here; --device cpu --small --steps 20 tries the script, in minutes"
        )
    size = SMALL if arguments.small else Size(heads=512 // arguments.head_dim, head_dim=arguments.head_dim)
    torch.manual_seed(0)
    data, held_out = text(arguments.device)
    model = Model(size).to(arguments.device)
    trained = train(model, data, size, arguments.seconds, arguments.steps)
    table = methods(arguments.device, size) | fp4_methods(arguments.device, size)
    result: dict[str, Any] = {
        "environment": environment("python bench/language_model.py " + " ".join(sys.argv[1:]), arguments.device),
        "model": {**size._asdict(), "parameters": sum(p.numel() for p in model.parameters())},
        "text": {"python": sys.version.split()[0], "bytes": len(data), "held_out_bytes": len(held_out)},
        "training": trained,
        "loss": held_out_losses(model, size, held_out, table),
        "layers": layer_errors(model, size, held_out, table),
    }
    print(markdown(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        try:
            draw(result, arguments.out.with_suffix(".svg"))
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
