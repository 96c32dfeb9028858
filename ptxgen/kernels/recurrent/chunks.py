"""Chunked form of recurrences for prompts: the prepared data of each chunk and their layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.heads import RecurrentHeads
from urdir.ptxgen.kernels.recurrent.heads_examples import chunk_examples
from urdir.ptxgen.spec import Access, Array, Param, Tolerance, ceil_div
from urdir.ptxgen.target import since

#: Tokens per chunk, and per block of it: the height of an mma.
CHUNK, BLOCK = 32, 16
#: Maximum number of keys whose state fits a warp's registers.
MAX_KEYS = 128
#: Bytes of a block of tokens by tokens, f16.
BLOCK_NBYTES = 2 * BLOCK * BLOCK
#: f16 values of padding after each row of a tile, so that eight rows' 16 bytes at the same offset
#: lie in different banks.
PADDING = 8


@dataclass(frozen=True)
class RecurrentChunks(RecurrentHeads):
    """What `RecurrentHeads` computes of segments, by chunks of `CHUNK` tokens from the first of
    each segment: the chunked form of SSD (Dao & Gu 2024, arXiv 2405.21060) and of the gated delta
    rule (Yang et al. 2024, arXiv 2412.06464).

    With G the sums of log g along a chunk, W its additions (e), all tokens of it at once:

        y_i = scale * (exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (k_j . q_i) w_j)
        S = exp(G_end) S + sum over j of exp(G_end - G_j) w_j k_j^T

    and for the delta rule w_i = beta_i (v_i - exp(G_i) S k_i - sum over j < i of exp(G_i - G_j)
    (k_j . k_i) w_j), a triangular system. Everything without S is prepared for all chunks at once
    (`PrepareChunks`); then states are advanced chunk by chunk (`ChunkedRecurrence`).

    Prepared data, per chunk and head:

    - ``tiles``: keys and queries divided by their lengths (f16; per key head); with ``channels``,
      per value head, decayed from the chunk's start on, and keys decayed until its end;
    - ``squares`` (f16), block by block: scores, exp(G_i - G_j) (k_j . q_i) for j <= i; for the
      delta rule the inverse of each block's triangular system, and below the diagonal what earlier
      blocks subtract;
    - ``numbers`` (f32): exp(G_i), exp(G_end - G_i), and factors of each token's addition and
      result; with ``channels``, the factors, exp(G_end) of each key, and the largest four times.

    The chunk that starts ``CHUNK`` i rows after the first row r of segment s has index r // CHUNK +
    s + i.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.segments or not self.serves(self.key_dim, self.value_dim, self.delta):
            raise PtxgenError(
                f"{self.name}: {self.segments} segments, keys of {self.key_dim}, {self.value_dim} "
                f"values: it is for segments, multiples of 4 values, and keys of multiples of "
                f"{BLOCK} up to {MAX_KEYS}, or of {2 * BLOCK} up to {2 * MAX_KEYS} without the "
                "delta rule"
            )

    @classmethod
    def serves(cls, key_dim: int, value_dim: int, delta: bool) -> bool:
        """Whether heads of this shape have a chunked form."""
        if value_dim % 4:  # bulk copies are of 16 bytes
            return False
        if key_dim <= MAX_KEYS:
            return key_dim % BLOCK == 0
        return key_dim % (2 * BLOCK) == 0 and key_dim <= 2 * MAX_KEYS and not delta

    @property
    def targets(self) -> tuple[str, ...]:
        # bulk copies
        return since(90)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return CHUNK

    @property
    def blocks(self) -> int:
        """Blocks of tokens of a chunk."""
        return CHUNK // BLOCK

    # ---- prepared data ----

    @property
    def slots(self) -> int:
        """Slots for chunks."""
        return self.rows // CHUNK + self.segments

    @property
    def tile_heads(self) -> int:
        """Heads with tiles."""
        return self.heads if self.channels else self.key_heads

    def tile_head(self, head: int) -> int:
        """The head whose tiles a value head uses."""
        return head if self.channels else self.key_head(head)

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
    def prepared_shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Element type and shape of each array, per chunk and head."""
        return {
            "tiles": ("f16", (len(self.tiles), CHUNK, self.key_dim + PADDING)),
            "squares": ("f16", (len(self.squares), len(self.pairs), 32, 8)),
            "numbers": ("f32", (sum(self.numbers.values()),)),
        }

    def prepared_params(self, access: Access) -> tuple[Param, ...]:
        """The arrays of prepared data."""
        heads = {"tiles": "tile_heads"}
        return tuple(
            Param(name, dtype, ("slots", heads.get(name, "heads"), *shape), access)
            for name, (dtype, shape) in self.prepared_shapes.items()
        )

    @property
    def nbytes_of(self) -> Mapping[str, int]:
        """Bytes of each array, per chunk and head."""
        each = {"f16": 2, "f32": 4}
        shapes = self.prepared_shapes.items()
        return {name: each[dtype] * math.prod(shape) for name, (dtype, shape) in shapes}

    @property
    def part_places(self) -> Mapping[str, int]:
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

    @property
    def prepared_nbytes(self) -> int:
        """Bytes of the prepared data of all rows, as one segment."""
        sizes, chunks = self.nbytes_of, ceil_div(self.rows, CHUNK)
        own = sizes["squares"] + sizes["numbers"]
        return chunks * (self.tile_heads * sizes["tiles"] + self.heads * own)

    # ---- in numpy ----

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

    def chunks_of(self, inputs: Mapping[str, Any]) -> Iterator[tuple[int, range, int]]:
        """The place of each chunk, its rows and the segment."""
        for index, (first, end) in enumerate(inputs["segment"].tolist()):
            for i, row in enumerate(range(first, end, CHUNK)):
                yield first // CHUNK + index + i, range(row, min(row + CHUNK, end)), index

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each factor that is rounded to f16."""
        return Tolerance(rtol=4 * 2**-11)

    @classmethod
    def examples(cls) -> Mapping[str, Self]:
        return chunk_examples(cls)
