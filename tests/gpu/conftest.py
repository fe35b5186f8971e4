"""What tests of the kernels on a GPU share."""

from __future__ import annotations

import pytest
from accuracy import TOLERANCES


@pytest.fixture(params=TOLERANCES)
def kernel(request: pytest.FixtureRequest) -> str:
    """Every kernel that is installed for this GPU."""
    from sageattention import dispatch  # test_fp4.py does without

    name: str = request.param
    gpu, present = dispatch.gpu_of("cuda", None)
    if present is None or name not in present:
        pytest.skip(f"not among the kernels installed for compute capability {gpu.capability}")
    return name
