"""Prefill attention on Hopper's tensor cores: wgmma, two alternating warpgroups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.heads_out import HeadsOut
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.prefill_examples import wgmma_examples
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.spec import LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP

#: Threads of a warpgroup, and the queries that it multiplies: the height of a wgmma.
WARPGROUP, WARPGROUP_QUERIES = 128, 64
#: f16 values per line of shared memory: the period of wgmma's swizzling.
LINE = 64
#: Maximum head width of each cache type. f16 is copied; other types are converted, and their
#: prefetched values (of some also what converts them) take registers: wider heads, or f32, need
#: more than there are.
WIDEST: Mapping[KvDtype, int] = {"f16": 256, "bf16": 192, "q8_0": 128, "fp8": 256, "q4_0": 256}
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


@dataclass(frozen=True)
class PrefillWgmma(PromptAttention):
    """Causal attention of prompt chunks on Hopper's tensor cores.

    See PromptAttention; for most caches and heads of 64 to 256 values (`serves`). FlashAttention-3
    (Shah et al. 2024, arXiv 2407.08608) without tensor maps: a cache is gathered row by row.

    The number of rows is the argument ``count``, not a constant of the text: one serves prompts of
    all lengths. With ``packs`` the output has the form that the next product takes: rows of heads *
    value_dim values as packed f16 (`weights.packed`). Only for heads that fill their places
    (`can_pack`).
    """

    packs: bool = False

    #: Whether keys come in blocks, one launch each (`PrefillBlock`).
    is_block = False

    name = "prefill_wgmma"
    template = ("urdir.templates", "attention/prefill_wgmma.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.serves(self.layout):
            raise PtxgenError(
                f"attention on wgmma takes heads of 64 to {WIDEST} values, a multiple of 16: not "
                f"{' and '.join({of.name: of for of in self.layout.formats})}, "
                f"head_dim {self.head_dim}, value_dim {self.value_dim}"
            )

        if self.packs and not self.can_pack:
            raise PtxgenError(
                f"attention packs parts of heads that are multiples of 32 values, of rows that are "
                f"multiples of {TILE_COLS}: not {self.heads} heads of {self.value_dim}"
            )

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"rows"})

    @property
    def params(self) -> tuple[Param, ...]:
        return (Param("count", "u32"), *super().params)

    @property
    def out(self) -> HeadsOut:
        shape = (self.rows, self.heads, self.value_dim)
        return HeadsOut(*shape, self.packs, groups="packed_groups")

    @property
    def positions(self) -> int:
        """Positions from this on mark padding rows."""
        return self.layout.max_len

    @property
    def can_pack(self) -> bool:
        """Whether ``packs`` is supported: places beyond the last column would not be cleared."""
        fills = self.heads * self.value_dim % TILE_COLS == 0
        return fills and self.value_dim % (32 * self.parts) == 0

    @property
    def packed_groups(self) -> int:
        """Groups of eight packed rows; those beyond ``rows`` are zeros."""
        return ceil_div(self.rows, GROUP)

    @property
    def packed_run(self) -> int:
        """Units of 32 columns that are contiguous in every CTA's part of a head."""
        return math.gcd(self.out_dims // 32, 4)

    @property
    def tiles(self) -> int:
        rows = GROUP * self.packed_groups if self.packs else self.rows
        return ceil_div(rows * self.group, self.queries)

    @property
    def tolerance(self) -> Tolerance:
        attention = super().tolerance
        return attention.rounded_to("f16") if self.packs else attention

    @staticmethod
    def serves(layout: KvLayout) -> bool:
        """Whether the kernel supports a cache."""
        return all(
            64 <= dim <= WIDEST.get(dtype, 0) and dim % 16 == 0
            for dtype, dim in (
                (layout.dtype, layout.head_dim),
                (layout.values.dtype, layout.values_per_head),
            )
        )

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 2

    @property
    def queries(self) -> int:
        return self.consumers * WARPGROUP_QUERIES

    @property
    def key_tile(self) -> int:
        """Keys per step: as many as fit the registers that the sums leave for scores and weights.

        All warps have 168 registers per thread. ``setmaxnreg``, with which copying warps could pass
        theirs to multiplying ones (as in `GemmWgmma`), is not tried here."""
        if self.scores.max_bias:  # slopes, and the distances to keys
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
    def stages(self) -> int:
        """Places in a ring."""
        return 2

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
            bounds_nbytes=16 if self.scores.texts else 8,
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads, self.tiles, self.parts),
            block=((self.consumers + 1) * WARPGROUP, 1, 1),
            shared_bytes=self.shared.nbytes,
            resident=1,
        )

    @classmethod
    def examples(cls) -> Mapping[str, PrefillWgmma]:
        return wgmma_examples(cls)
