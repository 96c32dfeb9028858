"""What lies on the device is what the file means, for every type, compared with gguf's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as reference
import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver.device import Device
from urdir.model.families.config import Config
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.stored import Linear, Normalization, StoredMatrix, StoredVector
from urdir.model.files.gguf import Gguf
from urdir.model.files.opened import Tensor
from urdir.model.memory import upload
from urdir.model.memory.weight_sizes import weight_sizes
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm

Array = npt.NDArray[Any]

TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q2_k", "q3_k", "q5_k", "q6_k", "q4_k_m"),
)


@pytest.mark.parametrize("kind", TYPES)
def test_every_matrix_is_repacked_exactly(
    reference_file: Callable[[str], Path], device_name: str, kind: str
) -> None:
    with (
        Gguf(reference_file(f"nano-llama-{kind}")) as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, Config.of(gguf), device) as weights,
    ):
        for name in ("token_embd", "output", "blk.1.attn_q", "blk.1.attn_v", "blk.1.ffn_down"):
            tensor = gguf.tensors[f"{name}.weight"]
            matrix = weights.matrix(StoredMatrix.whole(tensor.name, *tensor.shape))
            expected = reference.quants.dequantize(
                tensor.data[:].reshape(tensor.shape[0], -1)
                if tensor.type_name not in ("F32", "F16")
                else tensor.data[:].view(np.float32 if tensor.type_name == "F32" else np.float16),
                reference.GGMLQuantizationType(tensor.type_id),
            ).reshape(tensor.shape)
            unpacked = matrix.layout.unpack(matrix.data.download(np.uint8))
            np.testing.assert_allclose(unpacked, expected, rtol=2e-7, atol=1e-9)


def test_several_threads_copy_every_byte_once(
    reference_file: Callable[[str], Path], device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of bands and of vectors, in lanes that have many each."""
    monkeypatch.setattr(upload, "_SLOT_BYTES", 5120)
    begun: list[str] = []
    lane = upload._Lane

    def new_lane(device: Device, name: str) -> Any:
        begun.append(name)
        return lane(device, name)

    monkeypatch.setattr(upload, "_Lane", new_lane)
    with (
        Gguf(reference_file("nano-llama-q6_k")) as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, Config.of(gguf), device) as weights,
    ):
        tensor = gguf.tensors["blk.1.ffn_down.weight"]
        matrix = weights.matrix(StoredMatrix.whole(tensor.name, *tensor.shape))
        expected = matrix.layout.pack(np.array(tensor.data[:]))
        np.testing.assert_array_equal(matrix.data.download(np.uint8), expected)
    assert len(begun) == upload._LANES


def test_norms_are_kept_as_they_are(data: Path, device_name: str) -> None:
    with (
        Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, Config.of(gguf), device) as weights,
    ):
        tensor = gguf.tensors["blk.0.ffn_norm.weight"]
        kept = weights.vector(StoredVector.whole(tensor.name, *tensor.shape))
        np.testing.assert_array_equal(kept.download(np.float32), tensor.data[:].view(np.float32))


