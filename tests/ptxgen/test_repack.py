"""Repacking, chunk by chunk, against the layout's own packing."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, Bytes, Format, random_blocks
from urdir.ptxgen.kernels.repack import Repack
from urdir.ptxgen.layout import Chunk, Layout


def _layout(fmt: Format) -> Layout:
    return Layout(fmt, 33, 1024 if fmt.block > 1 else 75)


def _place(packed: Bytes, layout: Layout, chunk: Chunk, planes: dict[str, Bytes]) -> None:
    spec = Repack.of(layout, chunk)
    for name, (offset, nbytes) in spec.regions(layout, chunk).items():
        if name != "source":
            packed[offset : offset + nbytes] = planes[name].reshape(-1)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("max_units", [1, 1000, 10**6])
def test_references_of_chunks_make_the_packed_matrix(fmt: Format, max_units: int) -> None:
    layout = _layout(fmt)
    blocks = random_blocks(fmt, layout.rows * layout.cols // fmt.block, np.random.default_rng(1))
    source = blocks.reshape(-1)
    packed = np.zeros(layout.nbytes, np.uint8)
    for chunk in layout.chunks(max_units):
        part = source[chunk.source_offset : chunk.source_offset + chunk.source_nbytes]
        spec = Repack.of(layout, chunk)
        assert spec.regions(layout, chunk)["source"] == (0, part.size)
        _place(packed, layout, chunk, spec.reference(source=part))
    np.testing.assert_array_equal(packed, layout.pack(source))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_kernel_makes_the_packed_matrix(device: Device, fmt: Format) -> None:
    layout = _layout(fmt)
    blocks = random_blocks(fmt, layout.rows * layout.cols // fmt.block, np.random.default_rng(2))
    source = blocks.reshape(-1)
    packed = np.zeros(layout.nbytes, np.uint8)
    chunks = list(layout.chunks(640))
    for chunk in chunks:
        part = source[chunk.source_offset : chunk.source_offset + chunk.source_nbytes]
        planes = run_kernel(device, Repack.of(layout, chunk), {"source": part})
        _place(packed, layout, chunk, planes)
    np.testing.assert_array_equal(packed, layout.pack(source))


def test_chunks_that_are_no_whole_blocks_or_rows_are_refused() -> None:
    with pytest.raises(PtxgenError, match="Q4_K: 12 units, no multiple of 8"):
        Repack(FORMATS["Q4_K"], 12)
    with pytest.raises(PtxgenError, match="F16: 4 units, no multiple of 3"):
        Repack(FORMATS["F16"], 4, 75)
    with pytest.raises(PtxgenError, match="Q8_0: cols is 64"):
        Repack(FORMATS["Q8_0"], 4, 64)
    with pytest.raises(PtxgenError, match="F32: cols is 0"):
        Repack(FORMATS["F32"], 4)
