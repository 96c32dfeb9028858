"""Short causal convolution for prompts: each thread has a tile of a segment's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.causal_conv import THREADS, CausalConv
from urdir.ptxgen.kernels.recurrent.rows import SEGMENT_ROWS
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape


@dataclass(frozen=True)
class PrefillConv(CausalConv):
    """`CausalConv` for segments of prompts, bit for bit.

    With ``packs`` (`can_pack`) y is also written as ``packed`` f16 for products (`weights.packed`).
    """

    packs: bool = False

    #: Rows per thread, all of one segment; a group of packed ones.
    tile = SEGMENT_ROWS

    name = "prefill_conv"
    template = ("urdir.templates", "recurrent/prefill_conv.ptx.j2")

    def check_segments(self) -> None:
        if not self.segments:
            raise PtxgenError("prefill_conv: no segments: single rows are causal_conv's")
        if self.packs and not self.can_pack(self.channels):
            raise PtxgenError(
                f"prefill_conv packs channels that are multiples of {TILE_COLS}: not "
                f"{self.channels}"
            )

    @staticmethod
    def can_pack(channels: int) -> bool:
        """Whether ``packs`` is supported: places beyond the last channel would not be cleared."""
        return channels % TILE_COLS == 0

    @property
    def groups(self) -> int:
        """Groups of packed rows; those beyond ``rows`` are zeros."""
        return ceil_div(self.rows, GROUP)

    @property
    def params(self) -> tuple[Param, ...]:
        if not self.packs:
            return super().params
        packed = packed_shape(self.rows, self.channels)
        return *super().params, Param("packed", "f16", packed, Access.OUT)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.channels, THREADS), ceil_div(self.rows, self.tile), 1),
            block=(THREADS, 1, 1),
        )

    @property
    def tolerance(self) -> Tolerance:
        exact = super().tolerance
        return exact.rounded_to("f16") if self.packs else exact

    def reference(self, **inputs: Any) -> dict[str, Array]:
        made = super().reference(**inputs)
        return made | {"packed": pack(made["y"])} if self.packs else made

    @classmethod
    def examples(cls) -> Mapping[str, PrefillConv]:
        silu = Activation("silu")
        prompt, several = (partial(cls, max_len=64, segments=n) for n in (1, 3))
        return {
            "a short prompt": prompt(2, 2, channels=40, taps=4, activation=silu),
            "a prompt of one": prompt(1, 1, channels=33, taps=9),
            "a prompt": prompt(37, 3, channels=150, taps=4, bias=True, activation=silu),
            "a gated prompt": prompt(24, 2, channels=128, taps=3, gated=True),
            "two taps": prompt(9, 2, channels=12, taps=2, bias=True),
            "nine taps": prompt(20, 2, channels=12, taps=9),
            "segments": several(45, 4, channels=130, taps=4, bias=True, activation=silu),
            "gated segments": several(64, 9, channels=40, taps=3, gated=True),
            "ring": several(45, 4, channels=130, taps=4, activation=silu, most=3),
            "gated ring": prompt(2, 2, channels=40, taps=9, gated=True, most=2),
            "packed": several(45, 4, channels=256, taps=4, bias=True, activation=silu, packs=True),
        }
