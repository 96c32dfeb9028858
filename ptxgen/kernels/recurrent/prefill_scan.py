"""The selective scan of Mamba over prompts: tokens in order, many at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import LaunchShape, ceil_div

#: Warps that move states on, in a CTA at most.
MAX_WARPS = 8
#: Tokens of a tile at most, and bytes of two tiles.
TILE, TILES_NBYTES = 32, 48 << 10


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
        """Warps that bring every other tile: half as many as move states, and a thread for each
        channel."""
        return max(ceil_div(self.warps, 2), ceil_div(self.own_channels, 32))

    @property
    def idle(self) -> int:
        """Warps between the halves of those that bring: one where, of five that move states, two
        share a quarter of an SM, which then has no other."""
        return 1 if self.warps == 5 else 0

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token in both places: b and c, and four numbers of each channel."""
        return 2 * (8 * self.size + 16 * self.own_channels)

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        most = min(TILE, TILES_NBYTES // self.token_nbytes)
        return 4 * min(most // 4, ceil_div(self.rows, 4))

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.channels, self.own_channels)
        threads = 32 * (self.warps + 2 * self.bringing + self.idle)
        return LaunchShape(
            grid=(ctas, self.segments, 1),
            block=(threads, 1, 1),
            shared_bytes=self.tile * self.token_nbytes,
        )

    @classmethod
    def examples(cls) -> Mapping[str, PrefillScan]:
        prompt, several = (partial(cls, max_len=64, segments=n) for n in (1, 4))
        return {
            "one token": prompt(1, 1, channels=5, size=16),
            "a prompt": prompt(37, 2, channels=70, size=16, warps=5),
            "two lanes": prompt(6, 1, channels=70, size=8, warps=3),
            "long states": prompt(8, 1, channels=40, size=128, warps=4),
            "odd vectors": prompt(9, 2, channels=9, size=24, warps=1),
            "many values": prompt(5, 1, channels=3, size=40, warps=2),
            "segments": several(50, 6, channels=40, size=16, warps=7),
            "many warps": prompt(40, 1, channels=130, size=16, warps=8),
        }
