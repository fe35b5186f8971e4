"""The public functions of one tensor a role, for tests that hold for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sageattention

FUNCTIONS: list[Callable[..., Any]] = [
    sageattention.sageattn,
    sageattention.sageattn_qk_int8_pv_fp16_cuda,
    sageattention.sageattn_qk_int8_pv_fp16_triton,
    sageattention.sageattn_qk_int8_pv_fp8_cuda,
    sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90,
]
