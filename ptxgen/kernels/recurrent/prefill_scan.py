"""The selective scan of Mamba over prompts: tokens in order, many at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import LaunchShape, ceil_div

#: Warps that move states on, in a CTA at most.
MAX_WARPS = 16
#: Tokens of a tile at most, and bytes of two tiles.
TILE, TILES_NBYTES = 32, 64 << 10


@dataclass(frozen=True)
class PrefillScan(SelectiveScan):
    """`SelectiveScan` of segments of prompts, bit for bit.

    A token's exponentials and products need no token before it; what goes from token to token is a
    product and a sum of each value of the state. So ``warps`` of a CTA move states on by a tile of
    tokens, all of whose instructions stand side by side, while others bring the next tile to shared
    memory.
    """

    warps: int = 4

    name = "prefill_scan"
    template = ("urdir.templates", "prefill_scan.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.warps <= MAX_WARPS:
            raise PtxgenError(f"prefill_scan: {self.warps} warps with states: 1 to {MAX_WARPS}")

    def check_segments(self) -> None:
        if not self.segments:
            raise PtxgenError("prefill_scan: no segments: single rows are selective_scan's")

    @property
    def own_channels(self) -> int:
        return 32 * self.warps // self.lanes

    @property
    def bringing(self) -> int:
        """Warps that bring every other tile."""
        return ceil_div(self.own_channels, 8 if self.warps <= 12 else 16)

    @property
    def quarters(self) -> int:
        """Quarters of an SM with warps that bring: those that have one of ``warps`` fewer, where
        there are several. A CTA's i-th warp is in quarter i % 4."""
        more = self.warps % 4
        return 4 - more if more in (1, 2) else 4

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token in both places: b and c, and its part of `quad_nbytes`."""
        return 2 * (8 * self.size + self.quad_nbytes // 4)

    @property
    def quad_nbytes(self) -> int:
        """Bytes of four tokens' numbers, four of each channel, and of a gap, so that one number of
        eight tokens and a warp's channels has a bank each."""
        return 64 * self.own_channels + 64

    @property
    def tile(self) -> int:
        """Tokens of a tile: as many turns as there are lanes for a token each."""
        most = min(TILE, TILES_NBYTES // self.token_nbytes)
        return self.lanes * min(most // self.lanes, ceil_div(self.rows, self.lanes))

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.channels, self.own_channels)
        rounds, last = divmod(2 * self.bringing - 1, self.quarters)
        return LaunchShape(
            grid=(ctas, self.segments, 1),
            block=(32 * (self.warps + 4 * rounds + last + 1), 1, 1),
            shared_bytes=self.tile * self.token_nbytes,
        )

    @classmethod
    def examples(cls) -> Mapping[str, PrefillScan]:
        prompt, several = (partial(cls, max_len=64, segments=n) for n in (1, 4))
        return {
            "one token": prompt(1, 1, channels=5, size=16),
            "a prompt": prompt(37, 2, channels=70, size=16, warps=5),
            "eight values": prompt(6, 1, channels=70, size=8, warps=3),
            "long states": prompt(8, 1, channels=40, size=128, warps=4),
            "odd eights": prompt(9, 2, channels=9, size=24, warps=1),
            "many values": prompt(5, 1, channels=3, size=40, warps=2),
            "segments": several(50, 6, channels=40, size=16, warps=7),
            "many warps": prompt(40, 1, channels=130, size=16, warps=8),
        }
