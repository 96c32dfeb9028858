"""Folders of classes that no other golden covers, against transformers' logits."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.class_goldens import NAMES, ClassGolden
from urdir.model.errors import ConfigError, ModelError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.pretrained import model
from urdir.model.files.pretrained.config import family_of, read_config, text_config
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.safetensors import StoredTensor, read_folder
from urdir.model.verify.conformance import relative_rms


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_class(name: str, tmp_path: Path, reference_model: Any) -> None:
    golden = ClassGolden.read(name)
    with SafetensorsModel(golden.write_folder(tmp_path)) as file:
        logits = reference_model(file, Config.of(file), 512).logits(golden.tokens)
    assert relative_rms(logits[golden.positions], golden.logits) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_other_tensor_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the tensors, another one for each golden."""
    golden = ClassGolden.read(name)
    folder = golden.write_folder(tmp_path)
    stored = read_folder(folder)
    with SafetensorsModel(folder) as file:
        used = [of for of in stored if of not in file.unused_tensors]
    used = [of for of in used if "correction_bias" not in of]  # no bias is 0
    odd = used[zlib.crc32(name.encode()) % len(used)]
    shape = (*stored[odd].shape, 2)
    other = StoredTensor(odd, "F32", shape, np.zeros(4 * np.prod(shape), np.uint8), "a")
    for found in ({of: stored[of] for of in stored if of != odd}, {**stored, odd: other}):
        monkeypatch.setattr(model, "read_folder", lambda _, found=found: dict(found))
        with pytest.raises(ModelError, match="tensor"), SafetensorsModel(folder) as file:
            Config.of(file)


_TYPE = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mllama_text_model", {"cross_attention_layers": [1, 1]}, "layers' is .1, 1"),
        ("mllama_text_model", {"cross_attention_layers": [6]}, "layers' is .6"),
        ("mllama_text_model", {"cross_attention_layers": [*range(6)]}, "layers' is .0, 1"),
        ("mllama_text_model", {"vocab_size": 1 << 40}, "'vocab_size' is"),
        ("GPTNeo", {"attention_types": [[["global"], 3]]}, "3 kinds for 4 layers"),
        ("GPTNeo", {"attention_types": [["global", 4]]}, "'attention_types' is"),
        ("GPTNeo", {"attention_types": [[["local"], 4]]}, "'attention_layers' is"),
        ("GPTNeo", {"attention_types": [[["odd"], 4]], "attention_layers": None},
         "global and local are supported"),
        ("Lfm3", {"sliding_window": None}, "'sliding_window' is None"),
        ("Lfm3", {"conv_bias": True}, "'conv_bias' is True"),
        ("Flint", {"sliding_window": None}, "'sliding_window' is None"),
        ("Flint", {"mlp_only_layers": [1]}, "the first layers are supported"),
        ("cohere_compass_text", {"rope_parameters": _TYPE}, "for each kind of layer"),
        ("cohere_compass_text", {"rope_parameters": {
            "sliding_attention": _TYPE, "full_attention": {**_TYPE, "rope_theta": 5.0}}},
         "one rotation for all"),
        ("XGLM", {"max_position_embeddings": 1 << 24}, "16777216, with 64 values each"),
        ("aria_text", {"moe_num_shared_experts": 0}, "'moe_num_shared_experts' is 0"),
        ("openai-gpt", {"afn": "relu"}, "'afn' is relu"),
        ("NanoChat", {"hidden_act": "silu"}, "'hidden_act' is silu"),
        ("VaultGemma", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    config = {**text_config(ClassGolden.read(name).config), **fields}
    path = Path("config.json")
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        read_config(config, family_of(config, path), path)


def test_a_layer_that_attends_to_pictures_has_no_attention_of_its_own(tmp_path: Path) -> None:
    golden = ClassGolden.read("mllama_text_model")
    golden.config["cross_attention_layers"] = [1, 4, 5]
    with pytest.raises(ModelError, match=r"layers\.5\.self_attn\..* 'cross_attention_layers'"):
        SafetensorsModel(golden.write_folder(tmp_path))
