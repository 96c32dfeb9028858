"""What changes from token to token: device memory that kernels read and advance.

A step processes *rows*, each the token at ``position[r]`` of sequence ``sequence[r]``; a position
of ``IDLE`` marks a row without work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.owner import Owner
from urdir.ptxgen.kernels.sampling import SETTINGS_WORDS

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice

IDLE = 0xFFFFFFFF
#: Tokens of a row that the host may be late in reading: a power of two.
MAILBOX_SLOTS = 8


class DecodeState(Owner):
    """The sequences' tokens, and the rows of the next step.

    ``tokens`` (sequences, max_len) u32: prompts and answers. ``known`` (sequences,) u32: how many
    of them are valid. ``sequence``, ``position``, ``sampled`` (rows,) u32: the rows of a decode
    step and the tokens it chose. ``chunk_sequence``, ``chunk_position`` (chunk,) u32: the rows of
    a prompt step. ``settings`` (sequences, SETTINGS_WORDS) u32 and ``seed`` (sequences,) u64: how
    each sequence's tokens are sampled. ``mailbox`` (rows, MAILBOX_SLOTS) u32, in page-locked memory
    of the host: the token that a step chose at position p, in place p % MAILBOX_SLOTS.
    """

    def __init__(self, device: Device, sequences: int, max_len: int, rows: int, chunk: int) -> None:
        self.sequences = sequences
        self.max_len = max_len
        self.rows = rows
        self.chunk = chunk
        self._arena = device.arena(state_sizes(sequences, max_len, rows, chunk), "decode state")
        for name, part in self._arena.items():
            if name.startswith(("position", "chunk_position")):
                part.fill(0xFF)
            else:
                part.fill(0)
        self.mailbox = device.pinned(4 * rows * MAILBOX_SLOTS, "mailbox")
        self._letters = self.mailbox.view(np.uint32, rows * MAILBOX_SLOTS).data

    def __getitem__(self, name: str) -> Slice:
        """A part by name."""
        return self._arena[name]

    def write_tokens(self, sequence: int, start: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` at ``start`` of a sequence and make them the end of what is known."""
        values = np.asarray(tokens, np.uint32)
        self["tokens"].upload(values, offset=4 * (sequence * self.max_len + start))
        self.write_known(sequence, start + len(values))

    def write_known(self, sequence: int, known: int) -> None:
        """Set the number of valid tokens of a sequence."""
        self["known"].upload(np.array([known], np.uint32), offset=4 * sequence)

    def chosen(self, row: int, position: int) -> int:
        """The token that a step, now complete, chose after the one at ``position``."""
        token: int = self._letters[row * MAILBOX_SLOTS + position % MAILBOX_SLOTS]
        return token

    def write_rows(self, rows: Sequence[tuple[int, int]]) -> None:
        """Make (sequence, position) pairs the rows of the next decode steps, the rest idle."""
        self._write_pairs("sequence", "position", rows, self.rows)

    def write_chunk(self, sequence: int, start: int, end: int) -> None:
        """Make positions ``start`` to ``end`` of a sequence the rows of the next prompt step."""
        pairs = [(sequence, position) for position in range(start, end)]
        self._write_pairs("chunk_sequence", "chunk_position", pairs, self.chunk)

    def _write_pairs(
        self, first: str, second: str, pairs: Sequence[tuple[int, int]], count: int
    ) -> None:
        table = np.full((2, count), IDLE, np.uint32)
        table[0] = pairs[0][0] if pairs else 0  # an idle row's sequence must still exist
        table[:, : len(pairs)] = np.asarray(pairs, np.uint32).reshape(-1, 2).T
        self[first].upload(table[0])
        self[second].upload(table[1])

    def close(self) -> None:
        """Free the state; closing twice does nothing."""
        self._arena.close()
        self.mailbox.close()


def state_sizes(sequences: int, max_len: int, rows: int, chunk: int) -> dict[str, int]:
    """Bytes of every part of the state, by name."""
    return {
        "tokens": 4 * sequences * max_len,
        "known": 4 * sequences,
        "settings": 4 * SETTINGS_WORDS * sequences,
        "seed": 8 * sequences,
        "sequence": 4 * rows,
        "position": 4 * rows,
        "sampled": 4 * rows,
        "chunk_sequence": 4 * chunk,
        "chunk_position": 4 * chunk,
    }
