"""What all attention kernels have in common: fields, parameters, output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.heads_out import HeadsOut
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.random_inputs import cached_inputs
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param

#: The most values of a head, of keys and of values.
MAX_HEAD_DIM = 576


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Attention of ``rows`` query tokens over the KV cache: row r is token ``position[r]`` of
    sequence ``sequence[r]`` and attends to keys up to its own, as ``scores`` says.

    out[r, h] = softmax(scores(q[r, h] . K[s, h / group])) V[s, h / group]. Keys that no row attends
    to are never read. A position from ``max_len`` on marks a padding row, whose results are zeros.
    In a ring, rows look back on at most ``capacity`` keys.
    """

    heads: int
    layout: KvLayout
    rows: int = 1
    scores: Scores = PLAIN

    def __post_init__(self) -> None:
        if self.heads < 1 or self.heads % self.layout.kv_heads:
            raise PtxgenError(
                f"{self.heads} query heads are not a multiple of {self.layout.kv_heads} KV heads"
            )
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"attention of {self.rows} rows: 1 to 65535")
        if max(self.head_dim, self.value_dim) > MAX_HEAD_DIM:
            raise PtxgenError(
                f"attention takes heads of up to {MAX_HEAD_DIM} values: "
                f"head_dim {self.head_dim}, value_dim {self.value_dim}"
            )
        if not self.scores.causal:
            raise PtxgenError("keys after a row's own are those of texts")
        if self.scores.texts and (self.layout.sequences > 1 or self.rows > self.layout.max_len):
            raise PtxgenError(
                f"texts side by side are one sequence with room for all rows: {self.rows} rows, "
                f"{self.layout.sequences} sequences of {self.layout.max_len}"
            )
        if self.layout.capacity and not 0 < self.scores.span <= self.layout.capacity:
            raise PtxgenError(
                f"rows look back on {self.scores.span or 'all'} keys, in a ring of "
                f"{self.layout.capacity}"
            )

    @property
    def head_dim(self) -> int:
        """Width of query and key heads."""
        return self.layout.head_dim

    @property
    def value_dim(self) -> int:
        """Values of a head of V, and of the output."""
        return self.layout.values_per_head

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.layout.kv_heads

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, and where the rows are."""
        return (
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            *self.layout.params(Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def params(self) -> tuple[Param, ...]:
        return (*self.input_params, *self.scores.params, self.out.param)

    @property
    def out(self) -> HeadsOut:
        """The output."""
        return HeadsOut(self.rows, self.heads, self.value_dim)

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        """Random inputs for given rows: see `cached_inputs`."""
        return cached_inputs(self, rng, positions, sequences, block_table)
