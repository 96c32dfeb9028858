"""GGUF files written with other types."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from urdir.model.errors import ModelError, SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.files.opened import Tensor
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.requantise import requantise

SOURCE = "nano-llama-q8_0.gguf"


def _values(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    raw = tensor.data[: len(tensor.data)].reshape(*tensor.shape[:-1], -1)
    kind = reference.GGMLQuantizationType(tensor.type_id)
    raw = raw.view(np.float32) if tensor.type_name == "F32" else raw
    return reference.quants.dequantize(raw, kind).reshape(tensor.shape)


@pytest.mark.parametrize(("kind", "most"), [("q4_k_m", 0.09), ("q6_k", 0.025), ("f16", 1e-3)])
def test_weights_are_near_and_metadata_equal(
    data: Path, tmp_path: Path, kind: str, most: float
) -> None:
    out = tmp_path / "out.gguf"
    read: list[int] = []
    requantise(data / "golden" / SOURCE, out, kind, read.append)
    types = set()
    with Gguf(data / "golden" / SOURCE) as before, Gguf(out) as after:
        assert list(after.tensors) == list(before.tensors)
        assert sum(read) == sum(tensor.nbytes for tensor in before.tensors.values())
        keys = [key for key, _ in before.metadata.items()]
        assert [key for key, _ in after.metadata.items()] == keys
        for key, value in before.metadata.items():
            np.testing.assert_array_equal(after.metadata.require(key, object), value)
        for name, old in before.tensors.items():
            new = after.tensors[name]
            assert new.shape == old.shape
            types.add(new.type_name)
            wanted, found = _values(old), _values(new)
            assert ((found - wanted) ** 2).mean() <= most**2 * (wanted**2).mean()
            if len(old.shape) == 1:
                assert bytes(new.data[:]) == bytes(old.data[:])
    kinds = {"q4_k_m": {"Q4_K", "Q6_K"}, "q6_k": {"Q6_K"}, "f16": {"F16"}}[kind]
    assert types <= kinds | {"F32", "Q5_0", "Q8_0"}
    assert types & kinds


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"a.nested", struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQB", 0, 1, 7), "of arrays"),
        (b"a.empty", struct.pack("<IIQ", 9, 4, 0), "'a.empty' is an empty array"),
        (b"a.text", struct.pack("<IQ", 8, 2) + b"\xff\xff", "metadata cannot be copied: .*utf-8"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, key: bytes, value: bytes, message: str) -> None:
    pairs = [
        struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama",
        struct.pack("<Q", len(key)) + key + value,
    ]
    name = struct.pack("<Q", 13) + b"output.weight"
    info = name + struct.pack("<IQQIQ", 2, 256, 2, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + info
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    source.write_bytes(header + bytes(-len(header) % 32) + bytes(2048))
    with pytest.raises(ModelError, match=message):
        requantise(source, out, "q6_k")
    assert not out.exists()


@pytest.mark.parametrize("folder", ["llama-bf16", "qwen2-f16-sharded", "qwen3moe-bf16"])
def test_a_folder_becomes_what_it_is_loaded_as(data: Path, tmp_path: Path, folder: str) -> None:
    source, out = data / "safetensors" / folder, tmp_path / "out.gguf"
    requantise(source, out, "q4_k_m")
    with Gguf(out) as made, SafetensorsModel(source, "q4_k_m") as loaded:
        assert Config.of(made) == Config.of(loaded)
        assert list(made.tensors) == list(loaded.tensors)
        for name, tensor in loaded.tensors.items():
            assert (made.tensors[name].type_id, made.tensors[name].shape) == (
                tensor.type_id,
                tensor.shape,
            )
            np.testing.assert_array_equal(made.tensors[name].data[:], tensor.data[:])
        for key, value in loaded.metadata.items():
            np.testing.assert_array_equal(made.metadata.require(key, object), value)


def test_what_is_refused_leaves_no_file(data: Path, tmp_path: Path) -> None:
    source, out = data / "golden" / SOURCE, tmp_path / "out.gguf"
    with pytest.raises(UnsupportedError, match="GGUF has no type E4M3"):
        requantise(source, out, "fp8")
    with pytest.raises(UnsupportedError, match="GGUF has no type E4M3"):
        requantise(data / "safetensors" / "llama-bf16", out, "fp8")
    with pytest.raises(SettingsError, match="cannot quantise to 'q9'"):
        requantise(source, out, "q9")
    assert not out.exists()
    out.write_bytes(b"kept")
    with pytest.raises(ModelError, match="exists already"):
        requantise(source, out, "q6_k")
    assert out.read_bytes() == b"kept"
