"""What tests of the kernels on a GPU share."""

from __future__ import annotations

import pytest
from accuracy import TOLERANCES


@pytest.fixture(params=TOLERANCES)
def kernel(request: pytest.FixtureRequest) -> str:
    """Every kernel that this GPU can run."""
    from sageattention import dispatch  # test_fp4.py does without

    name: str = request.param
    gpu, _ = dispatch.gpu_of("cuda", None)
    if not dispatch.GPUS[dispatch.KERNELS[name].gpus](gpu):
        pytest.skip(f"runs on compute capability {dispatch.KERNELS[name].gpus}")
    return name
