"""Folders as transformers writes them: names, values and types, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import ml_dtypes
import numpy as np
import pytest

from tests.model.files.plain_folder import CONFIG, made_tensors
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.names import ENDS, LAYER
from urdir.model.files.pretrained.rows import RowBytes, Rows
from urdir.model.files.pretrained.tables import FAMILIES
from urdir.model.files.safetensors import StoredTensor, read_folder
from urdir.model.files.source import open_model

Folders = Callable[..., Path]
FOLDERS = ("llama-bf16", "qwen2-f16-sharded", "qwen3moe-bf16")
_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def _array(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    return tensor.data[:].view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


# ---- names -------------------------------------------------------------------------------------


#: Tensors of descriptions that GGUF has under other names, or not at all.
_OF_FOLDERS = {
    *("fc", "hrm.z_l_init", "head", "head_norm"),
    *(f"{at}_{of}" for at in ("output_hc", "hc_attn", "hc_ffn") for of in ("fn", "base", "scale")),
}
#: Beginnings of names that the installed gguf package does not have.
_NEWER = (
    *("xielu.", "ffn_", "indexer_compressor_", "attn_compressor_"),
    *("attn_kv", "attn_output_", "indexer.q_", "indexer.k_"),
    *("hc_attn_", "hc_ffn_", "output_hc_", "ple_"),
)


def test_names_are_those_of_the_gguf_package() -> None:
    known = {name.removeprefix("blk.{bid}.") for name in reference.TENSOR_NAMES.values()}
    known |= {name.removesuffix(".weight") for name in known} | _OF_FOLDERS
    tables = [ENDS, LAYER, *(of.names for of in FAMILIES.values())]
    for table in [*tables, *(of.ends for of in FAMILIES.values())]:
        for names in table.values():
            for name in (names,) if isinstance(names, str) else names:
                base = name.removesuffix(".").removesuffix(".weight").removesuffix(".bias")
                is_newer = base.startswith(_NEWER) or "_adapter." in base
                assert base in known or is_newer, name


@pytest.mark.parametrize("name", FOLDERS)
def test_names_are_those_of_the_converter(data: Path, name: str) -> None:
    folder = data / "safetensors" / name
    with SafetensorsModel(folder) as model:
        archs = {name: arch for arch, name in reference.MODEL_ARCH_NAMES.items()}
        known = reference.get_tensor_name_map(archs[model.architecture], 3)
        for stored in read_folder(folder):
            merged = re.sub(r"experts\.\d+", "experts", stored)
            wanted = known.get_name(merged, try_suffixes=(".weight", ".bias"))
            assert wanted in model.tensors or wanted == "output.weight"


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_matrices_keep_their_values_and_types(data: Path, name: str) -> None:
    folder = data / "safetensors" / name
    stored = read_folder(folder)
    with SafetensorsModel(folder) as model:
        found = {
            "token_embd.weight": stored["model.embed_tokens.weight"],
            "blk.1.attn_v.weight": stored["model.layers.1.self_attn.v_proj.weight"],
            "blk.0.attn_output.weight": stored["model.layers.0.self_attn.o_proj.weight"],
        }
        for gguf_name, tensor in found.items():
            ours = model.tensors[gguf_name]
            assert (ours.shape, ours.type_name) == (tensor.shape, tensor.dtype)
            assert np.array_equal(ours.data[:], tensor.data[:])
        query = _array(stored["model.layers.1.self_attn.q_proj.weight"])
        assert bytes(model.tensors["blk.1.attn_q.weight"].data[:]) == query.tobytes()
        norm = model.tensors["blk.0.attn_norm.weight"]
        expected = _array(stored["model.layers.0.input_layernorm.weight"]).astype(np.float32)
        assert norm.type_name == "F32"
        assert np.array_equal(norm.data.view(np.float32), expected)


def test_experts_become_one_tensor(data: Path) -> None:
    folder = data / "safetensors" / "qwen3moe-bf16"
    stored = read_folder(folder)
    with SafetensorsModel(folder) as model:
        tensors = f"{len(model.tensors)} tensors"
        assert repr(model) == f"<SafetensorsModel {str(folder)!r}, {tensors}>"
        assert model.architecture == "qwen3moe"
        for ours, theirs in (("ffn_gate", "gate"), ("ffn_up", "up"), ("ffn_down", "down")):
            expected = np.stack(
                [
                    _array(stored[f"model.layers.1.mlp.experts.{i}.{theirs}_proj.weight"])
                    for i in range(4)
                ]
            )
            tensor = model.tensors[f"blk.1.{ours}_exps.weight"]
            assert (tensor.shape, tensor.type_name) == (expected.shape, "BF16")
            raw = expected.tobytes()
            assert len(tensor.data) == tensor.nbytes == len(raw)
            assert bytes(tensor.data[:]) == raw
            for begin, end in ((0, 1), (255, 257), (16383, 32770), (49151, 65536)):
                assert bytes(tensor.data[begin:end]) == raw[begin:end]
        router = model.tensors["blk.1.ffn_gate_inp.weight"]
        expected = _array(stored["model.layers.1.mlp.gate.weight"]).astype(np.float32)
        assert (router.shape, router.type_name) == ((4, 128), "F32")
        assert bytes(router.data[:]) == expected.tobytes()
        metadata = {key.partition(".")[2]: value for key, value in model.metadata.items()}
        expected_keys = {
            "block_count": 2, "context_length": 512, "embedding_length": 128,
            "feed_forward_length": 192, "attention.head_count": 2, "attention.head_count_kv": 1,
            "attention.key_length": 64, "attention.value_length": 64,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64,
        }  # fmt: skip
        assert expected_keys.items() <= metadata.items()


def test_a_tied_matrix_is_left_out(data: Path, tmp_path: Path) -> None:
    folder = data / "safetensors" / "llama-bf16"
    assert "output.weight" in SafetensorsModel(folder).tensors
    assert "output.weight" not in SafetensorsModel(_changed(folder, tmp_path, TIE)).tensors
    assert "output.weight" not in SafetensorsModel(folder.with_name("qwen2-f16-sharded")).tensors


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f16", "f32"])
def test_quantised_while_read(data: Path, kind: str) -> None:
    folder = data / "safetensors" / "qwen3moe-bf16"
    kept, model = SafetensorsModel(folder), open_model(folder, quantize=kind)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down_exps.weight"):
        values = np.frombuffer(bytes(kept.tensors[name].data[:]), ml_dtypes.bfloat16)
        values = values.astype(np.float32).reshape(kept.tensors[name].shape)
        expected = reference.quants.quantize(values, reference.GGMLQuantizationType[kind.upper()])
        tensor = model.tensors[name]
        assert tensor.type_name == kind.upper()
        raw = expected.tobytes()
        assert len(tensor.data) == tensor.nbytes == len(raw)
        assert bytes(tensor.data[:]) == raw
        assert bytes(tensor.data[7:1009]) == raw[7:1009]
    for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight"):
        assert model.tensors[name].type_name == "F32"
        assert bytes(model.tensors[name].data[:]) == bytes(kept.tensors[name].data[:])


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5)])
def test_transposed_rows_in_any_order(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((2, *shape)).astype(np.float32)
    parts = tuple(
        StoredTensor(str(n), "F32", shape, np.ascontiguousarray(of).reshape(-1).view(np.uint8), "")
        for n, of in enumerate(values)
    )
    turned = values.swapaxes(-1, -2).reshape(2, -1, 7)
    order = rng.permutation(turned.shape[1])
    for rows, wanted in (
        (Rows(parts, transposed=True), turned),
        (Rows(parts, order, transposed=True), turned[:, order]),
    ):
        wanted = wanted.reshape(-1, 7)
        assert rows.count == len(wanted)
        for first, last in ((0, rows.count), (1, 4), (3, rows.count - 1), (2, 3)):
            np.testing.assert_array_equal(rows.floats(first, last), wanted[first:last])


def test_slices_of_bytes_that_are_made() -> None:
    whole = np.arange(7 * 5, dtype=np.uint8).reshape(7, 5)
    made: list[tuple[int, int]] = []

    def make(first: int, last: int) -> Any:
        made.append((first, last))
        return whole[first:last]

    rows = RowBytes(make, 7, 5, rows_at_once=2)
    for begin in range(36):
        for end in range(36):
            assert np.array_equal(rows[begin:end], whole.reshape(-1)[begin:end])
    assert max(last - first for first, last in made) == 2
    made.clear()
    assert len(rows[11:14]) == 3
    assert made == [(2, 3)]


# ---- small folders -----------------------------------------------------------------------------

TIE = {"tie_word_embeddings": True}


def _changed(folder: Path, tmp_path: Path, fields: dict[str, Any]) -> Path:
    """A copy of a folder with other fields in its config.json."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


