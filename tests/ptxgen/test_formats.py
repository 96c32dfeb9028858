"""Tensor types and layouts against the gguf package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, UNIT, Format, format_of, random_blocks
from urdir.ptxgen.layout import Layout

SIZES = [
    (rows, cols)
    for cols in (1, 37, 256, 288, 352, 896, 4864)
    for rows in ((1, 3, 17, 33) if cols in (256, 288) else (3,))
]


def _cases() -> list[tuple[Format, int, int]]:
    return [(f, r, c) for f in FORMATS.values() for r, c in SIZES if c % f.block == 0]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_type_number_block_and_bytes_are_ggufs(fmt: Format) -> None:
    kind = gguf.GGMLQuantizationType[fmt.name]
    assert fmt.ggml_type == kind.value
    assert (fmt.block, fmt.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    assert format_of(kind.value) is fmt


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_repacking_adds_no_bytes(fmt: Format) -> None:
    per_unit = sum(p.nbytes / p.units for p in fmt.planes)
    assert per_unit * fmt.block == fmt.nbytes * UNIT


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_bit_of_a_block_is_moved_to_a_bit_of_its_own(fmt: Format) -> None:
    sources: list[int] = []
    for plane in fmt.planes:
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
                assert sorted(targets) == list(range(8 * plane.nbytes))
    if not fmt.is_float:
        assert sorted(sources) == list(range(8 * fmt.nbytes))


@pytest.mark.parametrize(("fmt", "rows", "cols"), _cases(), ids=str)
def test_unpacked_weights_are_ggufs_to_the_bit(fmt: Format, rows: int, cols: int) -> None:
    layout = Layout(fmt, rows, cols)
    rng = np.random.default_rng(rows * 10007 + cols)
    blocks = random_blocks(fmt, rows * cols // fmt.block, rng)
    kind = gguf.GGMLQuantizationType[fmt.name]
    if fmt.name in ("F32", "F16"):
        expected = blocks.view(np.dtype(fmt.element.replace("f", "float"))).astype(np.float32)
    else:
        expected = gguf.quants.dequantize(blocks.reshape(rows, -1), kind)
    packed = layout.pack(blocks)
    assert packed.shape == (layout.nbytes,)
    unpacked = layout.unpack(packed)
    assert unpacked.dtype == np.float32
    assert np.isfinite(unpacked).all()
    np.testing.assert_array_equal(
        unpacked.view(np.uint32), expected.reshape(rows, cols).view(np.uint32)
    )


def test_planes_are_aligned_and_disjoint() -> None:
    for fmt in FORMATS.values():
        layout = Layout(fmt, 3, 768)
        at = 0
        for plane in fmt.planes:
            offset = layout.offsets[plane.name]
            assert offset % 256 == 0
            assert offset >= at
            at = offset + layout.plane_nbytes(plane)
        assert at == layout.nbytes


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("max_units", [1, 300, 10**6])
def test_chunks_cover_the_tensor_once_in_order(fmt: Format, max_units: int) -> None:
    layout = Layout(fmt, 33, 768)
    unit, byte = 0, 0
    for chunk in layout.chunks(max_units):
        assert (chunk.first, chunk.source_offset) == (unit, byte)
        for plane in fmt.planes:
            assert chunk.first // plane.units * plane.nbytes % 16 == 0
        unit += chunk.units
        byte += chunk.source_nbytes
    assert (unit, byte) == (layout.units, layout.source_nbytes)


def test_errors_name_the_type_and_the_shape() -> None:
    with pytest.raises(PtxgenError, match="type 99 is not supported"):
        format_of(99)
    with pytest.raises(PtxgenError, match=r"Q4_K matrix of 2 x 288.*multiple of 256"):
        Layout(FORMATS["Q4_K"], 2, 288)
    with pytest.raises(PtxgenError, match="takes 34 bytes, got 33"):
        Layout(FORMATS["Q8_0"], 1, 32).pack(np.zeros(33, np.uint8))


def test_the_digest_of_a_type_follows_its_description() -> None:
    names = {repr(f) for f in FORMATS.values()}
    assert len(names) == len(FORMATS)
    assert all(n.split("#")[0] in FORMATS for n in names)
