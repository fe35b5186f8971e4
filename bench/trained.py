"""What 8 bits do to a trained language model: `python bench/trained.py MODEL`, a folder or a GGUF file as transformers reads them.

Each head's attention is computed by each kernel, of the model's own q, k and v rounded to bfloat16, and compared with float64; then
the model is run with each kernel's attention in the place of exact attention, in float32 else. Without a GPU by the kernels' reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from measure import environment, exact, result_file
from methods import fp4_kernel

from sageattention import _ops, dispatch

# q, k, v as [batch, heads, tokens, head_dim], a mask or None, whether causal, the factor on the scores.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", bool, float], torch.Tensor]
PYTORCH = "PyTorch bf16"


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, factor: float
) -> torch.Tensor:
    """In float64."""
    return exact(q, k, v, is_causal=causal, sm_scale=factor, attn_mask=mask)[0]


def in_bfloat16(kernel: str | None) -> Attend:
    """By a kernel of ours, of what is rounded to bfloat16; None: by PyTorch."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, factor: float
    ) -> torch.Tensor:
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(torch.bfloat16)
        if kernel is None:
            return ORIGINAL(q, k, v, mask, is_causal=causal, scale=factor, enable_gqa=True)
        out: torch.Tensor = _ops.attention(q, k, v, mask, "HND", causal, factor, True, "f8" in kernel, False, kernel)[0]
        return out

    return attend


ORIGINAL = F.scaled_dot_product_attention


def in_fp4(device: torch.device) -> dict[str, Attend]:
    """By sageattn3, where it is installed and the device is one that it serves."""
    kernel = fp4_kernel(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device))
    if kernel is None:
        return {}
    import sageattn3

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, factor: float
    ) -> torch.Tensor:
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        out: torch.Tensor = sageattn3.sageattn3_blackwell(q, k, v, mask, causal, sm_scale=factor)
        return out

    return {kernel: attend}


def attention(attend: Attend) -> Any:
    """Within it models that call PyTorch's attention, as transformers' do by default, call this."""

    def in_its_place(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        del dropout_p, enable_gqa
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return attend(query, key, value, attn_mask, is_causal, factor).to(query.dtype)

    return mock.patch.object(F, "scaled_dot_product_attention", in_its_place)


def load(path: Path) -> tuple[Any, Any]:
    """A model in float32, and its tokeniser."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, more = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    tokeniser = AutoTokenizer.from_pretrained(folder, **more)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **more)
    return model.eval(), tokeniser


def errors(run: Callable[[], torch.Tensor], attends: dict[str, Attend]) -> list[dict[str, Any]]:
    """A row for each layer: the relative L1 distance of each head's output from float64's."""
    rows: list[dict[str, Any]] = []

    def look(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, factor: float
    ) -> torch.Tensor:
        a, b, c = (x.to(torch.bfloat16) for x in (q, k, v))
        expected = truth(a, b, c, mask, causal, factor)
        row: dict[str, Any] = {"head_dim": q.shape[-1], "queries": q.shape[2], "keys": k.shape[2]}
        for name, attend in attends.items():
            distance = (attend(q, k, v, mask, causal, factor).double() - expected).abs().sum(dim=(0, 2, 3))
            row[name] = (distance / expected.abs().sum(dim=(0, 2, 3))).tolist()
        rows.append(row)
        print(f"layer {len(rows)}", end="\r", file=sys.stderr, flush=True)
        return truth(q, k, v, mask, causal, factor)

    with attention(look):
        run()
    return rows


def predictions(run: Callable[[], torch.Tensor], tokens: torch.Tensor, attends: dict[str, Attend]) -> list[dict[str, Any]]:
    """A row for each attention: what it adds to the loss in nats a token, that difference's standard error, a Kullback-Leibler distance."""
    with attention(truth):
        right = run().log_softmax(dim=-1)
    loss = F.nll_loss(right[:-1], tokens[1:], reduction="none")
    rows = [{"attention": "exact, float32", "loss": float(loss.mean()), "more": 0.0, "standard_error": 0.0, "distance": 0.0}]
    for name, attend in attends.items():
        with attention(attend):
            found = run().log_softmax(dim=-1)
        other = F.nll_loss(found[:-1], tokens[1:], reduction="none")
        more, distance = other - loss, (right.exp() * (right - found)).sum(dim=-1)
        rows.append({"attention": name, "loss": float(other.mean()), "more": float(more.mean()),
                     "standard_error": float(more.std() / len(more) ** 0.5), "distance": float(distance.mean())})  # fmt: skip
        print(f"{name}: {float(more.mean()):+.4f}", file=sys.stderr, flush=True)
    return rows


def markdown(result: dict[str, Any]) -> str:
    """A row for each attention: errors over all heads, and predictions."""
    lines = [
        "| attention | error, median of heads | 9 in 10 below | worst | loss, nats a token | Kullback-Leibler distance |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["predictions"]:
        heads = sorted(error for layer in result["layers"] for error in layer.get(row["attention"], []))
        found = f"{heads[len(heads) // 2]:.4f} | {heads[len(heads) * 9 // 10]:.4f} | {heads[-1]:.4f}" if heads else " | | "
        loss = f"{row['more']:+.4f} ± {row['standard_error']:.4f}" if heads else f"{row['loss']:.4f}"
        lines.append(f"| {row['attention']} | {found} | {loss} | {row['distance']:.5f} |")
    return "\n".join(lines)


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a causal language model: a folder of transformers', or a GGUF file")
    parser.add_argument(
        "--text", type=Path, default=Path(sysconfig.get_path("stdlib")) / "argparse.py", help="(default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="the text's first so many (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=result_file, help="where to write the numbers as JSON, head by head")
    arguments = parser.parse_args()
    if not arguments.model.exists():
        sys.exit(f"trained.py: there is no {arguments.model}: expected a folder or a GGUF file")
    if not arguments.text.is_file():
        sys.exit(f"trained.py: there is no file {arguments.text}")
    text = arguments.text.read_text(encoding="utf-8")
    model, tokeniser = load(arguments.model)
    model.to(arguments.device)
    tokens = tokeniser(text, return_tensors="pt").input_ids[:, : arguments.tokens].to(arguments.device)
    present = dispatch.gpu_of(tokens.device.type, tokens.device.index)[1]
    attends = {
        PYTORCH: in_bfloat16(None),
        **{name: in_bfloat16(name) for name in dispatch.KERNELS if present is None or name in present},
        **in_fp4(tokens.device),
    }

    def run() -> torch.Tensor:
        logits: torch.Tensor = model(tokens, use_cache=False).logits
        return logits[0].float()

    result: dict[str, Any] = {
        "environment": environment("python bench/trained.py " + " ".join(sys.argv[1:]), arguments.device),
        "model": {"type": model.config.model_type, "parameters": sum(p.numel() for p in model.parameters())},
        "text": {"file": arguments.text.name, "sha256": sha256(text.encode()).hexdigest(), "tokens": tokens.shape[1]},
        "layers": errors(run, attends),
        "predictions": predictions(run, tokens[0], attends),
    }
    print(markdown(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
