"""Causal attention over a chunk of a prompt, on tensor cores, without a matrix of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div

#: Queries of a warp: the height of an mma.
WARP_QUERIES = 16
MAX_WARPS = 4
#: Values of a row that a thread stages at once: 16 bytes of f16.
PIECE = 8


@dataclass(frozen=True)
class PrefillAttention(AttentionSpec):
    """Causal attention of a chunk of a prompt; the K and V of its rows are in the cache already.

    See AttentionSpec for what it computes. All rows belong to sequence ``sequence[0]``, usually at
    consecutive positions. Any others work too, but a tile reads all keys between the first and the
    last that some row of it sees.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691). The queries of the heads that share a KV head lie
    in one tile, so that K and V are read once for all of them. q (scaled), the probabilities, K and
    V are rounded to f16, which is exact for K and V of an f16 cache; sums are f32. Scaled queries,
    and keys and values of other caches, become infinite from 65520 on. A NaN or an infinity in V
    also reaches the rows before it whose last key shares its tile, as 0 * infinity.

    A row has the same bits in whatever chunk it stands, whatever (finite) keys and values come
    after it, and in a paged cache as in a contiguous one.
    """

    name = "prefill_attention"
    template = ("urdir.templates", "prefill_attention.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % (16 if self.head_dim <= 128 else 64) or self.head_dim > 256:
            raise PtxgenError(
                f"prefill attention takes a head_dim that is a multiple of 16 up to 128 or of 64 up"
                f" to 256: {self.head_dim}"
            )
        if self.tiles > 65535:
            raise PtxgenError(f"prefill attention of {self.rows} rows: more than 65535 tiles")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.input_params,
            Param("out", "f32", ("rows", "heads", "head_dim"), Access.OUT),
        )

    @property
    def warps(self) -> int:
        """Warps of a CTA: a power of two, fewer than the most where there are few queries."""
        wanted = ceil_div(self.rows * self.group, WARP_QUERIES)
        return min(MAX_WARPS, 1 << (wanted - 1).bit_length())

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.rows * self.group, self.warps * WARP_QUERIES)

    @property
    def parts(self) -> int:
        """CTAs that share a tile of queries: beyond 128 dims, sums for all of them are more than
        the registers hold, so that each makes its part of ``out`` (and all of the scores)."""
        return 1 if self.head_dim <= 128 else 2

    @property
    def out_dims(self) -> int:
        """Dims of ``out``, and so of V, of one CTA."""
        return self.head_dim // self.parts

    @property
    def key_tile(self) -> int:
        """Keys of a step: what registers and 48 KB of shared memory allow."""
        return 64 if self.head_dim <= 128 else 32

    def stride(self, dims: int) -> int:
        """Bytes of a staged row: 16 more than its f16 values take, so that eight rows' 16 bytes at
        the same dims lie in different banks."""
        return 2 * dims + 16

    @property
    def lanes(self) -> int:
        """Threads that share the staging of a row."""
        return math.gcd(self.out_dims // PIECE, 8)

    def staged(self, dims: int) -> tuple[tuple[int, int], ...]:
        """The pieces that a thread stages of a tile with rows of ``dims``: (key, first dim) of
        each, relative to its first one."""
        keys = range(0, self.key_tile, 32 * self.warps // self.lanes)
        steps = range(0, dims, PIECE * self.lanes)
        return tuple((key, dim) for key in keys for dim in steps)

    @property
    def raw_registers(self) -> int:
        """Registers for values between their load and shared memory: those left by the sums."""
        return 32 if self.head_dim <= 128 else 8

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads, self.tiles, self.parts), block=(32 * self.warps, 1, 1)
        )

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each rounding to f16: q and probabilities; K and V where the cache's own
        values are no f16 (bf16 has fewer bits). Rounding errors of q and K reach the output as
        errors of scores: larger where scores are spread wider than about 2."""
        roundings = 2 if self.layout.dtype in ("f16", "bf16") else 4
        return Tolerance(rtol=roundings * 2**-11)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"out": self.attend(inputs)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A chunk at a random place of a random sequence, often with an idle tail."""
        max_len = self.layout.max_len
        live = min(int(rng.integers(ceil_div(self.rows, 2), self.rows + 1)), max_len)
        start = int(rng.integers(0, max_len - live + 1))
        positions = [start + r if r < live else max_len + 1000 * r for r in range(self.rows)]
        sequence = int(rng.integers(0, self.layout.sequences))
        return self.inputs_at(rng, positions, [sequence] * self.rows)

    @classmethod
    def examples(cls) -> Mapping[str, PrefillAttention]:
        return {
            "one row": cls(1, KvLayout(1, 1, 1, 16, "f16"), rows=1),
            "head_dim 64": cls(2, KvLayout(2, 1, 100, 64, "f16"), rows=17),
            "bf16 softcap": cls(4, KvLayout(2, 2, 80, 80, "bf16"), rows=50, softcap=5.0),
            "pages window": cls(7, KvLayout(2, 1, 160, 128, "f16", 16, 22), rows=20, window=70),
            "pages f32 head_dim 256": cls(3, KvLayout(1, 3, 96, 256, "f32", 32, 3), rows=70),
            "pages q8_0 window": cls(
                4, KvLayout(1, 1, 192, 96, "q8_0", 64, 4), rows=33, window=5, softcap=30.0
            ),
            "scale": cls(1, KvLayout(2, 1, 70, 112, "f16"), rows=64, scale=0.25),
        }

    def flops(self) -> int:
        """Of the last ``rows`` positions of a full cache: two products and about eight operations
        of softmax for every key that a query sees."""
        last = range(max(0, self.layout.max_len - self.rows), self.layout.max_len)
        seen = sum(min(p + 1, self.window or p + 1) for p in last)
        return self.heads * seen * (4 * self.head_dim + 8)

    def bytes_moved(self) -> int:
        """q and out, and once K and V of the keys that the last ``rows`` positions see."""
        keys = min(self.layout.max_len, self.window + self.rows - 1 if self.window else 1 << 32)
        ends = self.nbytes(self.param("q")) + self.nbytes(self.param("out"))
        return ends + 2 * keys * self.layout.token_nbytes
