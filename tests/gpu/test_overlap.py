"""A call's kernels may start before the caller's have ended (docs/architecture.md): its inputs are written, and its results read, right beside it.

Most kernels let others start when they end, and then it hardly shows whether those wait. One of ours that reads few queries' keys does so at once:
its output is what the next call attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

import sageattention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Made = TypeVar("Made")
Result = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Result]
HEADS, HEAD_DIM, ROUNDS = 8, 64, 6
SHAPES = {"few tokens": (64, 64), "one token": (1, 3000), "short": (500, 500), "long": (2500, 2500)}  # of Q and K


def replayed(run: Callable[[], Made]) -> Made:
    """What a CUDA graph leaves, the second time that it is replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = run()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return made


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Producer:
    """Calls of one query for each token, over the same keys: [1, heads, tokens, head_dim], others each time."""

    def __init__(self, tokens: int) -> None:
        self.q, self.k = randn(tokens, HEADS, 1, HEAD_DIM), randn(1, HEADS, 1000, HEAD_DIM).expand(tokens, -1, -1, -1)
        self.v = [randn(1, HEADS, 1000, HEAD_DIM).expand(tokens, -1, -1, -1) for _ in range(ROUNDS)]

    def __call__(self, which: int) -> torch.Tensor:
        tokens: torch.Tensor = sageattention.sageattn(self.q, self.k, self.v[which])
        return tokens.squeeze(2).transpose(0, 1).unsqueeze(0)


def check(attend: Attend, shape: str, mask: torch.Tensor | None) -> None:
    queries, keys = SHAPES[shape]
    produce = Producer(keys)

    def attended(tokens: torch.Tensor) -> Result:
        return attend(tokens[:, :, -queries:], tokens, tokens, mask)

    expected = []
    for which in range(ROUNDS):
        tokens = produce(which)
        torch.cuda.synchronize()
        expected.append(attended(tokens))
        torch.cuda.synchronize()

    def all_rounds() -> list[Result]:
        # Others each time, so that memory which a round gets back does not hold what is right there.
        return [tuple(x.clone() for x in attended(produce(which))) for which in range(ROUNDS)]

    for some in (all_rounds(), replayed(all_rounds)):
        for results, rights in zip(some, expected, strict=True):
            for result, right in zip(results, rights, strict=True):
                assert torch.equal(result, right)


def mask_of(kind: str, shape: str) -> torch.Tensor | None:
    sizes = 1, 1, *SHAPES[shape]
    if kind == "none":
        return None
    return randn(*sizes) if kind == "numbers" else torch.rand(*sizes, device="cuda") < 0.7


@pytest.mark.parametrize("mask", ["none", "bool", "numbers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sageattn(shape: str, mask: str) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None) -> Result:
        result: Result = sageattention.sageattn(q, k, v, attn_mask=attn_mask, return_lse=True)
        return result

    check(attend, shape, mask_of(mask, shape))


@pytest.mark.parametrize("lse", [False, True])  # for which kernels wait sooner
@pytest.mark.parametrize("mask", ["none", "bool", "numbers"])
def test_kernels(kernel: str, mask: str, lse: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None) -> Result:
        result: Result = sageattention._ops.attention(q, k, v, attn_mask, "HND", False, HEAD_DIM**-0.5, True, True, lse, kernel)
        return result

    check(attend, "short", mask_of(mask, "short"))


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_are_written_and_overwritten(shape: str) -> None:
    """By a kernel, a copy of memory, and a kernel on another stream that has been waited for."""
    queries, keys = SHAPES[shape]
    values = [randn(2, HEADS, tokens, HEAD_DIM) for tokens in (queries, keys, keys)]
    inputs = [torch.zeros_like(x) for x in values]
    busy = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    other = torch.cuda.Stream()
    expected, _ = sageattention.sageattn(*values, return_lse=True)
    torch.cuda.synchronize()

    def run() -> torch.Tensor:
        q, k, v = inputs
        busy.fill_(1)
        torch.maximum(values[0], values[0], out=q)
        k.copy_(values[1])
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.maximum(values[2], values[2], out=v)
        torch.cuda.current_stream().wait_stream(other)
        out: torch.Tensor = sageattention.sageattn(q, k, v).clone()
        for x in inputs:
            x.zero_()
        return out

    found = [*(run() for _ in range(4)), replayed(run)]
    assert all(torch.equal(out, expected) for out in found)


def test_within_a_green_context() -> None:
    """Which has some of the multiprocessors, and an order of its own: it is PyTorch's current context, beside the primary one's streams."""
    green = pytest.importorskip("torch.cuda.green_contexts", reason="PyTorch has them from 2.10 on")
    factor, start = (0.05 * randn(1, 2048, 2048) for _ in range(2))

    def made() -> torch.Tensor:
        x = start
        for _ in range(40):
            x = torch.nn.functional.normalize(x @ factor, dim=-1)
        return x.view(1, 2048, -1, 128).transpose(1, 2).contiguous()

    q, other = made(), randn(1, 16, 2048, 128)
    expected = sageattention.sageattn(q, other, other)
    torch.cuda.synchronize()
    try:
        context = green.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    except RuntimeError as error:
        pytest.skip(f"no green contexts here: {error}")
    context.set_context()
    try:
        results = [sageattention.sageattn(made(), other, other) + 0.0 for _ in range(3)]
    finally:
        context.pop_context()
    torch.cuda.synchronize()
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
