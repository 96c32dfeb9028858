"""What tests of commands share: files, good and bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest


@pytest.fixture
def nano(data: Path) -> Path:
    """A file without a vocabulary."""
    return data / "golden" / "nano-llama-q8_0.gguf"


@pytest.fixture
def write_llama(tmp_path: Path) -> Callable[..., Path]:
    """Writes a llama of one layer with one thing wrong: ``arch`` is another's, ``without`` a key,
    or q is of a type that no kernel knows, ``type_of_q``."""

    def write(name: str, **wrong: str) -> Path:
        return _write_llama(tmp_path / name, **wrong)

    return write


def _write_llama(
    path: Path, *, arch: str = "llama", without: str = "", type_of_q: str = "F32"
) -> Path:
    writer = gguf_package.GGUFWriter(str(path), arch)
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 32,
    }.items():
        if key != without:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    square, vector = np.ones((32, 32), np.float32), np.ones(32, np.float32)
    for name in ("token_embd", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output"):
        writer.add_tensor(f"{name}.weight", square)
    for name in ("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"):
        writer.add_tensor(f"{name}.weight", square)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", vector)
    kind = gguf_package.GGMLQuantizationType[type_of_q]
    block, nbytes = gguf_package.GGML_QUANT_SIZES[kind]
    q = square if type_of_q == "F32" else np.zeros((32, 32 // block * nbytes), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", q, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
