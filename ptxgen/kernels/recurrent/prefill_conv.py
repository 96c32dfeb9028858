"""Short causal convolution for prompts: each thread has a tile of a segment's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.causal_conv import THREADS, CausalConv
from urdir.ptxgen.kernels.recurrent.rows import SEGMENT_ROWS
from urdir.ptxgen.spec import LaunchShape, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS


@dataclass(frozen=True)
class PrefillConv(CausalConv):
    """`CausalConv` for segments of prompts, bit for bit."""

    #: Rows per thread, all of one segment; a group of packed ones.
    tile = SEGMENT_ROWS

    name = "prefill_conv"

    def check_segments(self) -> None:
        if not self.segments:
            raise PtxgenError("prefill_conv: no segments: single rows are causal_conv's")
        if self.beside > 1:
            raise PtxgenError("prefill_conv: a convolution a launch")

    @staticmethod
    def can_pack(rows: int, channels: int) -> bool:
        """Those of rows beyond the last are cleared."""
        return channels % TILE_COLS == 0

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.channels, THREADS), ceil_div(self.rows, self.tile), 1),
            block=(THREADS, 1, 1),
        )

    @classmethod
    def examples(cls) -> dict[str, PrefillConv]:
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
            "packed, gated": prompt(21, 2, channels=512, taps=3, gated=True, packs=True),
        }
