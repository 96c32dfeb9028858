"""What the kernels of attention over prompts have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.spec import Array, Param, Tolerance, ceil_div


@dataclass(frozen=True)
class PromptAttention(AttentionSpec):
    """Causal attention of chunks of prompts; the K and V of their rows are in the cache already.

    See AttentionSpec for what it computes. The queries of the heads that share a KV head lie in one
    tile, so that K and V are read once for all of them. All rows with a query in a tile belong to
    the sequence of the tile's first row: segments of several sequences begin at multiples of
    ``segment_rows``, with idle rows between them. Rows are usually at consecutive positions. Any
    others work too, but a tile reads all keys between the first and the last that some row of it
    sees.

    q (scaled), the probabilities, K and V are rounded to f16, which is exact for K and V of an f16
    cache; sums are f32. Scaled queries, and keys and values of other caches, become infinite from
    65520 on. A NaN or an infinity in V also reaches the rows before it whose last key shares its
    tile, as 0 * infinity.

    A row has the same bits in whatever chunk it stands, whatever (finite) keys and values come
    after it, and in a paged cache as in a contiguous one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles > 65535:
            raise PtxgenError(f"prefill attention of {self.rows} rows: more than 65535 tiles")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.input_params,
            *self.sink_params,
            self.out_param,
        )

    @property
    def queries(self) -> int:
        """Queries of a tile: pairs of a row and one of the heads that share a KV head."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        """Tiles of the queries that share one KV head."""
        return ceil_div(self.rows * self.group, self.queries)

    @property
    def segment_rows(self) -> int:
        """Rows of a sequence begin at a multiple of this many: where a tile does."""
        return self.queries // math.gcd(self.queries, self.group)

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each rounding to f16: q and probabilities; K and V where the cache's own
        values are no f16 (bf16 has fewer bits). Rounding errors of q and K reach the output as
        errors of scores: larger where scores are spread wider than about 2."""
        roundings = 2 if self.layout.dtype in ("f16", "bf16") else 4
        return Tolerance(rtol=roundings * 2**-11)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"out": self.finished(inputs)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A chunk at a random place of a random sequence, often with an idle tail."""
        max_len = self.layout.max_len
        live = min(int(rng.integers(ceil_div(self.rows, 2), self.rows + 1)), max_len)
        start = int(rng.integers(0, max_len - live + 1))
        positions = [start + r if r < live else max_len + 1000 * r for r in range(self.rows)]
        sequence = int(rng.integers(0, self.layout.sequences))
        return self.inputs_at(rng, positions, [sequence] * self.rows)

    def flops(self) -> int:
        """Of the last ``rows`` positions of a full cache: two products and about eight operations
        of softmax for every key that a query sees."""
        last = range(max(0, self.layout.max_len - self.rows), self.layout.max_len)
        seen = sum(p + 1 - self.scores.first_key(p) for p in last)
        return self.heads * seen * (2 * self.head_dim + 2 * self.value_dim + 8)

    def bytes_moved(self) -> int:
        """q and out, and once K and V of the keys that the last ``rows`` positions see."""
        span = self.scores.span
        keys = min(self.layout.max_len, span + self.rows - 1 if span else 1 << 32)
        ends = self.nbytes(self.param("q")) + self.nbytes(self.param("out"))
        return ends + keys * self.layout.pair_nbytes
