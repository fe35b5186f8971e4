"""What the tables of kernels are made of (`table.py`): kinds of GPUs, what a kernel can do, which one is whose choice."""

from __future__ import annotations

from typing import Callable, NamedTuple


class Gpu(NamedTuple):
    """What the choice depends on."""

    capability: tuple[int, int]
    geforce: bool = True  # whose tensor cores add products of floats in float32 at half the rate of float16


# On the CPU there is a reference of every kernel that is not for one GPU alone.
CPU = Gpu((1000, 0))

# Which GPUs.
GPUS: dict[str, Callable[[Gpu], bool]] = {
    "8.0 and later": lambda gpu: gpu.capability >= (8, 0),
    "8.6, 8.9 and 12.x": lambda gpu: gpu.capability in ((8, 6), (8, 9)) or gpu.capability[0] == 12 or gpu == CPU,
    "8.9 and 12.x": lambda gpu: gpu.capability == (8, 9) or gpu.capability[0] == 12 or gpu == CPU,
    "GeForce of 8.6": lambda gpu: gpu.geforce and gpu.capability == (8, 6),
    "GeForce of 8.9 and 12.x": lambda gpu: gpu.geforce and (gpu.capability == (8, 9) or gpu.capability[0] == 12),
    "GPUs of 8.9 and 12.x": lambda gpu: gpu.capability == (8, 9) or gpu.capability[0] == 12,
    "9.0 and later": lambda gpu: gpu.capability >= (9, 0) and gpu != CPU,
    "9.0 alone": lambda gpu: gpu.capability == (9, 0),
    "12.0 and 12.1": lambda gpu: gpu.capability in {(12, 0), (12, 1)} or gpu == CPU,
}


class Kernel(NamedTuple):
    """What an attention kernel can do; its reference on the CPU can do all."""

    gpus: str  # that it runs on
    error: float  # largest relative L1 error against float64: randn, 4096 tokens, head_dim 128
    uneven: bool = True  # head_dims that are no multiple of 8
    other_masks: bool = True  # masks that are added, of another dtype than q's

    @property
    def is_hoppers(self) -> bool:
        """Whether it is Hopper's own, which shares K and V among more rows: it leaves fewer calls to the kernels for few tokens."""
        return self.gpus == "9.0 alone"


class Row(NamedTuple):
    """One line of the table."""

    function: str
    pv_accum_dtype: str | None  # None: the function has no such choice, or it changes nothing
    gpus: str  # that it is the choice for
    kernel: str
    reason: str


class FewTokens(NamedTuple):
    """The kernels that serve calls of few tokens in 16 bits, in the place of all that quantise."""

    name: str
    error: float  # as a `Kernel`'s, but of 16 tokens, head_dim 64; of the other, of 4096 keys
    queries: int  # up to which it may
    keys: int  # of head_dims up to 64: fewer of wider ones
    queries_where_shared: int  # up to which it may on Hopper
    over_many_keys: str  # the kernel that serves any number of keys
    rows: int  # queries times heads that share K and V, up to which that one may
    rows_where_shared: int  # on Hopper
    short: str  # the kernel that serves short sequences on Hopper

    def kernels(self, *, shared: bool) -> frozenset[str]:
        """Their names; `shared`: on Hopper."""
        return frozenset({self.name, self.over_many_keys, *([self.short] if shared else [])})
