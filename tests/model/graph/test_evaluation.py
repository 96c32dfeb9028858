"""The operations of every family, evaluated in numpy, against the reference of descriptions."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.engine.sources import encoder_of
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.graph.adapters import with_adapters
from urdir.model.graph.evaluation import Evaluation
from urdir.model.graph.switch import SwitchedEvaluation
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.model.layers.pooled import encoded
from urdir.model.layers.source import source_keys, source_states
from urdir.model.verify.conformance import relative_rms

DATA = Path(__file__).parents[2] / "data"
FAMILIES = DATA / "families"
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
            wanted_rows = slice(None) if outputs is None else [-1]
            at = Evaluation(reference, tokens, wanted_rows)
            if (of := config.switch) is not None:
                at = SwitchedEvaluation(reference, tokens, of, config.vocab_size, wanted_rows)
            found = with_adapters(step.graph, config.adapters).evaluate(at)[logits]
            wanted = golden[-len(found) :]
            assert len(found) == (outputs or len(tokens))
            assert np.abs(found - wanted).max() <= 1e-9 * np.abs(wanted).max()


def test_logits_of_an_encoder_decoder_s_graphs_are_llama_cpp_s(
    tmp_path: Path, reference_model: Any
) -> None:
    folder, path = DATA / "encoder_decoders", tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((folder / "t5.gguf.xz").read_bytes()))
    golden = np.load(folder / "t5.npz")
    source, tokens = golden["encoder_tokens"], golden["tokens"]
    with Gguf(path) as file:
        config = Config.of(file)
        weights = reference_model(file, config, 64)
        step = StepOps(encoder_of(config), len(source))
        states = encoded(step, 1, "none")
        made = step.graph.evaluate(Evaluation(weights, source))[states]
        step = StepOps(config, len(source))
        source_keys(step, given := source_states(step))
        filled = Evaluation(weights, source)
        step.graph.evaluate(filled, {given: made})
        at = Evaluation(weights, tokens)
        at.cached = filled.cached
        step = StepOps(config, len(tokens))
        x = layers(step, embedding(step))
        assert x is not None
        logits = head(step, x)
        found = step.graph.evaluate(at)[logits]
    assert relative_rms(found, golden["logits"]) <= 1e-5
