"""Floats that are quantised on their way to the device: the bytes are those of the processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.model.families.config import Config
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.files.opened import Tensor
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.rows import Rows, row_bytes
from urdir.model.files.requantise import requantise
from urdir.model.files.safetensors import StoredTensor
from urdir.model.files.tensor_types import type_number
from urdir.model.memory import upload
from urdir.model.memory.device_blocks import DeviceBlocks
from urdir.model.memory.matrix_rows import float_rows, source_rows
from urdir.model.memory.quantising import FloatRows
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.quantise_kernel import unlike_values
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.quantise import QUANTISERS


def _tensor(name: str, floats: str, rows: int, cols: int) -> Tensor:
    """A tensor of values that is quantised while it is read."""
    data = unlike_values(rows * cols, FORMATS[floats], np.random.default_rng(3))
    stored = StoredTensor("w", floats, (rows, cols), data, "f")
    number = type_number(name)
    made = row_bytes(Rows((stored,)), number)
    return Tensor("w", number, (rows, cols), 0, len(made), made)


@pytest.mark.parametrize(
    ("name", "floats"),
    [*((name, "BF16") for name in QUANTISERS), ("Q4_K", "F16"), ("E4M3R256", "F32")],
)
def test_pieces_are_quantised_and_repacked(
    device_name: str, monkeypatch: pytest.MonkeyPatch, name: str, floats: str
) -> None:
    """In three pieces, with as little room for blocks behind floats as there may be."""
    tensor = _tensor(name, floats, 35, 512)
    layout = Layout(FORMATS[name], 35, 512)
    rows = float_rows(StoredMatrix.whole("w", 35, 512), tensor)
    assert rows is not None
    monkeypatch.setattr(upload, "_SLOT_BYTES", 13312 * FORMATS[floats].nbytes)
    with Device.open(device_name) as device, device.arena({"m": layout.nbytes}, "w") as arena:
        arena["m"].fill(0)
        repacking = upload.Repacking(device, [(layout, rows.format)])
        pieces = [*repacking.pieces(layout, rows, arena["m"])]
        assert len(pieces) == 3
        upload.upload(device, pieces, len(rows.data))
        repacking.add_powers([(layout, arena["m"], None)])
        found = arena["m"].download(np.uint8)
    np.testing.assert_array_equal(found, layout.pack(tensor.data[:]))


@pytest.mark.parametrize("kind", ["q8_0", "fp8"])
@pytest.mark.parametrize("folder", ["llama-bf16", "qwen3moe-bf16"])
def test_a_folder_is_quantised_on_the_device(
    data: Path, device_name: str, folder: str, kind: str
) -> None:
    """Rows in another order, and experts of several tensors, among them."""
    with (
        SafetensorsModel(data / "safetensors" / folder, kind) as file,
        Device.open(device_name) as device,
        Weights.load(file, Config.of(file), device) as weights,
    ):
        matrices = [of for of in stored_in(weights.config) if isinstance(of, StoredMatrix)]
        made = [of for of in matrices if float_rows(of, file.tensors[of.name]) is not None]
        assert len(made) > 8
        for of in made[:9]:
            matrix, tensor = weights.matrix(of), file.tensors[of.name]
            blocks = source_rows(of, tensor)[0 : matrix.layout.source_nbytes]
            expected = matrix.layout.pack(blocks)
            np.testing.assert_array_equal(matrix.data.download(np.uint8), expected)


def test_parts_of_rows() -> None:
    """Columns of blocks are quantised apart; with a scale of the whole row they are not."""
    whole = StoredMatrix.whole("w", 6, 1024)
    part = replace(whole, columns=((256, 512), (768, 1024)), runs=((1, 4),))
    tensor = _tensor("Q4_K", "BF16", 6, 1024)
    rows = float_rows(part, tensor)
    assert isinstance(rows, FloatRows)
    layout = Layout(rows.format, 3, 512)
    values = layout.unpack(layout.pack(rows.data[0 : layout.source_nbytes]))
    wanted = source_rows(part, tensor)[0 : 3 * 2 * 144]
    np.testing.assert_array_equal(QUANTISERS["Q4_K"](values).reshape(-1), wanted)
    assert float_rows(part, _tensor("E4M3R256", "BF16", 6, 1024)) is None
    assert float_rows(whole, _tensor("Q5_0", "BF16", 6, 1024)) is None


@pytest.mark.parametrize("kind", ["q4_k_m", "q8_0"])
def test_a_file_made_by_the_device(
    reference_file: Callable[[str], Path], tmp_path: Path, device_name: str, kind: str
) -> None:
    """Of float and of quantised types, some of which the processor makes."""
    for number, name in enumerate(("nano-llama-bf16", "nano-llama-q5_1")):
        source = reference_file(name)
        by_processor, by_device = (tmp_path / f"{by}{number}.gguf" for by in ("p", "d"))
        requantise(source, by_processor, kind)
        with Device.open(device_name) as device, DeviceBlocks(device) as blocks:
            requantise(source, by_device, kind, make=blocks)
        assert by_device.read_bytes() == by_processor.read_bytes()
