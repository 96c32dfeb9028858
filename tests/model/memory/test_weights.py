"""What lies on the device is what the file means, for every type, compared with gguf's own."""

from __future__ import annotations

from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.model.families.description import Config
from urdir.model.families.stored import StoredMatrix, StoredVector
from urdir.model.files.gguf import Gguf
from urdir.model.memory import upload
from urdir.model.memory.weights import Weights, weight_sizes

TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_k_m"),
)


@pytest.mark.parametrize("kind", TYPES)
def test_every_matrix_is_repacked_exactly(data: Path, device_name: str, kind: str) -> None:
    with (
        Gguf(data / "golden" / f"nano-llama-{kind}.gguf") as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, Config.from_gguf(gguf), device) as weights,
    ):
        for name in ("token_embd", "output", "blk.1.attn_q", "blk.1.attn_v", "blk.1.ffn_down"):
            tensor = gguf.tensors[f"{name}.weight"]
            matrix = weights.matrix(StoredMatrix.whole(tensor.name, *tensor.shape))
            expected = reference.quants.dequantize(
                tensor.data.reshape(tensor.shape[0], -1)
                if tensor.type_name not in ("F32", "F16")
                else tensor.data.view(np.float32 if tensor.type_name == "F32" else np.float16),
                reference.GGMLQuantizationType(tensor.type_id),
            ).reshape(tensor.shape)
            unpacked = matrix.layout.unpack(matrix.data.download(np.uint8))
            np.testing.assert_allclose(unpacked, expected, rtol=2e-7, atol=1e-9)


def test_several_threads_copy_every_byte_once(
    data: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_LEAST_SHARE", 1000)
    monkeypatch.setattr(upload, "_COPIERS", 3)
    with (
        Gguf(data / "golden" / "nano-llama-q6_k.gguf") as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, Config.from_gguf(gguf), device) as weights,
    ):
        tensor = gguf.tensors["blk.1.ffn_down.weight"]
        matrix = weights.matrix(StoredMatrix.whole(tensor.name, *tensor.shape))
        expected = matrix.layout.pack(np.array(tensor.data))
        np.testing.assert_array_equal(matrix.data.download(np.uint8), expected)


def test_norms_are_kept_as_they_are(data: Path, device_name: str) -> None:
    with (
        Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Device.open(device_name) as device,
        Weights.load(gguf, Config.from_gguf(gguf), device) as weights,
    ):
        tensor = gguf.tensors["blk.0.ffn_norm.weight"]
        kept = weights.vector(StoredVector.whole(tensor.name, *tensor.shape))
        np.testing.assert_array_equal(kept.download(np.float32), tensor.data.view(np.float32))


def test_sizes_are_told_beforehand_and_no_larger_than_the_file(data: Path) -> None:
    with Gguf(data / "golden" / "nano-llama-q4_k_m.gguf") as gguf:
        sizes = weight_sizes(gguf, Config.from_gguf(gguf))
        for name, nbytes in sizes.items():
            if name in gguf.tensors:
                assert nbytes - gguf.tensors[name].nbytes < 5 * 256  # alignment of planes only
