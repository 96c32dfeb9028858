"""Tiles of tokens in the shared memory of a scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.spec import ceil_div

#: Maximum tokens of a tile, and bytes of all places.
MAX_TOKENS, MAX_NBYTES = 32, 64 << 10


@dataclass(frozen=True, slots=True)
class ScanTiles:
    """``places`` for tiles of the tokens of ``channels``, which share b and c of ``size`` values:
    one is used while the next one comes. Up to ``rows`` tokens, in rounds of ``parts``."""

    channels: int
    size: int
    parts: int
    rows: int

    places: ClassVar[int] = 2

    @property
    def bringing(self) -> int:
        """Warps that load the tiles of a place."""
        return ceil_div(self.channels, 8 if self.channels <= 48 else 16)

    @property
    def bringing_warps(self) -> int:
        """Warps that load the tiles of all places."""
        return self.places * self.bringing

    @property
    def quad_nbytes(self) -> int:
        """Bytes of four tokens' numbers, four per channel, and of padding, so that one number of
        eight tokens and a warp's channels fall into separate banks."""
        return 64 * self.channels + 64

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token in all places: b and c, and its part of `quad_nbytes`."""
        return self.places * (8 * self.size + self.quad_nbytes // 4)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        most = min(MAX_TOKENS, MAX_NBYTES // self.token_nbytes)
        return self.parts * min(most // self.parts, ceil_div(self.rows, self.parts))

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return self.tokens * self.token_nbytes
