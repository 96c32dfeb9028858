"""Prefill attention on Hopper's tensor cores: wgmma, two alternating warpgroups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.heads_out import HeadsOut
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.prefill_examples import wgmma_examples
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.kernels.attention.wgmma_cta import WgmmaCta
from urdir.ptxgen.spec import LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP

#: Maximum head width of each cache type. f16 is copied; other types are converted, and their
#: prefetched values (of some also what converts them) take registers: wider heads, or f32, need
#: more than there are.
WIDEST: Mapping[KvDtype, int] = {"f16": 256, "bf16": 192, "q8_0": 128, "fp8": 256, "q4_0": 256}


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
    launch_fields = frozenset({"rows"})
    targets = ("sm_90a",)

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
    def params(self) -> tuple[Param, ...]:
        return (Param("count", "u32"), *super().params)

    @property
    def out(self) -> HeadsOut:
        shape = (self.rows, self.heads, self.value_dim)
        return HeadsOut(*shape, self.packs, groups="packed_groups")

    @property
    def can_pack(self) -> bool:
        """Whether ``packs`` is supported: places beyond the last column would not be cleared."""
        fills = self.heads * self.value_dim % TILE_COLS == 0
        return fills and self.value_dim % (32 * self.cta.parts) == 0

    @property
    def packed_groups(self) -> int:
        """Groups of eight packed rows; those beyond ``rows`` are zeros."""
        return ceil_div(self.rows, GROUP)

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
    def cta(self) -> WgmmaCta:
        """What a CTA has."""
        leans = self.scores.max_bias > 0
        return WgmmaCta(self.head_dim, self.value_dim, leans, self.scores.texts)

    @property
    def queries(self) -> int:
        return self.cta.queries

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads, self.tiles, self.cta.parts),
            block=(self.cta.threads, 1, 1),
            shared_bytes=self.cta.shared.nbytes,
            resident=1,
        )

    @classmethod
    def examples(cls) -> Mapping[str, PrefillWgmma]:
        return wgmma_examples(cls)
