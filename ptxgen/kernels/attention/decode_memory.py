"""Dynamic shared memory of the CTAs of decode attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.kernels.attention.cluster_inbox import ClusterInbox
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
    def queries_end(self) -> int:
        """End of the fragments."""
        return self.queries_at + self.queries_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.queries_end


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
        return self.queries_end

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
