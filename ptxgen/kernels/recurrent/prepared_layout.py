"""How the data that are prepared of a chunk lie in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from urdir.ptxgen.spec import Array

#: Tokens per chunk, and per block of it: the height of an mma.
CHUNK, BLOCK = 32, 16
#: Bytes of a block of tokens by tokens, f16.
BLOCK_NBYTES = 2 * BLOCK * BLOCK
#: f16 values of padding after each row of a tile, so that eight rows' 16 bytes at the same offset
#: lie in different banks.
PADDING = 8


@dataclass(frozen=True)
class PreparedLayout:
    """Arrays of a chunk and a head with keys of ``key_dim``, for the ``delta`` rule, by
    ``channels``: see `RecurrentChunks`."""

    key_dim: int
    delta: bool
    channels: bool

    @property
    def blocks(self) -> int:
        """Blocks of tokens of a chunk."""
        return CHUNK // BLOCK

    @property
    def tiles(self) -> tuple[str, ...]:
        """Matrices of a token by a key."""
        return ("keys", "queries", *(("left",) if self.channels else ()))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Blocks of tokens, each with itself and those before it."""
        return tuple((i, j) for i in range(self.blocks) for j in range(i + 1))

    @property
    def squares(self) -> tuple[str, ...]:
        """Token by token matrices: a block per pair, in the order of the multiplying lanes: lane 4
        r + c has rows r and r + 8, and in each columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9."""
        return ("scores", *(("solution",) if self.delta else ()))

    @property
    def numbers(self) -> Mapping[str, int]:
        """Number of values of each kind."""
        kinds = ("of_w", "of_y") if self.channels else ("before", "after", "of_w", "of_y")
        of_keys = {"decay": self.key_dim, "most": 4} if self.channels else {}
        return dict.fromkeys(kinds, CHUNK) | of_keys

    @property
    def shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Element type and shape of each array, per chunk and head."""
        return {
            "tiles": ("f16", (len(self.tiles), CHUNK, self.key_dim + PADDING)),
            "squares": ("f16", (len(self.squares), len(self.pairs), 32, 8)),
            "numbers": ("f32", (sum(self.numbers.values()),)),
        }

    @property
    def nbytes_of(self) -> Mapping[str, int]:
        """Bytes of each array, per chunk and head."""
        each = {"f16": 2, "f32": 4}
        shapes = self.shapes.items()
        return {name: each[dtype] * math.prod(shape) for name, (dtype, shape) in shapes}

    @property
    def places(self) -> Mapping[str, int]:
        """Byte offset of each part of an array, per chunk and head."""
        sizes = (
            dict.fromkeys(self.tiles, CHUNK * self.stride),
            dict.fromkeys(self.squares, len(self.pairs) * BLOCK_NBYTES),
            {name: 4 * count for name, count in self.numbers.items()},
        )
        return {
            name: place
            for parts in sizes
            for name, place in zip(parts, accumulate(parts.values(), initial=0), strict=False)
        }

    @property
    def stride(self) -> int:
        """Bytes of a row of a tile."""
        return 2 * (self.key_dim + PADDING)

    def to_blocks(self, square: Array) -> Array:
        """A square (tokens, tokens) in storage order: (pairs, 32, 8)."""
        blocks = square.reshape(self.blocks, BLOCK, self.blocks, BLOCK)
        rows, columns = np.transpose(self.pairs)
        parts: Array = blocks[rows, :, columns].reshape(-1, 2, 8, 2, 4, 2)
        return parts.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 32, 8)

    def of_blocks(self, parts: Array) -> Array:
        """The inverse of `to_blocks`."""
        square = np.zeros((self.blocks, BLOCK, self.blocks, BLOCK))
        rows, columns = np.transpose(self.pairs)
        blocks = parts.reshape(-1, 8, 4, 2, 2, 2).transpose(0, 3, 1, 4, 2, 5)
        square[rows, :, columns] = blocks.reshape(-1, BLOCK, BLOCK)
        return square.reshape(CHUNK, CHUNK)


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """What is ``prepared`` of a chunk, then ``columns`` values of each of its tokens, then a
    barrier; places in bytes."""

    prepared: PreparedLayout
    columns: int

    @property
    def places(self) -> Mapping[str, int]:
        """Start of each part of a prepared chunk in shared memory, contiguous, and their "end", in
        bytes."""
        sizes = self.prepared.nbytes_of
        squares, numbers = sizes["tiles"], sizes["tiles"] + sizes["squares"]
        begins = dict.fromkeys(self.prepared.squares, squares)
        begins |= dict.fromkeys(self.prepared.numbers, numbers)
        places = {name: begins.get(name, 0) + at for name, at in self.prepared.places.items()}
        return {**places, "end": numbers + sizes["numbers"]}

    @property
    def value_stride(self) -> int:
        """Bytes of a token's values: four more than needed, so that neighbouring lanes' tokens lie
        in different banks."""
        return 4 * (self.columns + 4)

    @property
    def barrier_place(self) -> int:
        """After the values: the barrier that counts arrived bytes."""
        return self.places["end"] + CHUNK * self.value_stride

    @property
    def nbytes(self) -> int:
        """Bytes of all that is loaded for a chunk."""
        return self.barrier_place + 16
