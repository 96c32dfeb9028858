"""Pairs of rows and experts, sorted by expert: the output of `GroupExperts`."""

from __future__ import annotations

import numpy as np

from urdir.ptxgen.spec import Array, ceil_div

#: Marks a place without a pair.
NO_PAIR = 0xFFFFFFFF


def most_tiles(rows: int, experts: int, used: int, tile: int) -> int:
    """Maximum number of tiles of ``tile`` pairs of one expert, for any choice."""
    pairs = rows * used
    chosen = min(experts, pairs)
    return chosen + (pairs - chosen) // tile


def most_places(rows: int, experts: int, used: int, align: int) -> int:
    """Maximum number of places that pairs take, if those of each expert start at multiples of
    ``align``; a multiple of it."""
    pairs = rows * used
    return (pairs + (align - 1) * min(experts, pairs)) // align * align


def grouped(choice: Array, experts: int, tile: int, align: int = 1) -> dict[str, Array]:
    """The lists ``pair`` and ``tile_of`` of `GroupExperts` for the experts that each row chose,
    (rows, used) u32."""
    shape = (len(choice), experts, choice.shape[1])
    pair = np.full(most_places(*shape, align), NO_PAIR, np.uint32)
    tile_of = np.zeros((most_tiles(*shape, tile), 4), np.uint32)
    place = number = 0
    for expert in range(experts):
        chosen = np.flatnonzero(choice == expert)
        pair[place : place + len(chosen)] = chosen
        for first in range(0, len(chosen), tile):
            tile_of[number] = expert, place + first, min(tile, len(chosen) - first), 0
            number += 1
        place += ceil_div(len(chosen), align) * align
    return {"pair": pair, "tile_of": tile_of}


def random_choice(rng: np.random.Generator, rows: int, experts: int, used: int) -> Array:
    """Different experts for each row, (rows, used) u32, some more often than others."""
    liking = 2.0 * rng.standard_normal(experts)
    choice = liking + rng.gumbel(size=(rows, experts))
    return np.argsort(-choice, axis=1)[:, :used].astype(np.uint32)
