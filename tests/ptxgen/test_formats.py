"""Tensor types and layouts against the gguf package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.ptxgen.own_types import dequantized, is_own
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.weights.formats import (
    CODE_VALUES,
    CODES,
    EVERY,
    FORMATS,
    UNIT,
    Bytes,
    Format,
    format_of,
    random_blocks,
)
from urdir.ptxgen.weights.grids import running_signs, signs_of
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS, TILE_UNITS, Layout, recoded

QUANTISED = [f for f in FORMATS.values() if not f.is_float]
#: Bits of a weight on the device, where they are more than in GGUF.
LARGER = {
    "IQ1_M": 1.8125,
    "IQ4_XS": 4.3125,
    "W4G128": 4.375,
}
GGUFS = [f for f in FORMATS.values() if not is_own(f)]
SIZES = [
    (rows, cols)
    for cols in (1, 37, 256, 288, 352, 896, 4864)
    for rows in ((1, 3, 17, 33) if cols in (256, 288) else (3,))
]


def _cases() -> list[tuple[Format, int, int]]:
    return [(f, r, c) for f in FORMATS.values() for r, c in SIZES if c % f.block == 0]


@pytest.mark.parametrize("fmt", GGUFS, ids=lambda f: f.name)
def test_type_number_block_and_bytes_are_ggufs(fmt: Format) -> None:
    kind = gguf.GGMLQuantizationType[fmt.name]
    assert fmt.ggml_type == kind.value
    assert (fmt.block, fmt.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    assert format_of(kind.value) is fmt


def test_types_that_gguf_lacks_have_numbers_of_their_own() -> None:
    own = [f for f in EVERY.values() if is_own(f)]
    assert len(own) == 5 + 12 + 4  # of E4M3 and E2M1, integers, codes
    numbers = {f.name: f.ggml_type for f in own}
    assert len(set(numbers.values())) == len(numbers)
    assert all(n > 1 << 16 and format_of(n).name == name for name, n in numbers.items())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_repacking_adds_no_bytes(fmt: Format) -> None:
    """But to types that say so."""
    bits = sum(8 * p.nbytes / p.units for p in fmt.tile_planes) / UNIT
    assert bits == LARGER.get(fmt.name, 8 * fmt.nbytes / fmt.block)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_bit_of_a_block_is_moved_to_a_bit_of_its_own(fmt: Format) -> None:
    sources: list[int] = []
    for plane in fmt.tile_planes:
        for item in range(fmt.block_units // plane.units):
            targets: list[int] = []
            for part in plane.parts:
                for index in range(part.count):
                    source = part.source.position(item * part.count + index)
                    target = part.target.position(index)
                    assert source % 8 + part.source.width <= 8
                    assert part.source.width == part.target.width
                    sources += range(source, source + part.source.width)
                    targets += range(target, target + part.target.width)
            if plane.parts:
                assert len(set(targets)) == len(targets)
                assert set(targets) <= set(range(8 * plane.nbytes))
                assert len(targets) == 8 * plane.nbytes or fmt.name in LARGER
    wanted = set(range(8 * fmt.nbytes))
    if fmt.has("minimum") and not fmt.has("scale"):  # a block's one minimum is that of each unit
        unread = set() if fmt.block == UNIT else set(range(36, 40))
        assert set(sources) == wanted - unread
    elif not fmt.is_float:
        assert len(sources) == len(wanted)
        assert set(sources) == wanted


@pytest.mark.turns(3)
@pytest.mark.parametrize(("fmt", "rows", "cols"), _cases(), ids=str)
def test_unpacked_weights_are_ggufs_to_the_bit(fmt: Format, rows: int, cols: int) -> None:
    layout = Layout(fmt, rows, cols)
    rng = np.random.default_rng(rows * 10007 + cols)
    blocks = random_blocks(fmt, rows * cols // fmt.block, rng)
    if is_own(fmt):
        expected = dequantized(fmt, blocks)
    elif fmt.name in ("F32", "F16"):
        expected = blocks.view(np.dtype(fmt.element.replace("f", "float"))).astype(np.float32)
    else:
        kind = gguf.GGMLQuantizationType[fmt.name]
        expected = gguf.quants.dequantize(blocks.reshape(rows, -1), kind)
    packed = layout.pack(blocks)
    assert packed.shape == (layout.nbytes,)
    unpacked = layout.unpack(packed)
    assert unpacked.dtype == np.float32
    assert np.isfinite(unpacked).all()
    np.testing.assert_array_equal(
        unpacked.view(np.uint32), expected.reshape(rows, cols).view(np.uint32)
    )


@pytest.mark.turns(3)
@pytest.mark.parametrize(("fmt", "rows", "cols"), _cases(), ids=str)
def test_every_unit_has_a_place_of_its_own(fmt: Format, rows: int, cols: int) -> None:
    """One to one: what is left is padding, less than a tile at the end of each row and matrix."""
    layout = Layout(fmt, rows, cols)
    places = [layout.place(r, u) for r in range(rows) for u in range(layout.row_units)]
    assert len(set(places)) == len(places) == rows * layout.row_units
    assert min(places) >= 0
    assert max(places) < layout.bands * layout.row_tiles * TILE_ROWS * TILE_UNITS
    assert 0 <= layout.row_tiles * TILE_UNITS - layout.row_units < TILE_UNITS
    assert 0 <= layout.bands * TILE_ROWS - rows < TILE_ROWS


def test_tiles_are_sixteen_rows_of_eight_units() -> None:
    """Rows of a tile follow each other, then the tiles of sixteen rows, then the next sixteen."""
    layout = Layout(FORMATS["Q8_0"], 35, 32 * 17)
    assert (layout.bands, layout.row_tiles) == (3, 3)
    assert [layout.place(0, u) for u in (0, 7, 8, 16)] == [0, 7, 128, 256]
    assert [layout.place(r, 0) for r in (0, 1, 15, 16, 34)] == [0, 8, 120, 384, 768 + 16]
    assert layout.place(18, 13) == 384 + 128 + 2 * 8 + 5


@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_a_unit_lies_at_its_place_in_every_plane(fmt: Format) -> None:
    """A matrix of zeros but for one unit's weights: no other unit's items are touched."""
    layout = Layout(fmt, 19, 9 * UNIT if fmt.block == UNIT else 512)
    row_blocks = layout.cols // fmt.block
    for row, unit in ((0, 0), (5, 8), (17, 1), (18, layout.row_units - 1)):
        blocks = np.zeros((layout.rows, row_blocks, fmt.nbytes), np.uint8)
        block = unit // fmt.block_units
        blocks[row, block] = recoded(fmt, random_blocks(fmt, 1, np.random.default_rng(unit)))
        wanted = items_of_a_block(fmt, blocks[row, block])
        packed = layout.pack_recoded(blocks)
        first = layout.place(row, block * fmt.block_units)
        for plane in fmt.tile_planes:
            items = layout.plane_of(packed, plane).reshape(-1, plane.nbytes)
            at = first // plane.units
            count = fmt.block_units // plane.units
            np.testing.assert_array_equal(items[at : at + count], wanted[plane.name])
            # a quant of zero is stored as it is but where its sign bit is flipped
            if not any(part.source.signed for part in plane.parts):
                assert items.any(axis=1).sum() == wanted[plane.name].any(axis=1).sum()


def items_of_a_block(fmt: Format, block: Bytes) -> dict[str, Bytes]:
    """The items of one block, plane by plane, from a matrix of a single one."""
    layout = Layout(fmt, 1, fmt.block)
    packed = layout.pack_recoded(block)
    count = fmt.block_units
    return {p.name: layout.plane_of(packed, p)[0, : count // p.units] for p in fmt.tile_planes}


@pytest.mark.turns(3)
@pytest.mark.parametrize(("fmt", "rows", "cols"), _cases(), ids=str)
def test_padding_is_zeros(fmt: Format, rows: int, cols: int) -> None:
    """Whatever the blocks hold; zeros are weights of zero to every kernel: their d is zero."""
    layout = Layout(fmt, rows, cols)
    packed = layout.pack(np.full(layout.source_nbytes, 0xFF, np.uint8))
    taken = np.array([layout.place(r, u) for r in range(rows) for u in range(layout.row_units)])
    for plane in fmt.tile_planes:
        used = np.zeros(layout.tiles_nbytes // layout.tile_nbytes * 128 // plane.units, bool)
        used[taken // plane.units] = True
        assert used.sum() == rows * layout.row_units // plane.units
        items = layout.plane_of(packed, plane).reshape(-1, plane.nbytes)
        assert items[used].any(axis=1).all()
        assert not items[~used].any()
    whole = Layout(fmt, layout.bands * TILE_ROWS, layout.row_tiles * TILE_UNITS * UNIT)
    assert whole.nbytes == layout.nbytes
    blocks = random_blocks(fmt, rows * cols // fmt.block, np.random.default_rng(1))
    weights = whole.unpack(layout.pack(blocks))
    assert not weights[rows:].any()
    assert not weights[:, cols:].any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_tile_is_one_run_of_its_planes(fmt: Format) -> None:
    """They follow each other, as 16-byte copies need them; powers follow the tiles."""
    for rows, cols in ((3, 768), (33, 768), (16, 256)):
        layout = Layout(fmt, rows, cols)
        tiles = -(-rows // 16) * cols // 256
        packed = np.arange(layout.nbytes, dtype=np.uint32).astype(np.uint8)
        at = 0
        for plane in fmt.tile_planes:
            assert layout.offsets[plane.name] == at
            nbytes = 128 // plane.units * plane.nbytes
            assert nbytes % 16 == 0
            view = layout.plane_of(packed, plane)
            assert np.shares_memory(view, packed)
            for tile in range(tiles):
                first = tile * layout.tile_nbytes + at
                run = packed[first : first + nbytes]
                np.testing.assert_array_equal(view[tile].reshape(-1), run)
            at += nbytes
        assert layout.tile_nbytes == at
        assert layout.tiles_nbytes == at * tiles
        powers = 0 if fmt.name == "F16" else 4 * 16 * -(-rows // 16)
        assert layout.nbytes == layout.tiles_nbytes + powers


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16"])
def test_bytes_lie_tile_by_tile(name: str) -> None:
    """An item's place, counted by hand: tile 4 is number 1 of the second band."""
    layout = Layout(FORMATS[name], 35, 256 * 3)
    starts = {
        "Q4_K": {"low": 0, "scales": 2048, "scales_high": 2176, "factors": 2240},
        "Q8_0": {"low": 0, "factors": 4096},
        "F16": {"values": 0},
    }[name]
    tile = {"Q4_K": 2304, "Q8_0": 4352, "F16": 8192}[name]
    for plane in layout.format.tile_planes:
        packed = np.zeros(layout.nbytes, np.uint8)
        item = (5 * 8 + 2) // plane.units  # row 21, unit 10: row 5 and unit 2 of the tile
        layout.plane_of(packed, plane)[4, item] = 1
        first = 4 * tile + starts[plane.name] + item * plane.nbytes
        np.testing.assert_array_equal(np.flatnonzero(packed), first + np.arange(plane.nbytes))
        assert layout.place(21, 10) // plane.units == 4 * 128 // plane.units + item


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("max_nbytes", [1, 20_000, 10**6])
def test_chunks_cover_the_tensor_once_in_order(fmt: Format, max_nbytes: int) -> None:
    """In whole bands, the largest that are allowed, each from a multiple of 16 bytes on."""
    layout = Layout(fmt, 43, 768)
    at = end = 0
    chunks = list(layout.chunks(max_nbytes))
    for number, (first, rows) in enumerate(chunks):
        assert first == at
        assert first % TILE_ROWS == 0
        offset, tiles_nbytes = layout.span(first, rows)
        assert offset == end
        assert offset % 16 == 0
        end += tiles_nbytes
        nbytes = rows * layout.source_row_nbytes
        assert nbytes <= max(max_nbytes, TILE_ROWS * layout.source_row_nbytes)
        if number < len(chunks) - 1:
            assert rows % TILE_ROWS == 0
            assert nbytes + TILE_ROWS * layout.source_row_nbytes > max_nbytes
        at += rows
    assert at == layout.rows
    assert end == layout.tiles_nbytes
    assert layout.rows * layout.source_row_nbytes == layout.source_nbytes


