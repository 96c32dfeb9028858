"""Mamba's selective scan for prompts: sequential over tokens, with many tokens prefetched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.scan_tiles import ScanTiles
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.limits import limited, up_to
from urdir.ptxgen.spec import LaunchShape, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS

#: Maximum number of warps per CTA that advance states.
MAX_WARPS = 16


@dataclass(frozen=True)
class PrefillScan(SelectiveScan):
    """`SelectiveScan` for segments of prompts, bit for bit.

    A token's exponentials and products do not depend on earlier tokens; only a product and a sum
    per value of the state do. So ``warps`` of a CTA advance states by a tile of tokens, whose
    instructions are independent, while others load the next tile to shared memory.
    """

    warps: int = 4

    name = "prefill_scan"
    limits = limited(**SelectiveScan.limits, warps=up_to(MAX_WARPS))

    @staticmethod
    def can_pack(rows: int, channels: int, size: int) -> bool:
        """Places beyond the last channel would not be cleared, and the rows of a group must be
        those whose sums a channel's lanes end with."""
        return channels % TILE_COLS == 0 and size % 16 == 0

    def check_segments(self) -> None:
        if not self.segments:
            raise PtxgenError("prefill_scan: no segments: single rows are selective_scan's")

    @property
    def parts(self) -> int:
        """Lanes that share a channel: one for each sum of `SelectiveScan`'s lanes."""
        return self.lanes * self.sums

    @property
    def own_channels(self) -> int:
        return 32 * self.warps // self.parts

    @cached_property
    def tiles(self) -> ScanTiles:
        """The tiles of tokens in shared memory."""
        return ScanTiles(self.own_channels, self.size, self.parts, self.rows)

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.channels, self.own_channels)
        return LaunchShape(
            grid=(ctas, self.segments, 1),
            block=(32 * (self.warps + self.tiles.bringing_warps), 1, 1),
            shared_bytes=self.tiles.nbytes,
            resident=1,
        )

    @classmethod
    def examples(cls) -> dict[str, PrefillScan]:
        prompt, several = (partial(cls, max_len=64, segments=n) for n in (1, 4))
        return {
            "one token": prompt(1, 1, channels=5, size=16),
            "a prompt": prompt(37, 2, channels=70, size=16, warps=10),
            "eight values": prompt(6, 1, channels=70, size=8, warps=6),
            "long states": prompt(8, 1, channels=40, size=128, warps=8),
            "odd eights": prompt(9, 2, channels=9, size=24, warps=2),
            "many values": prompt(5, 1, channels=3, size=40, warps=4),
            "segments": several(50, 6, channels=40, size=16, warps=7),
            "many channels": prompt(40, 1, channels=130, size=16, warps=16),
            "packed": prompt(13, 1, channels=256, size=16, warps=10, packs=True),
            "packed segments": several(45, 6, channels=256, size=16, warps=9, packs=True),
        }
