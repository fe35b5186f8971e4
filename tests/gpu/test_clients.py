"""diffusers on a GPU, where its checks of device and compute capability hold too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")
import clients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def transformer() -> clients.Transformer:
    return clients.Transformer("cuda")


@pytest.mark.parametrize("backend", clients.BACKENDS)
def test_diffusers_backends(transformer: clients.Transformer, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    if "fp8" in backend and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs compute capability 8.9")
    monkeypatch.setattr(_AttentionBackendRegistry, "_checks_enabled", True)
    assert transformer.error(backend) <= clients.TOLERANCE


def test_diffusers_compiled(transformer: clients.Transformer) -> None:
    """As diffusers compiles its layers, whole; the output is that of the layers as they are."""
    expected = transformer("sage")
    compiled = clients.Transformer("cuda")
    compiled.model.compile_repeated_blocks(fullgraph=True)
    torch.testing.assert_close(compiled("sage"), expected, rtol=0.05, atol=0.05)