def test_sizes_are_told_beforehand_and_no_larger_than_the_file(data: Path) -> None:
    with Gguf(data / "golden" / "nano-llama-q4_k_m.gguf") as gguf:
        sizes = weight_sizes(gguf, Config.of(gguf))
        for name, nbytes in sizes.items():
            if name in gguf.tensors:
                tensor = gguf.tensors[name]
                powers = 4 * -(-tensor.shape[0] // 16) * 16 if len(tensor.shape) > 1 else 0
                assert nbytes <= tensor.nbytes + powers


# ---- parts of tensors ----


def bf16(values: Array) -> Array:
    """The bits of f32 values that bf16 can hold."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def file_of(tensors: Mapping[str, tuple[str, Array]]) -> Any:
    """A file with these tensors: type and values (f32), which are quantised."""
    stored = {}
    for name, (kind, values) in tensors.items():
        of_type = reference.GGMLQuantizationType[kind]
        blocks = bf16(values) if kind == "BF16" else reference.quants.quantize(values, of_type)
        data = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)
        stored[name] = Tensor(name, int(of_type), values.shape, 0, data.nbytes, data)
    return SimpleNamespace(tensors=stored)


def load(device: Device, tensors: Mapping[str, tuple[str, Array]], *wanted: Any) -> Weights:
    """Weights of a description that names ``wanted`` alone."""
    norms = [Normalization(Norm("rms", 1e-5), v) for v in wanted if isinstance(v, StoredVector)]
    matrices = [Linear(m) for m in wanted if isinstance(m, StoredMatrix)]
    networks = (*(Branch(m) for m in matrices), *(Branch(Activation("relu"), n) for n in norms))
    layer = LayerConfig((Block(networks),))
    table = StoredMatrix.whole("token_embd.weight", 4, 32)
    config = Config("made", (layer,), 32, 4, 256, table, Linear(table), None)
    embedding = ("F32", np.zeros((4, 32), np.float32))
    return Weights.load(file_of({**tensors, table.name: embedding}), config, device)


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def values_of(weights: Weights, stored: StoredMatrix) -> Array:
    matrix = weights.matrix(stored)
    assert (matrix.rows, matrix.cols) == (stored.rows, stored.cols)
    unpacked: Array = matrix.layout.unpack(matrix.data.download(np.uint8))
    return unpacked


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_parts_of_a_fused_matrix(device_name: str, kind: str) -> None:
    """Q, K and V one after the other, of odd numbers of rows."""
    values = numbers(37 + 5 + 19, 64)
    whole = StoredMatrix.whole("qkv", 61, 64)
    parts = whole.part(0, 37), whole.part(37, 5), whole.part(42, 19)
    if kind == "BF16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    kept = values
    if kind not in ("F32", "BF16"):
        of_type = reference.GGMLQuantizationType[kind]
        kept = reference.quants.dequantize(reference.quants.quantize(values, of_type), of_type)
    with (
        Device.open(device_name) as device,
        load(device, {"qkv": (kind, values)}, *parts, whole) as weights,
    ):
        for part in (*parts, whole):
            expected = kept[part.first : part.first + part.rows]
            np.testing.assert_allclose(values_of(weights, part), expected, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("slot", [1 << 20, 16 * 4 * 96])
def test_rows_of_every_period(device_name: str, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every 7 rows 2 and of every 7 rows the other 5, in chunks that end within a period."""
    monkeypatch.setattr(upload, "_SLOT_BYTES", slot)
    values = numbers(9 * 7, 96)
    whole = StoredMatrix.whole("qg", 3, 21, 96)  # a tensor of three dimensions
    few, many = whole.part(0, 2, 7), whole.part(2, 5, 7)
    periods = values.reshape(9, 7, 96)
    with (
        Device.open(device_name) as device,
        load(device, {"qg": ("F32", values)}, few, many) as weights,
    ):
        found = values_of(weights, few), values_of(weights, many)
    np.testing.assert_array_equal(found[0], periods[:, :2].reshape(18, 96))
    np.testing.assert_array_equal(found[1], periods[:, 2:].reshape(45, 96))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("kind", "slot"), [("Q8_0", 1 << 20), ("Q4_0", 16 * 4 * 3 * 3)])
def test_rows_of_every_period_as_columns(
    device_name: str, kind: str, slot: int, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every 7 rows 3, in f32 or f16, as 64 rows: whole, or in chunks."""
    monkeypatch.setattr(upload, "_SLOT_BYTES", slot)
    values, of_type = numbers(2 * 7, 64), reference.GGMLQuantizationType[kind]
    part = replace(StoredMatrix.whole("kv", 14, 64).part(2, 3, 7), transposed=True, half=half)
    kept = reference.quants.dequantize(reference.quants.quantize(values, of_type), of_type)
    expected = kept.reshape(2, 7, 64)[:, 2:5].swapaxes(1, 2).reshape(128, 3)
    with Device.open(device_name) as device, load(device, {"kv": (kind, values)}, part) as weights:
        rtol, atol = (2**-11, 2**-25) if half else (2e-7, 1e-9)
        np.testing.assert_allclose(values_of(weights, part), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_vectors_of_every_type_are_f32(device_name: str, kind: str) -> None:
    """Whole, in part, and each value several times."""
    values = numbers(33)
    kept = {
        "F32": values,
        "F16": values.astype(np.float16).astype(np.float32),
        "BF16": (values.view(np.uint32) & 0xFFFF0000).view(np.float32),
    }[kind]
    whole = StoredVector.whole("v", 33)
    part = whole.part(5, 11)
    cases = {
        whole: kept,
        part: kept[5:16],
        part.part(2, 3): kept[7:10],
        whole.repeated(3): np.repeat(kept, 3),
        part.repeated(2): np.repeat(kept[5:16], 2),
    }
    stored = values if kind != "BF16" else kept
    with (
        Device.open(device_name) as device,
        load(device, {"v": (kind, stored)}, *cases) as weights,
    ):
        for of, expected in cases.items():
            assert of.size == len(expected)
            np.testing.assert_array_equal(weights.vector(of).download(np.float32), expected)
