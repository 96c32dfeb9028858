"""Common parts of the decode attention kernels: division of work between CTAs and lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.decode_cta import MAX_STATIC_SHARED, DecodeCta
from urdir.ptxgen.kernels.attention.decode_memory import DecodeMemory
from urdir.ptxgen.kernels.attention.decode_tolerance import decode_tolerance
from urdir.ptxgen.kernels.attention.head_lanes import LANE_DIMS, HeadLanes
from urdir.ptxgen.kernels.attention.heads_out import HeadsOut
from urdir.ptxgen.kernels.attention.rows_with_tokens import RowsWithTokens
from urdir.ptxgen.kernels.attention.tensor_cores import tensor_cores_take
from urdir.ptxgen.spec import Tolerance, ceil_div
from urdir.ptxgen.target import Target
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP
from urdir.ptxgen.weights.packed_few import Order

WARPS = 8
#: Query heads that share one read of K and V. Eight need more registers than two CTAs per SM have.
MAX_TILE = 4


@dataclass(frozen=True)
class DecodeAttention(RowsWithTokens):
    """See RowsWithTokens for the computation.

    A CTA takes some of the query heads that share a KV head, at most ``most_heads`` (a power of two
    up to `MAX_TILE`): fewer make more CTAs, each of which reads K and V. A head's result does not
    depend on other heads in its CTA; but a single head of a single row is multiplied differently.

    From sm_80 on tensor cores multiply if `suits_tensor_cores`, with queries and weights as the sum
    of two 16-bit floats. With quants as keys, queries are, per 32 dims, the sum of two 8-bit
    integers times scales; with quants as values, weights times scales of values are a 16-bit float.
    Weights times scales are finite for values up to 16,000. Scaled queries of f16 operands become
    infinite from 65,536 on, and an infinity in a key makes NaN. Otherwise a lane group takes a key,
    a lane eight of its dims (two or three times eight above 256 dims); values contained in keys are
    read once.

    With ``packs`` the output has the form that the next product takes: rows of heads * value_dim
    values as packed f16 (`weights.packed`), or up to eight rows as few packed vectors in that
    ``order`` (`weights.packed_few`), of which those beyond the rows stay as they were; see
    `can_pack`.
    """

    most_heads: int = MAX_TILE
    packs: bool = False
    order: Order = "units"

    #: Maximum number of heads per CTA.
    heads_of_cta: ClassVar[tuple[int, ...]] = (1, 2, MAX_TILE)
    #: Whether a CTA takes a chunk of a row's keys, possibly without the row's new token.
    splits_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_heads not in self.heads_of_cta:
            raise PtxgenError(f"most_heads {self.most_heads}: one of {self.heads_of_cta}")
        if self.packs and not self.can_pack:
            raise PtxgenError(
                f"attention packs up to {GROUP} rows, or groups of as many, of multiples of "
                f"{TILE_COLS} values, not {self.rows} with {self.heads} heads of {self.value_dim}"
            )

    @property
    def waits_for_dependencies(self) -> bool:  # type: ignore[override]
        """Not where the launch just before has chosen the keys and the table is read before the
        wait, as by kernels that append tokens."""
        return not (self.layout.is_chosen and self.appends)

    @property
    def can_pack(self) -> bool:
        """Whether ``packs`` is supported: unused places would not be cleared."""
        whole = self.rows <= GROUP or self.rows % GROUP == 0
        return whole and self.heads * self.value_dim % TILE_COLS == 0

    @property
    def packs_few(self) -> bool:
        """Whether the output is few packed vectors."""
        return self.packs and self.rows <= GROUP

    @property
    def out(self) -> HeadsOut:
        order = self.order if self.packs_few else None
        return HeadsOut(self.rows, self.heads, self.value_dim, self.packs, order)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return super().make_inputs(rng) | self.out.before(rng)

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return WARPS

    @property
    def norms(self) -> int:
        """Heads whose norms warps find, one after another: queries', the key's, the value's."""
        token = self.token
        if token is None or not (token.v_norm or (token.qk_norm and not token.norms_rows)):
            return 0
        return self.tile + self.appends + (token.v_norm is not None)

    @property
    def lanes(self) -> HeadLanes:
        """The lanes that share a key, unless tensor cores multiply."""
        return HeadLanes(self.head_dim, self.value_dim, self.warps)

    @property
    def tile(self) -> int:
        """Query heads per CTA, a power of two (the last tile of a KV head may have fewer)."""
        fit = MAX_TILE // max(self.lanes.pieces)
        if self.suits_tensor_cores:
            fit = min(MAX_TILE, self.sums_room // (4 * self.warps * (self.value_dim + 2)))
        most = min(self.most_heads, 1 << (fit.bit_length() - 1), self.lanes.count)
        return min(most, 1 << (self.group - 1).bit_length())

    @property
    def rows_at_once(self) -> int:
        """Maximum number of rows of a sequence per CTA."""
        return 1

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.group, self.tile)

    @property
    def suits_tensor_cores(self) -> bool:
        """Whether tensor cores multiply from sm_80 on.

        A single head without scales of one row is less work for lanes. On an H200 256 keys (32
        heads, 8 KV heads of 128 values, f16) take 3.6 us in lanes, on tensor cores 3.8; eight rows
        of them (16 heads, 8 KV heads of 256 values) 13.8 and 7.7.
        """
        is_single = self.rows == 1 and min(self.most_heads, self.lanes.count, self.group) == 1
        is_scaled = any(of.is_scaled for of in self.layout.formats)
        return tensor_cores_take(self.layout, self.scores) and (is_scaled or not is_single)

    @property
    def reads_once(self) -> bool:
        """Whether keys and values in tensor cores' rings are evicted first from the L2 cache: a
        step reads more of them than it holds, and CTAs that read the same ones do so at about the
        same time."""
        raise NotImplementedError

    @property
    def tensor_cores_since(self) -> int:
        """The first architecture with tensor cores: before sm_90 the sums of more than 256 values
        do not fit beside the assembler's other registers."""
        return 90 if self.value_dim > 256 else 80

    @property
    def ring_nbytes(self) -> int:
        """Dynamic shared memory for keys and values in flight to tensor cores; 0 if it is
        static."""
        return 0

    @property
    def sums_room(self) -> int:
        """Shared memory for the sums of all warps, after the keys."""
        return MAX_STATIC_SHARED

    @property
    def memory(self) -> DecodeMemory:
        """The dynamic shared memory of a CTA."""
        eights = (self.head_dim + self.value_dim) // LANE_DIMS
        strips = self.rows_at_once * ceil_div(self.head_dim, 32)
        return DecodeMemory(
            token_nbytes=eights * self.eight_nbytes if self.appends else 0,
            queries_nbytes=512 * strips if self.suits_tensor_cores else 0,
        )

    def resident_on(self, target: Target) -> int:
        """Resident CTAs per SM: two for wide heads or quants on tensor cores, where the assembler
        would otherwise use more registers. Not if some would not fit: before sm_90, with the sums
        of more than 256 values, with scales of more than 128."""
        is_quants = any(of.is_scaled for of in self.layout.formats)
        takes_more = is_quants or max(self.head_dim, self.value_dim) > 128
        fits = target.sm >= 90 and self.value_dim <= (128 if is_quants else 256)
        is_one = self.rows_at_once == 1
        return 2 if takes_more and fits and is_one and self.suits_tensor_cores else 0

    def cta(self, target: Target) -> DecodeCta:
        """The template's description of a CTA on ``target``."""
        return DecodeCta(self, target)

    @property
    def eight_nbytes(self) -> int:
        """Bytes of eight values of a row's new token, and their scale 8 bytes further."""
        return 32 if any(of.bits == 32 for of in self.layout.formats) else 16

    @property
    def tolerance(self) -> Tolerance:
        of = decode_tolerance(self.layout, self.scores, self.token, self.suits_tensor_cores)
        return of.rounded_to("f16") if self.packs else of

    def flops(self) -> int:
        """At full length: two products and about eight operations of softmax per key."""
        return self.rows * self.heads * self._longest * (2 * self.head_dim + 2 * self.value_dim + 8)

    @property
    def _longest(self) -> int:
        """Maximum number of keys that a row attends to."""
        return min(self.scores.span or self.layout.max_len, self.layout.max_len)

    def _kv_bytes(self) -> int:
        """K and V that all rows read at full length, each KV head once."""
        return self.rows * self._longest * self.layout.pair_nbytes
