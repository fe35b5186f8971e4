"""A call of attention by its sizes, which benchmarks time and the model predicts."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """What is asked for."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool = False

    @property
    def operations(self) -> float:
        return 4 * self.batch * self.heads * self.tokens**2 * self.head_dim / (2 if self.causal else 1)

    @property
    def elements(self) -> int:
        """Of Q, K, V or the output."""
        return self.batch * self.heads * self.tokens * self.head_dim
