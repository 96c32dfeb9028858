"""The operations of every family, evaluated in numpy, against the reference of descriptions."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.graph.evaluation import Evaluation
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers

FAMILIES = Path(__file__).parents[2] / "data" / "families"
NAMES = sorted(path.name.removesuffix(".gguf.xz") for path in FAMILIES.glob("*.gguf.xz"))
TOKENS = [3, 1, 4, 1, 5, 9, 2]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_graph_are_those_of_the_description(
    name: str, tmp_path: Path, reference_model: Any
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FAMILIES / f"{name}.gguf.xz").read_bytes()))
    with Gguf(path) as file:
        config = Config.of(file).at_context(64)
        reference = reference_model(file, config, 64)
        selects = any(mixer.indexer for mixer in config.attentions)
        tokens = TOKENS * 3 if selects else TOKENS  # more than are selected
        if any(mixer.compression for mixer in config.attentions):
            tokens = TOKENS * 19  # a block of 128
        golden = reference.logits(tokens)
        for outputs in (None, 1):
            step = StepOps(config, len(tokens))
            x = layers(step, embedding(step), outputs)
            assert x is not None
            logits = head(step, x)
            at = Evaluation(reference, tokens, slice(None) if outputs is None else [-1])
            found = step.graph.evaluate(at)[logits]
            wanted = golden[-len(found) :]
            assert len(found) == (outputs or len(tokens))
            assert np.abs(found - wanted).max() <= 1e-9 * np.abs(wanted).max()
