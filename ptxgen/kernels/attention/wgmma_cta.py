"""A CTA of prefill attention on Hopper's tensor cores: its tiles and its shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.spec import ceil_div

#: Threads of a warpgroup, and the queries that it multiplies: the height of a wgmma.
WARPGROUP, WARPGROUP_QUERIES = 128, 64
#: f16 values per line of shared memory: the period of wgmma's swizzling.
LINE = 64
#: Alignment of tiles: the period of swizzling.
ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Offsets in a CTA's shared memory, in bytes from its first multiple of `ALIGNMENT`.

    Queries of both warpgroups, then the rings of K and of V, each tile in lines of 64 f16 values:
    all lines of the first 64 dims, then those of the next; then data about queries, and barriers.
    """

    stages: int
    consumers: int
    q_nbytes: int
    k_nbytes: int
    v_nbytes: int
    bounds_nbytes: int = 8

    @property
    def k(self) -> int:
        """The first tile of K."""
        return self.consumers * self.q_nbytes

    @property
    def v(self) -> int:
        """The first tile of V."""
        return self.k + self.stages * self.k_nbytes

    @property
    def seen(self) -> int:
        """The position of every query, u32."""
        return self.v + self.stages * self.v_nbytes

    @property
    def bounds(self) -> int:
        """The number of keys that some query sees, and the first query's position, u32; of texts
        also the first and the last one of their first keys."""
        return self.seen + 4 * self.consumers * WARPGROUP_QUERIES

    def barrier(self, name: str) -> int:
        """The barriers of a ring, one per place: "full_k", "empty_k", "full_v" or "empty_v"."""
        names = ("full_k", "empty_k", "full_v", "empty_v")
        return self.bounds + self.bounds_nbytes + 8 * self.stages * names.index(name)

    @property
    def nbytes(self) -> int:
        """Bytes per CTA, for any alignment of its shared memory."""
        return self.barrier("empty_v") + 8 * self.stages + ALIGNMENT


@dataclass(frozen=True, slots=True)
class WgmmaCta:
    """Two warpgroups that multiply, of 64 queries each, and one that brings tiles of keys of
    ``head_dim`` and values of ``value_dim``; ``leans``: with ALiBi; ``texts``: of rows of texts."""

    head_dim: int
    value_dim: int
    leans: bool = False
    texts: bool = False

    #: Warpgroups that multiply, and places in a ring.
    consumers: ClassVar[int] = 2
    stages: ClassVar[int] = 2

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.consumers * WARPGROUP_QUERIES

    @property
    def threads(self) -> int:
        """Threads of all warpgroups."""
        return (self.consumers + 1) * WARPGROUP

    @property
    def key_tile(self) -> int:
        """Keys per step: as many as fit the registers that the sums leave for scores and weights.

        All warps have 168 registers per thread. ``setmaxnreg``, with which copying warps could pass
        theirs to multiplying ones (as in `GemmWgmma`), is not tried here."""
        if self.leans:  # slopes, and the distances to keys
            return 80
        return 112 if self.out_dims <= 80 and self.head_dim <= 128 else 96

    @property
    def parts(self) -> int:
        """CTAs that share a tile of queries: sums for more than 128 dims of V exceed the registers,
        so each computes its part of ``out`` (and all scores)."""
        return ceil_div(self.value_dim, 128)

    @property
    def out_dims(self) -> int:
        """Dims of ``out``, and so of V, per CTA. If the parts do not divide them, the last two
        overlap."""
        return 16 * ceil_div(self.value_dim, 16 * self.parts)

    @property
    def packed_run(self) -> int:
        """Units of 32 columns that are contiguous in every CTA's part of a head."""
        return math.gcd(self.out_dims // 32, 4)

    def pieces(self, dims: int) -> tuple[tuple[int, int], ...]:
        """The pieces of a tile with rows of ``dims`` that a thread copies, eight values each: (key,
        in units of 16 keys; first dim), relative to the first."""
        return tuple(
            (key, dim) for key in range(self.key_tile // 16) for dim in range(0, dims, LINE)
        )

    @property
    def shared(self) -> SharedMemory:
        """The CTA's shared memory."""
        q, v = (2 * LINE * ceil_div(dim, LINE) for dim in (self.head_dim, self.out_dims))
        return SharedMemory(
            stages=self.stages,
            consumers=self.consumers,
            q_nbytes=WARPGROUP_QUERIES * q,
            k_nbytes=self.key_tile * q,
            v_nbytes=self.key_tile * v,
            bounds_nbytes=16 if self.texts else 8,
        )
