"""A language model of transformers that writes, with `sageattn` in the place of `scaled_dot_product_attention`.

    pip install transformers
    python bench/generation.py [--output FILE.json]

A Llama of 16 layers with random weights, 8 prompts of which one is padded, with a cache that grows and with a static one that has room for
4096 tokens: milliseconds a token at a length that was not seen before and again, how much the first logits differ, and what kernels
take longest in a step that writes a token, by PyTorch's profiler. Without a GPU it says how much the logits of a small model differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measure import environment, parser_of, relative_l1
from torch.profiler import ProfilerActivity, profile

from sageattention import sageattn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, HEADS, KV_HEADS, WIDTH = (16, 16, 4, 2048) if ON_GPU else (2, 4, 2, 256)
BATCH, PROMPT, WRITTEN, ROOM = (8, 300, 40, 4096) if ON_GPU else (2, 20, 3, 64)
STEPS = 5  # that are profiled
ATTENTION: dict[str, Callable[..., Any]] = {"PyTorch": torch.nn.functional.scaled_dot_product_attention, "sageattn": sageattn}


def llama() -> Any:
    """In bfloat16; the same each time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=4096,
        max_position_embeddings=2 * ROOM,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def static(model: Any) -> Any:
    """A cache with room for more than will be written."""
    return transformers.StaticCache(config=model.config, max_cache_len=ROOM)


def written(model: Any, prompt: int, cache: Any) -> tuple[torch.Tensor, float]:
    """The first token's logits, and milliseconds a token, the prompt's included."""
    ids = torch.randint(1, 4096, (BATCH, prompt), generator=torch.Generator().manual_seed(prompt)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, : prompt // 4] = 0
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=WRITTEN,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    first = out.logits[0].float().cpu()  # which waits for all
    return first, (time.perf_counter() - start) / WRITTEN * 1e3


def kernels(model: Any) -> dict[str, float]:
    """Microseconds a layer, of those that take longest in a step that writes a token into the static cache."""
    cache = static(model)
    model(torch.ones(BATCH, PROMPT, dtype=torch.long, device=DEVICE), past_key_values=cache, use_cache=True)

    def step() -> None:
        token, position = (torch.full((BATCH, 1), number, device=DEVICE) for number in (1, PROMPT))
        model(token, past_key_values=cache, use_cache=True, position_ids=position)

    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / STEPS / LAYERS for event in profiled.key_averages()}
    return {name: round(took, 1) for name, took in sorted(times.items(), key=lambda item: -item[1])[:6]}


def main() -> None:
    """Measure, print, write."""
    arguments = parser_of("generation", __doc__).parse_args()
    torch.set_grad_enabled(False)
    about = {"transformers": transformers.__version__, **environment("python bench/generation.py")}
    model, logits = llama(), {}
    lengths = [PROMPT]  # that have been seen
    result: list[dict[str, Any]] = []
    for name, attention in ATTENTION.items():
        torch.nn.functional.scaled_dot_product_attention = attention
        logits[name] = written(model, PROMPT, None)[0]  # with what kernels need at first
        error = round(relative_l1(logits[name], logits["PyTorch"].double()), 4)
        print(f"{name}: first logits differ by {error}")
        result.append({"attention": name, "logits_differ": error})
        for kind in ("growing", "static") if ON_GPU else ():
            prompt = PROMPT + 2 * WRITTEN * len(lengths)
            lengths.append(prompt)
            first, again = (round(written(model, prompt, static(model) if kind == "static" else None)[1], 2) for _ in "12")
            result[-1][kind] = {"first": first, "again": again}
            print(f"{first:>8.1f} ms a token at new lengths{again:>8.1f} again  {kind} cache")
        if ON_GPU:
            result[-1]["kernels"] = kernels(model)
            for kernel, microseconds in result[-1]["kernels"].items():
                print(f"{microseconds:>8.1f} µs a layer and token  {kernel}")
    arguments.output.write_text(json.dumps({"environment": about, "generation": result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
