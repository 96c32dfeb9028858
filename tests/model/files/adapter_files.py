"""LoRA adapters of references, made as files and folders."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from urdir.model.files.gguf import Gguf
from urdir.model.files.safetensors import read_safetensors

DATA = Path(__file__).parents[2] / "data" / "families"
Matrices = Mapping[str, tuple[Any, Any]]
#: Modules of the transformers class, by tensor.
MODULES = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return path


def made(base: Path, seed: int, rank: int, *parts: str) -> dict[str, tuple[Any, Any]]:
    """A and B for the tensors whose names have one of these parts; every second is F16."""
    random, found = np.random.default_rng(seed), {}
    with Gguf(base) as file:
        for name, tensor in file.tensors.items():
            if len(tensor.shape) > 1 and any(part in name for part in parts):
                dtype = np.float16 if len(found) % 2 else np.float32
                *experts, rows, cols = tensor.shape
                a = random.standard_normal((*experts, rank, cols)) / cols**0.5
                b = random.standard_normal((*experts, rows, rank)) / rank**0.5
                found[name] = a.astype(dtype), b.astype(dtype)
    return found


def write_gguf(path: Path, matrices: Matrices, alpha: float = 2.0, **changed: Any) -> Path:
    """An adapter as llama.cpp writes it."""
    writer = gguf.GGUFWriter(path, changed.get("arch", "llama"))
    writer.add_string("general.type", changed.get("kind", "adapter"))
    writer.add_string("adapter.type", changed.get("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, pair in matrices.items():
        for which, values in zip("ab", pair, strict=True):
            if values is not None:
                writer.add_tensor(f"{name}.lora_{which}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_peft(folder: Path, matrices: Matrices, **fields: Any) -> Path:
    """The same as peft writes it: rows of queries and keys of the transformers class come in halves
    of heads."""
    folder.mkdir()
    header, data = {}, b""
    for name, (a, b) in matrices.items():
        _, layer, of, _ = name.split(".")
        if of in ("attn_q", "attn_k"):
            heads = 2 if of == "attn_q" else 1
            b = b.reshape(heads, -1, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        for which, values in (("A", a), ("B", b)):
            values = np.ascontiguousarray(values, np.float32)
            key = f"base_model.model.model.layers.{layer}.{MODULES[of]}.lora_{which}.weight"
            span = [len(data), len(data) + values.nbytes]
            header[key] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": span}
            data += values.tobytes()
    text = json.dumps(header).encode()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert read_safetensors(file)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "bias": "none", **fields}
    given = {name: value for name, value in config.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder
