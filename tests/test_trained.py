"""bench/trained.py, of a model that was not trained."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from sageattention import dispatch

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "trained.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped heads, biases of Q and K as Qwen has, and a token for each letter."""
    folder = tmp_path_factory.mktemp("model")
    letters = Tokenizer(models.WordLevel({chr(i): i for i in range(127)} | {"?": 127}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )  # fmt: skip
    qwen = transformers.Qwen2ForCausalLM(config)
    for layer in qwen.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.1)
        torch.nn.init.normal_(layer.self_attn.k_proj.weight, std=0.1)
    qwen.save_pretrained(folder)
    return folder


def test_a_folder(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), str(model), "--tokens", "200", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["text"]["tokens"] == 200
    kernels = [*dispatch.KERNELS, *(["sm120_qk_fp4_pv_fp4"] if importlib.util.find_spec("sageattn3") else [])]
    assert [row["attention"] for row in result["predictions"]] == ["exact, float32", "PyTorch bf16", *kernels]
    for layer in result["layers"]:
        assert (layer["head_dim"], layer["queries"], layer["keys"]) == (64, 200, 200)
        for name in ("PyTorch bf16", *kernels):
            assert len(layer[name]) == 4
            largest = 0.2 if "fp4" in name else 0.05 if "f8" in name else 0.03 if "int8" in name else 0.004
            assert all(0.0 < error < largest for error in layer[name])
    for row in result["predictions"][1:]:
        assert 0.0 < row["distance"] < (0.02 if "fp4" in row["attention"] else 0.001)
        assert abs(row["more"]) < (0.05 if "fp4" in row["attention"] else 0.01)
        assert f"| {row['attention']} | " in done.stdout


def test_what_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"trained.py: there is no {tmp_path / 'none'}: expected a folder or a GGUF file\n"
