"""What the attention kernels of decoding have in common: tiling, tolerance, inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels._attention import AttentionSpec
from urdir.ptxgen.spec import ceil_div

WARPS = 8
#: Query heads that share one read of K and V. Eight take more registers than two CTAs an SM have.
MAX_TILE = 4
#: Values of a head that one lane owns: 16 bytes of f16.
LANE_DIMS = 8
#: Random scores of a head whose queries are longer by this outgrow what a running maximum may lag
#: behind, so that sums are rescaled on the way.
STEEP = 4


@dataclass(frozen=True)
class DecodeAttention(AttentionSpec):
    """Attention of rows that need not have a sequence in common; see AttentionSpec.

    A lane group owns a key, a lane eight of its dims; a CTA takes some of the query heads that
    share a KV head.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim > 32 * LANE_DIMS:
            raise PtxgenError(f"attention takes head_dim up to {32 * LANE_DIMS}: {self.head_dim}")

    @property
    def lanes(self) -> int:
        """Lanes that share a key: head_dim / 8, rounded up to a power of two (the rest idle)."""
        return 1 << (self.head_dim // LANE_DIMS - 1).bit_length()

    @property
    def tile(self) -> int:
        """Query heads of one CTA, a power of two (the last tile of a KV head may have fewer)."""
        return min(MAX_TILE, self.lanes, 1 << (self.group - 1).bit_length())

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.group, self.tile)

    @property
    def keys_per_pass(self) -> int:
        """Keys a CTA takes at once, one a lane group."""
        return WARPS * (32 // self.lanes)

    @property
    def rtol(self) -> float:
        """Allowed deviation, relative to the largest output.

        The inputs are the cache's own values: what remains is f32 arithmetic and ex2.approx
        (2^-22 relative). A soft-cap adds what tanh is off by (4e-7) times the cap.
        """
        return 5e-6 + 4e-7 * self.softcap

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at random places of the sequences, of several one idle; one head is steep."""
        max_len = self.layout.max_len
        positions = [int(p) for p in rng.integers(0, max_len, self.rows)]
        positions[0] = min(max_len - 1, positions[0] + max_len // 2)
        if self.rows > 1:
            positions[-1] = max_len + int(rng.integers(0, 2)) * 1000
        sequences = [r % self.layout.sequences for r in range(self.rows)]
        inputs = self.inputs_at(rng, positions, sequences)
        inputs["q"][:, -1] *= STEEP
        return inputs

    def flops(self) -> int:
        """At full length: two products and about eight operations of softmax a key."""
        return self.rows * self.heads * self._longest * (4 * self.head_dim + 8)

    @property
    def _longest(self) -> int:
        """Most keys a row attends to."""
        return min(self.window or self.layout.max_len, self.layout.max_len)

    def _kv_bytes(self) -> int:
        """K and V that all rows read at full length, each KV head once."""
        return 2 * self.rows * self._longest * self.layout.token_nbytes
