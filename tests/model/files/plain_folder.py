"""What tests of folders as transformers writes them begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.files.pretrained.config import read_config
from urdir.model.files.pretrained.tables import FAMILIES

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "vocab_size": 3,
    "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32", "_name_or_path": "x",
    "num_key_value_heads": 1,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "hidden_act": "absent", "rope_theta": "absent"}


def made_tensors(**shapes: tuple[int, ...]) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: ("F32", rng.standard_normal(s).astype(np.float32)) for name, s in named.items()}


def keys_of(**fields: Any) -> dict[str, Any]:
    """Keys read from `CONFIG` with other fields."""
    config = {name: value for name, value in (CONFIG | fields).items() if value != "absent"}
    family = FAMILIES[config["model_type"]]
    return dict(read_config(config, family, Path("config.json")).keys)
