"""A small diffusers transformer with random weights, for the tests of diffusers' sage backends on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from accuracy import relative_l1
from diffusers import FluxTransformer2DModel

# The backends that call this package. (Those named *_hub download kernels instead.)
BACKENDS = {
    "sage": "sm80_qk_int8_pv_f16",
    "sage_varlen": "sm80_qk_int8_pv_f16",
    "_sage_qk_int8_pv_fp8_cuda": "sm89_qk_int8_pv_f8",
    "_sage_qk_int8_pv_fp8_cuda_sm90": "sm89_qk_int8_pv_f8",
    "_sage_qk_int8_pv_fp16_cuda": "sm80_qk_int8_pv_f16",
    "_sage_qk_int8_pv_fp16_triton": "sm80_qk_int8_pv_f16",
}
# Of the model's output, relative L1: measured 0.002 with 16-bit values and 0.0026 with FP8. Half the scale in attention makes
# 0.02, attention that gives zeros 0.12.
TOLERANCE = 0.005


class Transformer:
    """Joint attention over text and picture, then attention over both together: one layer of each."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(16, 24, 24), guidance_embeds=False,
        )  # fmt: skip
        # As they come, random weights let attention change little: weights that keep the size of what they multiply do not.
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            elif "norm" not in name:
                torch.nn.init.normal_(weight, std=0.5)
        self.device = device
        self.model = model.to(device, torch.bfloat16).eval()

    def __call__(self, backend: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, torch.bfloat16)

        self.model.set_attention_backend(backend)
        with torch.no_grad():
            answer: Any = self.model(
                hidden_states=randn(2, 150, 16) * 4,
                encoder_hidden_states=randn(2, 20, 32) * 4,
                pooled_projections=randn(2, 32),
                timestep=torch.full((2,), 0.5, dtype=torch.bfloat16, device=self.device),
                img_ids=torch.zeros(150, 3, device=self.device),
                txt_ids=torch.zeros(20, 3, device=self.device),
                return_dict=False,  # diffusers' context parallelism gathers tensors alone
            )[0]
        return torch.as_tensor(answer)

    def error(self, backend: str) -> float:
        """How far a backend's output is from the native one's."""
        return relative_l1(self(backend), self("native").double())
