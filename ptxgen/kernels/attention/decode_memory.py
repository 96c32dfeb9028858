"""Dynamic shared memory of the CTAs of decode attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.kernels.attention.decode import DecodeAttention
from urdir.ptxgen.kernels.attention.head_tiles import LANE_DIMS
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.spec import ceil_div


@dataclass(frozen=True)
class DecodeMemory:
    """A row's new key and value in raw registers of eight values, where they are appended; then the
    queries' fragments of tensor cores, 16 bytes per lane for 32 dims of each row. Sizes and offsets
    (``..._at``) are in bytes."""

    token_nbytes: int
    queries_nbytes: int

    @property
    def queries_at(self) -> int:
        """Start of the fragments."""
        return self.token_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.token_nbytes + self.queries_nbytes


@dataclass(frozen=True)
class ClusterInbox:
    """Shared memory of each of ``ctas`` CTAs from byte ``at`` on: an mbarrier; the maximum and the
    sum of weights of each of ``heads`` heads from each CTA; each CTA's sums for the part of all
    heads' ``value_dim`` outputs that this CTA merges. Empty for a single CTA.
    """

    ctas: int
    heads: int
    value_dim: int
    at: int

    @property
    def part(self) -> int:
        """Outputs that each CTA merges, in groups of four."""
        return 4 * ceil_div(self.heads * self.value_dim, 4 * self.ctas)

    @property
    def tops_at(self) -> int:
        """Offset of the maxima and sums of weights."""
        return self.at + 16

    @property
    def values_at(self) -> int:
        """Offset of the sums of weighted values."""
        return self.tops_at + 8 * self.ctas * self.heads

    @property
    def end(self) -> int:
        """End offset."""
        return self.values_at + 4 * self.ctas * self.part if self.ctas > 1 else self.at


@dataclass(frozen=True)
class SplitMemory(DecodeMemory):
    """Where keys are split, after these: the present chunk of each of ``warps``, while it loops
    over the keys; sums of all ``heads`` of a CTA from others of its ``cluster``; and the ring of
    keys and values."""

    warps: int
    cluster: int
    heads: int
    value_dim: int
    ring_nbytes: int

    #: Bytes of a warp's present chunk.
    parked_nbytes: ClassVar[int] = 32

    @property
    def parked_at(self) -> int:
        """Start of the warps' present chunks."""
        return self.token_nbytes + self.queries_nbytes

    @property
    def inbox(self) -> ClusterInbox:
        """Sums from other CTAs of the cluster."""
        at = self.parked_at + self.warps * self.parked_nbytes
        return ClusterInbox(self.cluster, self.heads, self.value_dim, at)

    @property
    def ring_at(self) -> int:
        """Start of the ring, if there is one."""
        return 256 * ceil_div(self.inbox.end, 256)

    @property
    def nbytes(self) -> int:
        return self.ring_at + self.ring_nbytes


def token_and_queries(spec: DecodeAttention) -> tuple[int, int]:
    """The sizes of `DecodeMemory`."""
    tiles, eights = spec.head_tiles, sum(spec.layout.widths) // LANE_DIMS
    strips = tiles.rows * ceil_div(spec.head_dim, 32)
    token = eights * eight_nbytes(spec.layout) if spec.appends else 0
    return token, 512 * strips if tiles.tensor_cores else 0


def eight_nbytes(layout: KvLayout) -> int:
    """Bytes of eight values of a row's new token, and their scale 8 bytes further."""
    return 32 if any(of.bits == 32 for of in layout.formats) else 16
