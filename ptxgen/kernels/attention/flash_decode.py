"""Flash decoding: attention with the keys of each row split among CTAs (split KV).

Each CTA leaves the sums of a chunk of keys; the last one of a row's heads to arrive merges them
(after Dao et al. 2023, "Flash-Decoding for long-context inference"). How a row is split depends on
how many keys it has, which the device reads: the launch is the same at every length. A row's result
depends on its own keys alone: not on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.decode import WARPS, DecodeAttention
from urdir.ptxgen.kernels.attention.decode_cta import MAX_STATIC_SHARED
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.target import since

#: Chunks are multiples of this.
CHUNK_UNIT = 16
#: Threads that merge the same outputs, at most: there is shared memory for these.
MAX_MERGERS = 4


@dataclass(frozen=True)
class FlashDecode(DecodeAttention):
    """Attention of each row over chunks of its keys, merged by the last CTA to arrive.

    See DecodeAttention for what it computes. For each KV head (tile of its query heads) there are
    ``ctas`` CTAs, to which the chunks of all rows are dealt. A row of n keys has chunks of n /
    (ctas / rows) keys, rounded up, so that rows of equal lengths give each CTA one chunk; but at
    least ``least``. Where it were more than twice ``most`` (0: any number), each of these is cut
    into equal ones of at most about ``most`` keys: a long row among short ones has many, and a CTA
    takes several.

    With ``cluster`` (2, 4 or 8; sm_90 and newer) each of the ``ctas`` is a cluster of so many. Its
    CTAs share a chunk, which has as many times the keys, and send each other their sums: that is
    faster than to merge through global memory.

    From sm_80 on, keys and values on their way to tensor cores are in ``ring`` bytes of shared
    memory; 0: in what a kernel may declare.

    Between launches ``arrived`` is 0. ``partial`` (sums of weights times V) and ``softmax`` (the
    maximum of 2's exponent that they are relative to, and the sum of weights) are a launch's own.
    """

    ctas: int = 16
    least: int = 64
    most: int = 0
    cluster: int = 1
    ring: int = 0

    splits_keys = True
    name = "flash_decode"
    template = ("urdir.templates", "flash_decode.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least < 1 or self.least % CHUNK_UNIT or self.most % CHUNK_UNIT:
            raise PtxgenError(
                f"chunks of {self.least} to {self.most} keys: multiples of {CHUNK_UNIT}"
            )
        if self.most and self.most < self.least:
            raise PtxgenError(f"chunks of at least {self.least} and at most {self.most} keys")
        if not 1 <= self.ctas <= 65535:
            raise PtxgenError(f"{self.ctas} CTAs for each KV head: 1 to 65535")
        if self.cluster not in (1, 2, 4, 8):
            raise PtxgenError(f"clusters of {self.cluster} CTAs: 1, 2, 4 or 8")
        if 0 < self.ring < MAX_STATIC_SHARED:
            raise PtxgenError(f"a ring of {self.ring} bytes: 0, or at least {MAX_STATIC_SHARED}")

    @property
    def targets(self) -> tuple[str, ...]:
        return since(CLUSTERS_SINCE) if self.cluster > 1 else super().targets

    # ---- how rows are split ----

    @property
    def share(self) -> int:
        """Chunks of a row that is as long as the others."""
        return max(1, self.ctas // self.rows)

    @property
    def fewest(self) -> int:
        """Keys of a chunk, at least."""
        return self.least * self.cluster

    @property
    def about(self) -> int:
        """Keys that chunks of a long row have, about; 0: any number."""
        return self.most * self.cluster

    def _rounds_of(self, keys: int) -> int:
        """Chunks that each share of a row of ``keys`` keys has, one after the other."""
        each = ceil_div(keys, self.share)
        return ceil_div(each, self.about) if self.most and each > 2 * self.about else 1

    def chunk_of(self, keys: int) -> int:
        """Keys of each chunk (the last may have fewer) of a row of ``keys`` keys."""
        each = ceil_div(ceil_div(keys, self.share), self._rounds_of(keys))
        return max(self.fewest, CHUNK_UNIT * ceil_div(each, CHUNK_UNIT))

    def chunks_of(self, keys: int) -> int:
        """How many chunks a row of ``keys`` keys has."""
        return ceil_div(keys, self.chunk_of(keys))

    @property
    def chunks(self) -> int:
        """The most chunks of a row."""
        shares = min(self.share, ceil_div(self._longest, self.fewest))
        return shares * self._rounds_of(self._longest)

    @property
    def takers(self) -> int:
        """CTAs (clusters) of a KV head (tile of query heads) in the grid."""
        return min(self.ctas, self.rows * self.chunks)

    @property
    def deals(self) -> bool:
        """Whether a CTA may get several chunks."""
        return self.rows * self.chunks > self.takers

    @property
    def parked_nbytes(self) -> int:
        """Dynamic shared memory of each warp, after the queries: which chunk it works on, while it
        goes through the keys."""
        return 32

    @property
    def parked_at(self) -> int:
        """Where that begins."""
        return self.queries_at + self.queries_nbytes

    @property
    def part(self) -> int:
        """Outputs that each CTA of a cluster merges, in groups of four."""
        return 4 * ceil_div(self.tile * self.value_dim, 4 * self.cluster)

    @property
    def near_at(self) -> int:
        """Dynamic shared memory: where a cluster's CTAs send what this one merges."""
        return self.parked_at + WARPS * self.parked_nbytes

    @property
    def near_nbytes(self) -> int:
        """Its size: a barrier, and each CTA's part, with maxima and sums of all heads."""
        return 16 + self.cluster * (8 * self.tile + 4 * self.part) if self.cluster > 1 else 0

    @property
    def ring_at(self) -> int:
        """Where the ring begins, if it is there."""
        return 256 * ceil_div(self.near_at + self.near_nbytes, 256)

    @property
    def ring_nbytes(self) -> int:
        return self.ring if self.suits_tensor_cores else 0

    @property
    def merged_vectors(self) -> int:
        """Groups of four output values of a CTA: each is merged by a thread, or by several."""
        return self.tile * self.value_dim // 4

    @property
    def mergers(self) -> int:
        """Threads that merge the chunks of four output values."""
        return max(1, min(MAX_MERGERS, 32 * WARPS // self.merged_vectors, self.chunks))

    # ---- the launch ----

    @property
    def params(self) -> tuple[Param, ...]:
        if self.chunks == 1:
            split: tuple[Param, ...] = ()
        else:
            # Chunks that rows do not have leave it as it was: INOUT, not OUT.
            split = (
                Param("partial", "f32", ("rows", "heads", "chunks", "value_dim"), Access.INOUT),
                Param("softmax", "f32", ("rows", "heads", "chunks", 2), Access.INOUT),
                Param("arrived", "u32", ("rows", "heads"), Access.INOUT),
            )
        return (
            *self.input_params,
            *self.sink_params,
            *split,
            Param("out", "f32", ("rows", "heads", "value_dim"), Access.OUT),
        )

    @property
    def head_tiles(self) -> int:
        """Tiles of query heads of a row."""
        return self.layout.kv_heads * self.tiles

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.head_tiles, self.takers * self.cluster, 1),
            block=(32 * WARPS, 1, 1),
            cluster=(1, self.cluster, 1),
            shared_bytes=self.ring_at + self.ring_nbytes,
            prefers_shared=True,
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=self.rtol)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs, caches = self.appended(inputs)
        out = {"out": self.attend(inputs)} | caches
        if self.chunks == 1:
            return out
        partial, softmax = inputs["partial"].copy(), inputs["softmax"].copy()
        for row, position in enumerate(inputs["position"].tolist()):
            for index, keys in enumerate(self.split(position)):
                top, total, values = self.softmax(inputs, row, keys[0], keys[-1])
                softmax[row, :, index] = np.stack([top, total], axis=1)
                partial[row, :, index] = values
        arrived = np.zeros_like(inputs["arrived"])
        return out | {"partial": partial, "softmax": softmax, "arrived": arrived}

    def split(self, position: int) -> list[range]:
        """The chunks of a row at ``position``; none where it is idle, or not split."""
        if position >= self.layout.max_len:
            return []
        first = self.scores.first_key(position)
        chunk, end = self.chunk_of(position + 1 - first), position + 1
        if chunk >= end - first:
            return []
        return [range(start, min(end, start + chunk)) for start in range(first, end, chunk)]

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        inputs = super().inputs_at(rng, positions, sequences, block_table)
        for name in ("partial", "softmax", "arrived") if self.chunks > 1 else ():
            param = self.param(name)
            inputs[name] = np.zeros(self.shape_of(param), param.numpy_dtype)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, FlashDecode]:
        return {
            "one chunk": cls(1, KvLayout(1, 1, 16, 64, "f16")),
            "head_dim 80": cls(4, KvLayout(1, 2, 70, 80, "f16"), ctas=3, least=16),
            "long chunks": cls(4, KvLayout(1, 1, 200, 128, "f16"), ctas=2),
            "many chunks": cls(4, KvLayout(1, 1, 300, 128, "f16"), ctas=40, least=16),
            "bf16": cls(7, KvLayout(1, 1, 50, 128, "bf16"), ctas=4, least=16, most=16),
            "f32 rows": cls(12, KvLayout(2, 1, 60, 96, "f32"), rows=3, ctas=6, least=16),
            "window": cls(
                3,
                KvLayout(2, 1, 70, 112, "f16"),
                rows=3,
                scores=Scores(window=20),
                ctas=4,
                least=16,
                most=16,
            ),
            "q8_0 softcap": cls(
                8,
                KvLayout(1, 1, 64, 256, "q8_0"),
                scores=Scores(softcap=50.0),
                ctas=4,
                least=16,
                most=32,
            ),
            "pages": cls(
                4,
                KvLayout(2, 2, 96, 64, "f16", page_len=16, pages=10),
                rows=3,
                ctas=4,
                least=16,
                most=32,
            ),
            "pages q8_0": cls(
                2,
                KvLayout(3, 1, 128, 128, "q8_0", page_len=64, pages=7),
                rows=4,
                ctas=4,
                least=16,
                most=16,
            ),
            "pages f32 window": cls(
                2,
                KvLayout(1, 1, 64, 256, "f32", page_len=16, pages=5),
                scores=Scores(window=33),
                ctas=4,
                least=16,
                most=32,
            ),
            "head_dim 512": cls(2, KvLayout(1, 1, 40, 512, "f16"), ctas=4, least=16, most=16),
            "latent": cls(
                3,
                KvLayout(1, 1, 40, 576, "f16", value_dim=512, values_in_keys=True),
                ctas=4,
                least=16,
                most=16,
            ),
            "value_dim": cls(
                3, KvLayout(1, 1, 40, 192, "f16", value_dim=128), ctas=4, least=16, most=32
            ),
            "chunk sinks": cls(
                2,
                KvLayout(3, 1, 90, 64, "f16"),
                3,
                Scores(chunk=48, sinks=True),
                ctas=4,
                least=16,
                most=16,
            ),
            "ALiBi": cls(
                3, KvLayout(2, 1, 70, 64, "f16"), 3, Scores(max_bias=8.0), ctas=4, least=16, most=32
            ),
            "40 rows": cls(2, KvLayout(40, 1, 50, 64, "f16"), rows=40, ctas=5, least=16, most=16),
            "a long row": cls(2, KvLayout(3, 2, 150, 64, "f16"), rows=3, ctas=8, least=32, most=48),
            "cluster": cls(4, KvLayout(2, 1, 70, 64, "f16"), rows=2, ctas=2, cluster=4, least=16),
            "clusters": cls(
                4, KvLayout(3, 1, 150, 64, "f16"), 3, ctas=2, cluster=2, least=16, most=16
            ),
            "cluster sinks f32": cls(
                6, KvLayout(1, 2, 90, 80, "f32"), 1, Scores(sinks=True), ctas=1, cluster=2, least=16
            ),
            "ring": cls(
                2,
                KvLayout(3, 1, 160, 64, "f16", 16, 13, capacity=64),
                3,
                Scores(window=50),
                ctas=4,
                least=16,
                most=16,
            ),
            **cls._examples_with_a_token(),
        }

    @classmethod
    def _examples_with_a_token(cls) -> Mapping[str, FlashDecode]:
        """Every type of cache; chunks shorter and longer than a step of keys."""
        whole = OwnToken(Rotation(128, "half"))
        half = OwnToken(Rotation(64, "interleaved", magnitude=1.2))
        return {
            "latent rows": cls(
                3,
                KvLayout(2, 1, 48, 576, "q8_0", 16, 7, value_dim=512, values_in_keys=True),
                rows=3,
                token=half,
                ctas=4,
                least=16,
                most=16,
            ),
            "values in keys": cls(
                8,
                KvLayout(2, 1, 40, 192, "f16", value_dim=128, values_in_keys=True),
                rows=3,
                token=half,
                ctas=4,
                least=16,
                most=16,
            ),
            "rope": cls(4, KvLayout(1, 1, 200, 128, "f16"), token=whole, ctas=4, least=16, most=64),
            "rope cluster": cls(
                4, KvLayout(1, 1, 300, 128, "f16"), 1, token=whole, ctas=1, cluster=8, ring=80 << 10
            ),
            "rope cluster pages q8_0": cls(
                8, KvLayout(2, 1, 96, 128, "q8_0", 16, 14), 2, token=whole, cluster=4, least=16
            ),
            "rope f32 rows": cls(
                12, KvLayout(2, 1, 60, 96, "f32"), rows=3, token=half, ctas=4, least=16, most=16
            ),
            "rope bf16 window": cls(
                3,
                KvLayout(2, 1, 70, 112, "bf16"),
                rows=3,
                scores=Scores(window=20),
                token=half,
                ctas=4,
                least=16,
                most=16,
            ),
            "rope q8_0 head_dim 256": cls(
                8,
                KvLayout(1, 1, 64, 256, "q8_0"),
                token=OwnToken(Rotation(90, "half")),
                ctas=4,
                least=16,
                most=32,
            ),
            "rope pages": cls(
                4,
                KvLayout(2, 2, 96, 64, "f16", page_len=16, pages=14),
                3,
                token=half,
                ctas=4,
                least=16,
                most=32,
            ),
            "norms head_dim 512 shared": cls(
                2,
                KvLayout(1, 1, 40, 512, "f16", value_dim=64),
                token=OwnToken(Rotation(128, "half"), QK_NORM, appends=False),
                ctas=4,
                least=16,
                most=16,
            ),
            "norm of rows": cls(
                6,
                KvLayout(2, 2, 60, 96, "bf16"),
                rows=2,
                token=OwnToken(Rotation(96, "half"), QK_NORM, qk_norm_over="row"),
                ctas=4,
                least=16,
                most=16,
            ),
            "norms ring": cls(
                3,
                KvLayout(2, 1, 100, 96, "q8_0", capacity=64),
                rows=2,
                scores=Scores(chunk=64, window=40),
                token=OwnToken(Rotation(96, "half"), QK_NORM, V_NORM, Temperature(0.2, 16)),
                ctas=4,
                least=16,
                most=16,
            ),
            "rope pages q8_0": cls(
                2,
                KvLayout(3, 1, 128, 128, "q8_0", 64, 7),
                rows=4,
                token=whole,
                ctas=4,
                least=16,
                most=16,
            ),
        }

    def bytes_moved(self) -> int:
        """K and V of every row at full length, queries and output, and the chunks' sums twice."""
        parts = 2 * self.chunks * (self.value_dim + 2) if self.chunks > 1 else 0
        ends = self.head_dim + self.value_dim + parts
        return self._kv_bytes() + 4 * self.rows * self.heads * ends
