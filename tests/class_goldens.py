"""Writes tests/data/classes, logits of transformers' classes (`tests/model/files/class_goldens`).

    PYTHONPATH=.src:. python tests/class_goldens.py [NAME ...]

Needs the extra `folders`. Names are those of `test_made_folders`, which has the fields.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.model.files.class_goldens import FOLDER, stream_weights
from tests.model.files.test_made_folders import DECODERS, OTHERS, filled

#: Types that no other golden covers.
NAMES = (
    *("AXK1", "BioGpt", "CodeGen", "FlexOlmo", "Flint", "GPTNeo", "Helium", "HyperCLOVAX"),
    *(
        "Lfm3",
        "ModernBertDecoder",
        "NanoChat",
        "Persimmon",
        "Phi4Multimodal",
        "VaultGemma",
        "XGLM",
        "Youtu",
    ),
    *("aria_text", "cohere_compass_text", "cosmos3_edge_text", "mllama_text_model", "openai-gpt"),
)
#: Within and beyond windows of 20 tokens.
_POSITIONS = np.array([5, 19, 26, 31])


def write(name: str) -> None:
    """One golden."""
    if name in OTHERS:
        config_class, model_class, fields = OTHERS[name]
    else:
        config_class, model_class = f"{name}Config", f"{name}ForCausalLM"
        fields = DECODERS[name]
    config = getattr(transformers, config_class)(**filled(fields))
    model = getattr(transformers, model_class)
    tokens = torch.arange(32)[None] * 37 % 310 + 5
    with TemporaryDirectory() as made:
        folder = Path(made)
        model(config).float().save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {of: tuple(file.get_slice(of).get_shape()) for of in sorted(file.keys())}
        save_file(stream_weights(shapes), folder / "model.safetensors", {"format": "pt"})
        read = model.from_pretrained(folder, attn_implementation="eager").float().eval()
        with torch.no_grad():
            logits = read(tokens).logits[0].numpy()
        said = json.loads((folder / "config.json").read_text())
    rows = read.get_input_embeddings().num_embeddings - logits.shape[1]  # never chosen
    logits = np.pad(logits, ((0, 0), (0, rows)), constant_values=np.finfo(np.float32).min)
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        config=json.dumps(said),
        shapes=json.dumps(shapes),
        tokens=tokens[0].numpy(),
        positions=_POSITIONS,
        logits=logits[_POSITIONS],
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or NAMES:
        write(name)
