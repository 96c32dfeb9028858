"""Common parts of the prefill attention kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.random_inputs import rows_of_prompt
from urdir.ptxgen.kernels.attention.reference import attend
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.spec import Array, Tolerance, ceil_div


@dataclass(frozen=True)
class PromptAttention(AttentionSpec):
    """Causal attention of prompt chunks; the K and V of their rows are already in the cache.

    See AttentionSpec for the computation. The queries of the heads that share a KV head lie in one
    tile, so that K and V are read once for all of them. All rows with a query in a tile belong to
    the sequence of the tile's first row: segments of several sequences start at multiples of
    ``segment_rows``, with padding rows between them. Rows are usually at consecutive positions.
    Others work too, but a tile reads all keys from the first to the last one visible to any of its
    rows. So do rows of texts (`Scores.texts`), which need no padding between them.

    q (scaled), the probabilities, K and V are rounded to f16, which is exact for K and V of an f16
    cache; sums are f32. Scaled queries, and keys and values of other caches, become infinite from
    65520 on; an fp8 head whose scale is below 2^-24 becomes 0 from sm_89 on. A NaN or infinity in V
    also reaches earlier rows whose last key is in the same tile, as 0 * infinity.

    A row has the same bits in any chunk, with any (finite) keys and values after it, and in a paged
    cache as in a contiguous one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles > 65535:
            raise PtxgenError(f"prefill attention of {self.rows} rows: more than 65535 tiles")

    @property
    def queries(self) -> int:
        """Queries per tile: pairs of a row and one of the heads that share a KV head."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        """Tiles of the queries that share one KV head."""
        return ceil_div(self.rows * self.group, self.queries)

    @property
    def segment_rows(self) -> int:
        """Segments start at multiples of this many rows, where tiles start."""
        return self.queries // math.gcd(self.queries, self.group)

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each rounding to f16: q and probabilities; K and V if the cache's values are
        not f16 (bf16 and fp8 have fewer bits). Rounding errors of q and K affect the output as
        errors of scores: more if scores are spread wider than about 2."""
        formats = (self.layout.format, self.layout.values.format)
        roundings = 2 + sum(of.operand not in ("f16", "bf16") for of in formats)
        return Tolerance(rtol=roundings * 2**-11)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"out": self.out.of(attend(self, inputs), inputs)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return rows_of_prompt(self, rng)

    def flops(self) -> int:
        """For the last ``rows`` positions of a full cache: two products and about eight operations
        of softmax per visible key."""
        last = range(max(0, self.layout.max_len - self.rows), self.layout.max_len)
        seen = sum(p + 1 - self.scores.first_key(p) for p in last)
        return self.heads * seen * (2 * self.head_dim + 2 * self.value_dim + 8)

    def bytes_moved(self) -> int:
        """q and out, and once the K and V of keys visible to the last ``rows`` positions."""
        span = self.scores.span
        keys = min(self.layout.max_len, span + self.rows - 1 if span else 1 << 32)
        ends = self.nbytes(self.param("q")) + self.nbytes(self.param("out"))
        return ends + keys * self.layout.pair_nbytes