def test_gemma_norms_get_one_added(make_folder: Folders) -> None:
    tensors = made_tensors(
        model__embed_tokens__weight=(3, 8),
        model__layers__0__input_layernorm__weight=(8,),
        model__layers__0__self_attn__q_norm__weight=(4,),
        model__layers__0__self_attn__q_proj__weight=(8, 8),
    )
    config = {k: v for k, v in CONFIG.items() if k != "hidden_act"} | {
        "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 4,
        "head_dim": 4,
    }  # fmt: skip
    model = SafetensorsModel(make_folder(config, tensors))
    for theirs, ours in (("input_layernorm", "attn_norm"), ("self_attn.q_norm", "attn_q_norm")):
        expected = tensors[f"model.layers.0.{theirs}.weight"][1] + np.float32(1)
        values = model.tensors[f"blk.0.{ours}.weight"].data.view(np.float32)
        assert np.array_equal(values, expected)
    query = model.tensors["blk.0.attn_q.weight"]  # half-style RoPE: no row moves
    assert bytes(query.data[:]) == tensors["model.layers.0.self_attn.q_proj.weight"][1].tobytes()
    assert model.metadata["gemma3.attention.sliding_window"] == 16


@pytest.mark.parametrize(
    ("prefix", "others"),
    [
        ("language_model.model", ("vision_tower.a.weight", "image_newline")),  # LLaVA 1.6
        ("model.language_model", ("model.vision_tower.a.weight", "model.image_newline")),
        # SmolVLM
        ("model.text_model", ("model.vision_model.a.bias", "model.connector.proj.weight")),
    ],
)
def test_the_decoder_of_a_model_of_pictures(
    make_folder: Folders, prefix: str, others: tuple[str, ...]
) -> None:
    plain = {"embed_tokens.weight": (3, 8), "layers.0.mlp.up_proj.weight": (16, 8)}
    names = {f"{prefix}.{name}": shape for name, shape in plain.items()}
    arrays = {name: ("F32", np.ones(shape, np.float32)) for name, shape in names.items()}
    arrays |= {name: ("F32", np.ones(2, np.float32)) for name in others}
    with SafetensorsModel(make_folder({"model_type": "a", "text_config": CONFIG}, arrays)) as model:
        assert set(model.tensors) == {"token_embd.weight", "blk.0.ffn_up.weight"}
        assert set(model.unused_tensors) == set(others)


def test_odd_rows_keep_their_type(make_folder: Folders) -> None:
    tensors = made_tensors(
        model__embed_tokens__weight=(3, 8),
        model__layers__0__mlp__down_proj__weight=(8, 32),
    )
    with pytest.warns(UserWarning, match=r"1 tensors keep .* q4_0's block: token_embd.weight"):
        model = SafetensorsModel(make_folder(CONFIG, tensors), "q4_0")
    assert model.tensors["token_embd.weight"].type_name == "F32"
    assert model.tensors["blk.0.ffn_down.weight"].type_name == "Q4_0"
