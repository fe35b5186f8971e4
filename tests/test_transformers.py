"""Models of transformers as they are, `sageattn` in the place of `scaled_dot_product_attention`, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from accuracy import relative_l1

from sageattention import sageattn

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
PICTURES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
BOTH: dict[str, Any] = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# By transformers' name: what differs from its defaults, and how many calls one pass makes.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({**SMALL, "num_key_value_heads": 2}, 2),
    "qwen2": ({**SMALL, "num_key_value_heads": 2}, 2),
    "mistral": ({**SMALL, "num_key_value_heads": 2, "sliding_window": 16}, 2),
    "gemma3_text": ({**SMALL, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16}, 2),
    "falcon": ({**SMALL, "multi_query": True}, 2),
    "opt": ({**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 128}, 2),
    "bert": (SMALL, 2),
    "clip_text_model": (SMALL, 2),
    "t5": ({"d_model": 128, "d_ff": 128, "d_kv": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 512}, 6),
    "bart": ({**BOTH, "max_position_embeddings": 256}, 6),
    "whisper": ({**BOTH, "max_source_positions": 100, "num_mel_bins": 20}, 6),
    "vit": (PICTURES, 2),
    "siglip_vision_model": ({**PICTURES, "intermediate_size": 128}, 2),
    "dinov2": (PICTURES, 2),
}
# Of a model's output, relative L1: measured 0.005 to 0.015. Half the scale in attention makes 0.08 at least.
TOLERANCE = 0.02


def built(name: str, how: Any = transformers.AutoModel) -> Any:
    """With random weights that keep the size of what they multiply: as they come, attention changes little by them."""
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(name, **MODELS[name][0])
    model = how.from_config(settings, attn_implementation="sdpa")
    for path, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in path:
            scaled = 32 if name == "t5" and path.endswith(".q.weight") else 1  # which has no scale but this
            torch.nn.init.normal_(weight, std=(weight.shape[1] * scaled) ** -0.5)
        elif name == "qwen2" and path.endswith("k_proj.bias"):  # as trained: large where positions hardly turn it
            weight.data.view(-1, 32)[:, 15::16] = 30.0
    return model.to(torch.bfloat16).eval()


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Two texts, of which one is padded at its beginning, two pictures, or two sounds."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (2, 40), generator=generator)
    if name in ("vit", "siglip_vision_model", "dinov2"):
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator).bfloat16()}
    if name == "whisper":
        return {"input_features": torch.randn(2, 20, 200, generator=generator).bfloat16(), "decoder_input_ids": ids[:, :12]}
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask, **({"decoder_input_ids": ids[:, :9]} if name in ("t5", "bart") else {})}


def seen(out: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last layer's output, but for what stands where a text is padded."""
    hidden: torch.Tensor = out.last_hidden_state.double()
    padded = "attention_mask" in given and "decoder_input_ids" not in given
    return hidden[given["attention_mask"].bool()] if padded else hidden


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def in_its_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], list[Any]]:
    """Puts a function there; what it is called with is gathered."""

    def put(attention: Callable[..., Any]) -> list[Any]:
        calls: list[Any] = []

        def called(*arguments: Any, **named: Any) -> Any:
            calls.append((arguments, named))
            return attention(*arguments, **named)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
        return calls

    return put


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, in_its_place: Callable[[Callable[..., Any]], list[Any]]) -> None:
    model, given = built(name), inputs(name)
    expected = seen(model(**given), given)
    calls = in_its_place(sageattn)
    error = relative_l1(seen(model(**given), given), expected)
    in_its_place(lambda q, *others, **named: sageattn(q / 2, *others, **named))
    worse = relative_l1(seen(model(**given), given), expected)
    assert len(calls) == MODELS[name][1]
    assert error <= TOLERANCE
    assert worse > 3 * TOLERANCE


@pytest.mark.parametrize("room", [None, 64])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_cache(name: str, room: int | None, in_its_place: Callable[[Callable[..., Any]], list[Any]]) -> None:
    """One that grows, and a static one that has room for more; the same tokens are written to both."""
    model, given = built(name, transformers.AutoModelForCausalLM), inputs(name)

    def logits() -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=room) if room else None
        ids = given["input_ids"][:, :25]
        first = model(ids, attention_mask=given["attention_mask"][:, :25], past_key_values=cache, use_cache=True)
        found, cache = [first.logits[:, -1]], first.past_key_values
        for place in range(25, 32):
            token, mask = given["input_ids"][:, place, None], given["attention_mask"][:, : place + 1]
            found.append(model(token, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1])
        return torch.stack(found).double()

    expected = logits()
    calls = in_its_place(sageattn)
    out = logits()
    assert len(calls) == 2 * 8
    assert room is None or {named["attn_mask"].shape[-1] for _, named in calls} == {room}
    assert relative_l1(out, expected) <= TOLERANCE


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that writes a token into a static cache, whole."""
    model = built("llama", transformers.AutoModelForCausalLM)

    def step(forward: Callable[..., Any]) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(torch.arange(3, 23)[None], past_key_values=cache, use_cache=True)
        out: torch.Tensor = forward(torch.tensor([[7]]), past_key_values=cache, use_cache=True).logits
        return out.double()

    expected = step(model)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sageattn)
    assert relative_l1(step(torch.compile(model.forward, fullgraph=True, backend="aot_eager")), expected) <= TOLERANCE