def test_errors_name_the_type_and_the_shape() -> None:
    with pytest.raises(PtxgenError, match="type 99 is not supported"):
        format_of(99)
    with pytest.raises(PtxgenError, match=r"Q4_K matrix of 2 x 288.*multiple of 256"):
        Layout(FORMATS["Q4_K"], 2, 288)
    with pytest.raises(PtxgenError, match="takes 34 bytes, got 33"):
        Layout(FORMATS["Q8_0"], 1, 32).pack(np.zeros(33, np.uint8))


@pytest.mark.parametrize("fmt", [f for f in QUANTISED if f.grid], ids=lambda f: f.name)
def test_any_bytes_are_ggufs_weights(fmt: Format) -> None:
    """Every index of a grid, every sign: 64 blocks have more numbers than a grid has entries."""
    blocks = random_blocks(fmt, 64, np.random.default_rng(7))
    kind = gguf.GGMLQuantizationType[fmt.name]
    layout = Layout(fmt, 1, 64 * fmt.block)
    assert recoded(fmt, blocks).size == blocks.size
    expected = gguf.quants.dequantize(blocks.reshape(1, -1), kind).astype(np.float32)
    np.testing.assert_array_equal(layout.unpack(layout.pack(blocks)), expected)


def test_every_exponent_is_a_power_of_two() -> None:
    """From 2^-128, all below 2^-126 by their bits, to those whose largest weight f32 holds."""
    exponents = np.arange(252, dtype=np.uint8)
    blocks = np.hstack([exponents[:, None], exponents[:, None] + np.arange(16, dtype=np.uint8)])
    layout = Layout(FORMATS["MXFP4"], 1, 252 * 32)
    expected = gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(layout.unpack(layout.pack(blocks)), expected)


