"""Flash decoding: attention with the keys of each row split among CTAs (split KV).

Each CTA computes the sums of a chunk of keys; the last CTA of a row's heads to arrive merges them
(after Dao et al. 2023, "Flash-Decoding for long-context inference"). The split of a row depends on
its number of keys, which the device reads: the launch is the same at every length. A row's result
depends only on its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.cache_examples import with_caches
from urdir.ptxgen.kernels.attention.chunk_cut import CHUNK_UNIT, ChunkCut, KeySplit
from urdir.ptxgen.kernels.attention.chunk_reference import places_in_runs, sums_of_chunks
from urdir.ptxgen.kernels.attention.decode import WARPS, DecodeAttention
from urdir.ptxgen.kernels.attention.decode_cta import MAX_STATIC_SHARED
from urdir.ptxgen.kernels.attention.decode_memory import SplitMemory
from urdir.ptxgen.kernels.attention.flash_decode_examples import (
    OTHER_CACHES,
    examples_of_drafts,
    examples_with_a_token,
    plain_examples,
)
from urdir.ptxgen.kernels.attention.random_inputs import rows_of_drafts
from urdir.ptxgen.kernels.attention.reference import attend
from urdir.ptxgen.kernels.attention.token_reference import appended
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div
from urdir.ptxgen.target import since

#: Maximum number of threads that merge the same outputs, limited by shared memory.
MAX_MERGERS = 4


@dataclass(frozen=True)
class FlashDecode(DecodeAttention):
    """Attention of each row over chunks of its keys, merged by the last CTA to arrive.

    See DecodeAttention for the computation. For each KV head (tile of its query heads) there are
    ``ctas`` CTAs, between which the chunks of all rows are distributed. A row of n keys has chunks
    of n / (ctas / rows) keys, rounded up, so that rows of equal lengths give each CTA one chunk;
    but at least ``least``. Above twice ``most`` (0: unlimited) each is cut into equal ones of at
    most about ``most`` keys: a long row among short ones has many, and a CTA takes several.

    With ``cluster`` (2, 4 or 8; sm_90 and newer) each of the ``ctas`` is a cluster of that size.
    Its CTAs share a chunk of correspondingly more keys and send each other their sums, which is
    faster than merging through global memory.

    With a ``ring`` (sm_90 and newer) keys and values in flight to tensor cores, and later the
    warps' sums, use that many bytes of dynamic shared memory; 0: static shared memory.

    With a ``run`` (2 or 4) up to this many consecutive tokens of a sequence in neighbouring rows,
    as the rows of drafts are, share one read of its keys and values: a CTA multiplies them with the
    heads of all these rows. The chunks are those of the first such row; the last one also has the
    keys of the others. On tensor cores, without a ``token``.

    Between launches ``arrived`` is 0. ``partial`` (sums of weights times V) and ``softmax`` (the
    maximum exponent of 2 that they are relative to, and the sum of weights) belong to a launch.
    """

    ctas: int = 16
    least: int = 64
    most: int = 0
    cluster: int = 1
    ring: int = 0
    run: int = 1

    splits_keys = True
    name = "flash_decode"
    template = ("urdir.templates", "attention/flash_decode.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores.texts:
            raise PtxgenError("the keys of texts are not split")
        if self.least < 1 or self.least % CHUNK_UNIT or self.most % CHUNK_UNIT:
            raise PtxgenError(
                f"chunks of {self.least} to {self.most} keys: multiples of {CHUNK_UNIT}"
            )
        if self.most and self.most < self.least:
            raise PtxgenError(f"chunks of at least {self.least} and at most {self.most} keys")
        if self.cluster not in (1, 2, 4, 8):
            raise PtxgenError(f"clusters of {self.cluster} CTAs: 1, 2, 4 or 8")
        if not 1 <= self.ctas * self.cluster <= 65535:
            raise PtxgenError(f"{self.ctas * self.cluster} CTAs for each KV head: 1 to 65535")
        if 0 < self.ring < MAX_STATIC_SHARED:
            raise PtxgenError(f"a ring of {self.ring} bytes: 0, or at least {MAX_STATIC_SHARED}")
        if self.run not in (1, 2, 4) or not self.can_share(self.run):
            raise PtxgenError(
                f"{self.run} rows of a sequence at once: 1, or on tensor cores, without a token, "
                f"2 or 4 whose sums fit {self.sums_room} bytes"
            )

    def can_share(self, run: int) -> bool:
        """Whether ``run`` rows of a sequence can share a read of its keys."""
        sums = 4 * WARPS * run * self.tile * (self.value_dim + 2)
        is_plain = self.token is None and self.rows > 1
        # the registers of wide heads, with what converts elements
        is_wide = max(self.head_dim, self.value_dim) > 128
        fits = not (is_wide and any(of.scales_heads for of in self.layout.formats))
        return run == 1 or (
            self.suits_tensor_cores and is_plain and fits and sums <= self.sums_room
        )

    @property
    def rows_at_once(self) -> int:
        return self.run

    @property
    def targets(self) -> tuple[str, ...]:
        if self.run > 1 and not (self.cluster > 1 or self.ring):
            return since(self.tensor_cores_since)
        return since(CLUSTERS_SINCE) if self.cluster > 1 or self.ring else super().targets

    @property
    def reads_once(self) -> bool:
        # With it, a step of an 8B Q4_K_M model at 4,096 keys on an H200 takes 1.454 ms, else 1.464;
        # of 8 rows 2.537 and 2.576, of q8_0 2.153 and 2.198, of 32 rows 4.120 and 4.168.
        return self.tiles == 1

    @cached_property
    def split(self) -> KeySplit:
        """The split of rows into chunks, and of chunks between CTAs."""
        share = max(1, self.ctas // ceil_div(self.rows, self.run))
        cut = ChunkCut(share, self.least * self.cluster, self.most * self.cluster)
        return KeySplit(cut, self.rows, self._longest, self.ctas)

    @property
    def chunks(self) -> int:
        """Maximum number of chunks of a row."""
        return self.split.chunks

    @property
    def memory(self) -> SplitMemory:
        before, heads = super().memory, self.rows_at_once * self.tile
        sizes = (WARPS, self.cluster, heads, self.value_dim, self.ring_nbytes)
        return SplitMemory(before.token_nbytes, before.queries_nbytes, *sizes)

    @property
    def ring_nbytes(self) -> int:
        return self.ring if self.suits_tensor_cores else 0

    @property
    def sums_room(self) -> int:
        return self.ring or MAX_STATIC_SHARED

    @property
    def merged_vectors(self) -> int:
        """Groups of four output values of a CTA: each is merged by one or several threads."""
        return self.run * self.tile * self.value_dim // 4

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
            # Chunks that rows lack leave it unchanged: INOUT, not OUT.
            split = (
                Param("partial", "f32", ("rows", "heads", "chunks", "value_dim"), Access.INOUT),
                Param("softmax", "f32", ("rows", "heads", "chunks", 2), Access.INOUT),
                Param("arrived", "u32", ("rows", "heads"), Access.INOUT),
            )
        *before, out = super().params
        return (*before, *split, out)

    @property
    def head_tiles(self) -> int:
        """Tiles of query heads of a row."""
        return self.layout.kv_heads * self.tiles

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.head_tiles, self.split.takers * self.cluster, 1),
            block=(32 * WARPS, 1, 1),
            cluster=(1, self.cluster, 1),
            shared_bytes=self.memory.nbytes,
            prefers_shared=True,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs, caches = appended(self, inputs)
        out = {"out": self.out.of(attend(self, inputs), inputs)} | caches
        if self.chunks == 1:
            return out
        places = places_in_runs(self, self.run, inputs)
        before = inputs["position"][np.arange(self.rows) - places].tolist()
        chunks = [self.chunks_of(position) for position in before]
        return out | sums_of_chunks(self, chunks, inputs)

    def chunks_of(self, position: int) -> list[range]:
        """The chunks of a row at ``position``; none for a padding row, or if not split."""
        if position >= self.layout.max_len:
            return []
        return self.split.cut.ranges(self.scores.first_key(position), position + 1)

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

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        if self.run == 1:
            return super().make_inputs(rng)
        return self.inputs_at(rng, *rows_of_drafts(self, rng)) | self.out.before(rng)

    @classmethod
    def examples(cls) -> Mapping[str, FlashDecode]:
        examples = plain_examples(cls) | examples_with_a_token(cls) | examples_of_drafts(cls)
        return with_caches(examples, OTHER_CACHES)

    def bytes_moved(self) -> int:
        """K and V of every row at full length, of as few as rows can share; queries and output, and
        the chunks' sums twice."""
        parts = 2 * self.chunks * (self.value_dim + 2) if self.chunks > 1 else 0
        ends = self.head_dim + self.value_dim + parts
        reads = self._kv_bytes() // self.rows * ceil_div(self.rows, self.run)
        return reads + 4 * self.rows * self.heads * ends
