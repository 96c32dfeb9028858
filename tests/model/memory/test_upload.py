"""Matrices of every type on their way to the device, in pieces."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.model.memory import upload
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout


@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.table or f.expanded], ids=lambda f: f.name
)
def test_what_lies_on_the_device_is_ggufs_dequantisation(
    device_name: str, monkeypatch: pytest.MonkeyPatch, fmt: Format
) -> None:
    """In three pieces; those of types that are expanded fit in a slot all the same."""
    layout = Layout(fmt, 35, 768)
    monkeypatch.setattr(upload, "_SLOT_BYTES", 16 * layout.stored_row_nbytes)
    assert [rows for _, rows in layout.chunks(16 * layout.stored_row_nbytes)] == [16, 16, 3]
    blocks = random_blocks(fmt, 35 * 768 // fmt.block, np.random.default_rng(1))
    with Device.open(device_name) as device, device.arena({"m": layout.nbytes}, "w") as arena:
        arena["m"].fill(0)
        repacking = upload.Repacking(device, [layout])
        pieces = repacking.pieces(layout, blocks.reshape(-1), arena["m"])
        upload.upload(device, pieces, blocks.nbytes)
        weights = layout.unpack(arena["m"].download(np.uint8))
    kind = gguf.GGMLQuantizationType[fmt.name]
    np.testing.assert_array_equal(weights, gguf.quants.dequantize(blocks.reshape(35, -1), kind))