@pytest.mark.parametrize("fmt", [f for f in QUANTISED if len(f.table) == 16], ids=lambda f: f.name)
def test_halves_of_a_table_add_up_to_it(fmt: Format) -> None:
    """As `prmt` looks them up: where a selector has its fourth bit it repeats the entry's sign."""

    def look_up(half: tuple[int, ...], selector: int) -> int:
        entry = half[selector & 7]
        assert -128 <= entry <= 127
        return (-1 if entry < 0 else 0) if selector & 8 else entry

    found = np.zeros(16, np.int64)
    for number in range(fmt.digits):
        first, second = fmt.halves_of_table(number)
        digit = [look_up(first, code) + look_up(second, ~code & 15) for code in range(16)]
        found += 256**number * np.array(digit)
    assert tuple(found) == fmt.table


@pytest.mark.parametrize("fmt", [f for f in QUANTISED if len(f.table) == 16], ids=lambda f: f.name)
def test_bytes_of_a_table_are_its_values(fmt: Format) -> None:
    """With a sign each, and of values that are biased."""
    of_byte = [np.array(fmt.table_bytes(n, biased=False), np.uint8) for n in range(fmt.digits)]
    values = sum(256**n * byte.view(np.int8).astype(np.int64) for n, byte in enumerate(of_byte))
    np.testing.assert_array_equal(values, fmt.table)
    biased = [np.array(fmt.table_bytes(n, biased=True), np.uint8) for n in range(fmt.digits)]
    numbers = np.stack(biased, axis=-1).copy().view(f"<u{fmt.digits}")[:, 0].astype(np.int64)
    np.testing.assert_array_equal(numbers - fmt.bias, fmt.table)


