"""How tiles of weights lie in shared memory: what lanes read at a time, and from which banks."""

from __future__ import annotations

import itertools

import pytest

from urdir.ptxgen.kernels.linear.products.gemv_room import RECORD_NBYTES
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.tiles import Quads, Tile

QUANTISED = [f for f in FORMATS.values() if not f.is_float]

every_format = pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)


@every_format
def test_lanes_that_read_together_find_their_pieces_in_different_banks(fmt: Format) -> None:
    """Sixteen bytes each: the first eight lanes (two rows) are served at a time, then the next.

    Records of the activations: eight units are in different banks as well; of f16 both parts of
    every other unit.
    """
    for of in ("f32", "i16"):
        assert len({RECORD_NBYTES[of] * unit % 128 // 16 for unit in range(8)}) == 8
    for j, first in itertools.product(range(2), range(4)):
        pieces = {(2 * t + j, 4 * part + (first ^ t)) for t in range(4) for part in range(2)}
        assert len({(RECORD_NBYTES["f16"] * u // 16 + piece) % 8 for u, piece in pieces}) == 8
    for run in Tile(Layout(fmt, 1, 2048)).runs:
        for j, q in itertools.product(range(2), range(run.chunks)):
            for quarter in range(4):
                banks = set()
                for lane in range(8 * quarter, 8 * quarter + 8):
                    g, t = divmod(lane, 4)
                    piece = run.place((2 * t + j) * run.chunks + q, g)
                    banks.add((g * run.row_nbytes + 16 * piece) % 128 // 16)
                assert len(banks) == 8, (run, j, q, quarter)


@every_format
def test_four_lanes_take_every_quad_of_a_unit_once(fmt: Format) -> None:
    for quads in Quads.of(fmt):
        taken = []
        for t in range(4):
            at = (t & 1) * quads.lane_bytes[0] + (t >> 1) * quads.lane_bytes[1]
            shift = (t & 1) * quads.lane_shifts[0] + (t >> 1) * quads.lane_shifts[1]
            taken += [8 * at + shift + e * quads.stride for e in range(2)]
        order = [4 * e + t if fmt.unit_groups == 2 else 2 * t + e for t in range(4) for e in (0, 1)]
        assert taken == [quads.part.target.position(4 * j) for j in order]


@every_format
def test_what_lanes_read_at_a_time_lies_in_different_banks(fmt: Format) -> None:
    """Every other unit of two rows, a piece a lane; of a unit the words that 32 lanes read."""
    for run in (r for r in Tile(Layout(fmt, 16, 256 * 8)).runs if r.chunks):
        pieces = run.row_nbytes // 16
        for row in range(16):
            assert sorted(run.place(p, row) for p in range(pieces)) == list(range(pieces))
        for row in range(0, 16, 2):
            for q in range(run.chunks):
                units = [2 * run.chunks * t for t in range(4)]
                read = [run.place(unit + q, row + r) for unit in units for r in (0, 1)]
                assert len({place % 8 for place in read}) == 8
        for unit in range(8):
            for row in range(0, 16, 8 // run.chunks):
                read = [
                    run.place(run.chunks * unit + q, row + r)
                    for q in range(run.chunks)
                    for r in range(8 // run.chunks)
                ]
                assert len({place % 8 for place in read}) == 8


@every_format
def test_copies_and_the_rest_are_the_tile(fmt: Format) -> None:
    """Runs of whole copies come first; what follows is no more than one copy."""
    tile = Tile(Layout(fmt, 16, 256 * 8))
    at = 0
    for run in tile.runs:
        assert run.offset == at
        assert bool(run.copies) == (at < tile.rest)
        assert run.nbytes == 512 * run.copies or not run.copies
        at += run.nbytes
    assert at == tile.layout.tile_nbytes == tile.rest + 16 * tile.rest_pieces
    assert 0 <= tile.rest_pieces <= 32
