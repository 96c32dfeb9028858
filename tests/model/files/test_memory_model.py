"""A model that a program gives: the same tensors as those of a file, or a refusal."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from urdir.model.engine.pieces import open_file
from urdir.model.errors import ConfigError, SettingsError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.files.memory_model import MemoryModel
from urdir.model.files.opened import Tensor
from urdir.model.memory.prefix_files import model_digest


def test_arrays_and_tensors_of_a_file_describe_the_same_model() -> None:
    rng = np.random.default_rng(3)
    with Gguf(demo_model()) as file:
        vector = rng.standard_normal(256).astype(np.float32)
        matrix = np.asfortranarray(rng.standard_normal((256, 768)).astype(np.float16))
        given = {"output_norm.weight": vector, "blk.2.ffn_down.weight": matrix}
        metadata = {**file.metadata, "tokenizer.ggml.tokens": ["a", "ü", ""], "own.numbers": (3, 5)}
        model = MemoryModel(metadata, {**file.tensors, **given}, "mine")
        assert str(Config.of(model)) == str(Config.of(file))
        assert list(model.tensors) == list(file.tensors)
        assert model.tensors["blk.0.attn_q.weight"] is file.tensors["blk.0.attn_q.weight"]
    for name, array in given.items():
        tensor = model.tensors[name]
        kind = GGMLQuantizationType(tensor.type_id).name
        assert (kind, tensor.shape) == (f"F{8 * array.itemsize}", array.shape)
        assert bytes(tensor.data[:]) == array.tobytes()
        assert tensor.nbytes == len(tensor.data) == array.nbytes
    assert list(model.metadata["tokenizer.ggml.tokens"]) == ["a", "ü", ""]  # type: ignore[arg-type]
    assert np.array_equal(model.metadata["own.numbers"], [3, 5])  # type: ignore[arg-type]
    assert repr(model) == f"<MemoryModel 'mine', {len(model.tensors)} tensors>"
    assert repr(model.metadata) == f"<Metadata of 'mine', {len(metadata)} keys>"
    assert open_file(model, None) is model
    with pytest.raises(SettingsError, match="mine: quantize applies to folders"):
        open_file(model, "q8_0")


def test_files_of_caches_know_models_that_differ_in_a_byte() -> None:
    values = np.random.default_rng(4).standard_normal((3, 4099)).astype(np.float32)
    digests = {model_digest(MemoryModel({}, {"x": values}))}
    for at in (0, 2):
        values[at, -1] = 7
        digests.add(model_digest(MemoryModel({}, {"x": values})))
    values[2, -1] = 7
    digests.add(model_digest(MemoryModel({}, {"x": values})))
    assert len(digests) == 3


def test_what_is_no_model_is_refused() -> None:
    for tensor, message in (
        (np.zeros(3), "is float64: give float32 or float16"),
        (np.zeros(3, np.int32), "is int32: give float32 or float16"),
        (
            Tensor("x", 0, (5,), 0, 20, np.zeros(8, np.uint8)),
            "(5,) has 8 bytes of data and says 20: F32 has 20",
        ),
    ):
        with pytest.raises(SettingsError, match=f"^mine: tensor 'x' {re.escape(message)}"):
            MemoryModel({}, {"x": tensor}, "mine")
    with pytest.raises(ConfigError, match=r"^memory: .*general\.architecture"):
        Config.of(MemoryModel({}, {}))
