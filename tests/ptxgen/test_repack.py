"""Repacking, chunk by chunk, against the layout's own packing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.repack import Repack
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout, recoded


def _layout(fmt: Format) -> Layout:
    """Rows that end inside a tile, and so do its columns where the type's blocks allow that."""
    return Layout(fmt, 43, 75 if fmt.is_float else 9 * fmt.block % 2048)


def _place(
    packed: Bytes, layout: Layout, first: int, spec: Repack, chunk: Mapping[str, Bytes]
) -> None:
    """A chunk's tiles to where they belong; they take what nobody has taken before."""
    offset, nbytes = layout.span(first, spec.rows)
    assert not packed[offset : offset + nbytes].any()
    packed[offset : offset + nbytes] = chunk["tiles"]


def _chunks(layout: Layout, source: Bytes, max_nbytes: int) -> Iterator[tuple[int, Repack, Bytes]]:
    """(first row, kernel, expanded bytes) of each chunk."""
    row = layout.source_row_nbytes
    for first, rows in layout.chunks(max_nbytes):
        part = source[first * row : (first + rows) * row]
        spec = Repack(layout.format, rows, layout.cols)
        part = recoded(layout.format, part)
        assert spec.source_nbytes == part.size
        yield first, spec, part


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("max_nbytes", [1, 12_000, 10**6])
def test_references_of_chunks_make_the_packed_matrix(fmt: Format, max_nbytes: int) -> None:
    layout = _layout(fmt)
    blocks = random_blocks(fmt, layout.rows * layout.cols // fmt.block, np.random.default_rng(1))
    source = blocks.reshape(-1)
    packed = np.zeros(layout.nbytes, np.uint8)
    for first, spec, part in _chunks(layout, source, max_nbytes):
        _place(packed, layout, first, spec, spec.reference(source=part))
    tiles = layout.tiles_nbytes
    np.testing.assert_array_equal(packed[:tiles], layout.pack(source)[:tiles])


@pytest.mark.turns(2)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_kernel_makes_the_packed_matrix(device: Device, fmt: Format) -> None:
    """In two launches, for 32 rows and for the others."""
    layout = _layout(fmt)
    blocks = random_blocks(fmt, layout.rows * layout.cols // fmt.block, np.random.default_rng(2))
    source = blocks.reshape(-1)
    packed = np.zeros(layout.nbytes, np.uint8)
    chunks = list(_chunks(layout, source, 32 * layout.source_row_nbytes))
    assert [first for first, _, _ in chunks] == [0, 32]
    for first, spec, part in chunks:
        inputs = spec.make_inputs(np.random.default_rng(3)) | {"source": part}
        _place(packed, layout, first, spec, run_kernel(device, spec, inputs))
    tiles = layout.tiles_nbytes
    np.testing.assert_array_equal(packed[:tiles], layout.pack(source)[:tiles])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_kernel_leaves_padding_alone(device: Device, fmt: Format) -> None:
    """What was there before the launch is there afterwards, wherever no weight lies."""
    layout = _layout(fmt)
    spec = Repack(fmt, layout.rows, layout.cols)
    inputs = spec.make_inputs(np.random.default_rng(4))
    taken = {layout.place(r, u) for r in range(layout.rows) for u in range(layout.row_units)}
    before = {"tiles": np.full_like(inputs["tiles"], 0xA5)}
    after = run_kernel(device, spec, inputs | before)["tiles"]
    wanted = spec.reference(**inputs)["tiles"]
    for plane in fmt.tile_planes:
        items, right = (
            layout.plane_of(tiles, plane).reshape(-1, plane.nbytes) for tiles in (after, wanted)
        )
        used = np.zeros(len(items), bool)
        used[[place // plane.units for place in taken]] = True
        if not fmt.is_float:
            assert (~used).sum() > 0
            np.testing.assert_array_equal(items[used], right[used])
        assert (items[~used] == 0xA5).all()


def test_chunks_that_are_no_whole_blocks_or_rows_are_refused() -> None:
    with pytest.raises(PtxgenError, match=r"Q4_K matrix of 16 x 384.*multiple of 256"):
        Repack(FORMATS["Q4_K"], 16, 384)
    with pytest.raises(PtxgenError, match=r"F16 matrix of 0 x 75: both must be positive"):
        Repack(FORMATS["F16"], 0, 75)
    with pytest.raises(PtxgenError, match=r"Q8_0 matrix of 4 x 48.*multiple of 32"):
        Repack(FORMATS["Q8_0"], 4, 48)
