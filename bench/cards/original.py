"""The original's kernels (SageAttention 2.2 and 3) under the same model, from cubins built beside this repository.

What a call of its `sageattn` launches, and how many bytes an element each of that reads and writes, is from its sources
(core.py, quant.py, triton/quant_per_thread.py; sageattention3_blackwell's api.py). Cubins are expected as
FOLDER/sm_XX/NAME-MASK-dD.cubin, MASK being kNone or kCausal.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cards.gpus import CARDS, Card
from cards.model import LAUNCH, Kernel, Quantiser, attention_seconds, quantisation_seconds, read_kernel
from cards.shape import Shape

MEAN = Quantiser("mean of K", 2)
TRITON_QK = (MEAN, Quantiser("K less its mean", 4), Quantiser("Q to INT8", 3), Quantiser("K to INT8", 3))
CUDA_QK = (MEAN, Quantiser("Q to INT8", 3), Quantiser("K less its mean to INT8", 3))
# The second pass of the scale's kernel finds what the first has read in a cache.
FP8_V = (Quantiser("V transposed", 4), Quantiser("V to FP8", 3))


class Call(NamedTuple):
    """What its `sageattn` does on an architecture."""

    kernel: str
    quantisers: tuple[Quantiser, ...]
    multiprocessors: int = 1024  # that it makes use of


CALLS = {
    "sm_80": Call("f16_accum_f32-kPerThread", TRITON_QK),
    "sm_86": Call("triton_f16", TRITON_QK),
    "sm_89": Call("f8_accum_f16-kPerThread", (*TRITON_QK, *FP8_V)),
    "sm_120": Call("f8_accum_f16-kPerWarp", (*CUDA_QK, *FP8_V)),
    # sageattn3_blackwell, for lengths that are multiples of 128: others are copied first.
    "sm_120a": Call(
        "fp4",
        (
            MEAN,
            Quantiser("K less its mean", 4),
            Quantiser("Q less its means", 4),
            Quantiser("scores of the means", 2, of_means=2),
            Quantiser("those in float32", 0, of_means=6),
            Quantiser("Q to FP4", 2.6),
            Quantiser("K to FP4", 2.6),
            Quantiser("V to FP4", 2.6),
        ),
        multiprocessors=170,  # launch.h: an RTX 5090's
    ),
}


def original_kernel(folder: Path, architecture: str, head_dim: int, *, causal: bool) -> Kernel:
    """The kernel that its `sageattn` takes."""
    name = f"{CALLS[architecture].kernel}-{'kCausal' if causal else 'kNone'}-d{head_dim}"
    # Registers alone limit their blocks: shared memory would have room for more.
    return read_kernel(folder / architecture / f"{name}.cubin", head_dim, shared=0, threads=128)


def original_seconds(folder: Path, card: Card, shape: Shape, architecture: str = "") -> tuple[float, float]:
    """Of its `sageattn`, or of what an architecture's kernels are for: attention, and all before it. Kernels are launched one after the
    other; what the host itself needs is left out."""
    architecture = architecture or card.architecture
    kernel = original_kernel(folder, architecture, shape.head_dim, causal=shape.causal)
    call = CALLS[architecture]
    quantisation = quantisation_seconds(call.quantisers, card, shape, overlapped=False)
    card = card._replace(multiprocessors=min(card.multiprocessors, call.multiprocessors))
    return attention_seconds(kernel, card, shape, rows_descend=False), quantisation + LAUNCH


def original_cards() -> list[Card]:
    """Those for whose architecture it has a kernel of this kind."""
    return [card for card in CARDS if card.architecture in CALLS]
