"""What changes from token to token: device scalars that kernels read and advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice


class DecodeState(Owner):
    """The token sequence and the place in it, in device memory.

    ``tokens`` (max_len,) u32: the whole sequence, prompt and answer. ``position`` (1,) u32: index
    of the token that the next step processes. ``known`` (1,) u32: how many entries of ``tokens``
    are valid. ``sampled`` (1,) u32: the token that the last greedy step chose.
    """

    def __init__(self, device: Device, max_len: int) -> None:
        sizes = {"tokens": 4 * max_len, "position": 4, "known": 4, "sampled": 4}
        self._arena = device.arena(sizes, "decode state")
        self.tokens: Slice = self._arena["tokens"]
        self.position: Slice = self._arena["position"]
        self.known: Slice = self._arena["known"]
        self.sampled: Slice = self._arena["sampled"]
        self.tokens.upload(np.zeros(max_len, np.uint32))
        self.sampled.upload(np.zeros(1, np.uint32))
        self.seek(0, 0)

    def write_tokens(self, start: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` at ``start`` and make them the end of the known sequence."""
        values = np.asarray(tokens, np.uint32)
        self.tokens.upload(values, offset=4 * start)
        self.known.upload(np.array([start + len(values)], np.uint32))

    def seek(self, position: int, known: int) -> None:
        """Set the next position to process and the number of valid tokens."""
        self.position.upload(np.array([position], np.uint32))
        self.known.upload(np.array([known], np.uint32))

    def close(self) -> None:
        """Free the state; closing twice does nothing."""
        self._arena.close()
