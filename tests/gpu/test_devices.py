"""The second GPU of a machine: beside one that is PyTorch's current device, alone, at the same time, and as the other half of a model."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from accuracy import QK_INT8_PV_F8, exact, relative_l1

import sageattention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

CURRENT, OTHER = "cuda:0", "cuda:1"
SHAPES = {"one token": (2, 8, 1, 2000), "short": (1, 8, 300, 300), "long": (1, 8, 2500, 2500)}  # batch, heads, queries, keys


def inputs(shape: str, head_dim: int = 128) -> list[torch.Tensor]:
    batch, heads, queries, keys = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(batch, heads, n, head_dim, generator=generator).bfloat16() for n in (queries, keys, keys)]


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(device) for x in tensors]


def python(*arguments: str) -> str:
    """What a new process prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_of_a_device_that_is_not_current(shape: str, masked: bool) -> None:
    q, k, v = inputs(shape)
    mask = torch.rand(q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None
    answers = []
    for device in (OTHER, CURRENT):
        there = on(device, q, k, v)
        out, lse = sageattention.sageattn(*there, attn_mask=None if mask is None else mask.to(device), return_lse=True)
        assert out.device == lse.device == torch.device(device)
        assert torch.cuda.current_device() == 0
        answers.append((out.cpu(), lse.cpu()))
    (out, lse), (expected, expected_lse) = answers
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    assert relative_l1(out, exact(q, k, v, attn_mask=mask)[0]) <= QK_INT8_PV_F8.any_shape


def test_packed_sequences_there() -> None:
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in inputs("long"))
    cu_seqlens = torch.tensor([0, 700, 700, 2500], dtype=torch.int32)
    answers = []
    for device in (CURRENT, OTHER):
        there_q, there_k, there_v, cu = on(device, q, k, v, cu_seqlens)
        answers.append(sageattention.sageattn_varlen(there_q, there_k, there_v, cu, cu, 1800, 1800).cpu())
    assert torch.equal(*answers)


def test_compiled_and_in_a_graph_there() -> None:
    q, k, v = on(OTHER, *inputs("long"))
    expected = sageattention.sageattn(q, k, v)
    assert torch.equal(torch.compile(sageattention.sageattn, fullgraph=True)(q, k, v), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(OTHER):
        # Of its own stream: that of PyTorch's own is on whichever card the process captured first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(OTHER)):
            out = sageattention.sageattn(q, k, v)
        graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("which", ["k", "v", "attn_mask"])
def test_tensors_of_two_devices(which: str) -> None:
    q, k, v = on(CURRENT, *inputs("short"))
    arguments = {"q": q, "k": k, "v": v, "attn_mask": torch.ones(300, 300, dtype=torch.bool, device=CURRENT)}
    arguments[which] = arguments[which].to(OTHER)
    with pytest.raises(ValueError, match=f"{which}: expected device cuda:0 as q, got cuda:1"):
        sageattention.sageattn(**arguments)


def test_two_threads_with_a_device_each() -> None:
    """At the same time, as programs do that spread a batch over cards."""
    made = inputs("long"), inputs("one token")
    expected = [sageattention.sageattn(*on(CURRENT, *qkv)).cpu() for qkv in made]
    wrong: list[str] = []

    def work(device: str) -> None:
        torch.cuda.set_device(device)
        there = [on(device, *qkv) for qkv in made]
        for _ in range(50):
            for qkv, right in zip(there, expected, strict=True):
                if not torch.equal(sageattention.sageattn(*qkv).cpu(), right):
                    wrong.append(device)

    threads = [threading.Thread(target=work, args=(device,)) for device in (CURRENT, OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_first_device_is_left_alone() -> None:
    """A context takes half a gigabyte: a process that works on the second card has none on the first."""
    code = """
import ctypes, torch, sageattention
torch.cuda.set_device(1)
q = torch.randn(1, 8, 3000, 128, device="cuda:1", dtype=torch.bfloat16)
sageattention.sageattn(q, q, q)
sageattention.sageattn(q[:, :, :1], q, q)
sageattention.sageattn(q, q, q, attn_mask=torch.ones(3000, 3000, device="cuda:1", dtype=torch.bool))
torch.cuda.synchronize()
flags, active = ctypes.c_uint(), ctypes.c_int()
for device in range(2):
    assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    print(device, active.value)
"""
    assert python("-P", "-c", code).split() == ["0", "0", "1", "1"]


PARALLEL = """
import os, sys
import torch, torch.distributed, torch.multiprocessing
import clients
from accuracy import relative_l1
from diffusers import ContextParallelConfig

def work(rank, port, degree):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    transformer = clients.Transformer(f"cuda:{rank}")
    exact = transformer("native").double()
    alone = transformer("sage")
    transformer.model.enable_parallelism(config=ContextParallelConfig(**{degree: 2}))
    together = transformer("sage")
    if rank == 0:
        print(relative_l1(alone, exact), relative_l1(together, exact))
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, sys.argv[1:], nprocs=2)
"""


@pytest.mark.parametrize("degree", ["ring_degree", "ulysses_degree"])
def test_a_model_over_two_devices(degree: str, tmp_path: Path) -> None:
    """diffusers' own context parallelism: keys of the other card (ring), or all keys of half the heads (ulysses)."""
    pytest.importorskip("diffusers")
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone, together = map(float, python(str(script), port, degree).split()[-2:])
    import clients  # which imports diffusers

    assert 0 < alone <= clients.TOLERANCE
    assert 0 < together <= clients.TOLERANCE
