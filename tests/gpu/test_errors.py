"""What is wrong with a call is said in the same words on a GPU, where the operator finds it and Python only words it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrong_arguments
from functions import FUNCTIONS

import sageattention
from sageattention import _call, dispatch, sageattn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("arguments", "error", "message"), [pytest.param(*e[1:], id=e[0]) for e in wrong_arguments.CASES])
def test_argument_errors(
    function: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], message: str, *, served: bool
) -> None:
    """Also where a call that is alike, but right, has been served before."""
    if torch.cuda.get_device_capability() < (8, 9) and "fp8" in function.__name__:
        pytest.skip("FP8 kernels are for compute capability 8.9 and later")
    dispatch.forget()
    if served:
        for mask in ({}, {"attn_mask": torch.ones(10, 10, dtype=torch.bool)}):
            function(**wrong_arguments.call(mask, "cuda"))
        assert _call.SERVED
    with pytest.raises(error) as caught:
        function(**wrong_arguments.call(arguments, "cuda"))
    assert str(caught.value) == message.replace("device cpu", "device cuda:0")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_error_keeps_no_tensor_alive() -> None:
    """Whoever runs out of memory and tries again with less must find free what the call held."""
    q = torch.randn(1, 2, 64, 64, device="cuda").half()
    gc.collect()  # what other tests left, which might go meanwhile
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        big = torch.zeros(1, 2, 64, 300, device="cuda").half()
        with pytest.raises(ValueError, match="head_dim"):
            sageattn(big, big, big)
        del big
        assert torch.cuda.memory_allocated() == before
    assert sageattention.sageattn(q, q, q).shape == q.shape


def test_a_kernels_fault_is_not_taken_for_lack_of_memory() -> None:
    """After it nothing can be allocated either; whoever takes that for lack of memory tries again for ever."""
    program = """
import torch
from sageattention import sageattn
q, k = (torch.randn(1, 2, tokens, 64, device="cuda").half() for tokens in (64, 100000))
sageattn(q, q, q)
torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
for _ in range(3):
    try:
        sageattn(k, k, k)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("none")
"""
    said = subprocess.run([sys.executable, "-P", "-c", program], check=False, capture_output=True, text=True).stdout.split()
    assert len(said) == 3
    assert not {"OutOfMemoryError", "none"} & set(said)
