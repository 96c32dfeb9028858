"""A CTA of decode attention on one target: the sizes that its templates share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.target import Target

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.attention.decode import DecodeAttention
    from urdir.ptxgen.kernels.attention.kv_layout import KvLayout


@dataclass(frozen=True)
class DecodeCta:
    """How the threads of a CTA divide keys and dims, and what lies where in shared memory.

    Where the target copies asynchronously, keys and values pass through a ring of ``stages``
    stages, a step of the loop over the keys each. All offsets and distances are in bytes.
    """

    spec: DecodeAttention
    target: Target

    #: Stages of the ring.
    stages = 3

    # ---- threads ----

    @cached_property
    def layout(self) -> KvLayout:
        """The layout of both caches."""
        return self.spec.layout

    @cached_property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.layout.head_dim

    @cached_property
    def threads(self) -> int:
        """Threads of the CTA."""
        return self.spec.launch_shape.threads

    @cached_property
    def warps(self) -> int:
        """Warps of the CTA."""
        return self.threads // 32

    @cached_property
    def tile(self) -> int:
        """Query heads of the CTA."""
        return self.spec.tile

    @cached_property
    def lanes(self) -> int:
        """Lanes that share a key."""
        return self.spec.lanes

    @cached_property
    def eights(self) -> int:
        """Those of them that have eight dims of it."""
        return self.head_dim // 8

    @cached_property
    def has_idle_lanes(self) -> bool:
        """Whether some have none."""
        return self.lanes != self.eights

    # ---- a step of the loop over the keys ----

    @cached_property
    def quantised(self) -> bool:
        """Whether eight elements of a cache come with a scale."""
        return self.layout.dtype == "q8_0"

    @cached_property
    def raw(self) -> int:
        """Registers of eight elements as they lie in the cache."""
        return self.layout.raw_words

    @cached_property
    def asynchronous(self) -> bool:
        """Whether keys and values pass through the ring. A q8_0 scale is copied with its neighbour
        in an aligned word, which must be of the same slot."""
        return self.target.sm >= 80 and (not self.quantised or self.head_dim % 64 == 0)

    @cached_property
    def ahead(self) -> int:
        """Keys that a lane takes a step."""
        return 1 if self.asynchronous and self.layout.dtype == "f32" else 2

    @cached_property
    def step(self) -> int:
        """Keys of the CTA a step."""
        return self.ahead * self.spec.keys_per_pass

    # ---- shared memory: the ring, then, in its place, what the warps have summed ----

    @cached_property
    def thread_bytes(self) -> int:
        """A thread's part of the first copy of a key or value."""
        return 8 if self.quantised else 16

    @cached_property
    def second_part(self) -> int:
        """From that to its part of the second copy, where there is one."""
        return self.thread_bytes * self.threads

    @cached_property
    def piece_bytes(self) -> int:
        """A key, or a value, of all threads."""
        return (32 if self.layout.dtype == "f32" else 16) * self.threads

    @cached_property
    def stage_bytes(self) -> int:
        """A stage of the ring: keys and values."""
        return 2 * self.ahead * self.piece_bytes

    @cached_property
    def ring_bytes(self) -> int:
        """The ring."""
        return self.stages * self.stage_bytes

    @cached_property
    def values_at(self) -> int:
        """Where the warps' weighted values begin, after maxima and sums."""
        return 8 * self.warps * self.tile

    @cached_property
    def scratch_bytes(self) -> int:
        """The ring, or all that the warps have summed."""
        merged = self.values_at + 4 * self.warps * self.tile * self.head_dim
        return max(self.ring_bytes, merged) if self.asynchronous else merged

    # ---- the row's own token, where the spec has a rope ----

    @cached_property
    def pairs(self) -> int:
        """Pairs of a head that turn."""
        return self.spec.rope.pairs if self.spec.rope else 0

    @cached_property
    def rest(self) -> int:
        """Values of a head that do not."""
        return self.head_dim - 2 * self.pairs

    @cached_property
    def turn_rounds(self) -> int:
        """Pairs of a thread, of the CTA's queries and the key."""
        return ceil_div((self.tile + 1) * self.pairs, self.threads)

    @cached_property
    def copy_rounds(self) -> int:
        """Other values of a thread."""
        return ceil_div((self.tile + 1) * self.rest, self.threads)

    @cached_property
    def rounds(self) -> int:
        """Both."""
        return self.turn_rounds + self.copy_rounds

    @cached_property
    def turned_at(self) -> int:
        """Where queries and key lie in the ring once they are turned: in its last stage, which is
        not filled before all have taken what they need."""
        return (self.stages - 1) * self.stage_bytes if self.asynchronous else 0

    @cached_property
    def token_bytes(self) -> int:
        """The token's key, or its value, as the cache holds it."""
        return self.spec.token_nbytes // 2

    @cached_property
    def eight_bytes(self) -> int:
        """Eight dims of it."""
        return self.token_bytes // self.eights
