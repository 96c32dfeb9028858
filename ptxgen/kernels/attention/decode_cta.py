"""A CTA of decode attention on one target: the sizes that its templates share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.target import Target

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.attention.decode import DecodeAttention


class DecodeCta:
    """How the threads of a CTA divide keys and dims, and what lies where in shared memory.

    Where the CTA is ``asynchronous``, keys and values pass through a ring of ``stages`` stages,
    each of a step of the loop over the keys; what the warps have summed then takes its place. A
    q8_0 scale is copied with its neighbour in an aligned word, which must be of the same slot.
    Sizes and offsets (``..._at``) are in bytes.
    """

    def __init__(self, spec: DecodeAttention, target: Target) -> None:
        layout, threads = spec.layout, spec.launch_shape.threads
        self.spec, self.target, self.layout = spec, target, layout
        self.head_dim, self.threads, self.warps = layout.head_dim, threads, threads // 32
        # query heads of the CTA; lanes that share a key; those of them that have eight of its dims
        self.tile, self.lanes, self.eights = spec.tile, spec.lanes, layout.head_dim // 8
        self.has_idle_lanes = self.lanes != self.eights
        # registers of eight elements as they lie in a cache
        self.raw = layout.raw_words
        self.quantised = layout.dtype == "q8_0"
        self.asynchronous = target.sm >= 80 and not (self.quantised and self.head_dim % 64)
        # keys a step: of a lane, of the CTA
        self.ahead = 1 if self.asynchronous and layout.dtype == "f32" else 2
        self.step = self.ahead * spec.keys_per_pass

        # the ring: a thread's part of the first copy of a key or value, the distance to its second
        # one, a key or value of all threads
        self.stages = 3
        self.thread_bytes = 8 if self.quantised else 16
        self.second_part = self.thread_bytes * threads
        self.piece_bytes = (32 if layout.dtype == "f32" else 16) * threads
        self.stage_bytes = 2 * self.ahead * self.piece_bytes
        self.ring_bytes = self.stages * self.stage_bytes
        # of the warps: maxima and sums, then weighted values
        self.values_at = 8 * self.warps * self.tile
        merged = self.values_at + 4 * self.warps * self.tile * self.head_dim
        self.scratch_bytes = max(self.ring_bytes, merged) if self.asynchronous else merged

        # the row's own token, if the spec has a rope: pairs of a head that turn and other values
        self.pairs = spec.rope.pairs if spec.rope else 0
        self.rest = self.head_dim - 2 * self.pairs
        # those of a thread, of the queries and the key
        self.turn_rounds = ceil_div((self.tile + 1) * self.pairs, threads)
        self.copy_rounds = ceil_div((self.tile + 1) * self.rest, threads)
        self.rounds = self.turn_rounds + self.copy_rounds
        # the last stage of the ring is not filled before all threads have taken what they need
        self.turned_at = self.ring_bytes - self.stage_bytes if self.asynchronous else 0
        # a key or a value as the cache holds it, and eight dims of it
        self.token_bytes = spec.token_nbytes // 2
        self.eight_bytes = self.token_bytes // self.eights
