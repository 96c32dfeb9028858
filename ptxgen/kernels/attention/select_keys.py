"""Selection of the keys that a row attends to: those with the highest index scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited, up_to
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div
from urdir.ptxgen.target import since

#: Threads of a CTA for buckets up to `FEW_KEYS`, and for longer ones.
THREADS, MANY_THREADS, FEW_KEYS = 512, 1024, 4096
#: Tokens that a row selects at most.
MOST_KEYS = (1 << 15) - 1
#: Scores of a CTA that stay in registers.
MOST_HELD = 8192
#: What marks a padding row.
NO_POSITION = 0xFFFFFFFF


@dataclass(frozen=True)
class SelectKeys(KernelSpec):
    """The ``most`` highest of a row's scores, of equal ones those of lower positions: their slots
    in a cache of ``layout`` (of its first KV head), in order of position.

    Row r has scores of positions up to position[r], in a bucket of ``keys``. ``slots`` are
    followed by zeros where the row has fewer tokens. ``last`` is how many there are, less one,
    and ``row`` is ``first`` + r: position and sequence of the row in `KvLayout.chosen`. A padding
    row, with a position from ``max_len`` on, remains one. NaN counts as a high score.

    With a ``pool`` above 1 scores are those of this many tokens each. ``most`` tokens of whole
    pools are selected, and the last tokens of the row, which are no whole pool.

    On sm_90 and newer a ``cluster`` of CTAs (2, 4 or 8) may share a row. The result is the same.
    """

    layout: KvLayout
    rows: int
    keys: int
    most: int
    cluster: int = 1
    pool: int = 1

    #: Bins of even width, which narrow most rows' scores to few; this many are compared directly.
    even_bins: ClassVar = 1024
    listed: ClassVar = 256
    #: Bits of a digit, by which a radix selection narrows the scores of other rows.
    digits: ClassVar = (11, 11, 10)
    bins: ClassVar = 1 << max(digits)
    #: Scores of a thread side by side.
    each: ClassVar = 8
    name = "select_keys"
    limits = limited(rows=GRID_ROWS, pool=POSITIVE, most=up_to(MOST_KEYS), cluster=(1, 2, 4, 8))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout.capacity:
            raise PtxgenError("select_keys: a cache of all tokens")
        if not 1 <= self.keys * self.pool <= self.layout.max_len:
            raise PtxgenError(f"select_keys: {self.keys} keys of {self.layout.max_len}")
        if self.most % self.pool:
            raise PtxgenError(f"select_keys: {self.most} tokens in pools of {self.pool}")
        if self.cluster > 1 and self.keys <= FEW_KEYS:
            raise PtxgenError(
                f"select_keys: clusters of {self.cluster} for {self.keys} keys: 2, 4 or 8 for more "
                f"than {FEW_KEYS}"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("first", "u32"),
            Param("scores", "f32", ("rows", "keys"), Access.IN),
            *self.layout.table_params,
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("slots", "u32", ("rows", "width"), Access.OUT),
            Param("last", "u32", ("rows",), Access.OUT),
            Param("row", "u32", ("rows",), Access.OUT),
        )

    @property
    def pools(self) -> int:
        """Pools that a row selects at most."""
        return self.most // self.pool

    @property
    def width(self) -> int:
        """Slots of a row at most."""
        return self.most + self.pool - 1

    @property
    def targets(self) -> tuple[str, ...]:
        return since(CLUSTERS_SINCE) if self.cluster > 1 else super().targets

    @property
    def groups(self) -> int:
        """Groups of ``each`` scores that a thread has."""
        part = 32 * ceil_div(self.keys, 32 * self.cluster)
        return ceil_div(part, self.each * self.launch_shape.threads)

    @property
    def held(self) -> bool:
        """Whether scores are loaded once, into registers."""
        return self.groups * self.each * self.launch_shape.threads <= MOST_HELD

    @property
    def launch_shape(self) -> LaunchShape:
        threads = THREADS if self.keys <= FEW_KEYS else MANY_THREADS
        return LaunchShape(
            grid=(self.cluster, self.rows, 1),
            block=(threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            resident=MANY_THREADS // threads,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        slots = np.zeros((self.rows, self.width), np.uint32)
        last = np.full(self.rows, NO_POSITION, np.uint32)
        for row in np.flatnonzero(inputs["position"] < self.layout.max_len).tolist():
            count = int(inputs["position"][row]) + 1
            scores = inputs["scores"][row, : count // self.pool]
            ranked = np.where(np.isnan(scores), np.inf, scores)
            best = np.sort(np.argsort(-ranked, kind="stable")[: self.pools])
            pools = best[:, None] * self.pool + np.arange(self.pool)
            chosen = np.concatenate([pools.ravel(), np.arange(count - count % self.pool, count)])
            sequence, table = int(inputs["sequence"][row]), inputs.get("block_table")
            slots[row, : chosen.size] = self.layout.slots_of(sequence, chosen, table)[0]
            last[row] = chosen.size - 1
        row = np.arange(self.rows, dtype=np.uint32) + inputs["first"]
        return {"slots": slots, "last": last, "row": row.astype(np.uint32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Scores on grids, coarse ones of every second row, so that the last chosen one has
        equals, many or few; of several rows a wide one, a short one and a padding row."""
        grids = np.where(np.arange(self.rows) % 2, 256, 4)[:, None]
        scores = np.round(grids * rng.standard_normal((self.rows, self.keys))) / grids
        scores[0] = np.maximum(scores[0], 0)
        if self.rows > 2:
            scores[-1] *= rng.choice([1e-9, 1.0, 1e9], self.keys)
        positions = rng.integers(0, self.keys * self.pool, self.rows)
        positions[0] = self.keys * self.pool - 1
        if self.rows > 2:
            positions[1:3] = min(self.keys, self.pools) * self.pool // 2, self.layout.max_len
        sequences = rng.integers(0, self.layout.sequences, self.rows)
        table = {"block_table": self.layout.random_table(rng)} if self.layout.is_paged else {}
        at = {"sequence": sequences, "position": positions}
        first = np.uint32(rng.integers(0, 100))
        return {"first": first, "scores": scores.astype(np.float32), **table} | {
            name: of.astype(np.uint32) for name, of in at.items()
        }

    @classmethod
    def examples(cls) -> dict[str, SelectKeys]:
        latent = partial(KvLayout, value_dim=512, values_in_keys=True)
        return {
            "few": cls(KvLayout(2, 1, 70, 64, "f16"), 4, 65, 5),
            "one of one": cls(KvLayout(1, 1, 1, 64, "f16"), 1, 1, 1),
            "some": cls(KvLayout(2, 1, 300, 64, "f32"), 4, 300, 16),
            "odd": cls(latent(2, 1, 1600, 576, "f16"), 5, 1301, 257),
            "pages": cls(latent(3, 1, 512, 576, "bf16", 16, 70), 3, 512, 100),
            "long": cls(latent(1, 1, 20000, 576, "f16"), 2, 12345, 2048),
            "longer": cls(latent(2, 1, 18432, 576, "f16", 16, 2400), 2, 17001, 2048),
            "pools": cls(KvLayout(2, 1, 600, 64, "f16"), 5, 141, 64, pool=4),
            "KV heads": cls(KvLayout(3, 2, 64, 64, "f16", 16, 14), 3, 21, 12, pool=3),
            "few pools": cls(latent(2, 1, 32, 576, "f16", 16, 5), 4, 8, 9, pool=3),
            "cluster": cls(latent(2, 1, 8192, 576, "f16", 16, 1100), 4, 8000, 2048, cluster=2),
            "odd cluster": cls(latent(1, 1, 9000, 576, "f16"), 2, 8191, 1000, cluster=4),
        }

    def bytes_moved(self) -> int:
        """Scores, read once, and slots."""
        return 4 * self.rows * (self.keys + self.width)


def select_keys(
    layout: KvLayout, rows: int, keys: int, most: int, pool: int, sm_count: int, target: str
) -> SelectKeys:
    """The kernel on a device of native ``target``: with clusters, where they are resident, of as
    few CTAs as hold the scores."""
    spec = SelectKeys(layout, rows, keys, most, pool=pool)
    for cluster in (2, 4, 8):
        if spec.held or cluster * rows > sm_count:
            break
        near = replace(spec, cluster=cluster)
        if not near.target_on(target):
            break
        spec = near
    return spec
