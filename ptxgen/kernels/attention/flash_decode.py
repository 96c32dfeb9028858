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
from urdir.ptxgen.kernels.attention.chunk_reference import sums_of_chunks
from urdir.ptxgen.kernels.attention.decode import DecodeAttention
from urdir.ptxgen.kernels.attention.decode_cta import DecodeCta
from urdir.ptxgen.kernels.attention.decode_memory import SplitMemory, token_and_queries
from urdir.ptxgen.kernels.attention.flash_decode_examples import (
    OTHER_CACHES,
    examples_of_drafts,
    examples_with_a_token,
    plain_examples,
)
from urdir.ptxgen.kernels.attention.head_tiles import (
    MAX_STATIC_SHARED,
    WARPS,
    HeadTiles,
    decode_tiles,
)
from urdir.ptxgen.kernels.attention.random_inputs import rows_of_decode, rows_of_drafts
from urdir.ptxgen.kernels.attention.reference import attend
from urdir.ptxgen.kernels.attention.token_reference import appended
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import Array, LaunchShape, Param, ceil_div
from urdir.ptxgen.target import Target, since


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

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_split(self)

    @property
    def targets(self) -> tuple[str, ...]:
        if self.cluster > 1 or self.ring:
            return since(CLUSTERS_SINCE)
        return since(self.head_tiles.since) if self.run > 1 else super().targets

    @cached_property
    def head_tiles(self) -> HeadTiles:
        shape = (self.layout, self.scores, self.heads, self.rows, self.most_heads)
        return decode_tiles(*shape, ring=self.ring, run=self.run)

    @cached_property
    def split(self) -> KeySplit:
        """The split of rows into chunks, and of chunks between CTAs."""
        share = max(1, self.ctas // ceil_div(self.rows, self.run))
        cut = ChunkCut(share, self.least * self.cluster, self.most * self.cluster)
        return KeySplit(cut, self.rows, self.longest, self.ctas)

    @property
    def memory(self) -> SplitMemory:
        """The dynamic shared memory of a CTA."""
        tiles = self.head_tiles
        sizes = (WARPS, self.cluster, tiles.rows * tiles.size, self.value_dim, tiles.ring)
        return SplitMemory(*token_and_queries(self), *sizes)

    def cta(self, target: Target) -> DecodeCta:
        """The template's description of a CTA on ``target``."""
        # reads_once: with it, a step of an 8B Q4_K_M model at 4,096 keys on an H200 takes 1.454 ms,
        # else 1.464; of 8 rows 2.537 and 2.576, of q8_0 2.153 and 2.198, of 32 rows 4.120 and 4.168
        return DecodeCta(self, target, reads_once=self.head_tiles.each == 1)

    # ---- the launch ----

    @property
    def params(self) -> tuple[Param, ...]:
        *before, out = super().params
        return (*before, *self.split.params, out)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.head_tiles.count, self.split.takers * self.cluster, 1),
            block=(32 * self.head_tiles.lanes.warps, 1, 1),
            cluster=(1, self.cluster, 1),
            shared_bytes=self.memory.nbytes,
            prefers_shared=True,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs, caches = appended(self, inputs)
        out = {"out": self.out.of(attend(self, inputs), inputs)} | caches
        if self.split.chunks == 1:
            return out
        return out | sums_of_chunks(self, self.split.cut, self.run, inputs)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return rows_of_decode(self, rng) if self.run == 1 else rows_of_drafts(self, rng)

    @classmethod
    def examples(cls) -> Mapping[str, FlashDecode]:
        examples = plain_examples(cls) | examples_with_a_token(cls) | examples_of_drafts(cls)
        return with_caches(examples, OTHER_CACHES)

    def bytes_moved(self) -> int:
        """K and V of every row at full length, of as few as rows can share; queries and output, and
        the chunks' sums twice."""
        parts = 2 * self.split.chunks * (self.value_dim + 2) if self.split.chunks > 1 else 0
        ends = self.head_dim + self.value_dim + parts
        reads = self.longest * self.layout.pair_nbytes * ceil_div(self.rows, self.run)
        return reads + 4 * self.rows * self.heads * ends


def can_share(spec: FlashDecode, run: int) -> bool:
    """Whether ``run`` rows of a sequence can share a read of its keys."""
    if run == 1:
        return True
    tiles, room = spec.head_tiles, spec.ring or MAX_STATIC_SHARED
    fits = 4 * WARPS * run * tiles.size * (spec.value_dim + 2) <= room
    # the registers of wide heads, with what converts elements
    is_wide = max(spec.layout.widths) > 128
    is_full = is_wide and any(of.scales_heads for of in spec.layout.formats)
    is_plain = spec.token is None and spec.rows > 1
    return tiles.tensor_cores and is_plain and fits and not is_full


def _check_split(spec: FlashDecode) -> None:
    least, most, ctas = spec.least, spec.most, spec.ctas * spec.cluster
    if spec.scores.texts:
        raise PtxgenError("the keys of texts are not split")
    if least < 1 or least % CHUNK_UNIT or most % CHUNK_UNIT:
        raise PtxgenError(f"chunks of {least} to {most} keys: multiples of {CHUNK_UNIT}")
    if most and most < least:
        raise PtxgenError(f"chunks of at least {least} and at most {most} keys")
    if spec.cluster not in (1, 2, 4, 8):
        raise PtxgenError(f"clusters of {spec.cluster} CTAs: 1, 2, 4 or 8")
    if not 1 <= ctas <= 65535:
        raise PtxgenError(f"{ctas} CTAs for each KV head: 1 to 65535")
    if 0 < spec.ring < MAX_STATIC_SHARED:
        raise PtxgenError(f"a ring of {spec.ring} bytes: 0, or at least {MAX_STATIC_SHARED}")
    if spec.run not in (1, 2, 4) or not can_share(spec, spec.run):
        raise PtxgenError(
            f"{spec.run} rows of a sequence at once: 1, or on tensor cores, without a token, 2 or "
            f"4 whose sums fit {spec.ring or MAX_STATIC_SHARED} bytes"
        )
