"""The selective scan of Mamba over prompts: tokens in order, many at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.selective_scan import THREADS, SelectiveScan
from urdir.ptxgen.spec import LaunchShape, ceil_div

#: Tokens of a tile at most, and bytes of two tiles.
TILE, TILES_NBYTES = 32, 48 << 10
#: Tokens whose results lanes add up together, where a lane has no more than so many values.
TOGETHER, FEW_VALUES = 4, 16


@dataclass(frozen=True)
class PrefillScan(SelectiveScan):
    """`SelectiveScan` of segments of prompts, bit for bit.

    A token's exponentials and products need no token before it; what goes from token to token is a
    product and a sum of each value of the state. So half of the warps bring a tile of tokens to
    shared memory while the others move states on by the tile before, all of whose instructions
    stand side by side.
    """

    name = "prefill_scan"
    template = ("urdir.templates", "prefill_scan.ptx.j2")

    def check_segments(self) -> None:
        if not self.segments:
            raise PtxgenError("prefill_scan: no segments: single rows are selective_scan's")

    @property
    def together(self) -> int:
        """Tokens whose results lanes add up together."""
        return TOGETHER if self.size // self.lanes <= FEW_VALUES else 1

    @property
    def tile(self) -> int:
        """Tokens of a tile: b and c of each, and four numbers of each channel."""
        most = min(TILE, TILES_NBYTES // (2 * (8 * self.size + 16 * self.own_channels)))
        return self.together * min(most // self.together, ceil_div(self.rows, self.together))

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.channels, self.own_channels)
        return LaunchShape(grid=(ctas, self.segments, 1), block=(2 * THREADS, 1, 1))

    @classmethod
    def examples(cls) -> Mapping[str, PrefillScan]:
        prompt, several = (partial(cls, max_len=64, segments=n) for n in (1, 4))
        return {
            "one token": prompt(1, 1, channels=5, size=16),
            "a prompt": prompt(37, 2, channels=70, size=16),
            "two lanes": prompt(6, 1, channels=70, size=8),
            "long states": prompt(8, 1, channels=40, size=128),
            "odd vectors": prompt(9, 2, channels=9, size=12),
            "many values": prompt(5, 1, channels=3, size=20),
            "segments": several(50, 6, channels=40, size=16),
        }
