"""Tensors, sizes and files that do not fit in a folder as transformers writes it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.plain_folder import CONFIG, GPT2, made_tensors
from urdir.model.errors import (
    ConfigError,
    ModelError,
    SafetensorsError,
    SettingsError,
    TokenizerError,
    UnsupportedError,
)
from urdir.model.files.metadata import Metadata
from urdir.model.files.pretrained.layouts import Layout, groups, halves, taps, turned_experts
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.places import Place
from urdir.model.files.pretrained.tensors import make_tensors
from urdir.model.files.safetensors import StoredTensor
from urdir.model.files.source import open_model
from urdir.model.text.tokenizer import Tokenizer

Folders = Callable[..., Path]


@pytest.mark.parametrize(
    ("shapes", "fields", "message"),
    [
        (
            {"model__odd__weight": (2,)},
            {},
            "tensor 'model.odd.weight' is not supported in a 'llama'",
        ),
        ({"model__layers__00__mlp__up_proj__weight": (2, 2)}, {}, "'model.layers.00.mlp"),
        ({"model__norm__scale": (2,)}, {}, "tensor 'model.norm.scale' is not supported"),
        ({"model__embed_tokens__weight": (4, 8)}, {}, "'vocab_size' is 3, the embedding has 4"),
        (
            {"model__embed_tokens__weight": (4, 8)},
            {"vocab_size": "\x1b[1m"},
            r"'vocab_size' is '\\x1b\[1m', the embedding has 4",
        ),
        ({"h__0__attn__c_attn__weight": (8,)}, GPT2, r"c_attn.weight' \(8,\) is not a matrix"),
        (
            {"model__decoder__embed_positions__weight": (2, 8)},
            {"model_type": "opt", "hidden_act": "absent"},
            "2 rows do not fit",
        ),
        (
            {"model__norm__weight": (8,)},
            {"tie_word_embeddings": False},
            "tensor 'lm_head.weight' is missing, 'tie_word_embeddings' of config.json is false",
        ),
        (
            {"model__layers__0__block_sparse_moe__experts__1__w1__weight": (2, 2)},
            {"model_type": "mixtral"},
            "expert 0 of 1 is missing",
        ),
        (
            {
                "model__layers__0__block_sparse_moe__experts__0__w1__weight": (2, 2),
                "model__layers__0__block_sparse_moe__experts__1__w1__weight": (2, 4),
            },
            {"model_type": "mixtral"},
            r"experts.1.w1.weight' is F32 \(2, 4\), .*experts.0.w1.weight' F32 \(2, 2\)",
        ),
        (
            {"model__norm__weight": (8,), "model__norm": (8,)},
            {},
            "tensors 'model.norm' and 'model.norm.weight' are the same",
        ),
        (
            {"model__norm__weight": (8,), "transformer__norm__weight": (8,)},
            {},
            "tensors 'transformer.norm.weight' and 'model.norm.weight' are the same",
        ),
        (
            {
                "model__layers__0__block_sparse_moe__experts__0__w1__weight": (2, 2),
                "model__layers__0__block_sparse_moe__experts__1__w1__bias": (2,),
            },
            {"model_type": "mixtral"},
            "expert 0 of 1 is missing",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    make_folder: Folders, shapes: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    config = {name: value for name, value in (CONFIG | fields).items() if value != "absent"}
    with pytest.raises(ModelError, match=message):
        SafetensorsModel(make_folder(config, made_tensors(**shapes)))


@pytest.mark.parametrize(
    ("layout", "shape", "keys"),
    [
        (Layout(shape=groups), (8,), {}),
        (Layout(shape=groups), (8,), {"ssm.group_count": -1}),
        (Layout(shape=groups), (8,), {"ssm.group_count": 3}),
        (Layout(shape=groups), (8,), {"ssm.group_count": math.inf}),
        (Layout(shape=taps), (8, 1, 4), {"ssm.conv_kernel": -1}),
        (Layout(shape=taps), (8, 1, 4), {"ssm.conv_kernel": -2}),
        (Layout(transposed=turned_experts), (2, 8, 8), {"embedding_length": 8}),
        (Layout(rows=halves), (8, 8), {"expert_feed_forward_length": 0}),
    ],
)
def test_sizes_that_do_not_fit_a_tensor(
    layout: Layout, shape: tuple[int, ...], keys: dict[str, Any]
) -> None:
    array = np.zeros(4 * math.prod(shape), np.uint8)
    stored = {"a": StoredTensor("a", "F32", shape, array, "a.safetensors")}
    with pytest.raises((ConfigError, SafetensorsError), match=r"^folder: .*(not fit|expected|'a')"):
        make_tensors(
            {"blk.0.b.weight": Place(("a",), layout)}, stored, keys, quantize=None,
            path=Path("folder"),
        )  # fmt: skip


@pytest.mark.parametrize("is_added", [True, False])
def test_tokens_beyond_the_embedding(data: Path, tmp_path: Path, is_added: bool) -> None:
    """An added one that the model was never trained with, such as "<pad>" of Llama 2, is text;
    words of the vocabulary are not left out."""
    folder = Path(shutil.copytree(data / "safetensors" / "llama-bf16", tmp_path / "copy"))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary |= {f"word {n}": n for n in range(320) if n not in vocabulary.values()}
    if is_added:
        tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": 320, "content": "<pad>"})
    else:
        vocabulary["<pad>"] = 320
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    with open_model(data / "safetensors" / "llama-bf16") as usual, open_model(folder) as model:
        if not is_added:
            with pytest.raises(TokenizerError, match="321 tokens, more than the 320 rows of"):
                Tokenizer.of(model)
            return
        expected, found = Tokenizer.of(usual), Tokenizer.of(model)
    for text in ("a <pad> b", "<pad>", "<|begin|>x"):
        ids = found.encode(text, parse_special=True)
        assert ids == expected.encode(text, parse_special=True)
        assert found.decode(ids, keep_control=True) == text


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.default.weight", "base_layer.weight"])
def test_tensors_of_an_adapter_in_a_model_are_refused_with_what_to_do(
    make_folder: Folders, part: str
) -> None:
    name = f"model.layers.0.self_attn.q_proj.{part}"
    found = {
        **made_tensors(model__embed_tokens__weight=(3, 8)),
        name: ("F32", np.ones((2, 8), np.float32)),
    }
    with pytest.raises(UnsupportedError, match=r"q_proj.*of an adapter \(merge it"):
        SafetensorsModel(make_folder(CONFIG | {"tie_word_embeddings": True}, found))


def test_a_dtype_that_is_not_converted(make_folder: Folders) -> None:
    folder = make_folder(CONFIG, {"model.norm.weight": ("F8_E4M3", np.zeros(8, np.uint8))})
    with pytest.raises(UnsupportedError, match=r"'model.norm.weight' has dtype F8_E4M3"):
        SafetensorsModel(folder)


def test_folders_that_are_none(tmp_path: Path, data: Path) -> None:
    with pytest.raises(SafetensorsError, match=r"no config\.json in this folder"):
        open_model(tmp_path)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(SafetensorsError, match=r"no config\.json.*: give one .*, such as b\.gguf"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"config\.json: it has no model_type"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bart"}')
    with pytest.raises(UnsupportedError, match=r"model_type 'bart' is not supported"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SafetensorsError, match=r"config\.json: the file is not JSON"):
        open_model(tmp_path)
    with pytest.raises(SettingsError, match=r"quantize applies to safetensors"):
        open_model(data / "golden" / "nano-llama-q8_0.gguf", quantize="q8_0")
    with pytest.raises(SettingsError, match=r"cannot quantise to 'q3_k'"):
        open_model(data / "safetensors" / "llama-bf16", quantize="q3_k")


def test_closed(data: Path) -> None:
    model = SafetensorsModel(data / "safetensors" / "llama-bf16")
    model.close()
    assert (model.tensors, model.metadata.keys() | set()) == ({}, set())
    assert isinstance(model.metadata, Metadata)