@pytest.mark.parametrize(("kind", "most", "rms"), [("NF4", 8e-6, 4.2e-6), ("FP4", 0, 0)])
def test_codes_are_integers_near_their_floats(kind: str, most: float, rms: float) -> None:
    """And rounded once to f16 where they are looked up as such."""
    fmt = EVERY[f"{kind}G64"]
    errors = np.array(fmt.table) / CODES[kind] - np.array(CODE_VALUES[kind])
    assert abs(errors).max() <= most
    assert np.sqrt((errors**2).mean()) <= rms
    halves = np.stack([Halves(fmt).table_bytes(n) for n in range(2)], axis=-1).astype(np.uint8)
    found = halves.view("<f2")[:, 0].astype(np.float64) * 2.0**24
    np.testing.assert_allclose(found, fmt.table, rtol=2.0**-11)
    if kind == "FP4":
        np.testing.assert_array_equal(found, fmt.table)


def test_floats_of_four_bits_are_f16_numbers() -> None:
    """Sign, exponent and fraction of a code are those of an f16 number (`Halves.are_e2m1`)."""
    codes = np.arange(16, dtype=np.uint16)
    halves = ((codes & 8) << 12 | (codes & 7) << 9).view(np.float16).astype(np.float64)
    types = [f for f in QUANTISED if Halves(f).are_e2m1]
    assert {f.name for f in types} == {"MXFP4", "NVFP4", "E2M1G256", "E2M1G64"}
    for fmt in types:
        quants = np.array(fmt.table) * 2.0**-24
        np.testing.assert_array_equal(halves, quants * 2.0 ** Halves(fmt).raised)


def test_the_digest_of_a_type_follows_its_description() -> None:
    names = {repr(f) for f in FORMATS.values()}
    assert len(names) == len(FORMATS)
    assert all(n.split("#")[0] in FORMATS for n in names)


@pytest.mark.parametrize("group", range(4))
def test_running_signs_give_all_eight(group: int) -> None:
    """Of all combinations of seven signs; what else the word has stays."""
    seven = np.arange(128, dtype=np.uint32)
    bits = seven[:, None] >> np.arange(7, dtype=np.uint32) & np.uint32(1)
    places = np.uint32(4) * np.arange(7, dtype=np.uint32) + np.uint32(group)
    words = (bits << places).sum(axis=1, dtype=np.uint32) | np.uint32(0xA0000000)
    running = running_signs(words)
    assert (running >> np.uint32(28) == 0xA).all()
    found = signs_of(running, "seven").reshape(128, 4, 8)[:, group]
    expected = [[bool(n >> k & 1) for k in range(7)] + [n.bit_count() % 2 == 1] for n in range(128)]
    np.testing.assert_array_equal(found, expected)
