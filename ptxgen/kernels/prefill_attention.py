"""Causal attention over a chunk of a prompt, on tensor cores, without a matrix of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Queries of a warp: the height of an mma.
WARP_QUERIES = 16
MAX_WARPS = 4
#: Values of a row that a thread stages at once: 16 bytes of f16.
PIECE = 8


@dataclass(frozen=True)
class PrefillAttention(KernelSpec):
    """out[r, h] = softmax(scale * q[r, h] . K[h / group]) V[h / group], causal, of a prompt chunk.

    All rows belong to sequence ``sequence[0]``, and their K and V are in the cache already. The row
    at position p = ``position[r]`` attends to keys ``max(0, p - window + 1)`` ... p (``window`` 0:
    from key 0 on); p >= max_len marks an idle row, which gives zeros. Rows of a chunk usually
    have consecutive positions; any are right, but a tile reads all keys between the first and the
    last that some row of it sees. ``softcap`` c > 0 replaces a score s by c tanh(s / c); ``scale``
    None means 1 / sqrt(head_dim).

    FlashAttention-2 (Dao 2023, arXiv 2307.08691). The queries of the heads that share a KV head lie
    in one tile, so that K and V are read once for all of them. q, K, V and the probabilities are
    rounded to f16 (K and V of an f16 cache are exact), sums are f32: scores beyond 65504 in q, K or
    V of another cache become infinite. A NaN or an infinity in V reaches the rows before it that
    share its tile of keys, as 0 * infinity. A row has the same bits in whatever chunk it stands and
    whatever the rows around it hold, in a paged cache as in a contiguous one.
    """

    heads: int
    layout: KvLayout
    rows: int
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0

    name = "prefill_attention"
    template = ("urdir.templates", "prefill_attention.ptx.j2")

    def __post_init__(self) -> None:
        if self.heads < 1 or self.heads % self.layout.kv_heads:
            raise PtxgenError(
                f"{self.heads} query heads are not a multiple of {self.layout.kv_heads} KV heads"
            )
        if self.head_dim % (16 if self.head_dim <= 128 else 64) or self.head_dim > 256:
            raise PtxgenError(
                f"prefill attention takes a head_dim that is a multiple of 16 up to 128 or of 64 up"
                f" to 256: {self.head_dim}"
            )
        if self.rows < 1 or self.tiles > 65535:
            raise PtxgenError(f"prefill attention of {self.rows} rows: 1 or more, 65535 tiles")
        if self.window < 0 or not self.softcap >= 0:
            raise PtxgenError(
                f"window {self.window} and softcap {self.softcap} must not be negative (0: none)"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            *self.layout.params(Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("out", "f32", ("rows", "heads", "head_dim"), Access.OUT),
        )

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.layout.head_dim

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.layout.kv_heads

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
        """Bytes of a staged row: 16 more than its halves take, so that eight rows' 16 bytes at the
        same dims lie in different banks."""
        return 2 * dims + 16

    @property
    def lanes(self) -> int:
        """Threads that share the staging of a row."""
        return math.gcd(self.out_dims // PIECE, 8)

    def staged(self, dims: int) -> tuple[tuple[int, int], ...]:
        """What a thread stages of a tile with rows of ``dims``: (key, first dim) of every piece,
        from its first one on."""
        keys = range(0, self.key_tile, 32 * self.warps // self.lanes)
        steps = range(0, dims, PIECE * self.lanes)
        return tuple((key, dim) for key in keys for dim in steps)

    @property
    def raw_registers(self) -> int:
        """Registers that hold what a thread has loaded to stage it: what the sums leave."""
        return 32 if self.head_dim <= 128 else 8

    @property
    def query_scale(self) -> float:
        """Factor of q before it is rounded: products with K are exponents of 2, of the softmax or
        (softcap) of the tanh."""
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return scale * math.log2(math.e) * (2 / self.softcap if self.softcap else 1)

    @property
    def cap_exponent(self) -> float:
        """``softcap`` as an exponent of 2."""
        return self.softcap * math.log2(math.e)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads, self.tiles, self.parts), block=(32 * self.warps, 1, 1)
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-3)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        out = np.zeros((self.rows, self.heads, self.head_dim), np.float32)
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        table = inputs.get("block_table")
        for row, position in enumerate(inputs["position"].tolist()):
            if position >= self.layout.max_len:
                continue
            seen = np.arange(max(0, position - self.window + 1) if self.window else 0, position + 1)
            keys, values = (
                self.layout.read(inputs[name], int(inputs["sequence"][0]), seen, table)
                for name in ("k_cache", "v_cache")
            )
            q = inputs["q"][row].astype(np.float64).reshape(-1, self.group, self.head_dim)
            scores = np.einsum("hgd,hkd->hgk", q, keys.astype(np.float64)) * scale
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            result = np.einsum("hgk,hkd->hgd", weights, values.astype(np.float64))
            out[row] = result.reshape(self.heads, self.head_dim)
        return {"out": out}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A chunk at a random place of a random sequence, often with an idle tail."""
        max_len = self.layout.max_len
        live = min(int(rng.integers(ceil_div(self.rows, 2), self.rows + 1)), max_len)
        start = int(rng.integers(0, max_len - live + 1))
        positions = [start + r if r < live else max_len + 1000 * r for r in range(self.rows)]
        sequence = int(rng.integers(0, self.layout.sequences))
        return self.inputs_at(rng, positions, [sequence] * self.rows)

    def inputs_at(
        self, rng: np.random.Generator, positions: list[int], sequences: list[int]
    ) -> dict[str, Any]:
        """Inputs for given rows: the caches hold what they attend to, and NaN beyond."""
        layout = self.layout
        q = rng.standard_normal((self.rows, self.heads, self.head_dim)).astype(np.float32)
        position = np.array(positions, np.uint32)
        q[position >= layout.max_len] = np.nan
        table = layout.random_table(rng) if layout.is_paged else None
        lengths = [0] * layout.sequences
        lengths[sequences[0]] = 1 + max((p for p in positions if p < layout.max_len), default=-1)
        return {
            "q": q,
            "k_cache": layout.random_cache(rng, lengths, table),
            "v_cache": layout.random_cache(rng, lengths, table),
            **({} if table is None else {"block_table": table}),
            "sequence": np.array(sequences, np.uint32),
            "position": position,
        }

    @classmethod
    def examples(cls) -> Sequence[PrefillAttention]:
        return (
            cls(1, KvLayout(1, 1, 1, 16, "f16"), rows=1),
            cls(2, KvLayout(2, 1, 100, 64, "f16"), rows=17),
            cls(4, KvLayout(2, 2, 80, 80, "bf16"), rows=50, softcap=5.0),
            cls(7, KvLayout(2, 1, 160, 128, "f16", 16, 22), rows=20, window=70),
            cls(3, KvLayout(1, 3, 96, 256, "f32", 32, 3), rows=70),
            cls(4, KvLayout(1, 1, 192, 96, "q8_0", 64, 4), rows=33, window=5, softcap=30.0),
            cls(1, KvLayout(2, 1, 70, 112, "f16"), rows=64, scale=0.25),
        )

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
