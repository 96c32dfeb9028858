"""Scores of a lightning indexer: how much each cached token matters to a row (DeepSeek V3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.target import Target

#: Threads of a CTA, which scores as many keys at once: of those that fill all SMs, and of fewer.
MANY_THREADS, THREADS = 256, 128
#: Threads of an SM, by registers: CTAs beyond would wait until the first are done.
SM_THREADS = 512
#: The most heads, whose sums are registers, and values of a head.
MOST_HEADS, MOST_DIM = 64, 256


@dataclass(frozen=True)
class IndexScores(KernelSpec):
    """scores[r, p] = the sum over ``heads`` of weights[r, h] * max(0, q[r, h] . K[s, p]), for the
    positions p up to position[r] of sequence s = sequence[r]; -inf beyond.

    ``layout`` is that of a cache of keys alone, of one head (`KvLayout.values_in_keys`). A row's
    scores of ``keys`` positions, a bucket, are cut into tiles of ``threads``, which its ``ctas``
    CTAs take in turn. With ``rounds`` queries are rounded to f16 and tensor cores multiply, from
    sm_80 on. A row with a position from ``max_len`` on has -inf alone.

    With a ``pool`` above 1 key n is that of tokens n * pool ... and lies in the slot of the last of
    them (`PoolKeys`); a row sees pools up to its position. Where scores are not ``weighted``, all
    weights are 1.

    ``early``: rows are of different sequences, so that launches just before write the key of a
    row's last token (or pool) alone. The first tile's others, the block table, sequence and
    position are read before ``griddepcontrol.wait``.
    """

    layout: KvLayout
    heads: int
    rows: int
    keys: int
    ctas: int = 1
    rounds: bool = True
    pool: int = 1
    weighted: bool = True
    threads: int = THREADS
    early: bool = False

    name = "index_scores"
    limits = limited(
        heads=up_to(MOST_HEADS), rows=GRID_ROWS, ctas=POSITIVE, threads=(THREADS, MANY_THREADS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        layout = self.layout
        if layout.kv_heads != 1 or not layout.values_in_keys or layout.capacity:
            raise PtxgenError("index_scores: keys of one head, of all tokens, without values")
        if layout.head_dim > MOST_DIM:
            raise PtxgenError(f"index_scores: heads of {layout.head_dim} values: up to {MOST_DIM}")
        if not 1 <= self.keys * self.pool <= layout.max_len:
            raise PtxgenError(f"index_scores: {self.keys} keys of {layout.max_len}")
        if self.rounds and not can_multiply(layout):
            raise PtxgenError(
                "index_scores: tensor cores multiply f16 and fp8 keys of multiples of 32 values, "
                f"not {layout.head_dim} in {layout.dtype}"
            )

    def spread(self, sm_count: int) -> IndexScores:
        """The same work on as many CTAs as are resident on this many SMs."""
        fills = self.rows * ceil_div(self.keys, MANY_THREADS) >= sm_count
        threads = MANY_THREADS if fills else THREADS
        ctas = max(1, SM_THREADS // threads * sm_count // self.rows)
        return replace(self, threads=threads, ctas=ctas)

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            self.weighted and Param("weights", "f32", ("rows", "heads"), Access.IN),
            *self.layout.params(Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("scores", "f32", ("rows", "keys"), Access.OUT),
        )

    @property
    def head_dim(self) -> int:
        """Values of a key."""
        return self.layout.head_dim

    @property
    def head_room(self) -> int:
        """Heads rounded up to those of an mma."""
        return 8 * ceil_div(self.heads, 8)

    @property
    def pitch(self) -> int:
        """Bytes from a head to the next one in shared memory: lanes of a warp meet other banks."""
        return 2 * self.head_dim + 16 if self.rounds else 4 * self.head_dim

    @property
    def weights_at(self) -> int:
        """Where the heads' weights are in shared memory, after the queries."""
        return self.head_room * self.pitch

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return ceil_div(self.keys, self.threads)

    def multiplies(self, target: Target) -> bool:
        """Whether tensor cores multiply."""
        return self.rounds and target.sm >= 80

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(min(self.ctas, self.tiles), self.rows, 1),
            block=(self.threads, 1, 1),
            shared_bytes=self.weights_at + 4 * self.head_room,
            resident=SM_THREADS // self.threads if self.rounds else 0,
        )

    @property
    def tolerance(self) -> Tolerance:
        """Of rounded queries: 2^-11 a term of a product, some of a row's largest scores."""
        return Tolerance(rtol=1e-3 if self.rounds else 1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        scores = np.full((self.rows, self.keys), -np.inf, np.float32)
        for row in np.flatnonzero(inputs["position"] < self.layout.max_len).tolist():
            count = min((int(inputs["position"][row]) + 1) // self.pool, self.keys)
            sequence, table = int(inputs["sequence"][row]), inputs.get("block_table")
            tokens = np.arange(count) * self.pool + self.pool - 1
            k = self.layout.read(inputs["k_cache"], sequence, tokens, table)[0]
            products = inputs["q"][row].astype(np.float64) @ k.T.astype(np.float64)
            weights = inputs["weights"][row] if self.weighted else np.ones(self.heads)
            scores[row, :count] = weights @ np.maximum(products, 0)
        return {"scores": scores}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at random places; the last of several is a padding row."""
        inputs, layout = super().make_inputs(rng), self.layout
        positions = rng.integers(0, self.keys * self.pool, self.rows)
        positions[0] = self.keys * self.pool - 1
        if self.rows > 1:
            positions[-1] = layout.max_len + 7
        table = None
        if layout.is_paged:
            inputs["block_table"] = table = layout.random_table(rng)
        lengths = [self.keys * self.pool] * layout.sequences
        sequences = rng.integers(0, layout.sequences, self.rows)
        inputs["k_cache"] = layout.random_cache(rng, lengths, table)
        at = {"sequence": sequences, "position": positions}
        return inputs | {name: of.astype(np.uint32) for name, of in at.items()}

    @classmethod
    def examples(cls) -> dict[str, IndexScores]:
        keys = partial(KvLayout, values_in_keys=True)
        return {
            "few keys": cls(keys(2, 1, 50, 32, "f16"), 3, 2, 40),
            "f32": cls(keys(2, 1, 300, 64, "f32"), 16, 3, 290, ctas=2, rounds=False),
            "f16 as it is": cls(keys(1, 1, 200, 40, "f16"), 5, 2, 150, rounds=False),
            "odd heads": cls(keys(2, 1, 260, 96, "f16"), 13, 3, 257, ctas=2),
            "pools": cls(keys(2, 1, 300, 64, "f16"), 9, 3, 70, pool=4),
            "no weights": cls(keys(2, 1, 300, 64, "f16"), 9, 3, 70, pool=4, weighted=False),
            "pools f32": cls(keys(1, 1, 64, 32, "f32", 16, 6), 4, 2, 15, rounds=False, pool=4),
            "DeepSeek V3.2": cls(keys(2, 1, 512, 128, "f16", 64, 17), 64, 3, 390, ctas=3),
            "fp8": cls(keys(2, 1, 260, 96, "fp8"), 13, 3, 257, ctas=2, early=True),
            "fp8 pages": cls(keys(2, 1, 640, 128, "fp8", 64, 21), 64, 2, 600, ctas=1, threads=256),
            "fp8 as it is": cls(keys(2, 1, 100, 40, "fp8"), 5, 2, 99, rounds=False),
            "early": cls(keys(2, 1, 300, 64, "f16"), 9, 2, 290, ctas=2, early=True),
            "early pools": cls(keys(3, 1, 300, 32, "f16"), 9, 3, 70, pool=4, early=True),
            "early pages": cls(
                keys(2, 1, 640, 128, "f16", 64, 21), 64, 2, 600, ctas=2, threads=256, early=True
            ),
        }

    def flops(self) -> int:
        """At full length."""
        return self.rows * self.keys * self.heads * (2 * self.head_dim + 3)

    def bytes_moved(self) -> int:
        """Keys of every row at full length, queries, weights, scores."""
        own = self.heads * (self.head_dim + 1) + self.keys
        return self.rows * (self.keys * self.layout.token_nbytes + 4 * own)


def can_multiply(layout: KvLayout) -> bool:
    """Whether tensor cores multiply such keys."""
    return layout.dtype in ("f16", "fp8") and layout.head_dim % 32 == 0
