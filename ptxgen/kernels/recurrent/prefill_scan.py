"""The selective scan of Mamba over prompts: tokens in order, many at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

#: Channels of a CTA at most, four at a time.
MAX_QUADS = 16
#: Tokens of a tile at most, and bytes of all places.
TILE, TILES_NBYTES = 32, 64 << 10


@dataclass(frozen=True)
class PrefillScan(SelectiveScan):
    """`SelectiveScan` of segments of prompts, bit for bit.

    A token's exponentials and products need no token before it; what goes from token to token is a
    product and a sum of each value of the state. So `warps` of a CTA, which has four times
    ``quads`` channels, move states on by a tile of tokens, all of whose instructions stand side by
    side, while others bring the next tile to shared memory.

    With ``packs`` (`can_pack`) y is the packed f16 that the next product takes (`weights.packed`).
    """

    quads: int = 4
    packs: bool = False

    name = "prefill_scan"
    template = ("urdir.templates", "prefill_scan.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.quads <= MAX_QUADS:
            raise PtxgenError(
                f"prefill_scan: {self.quads} times four channels a CTA: 1 to {MAX_QUADS}"
            )
        if self.packs and not self.can_pack(self.channels, self.size):
            raise PtxgenError(
                f"prefill_scan packs channels that are multiples of {TILE_COLS}, with multiples of "
                f"16 values: not {self.channels} of {self.size}"
            )

    @staticmethod
    def can_pack(channels: int, size: int) -> bool:
        """Whether there is a form with ``packs``: nobody clears places beyond the last channel, and
        groups of rows are parts of tiles."""
        return channels % TILE_COLS == 0 and size % 16 == 0

    @property
    def groups(self) -> int:
        """Groups of packed rows; those beyond ``rows`` are zeros."""
        return ceil_div(self.rows, GROUP)

    @property
    def out_param(self) -> Param:
        if not self.packs:
            return super().out_param
        return Param("y", "f16", packed_shape(self.rows, self.channels), Access.OUT)

    @property
    def tolerance(self) -> Tolerance:
        exact = super().tolerance
        return replace(exact, rtol=exact.rtol + 2**-11) if self.packs else exact

    def reference(self, **inputs: Any) -> dict[str, Array]:
        made = super().reference(**inputs)
        return made | {"y": pack(made["y"])} if self.packs else made

    def check_segments(self) -> None:
        if not self.segments:
            raise PtxgenError("prefill_scan: no segments: single rows are selective_scan's")

    @property
    def wide(self) -> int:
        """Warps that have eight channels, of four lanes each: as many in every quarter of an SM,
        so that their exponentials take as long. All, where eight lanes cannot share a state; none,
        where four have too many values each."""
        if self.sums == 1:
            return ceil_div(self.quads, 2)
        return self.quads // 8 * 4 if self.size <= 64 else 0

    @property
    def narrow(self) -> int:
        """Warps that have the other channels, four each, of eight lanes."""
        return self.quads - 2 * self.wide if self.sums == 2 else 0

    @property
    def warps(self) -> int:
        """Warps that move states on."""
        return self.wide + self.narrow

    @property
    def wide_channels(self) -> int:
        """Channels of the wide warps, which come first."""
        return 8 * self.wide

    @property
    def own_channels(self) -> int:
        return self.wide_channels + 4 * self.narrow

    @property
    def bringing(self) -> int:
        """Warps that bring the tiles of a place."""
        return ceil_div(self.own_channels, 8 if self.quads <= 12 else 16)

    @property
    def places(self) -> int:
        """Places for tiles."""
        return 2

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token in all places: b and c, and its part of `quad_nbytes`."""
        return self.places * (8 * self.size + self.quad_nbytes // 4)

    @property
    def quad_nbytes(self) -> int:
        """Bytes of four tokens' numbers, four of each channel, and of a gap, so that one number of
        eight tokens and a warp's channels has a bank each."""
        return 64 * self.own_channels + 64

    @property
    def tile(self) -> int:
        """Tokens of a tile: as many turns as there are lanes for a token each."""
        most, lanes = min(TILE, TILES_NBYTES // self.token_nbytes), self.lanes * self.sums
        return lanes * min(most // lanes, ceil_div(self.rows, lanes))

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.channels, self.own_channels)
        return LaunchShape(
            grid=(ctas, self.segments, 1),
            block=(32 * (self.warps + self.places * self.bringing), 1, 1),
            shared_bytes=self.tile * self.token_nbytes,
            resident=1,
        )

    @classmethod
    def examples(cls) -> Mapping[str, PrefillScan]:
        prompt, several = (partial(cls, max_len=64, segments=n) for n in (1, 4))
        return {
            "one token": prompt(1, 1, channels=5, size=16),
            "a prompt": prompt(37, 2, channels=70, size=16, quads=10),
            "eight values": prompt(6, 1, channels=70, size=8, quads=6),
            "long states": prompt(8, 1, channels=40, size=128, quads=8),
            "odd eights": prompt(9, 2, channels=9, size=24, quads=2),
            "many values": prompt(5, 1, channels=3, size=40, quads=4),
            "segments": several(50, 6, channels=40, size=16, quads=7),
            "many channels": prompt(40, 1, channels=130, size=16, quads=16),
            "packed": prompt(13, 1, channels=256, size=16, quads=10, packs=True),
            "packed segments": several(45, 6, channels=256, size=16, quads=9, packs=True),
        }
