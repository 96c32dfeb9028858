"""Files of LoRA adapters, good and hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.adapter_files import (
    MODULES,
    Matrices,
    made,
    unpacked,
    write_gguf,
    write_peft,
)
from tests.model.files.quantised_folders import KINDS, OWN_ORDERS, quantised
from urdir.model.engine.engine import Engine
from urdir.model.engine.logits import logits_after
from urdir.model.errors import ModelError
from urdir.model.files.adapter import open_adapter
from urdir.model.files.gguf import Gguf
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.safetensors import read_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama."""
    return unpacked("llama-dense", tmp_path_factory.mktemp("adapters"))


def opens(path: Path, model: Gguf) -> bool:
    """Whether an adapter can be read; no other error is raised than for a bad file."""
    try:
        open_adapter(path, model)
    except ModelError:
        return False
    return True


def test_peft_folder(base: Path, tmp_path: Path) -> None:
    matrices = made(base, 3, 4, "blk.0.attn_", "blk.1.ffn_")
    matrices = {name: of for name, of in matrices.items() if "norm" not in name}
    file = write_gguf(tmp_path / "a.gguf", matrices, alpha=2.0)
    folder = write_peft(tmp_path / "a", matrices)
    with Gguf(base) as model:
        wanted = open_adapter(file, model).matrices
        found = open_adapter(folder, model, interleaved=True).matrices
    assert found.keys() == wanted.keys()
    for name, of in wanted.items():
        assert np.array_equal(found[name].a, of.a)
        assert np.array_equal(found[name].b, of.b)


def test_models_with_columns_in_an_order(data: Path, tmp_path: Path) -> None:
    """A is multiplied with the x of its matrix."""
    folder, _ = quantised(data / "safetensors/llama-bf16", KINDS["gptq-order"], tmp_path)
    stored = read_folder(folder)
    with SafetensorsModel(folder) as model:
        random = np.random.default_rng(2)
        shapes = {f"blk.1.{name}.weight": model.tensors[f"blk.1.{name}.weight"].shape
                  for name in ("attn_k", "ffn_down", "ffn_up")}  # fmt: skip
        matrices = {
            name: tuple(random.normal(size=of).astype("f4") for of in ((4, cols), (rows, 4)))
            for name, (rows, cols) in shapes.items()
        }
        file = write_gguf(tmp_path / "a.gguf", matrices)
        found = open_adapter(file, model).matrices
    for name, (a, _) in matrices.items():
        raw = stored[f"model.layers.1.{MODULES[name.split('.')[2]]}.g_idx"].data[:]
        order = np.argsort(raw.view("<i4"), kind="stable")
        np.testing.assert_array_equal(found[name].a[0], a[:, order])


def test_experts_with_columns_in_orders_are_refused(data: Path, tmp_path: Path) -> None:
    folder, _ = quantised(data / "safetensors/qwen3moe-bf16", OWN_ORDERS, tmp_path)
    pair = np.ones((2, 4, 8), np.float32), np.ones((2, 8, 4), np.float32)
    with SafetensorsModel(folder) as model:
        for kind in ("up", "down"):
            matrices = {f"blk.1.ffn_{kind}_exps.weight": pair}
            file = write_gguf(tmp_path / kind, matrices, arch="qwen3moe")
            with pytest.raises(ModelError, match="columns in orders of their own"):
                open_adapter(file, model)


def test_scales_of_peft(base: Path, tmp_path: Path) -> None:
    matrices = made(base, 3, 4, "attn_v", "ffn_up")
    folder = write_peft(
        tmp_path / "a", matrices, use_rslora=True, alpha_pattern={r"layers\.1\..*up_proj": 6}
    )
    with Gguf(base) as model:
        found = open_adapter(folder, model).matrices
    for name, (_, b) in matrices.items():
        alpha = 6 if name == "blk.1.ffn_up.weight" else 2
        np.testing.assert_allclose(found[name].b[0], alpha / 2 * b.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": ...}, "peft_type None"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"use_rslora": "true"}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"alpha_pattern": ["a"]}, "alpha_pattern"),
    ],
)
def test_refused_fields(base: Path, tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    folder = write_peft(tmp_path / "a", made(base, 3, 4, "attn_v"), **fields)
    with Gguf(base) as model, pytest.raises(ModelError, match=named):
        open_adapter(folder, model)


def test_damaged_files(base: Path, tmp_path: Path) -> None:
    """Bytes of headers and fields of other types: nothing but errors of this package."""
    matrices = made(base, 3, 4, "attn_v")
    file, folder = write_gguf(tmp_path / "a.gguf", matrices), tmp_path / "a"
    write_peft(folder, matrices)
    whole, random = file.read_bytes(), np.random.default_rng(5)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    opened = 0
    with Gguf(base) as model:
        for number in range(300):
            damaged = bytearray(whole if number % 2 else tensors)
            damaged[int(random.integers(min(600, len(damaged))))] ^= 1 << int(random.integers(8))
            (file if number % 2 else folder / "adapter_model.safetensors").write_bytes(damaged)
            opened += opens(file if number % 2 else folder, model)
        (folder / "adapter_model.safetensors").write_bytes(tensors)
        for name in (*config, "alpha_pattern", "use_rslora", "modules_to_save"):
            for value in (None, [], {}, "x", -1, 1e308, [["a"]], {"(": 1}, {"a": "b"}):
                text = json.dumps({**config, name: value})
                (folder / "adapter_config.json").write_text(text)
                opened += opens(folder, model)
    assert opened > 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("architecture", "'gpt2' models"),
        ("kind", "not a LoRA adapter"),
        ("adapter type", "only lora"),
        ("no pair", "lora_b' is missing"),
        ("nothing", "without tensors"),
        ("nan", "NaN"),
        ("rank", "lora_a"),
        ("huge", "rank 1025"),
        ("unknown", "no such tensor"),
        ("norm", "not supported"),
        ("shape", "the model's tensor is"),
        ("large", "beyond f16"),
        ("embedding", "not supported"),
    ],
)
def test_hostile_files(base: Path, tmp_path: Path, case: str, words: str) -> None:
    name = "blk.0.attn_v.weight"
    a, b = made(base, 3, 4, "blk.0.attn_v")[name]
    pairs: dict[str, Matrices] = {
        "no pair": {name: (a, None)},
        "nothing": {},
        "nan": {name: (a, np.where(b == b.max(), np.float32(np.nan), b))},
        "rank": {name: (a[:3], b)},
        "huge": {name: (np.zeros((1025, a.shape[1]), "f4"), np.zeros((len(b), 1025), "f4"))},
        "unknown": {"blk.9.attn_v.weight": (a, b)},
        "norm": {"blk.0.attn_norm.weight": (a, b)},
        "shape": {name: (a[:, 1:], b)},
        "large": {name: (a, b * np.float32(1e6))},
        "embedding": {"token_embd.weight": (a, b)},
    }
    changed = {
        "architecture": {"arch": "gpt2"},
        "kind": {"kind": "model"},
        "adapter type": {"adapter_type": "control_vector"},
    }.get(case, {})
    file = write_gguf(tmp_path / "a.gguf", pairs.get(case, {name: (a, b)}), **changed)
    with (
        pytest.raises(ModelError, match=words),
        Engine.open(base, device="emulator", context=8, adapters=[(file, 1.0)]) as opened,
    ):
        [*logits_after(opened.session, [1])]
