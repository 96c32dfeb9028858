"""EAGLE-3 heads in transformers folders, made of llama.cpp's references: the same tensors and
logits as in GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from urdir.model.errors import ConfigError, ModelError, SafetensorsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.eagle3 import eagle3
from urdir.model.files.gguf import Gguf
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.verify.conformance import relative_rms

Folders = Callable[..., Path]
Tensors = dict[str, tuple[str, np.ndarray[Any, Any]]]
HEADS = {"q": 2, "k": 1}
#: Of a published head, by the names in GGUF.
NAMES = {
    "fc": "fc",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "blk.0.attn_norm": "midlayer.input_layernorm",
    "blk.0.attn_norm_2": "midlayer.hidden_norm",
    "blk.0.attn_q": "midlayer.self_attn.q_proj",
    "blk.0.attn_k": "midlayer.self_attn.k_proj",
    "blk.0.attn_v": "midlayer.self_attn.v_proj",
    "blk.0.attn_output": "midlayer.self_attn.o_proj",
    "blk.0.ffn_norm": "midlayer.post_attention_layernorm",
    "blk.0.ffn_gate": "midlayer.mlp.gate_proj",
    "blk.0.ffn_up": "midlayer.mlp.up_proj",
    "blk.0.ffn_down": "midlayer.mlp.down_proj",
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256, "vocab_size": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "rope_scaling": None,
    "draft_vocab_size": 72, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "torch_dtype": "float32", "pretraining_tp": 1, "use_cache": True,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}  # fmt: skip


def values_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The values of a GGUF file's tensors, by name without ".weight"."""
    return {
        tensor.name.removesuffix(".weight"): tensor.data
        if tensor.name == "d2t"
        else reference.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reference.GGUFReader(path).tensors
    }


def halves(matrix: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head in the order of transformers: those with even numbers first."""
    of_heads = np.split(matrix, heads)
    return np.concatenate([part for rows in of_heads for part in (rows[0::2], rows[1::2])])


def folder_of(path: Path) -> Tensors:
    """The tensors of a head as its authors store them."""
    found: Tensors = {}
    for name, values in values_of(path).items():
        if name == "d2t":
            found["d2t"] = "I64", values.astype(np.int64) - np.arange(len(values))
            known = np.zeros(128, bool)
            known[values] = True
            found["t2d"] = "BOOL", known
            continue
        if (heads := HEADS.get(name.removeprefix("blk.0.attn_"))) is not None:
            values = halves(values, heads)
        found[f"{NAMES[name]}.weight"] = "F32", np.ascontiguousarray(values, np.float32)
    return found


@pytest.fixture
def published(reference_file: Callable[[str], Path]) -> Tensors:
    return folder_of(reference_file("eagle3-d2t.draft"))


def test_a_folder_has_what_gguf_has(
    published: Tensors, make_folder: Folders, reference_file: Callable[[str], Path]
) -> None:
    wanted = values_of(reference_file("eagle3-d2t.draft"))
    for name, heads in HEADS.items():
        key = f"blk.0.attn_{name}"
        wanted[key] = halves(wanted[key], heads)
    with SafetensorsModel(make_folder(CONFIG, published)) as model:
        assert model.architecture == "eagle3"
        assert {name.removesuffix(".weight") for name in model.tensors} == set(wanted)
        for name, tensor in model.tensors.items():
            kind = np.int64 if name == "d2t" else np.float32
            found = np.ascontiguousarray(tensor.data[:]).view(kind).reshape(tensor.shape)
            np.testing.assert_array_equal(found, wanted[name.removesuffix(".weight")])
        assert model.metadata["eagle3.target_layers"].tolist() == [1, 2, 3]


def test_logits_of_a_folder_are_llama_cpp_s(
    cli: Callable[..., tuple[int, str, str]],
    published: Tensors,
    make_folder: Folders,
    data: Path,
    tmp_path: Path,
    reference_file: Callable[[str], Path],
) -> None:
    output, folder = tmp_path / "out.npz", make_folder(CONFIG, published)
    with np.load(data / "drafts" / "eagle3-d2t.npz") as golden:
        tokens, drafted = golden["tokens"], golden["draft_logits"]
    given = ",".join(map(str, tokens[:4].tolist()))
    words = ("logits", reference_file("target-any"), "--draft", folder, "--tokens", given)
    assert cli(*words, "-o", output, "--exact")[0] == 0
    known = np.isfinite(drafted[:3])
    with np.load(output) as found:
        np.testing.assert_array_equal(np.isfinite(found["draft_logits"][:3]), known)
        assert relative_rms(found["draft_logits"][:3][known], drafted[:3][known]) <= 1e-4


def test_a_head_without_layers_reads_those_it_is_trained_with(
    published: Tensors, make_folder: Folders, reference_file: Callable[[str], Path]
) -> None:
    fields = {**CONFIG, "norm_before_residual": True}
    del fields["eagle_config"]
    with (
        SafetensorsModel(make_folder(fields, published)) as model,
        closing(Gguf(reference_file("target-any"))) as target,
    ):
        config = Config.of(target)
        draft = eagle3(model, config)
    assert config.n_layers == 4
    assert draft.target_layers == (2, 2, 1)
    assert draft.norm_before_residual


@pytest.mark.parametrize(
    ("fields", "error", "what"),
    [
        ({"norm_before_residual": "yes"}, ConfigError, "'norm_before_residual' is yes"),
        ({"eagle_config": {"new": 1}}, UnsupportedError, "unknown field 'new'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedError, "'use_aux_hidden_"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, -1]}}, ConfigError, "is .1, -1"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1] * 17}},
            ConfigError,
            "17 streams of the model",
        ),
        ({"draft_vocab_size": 71}, SafetensorsError, r"'d2t' is I64 \(72,\), expected I64 \(71,\)"),
        ({"quantization_config": {"quant_method": "x"}}, UnsupportedError, "quantization_config"),
    ],
)
def test_what_a_folder_cannot_have_is_named(
    fields: dict[str, Any],
    error: type[ModelError],
    what: str,
    published: Tensors,
    make_folder: Folders,
) -> None:
    folder = make_folder({**CONFIG, **fields}, published)
    with pytest.raises(error, match=what) as caught:
        SafetensorsModel(folder)
    assert str(folder) in str(caught.value)


def test_a_vocabulary_that_cannot_be(published: Tensors, make_folder: Folders) -> None:
    for wrong in (
        ("I32", np.zeros(72, np.int32)),
        ("I64", np.zeros((8, 9), np.int64)),
        ("I64", np.full(72, 1 << 40)),
    ):
        with pytest.raises(SafetensorsError, match="tensor 'd2t'"):
            SafetensorsModel(make_folder(CONFIG, {**published, "d2t": wrong}))
    folder = make_folder(CONFIG, {**published, "midlayer.x.weight": ("F32", np.zeros(4, "f4"))})
    with pytest.raises(UnsupportedError, match=r"tensor 'midlayer\.x\.weight' is not"):
        SafetensorsModel(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 0}))
    with pytest.raises(ConfigError, match="'num_attention_heads' is 0"):
        SafetensorsModel(folder)
