"""DeepSeek V4 where no golden of llama.cpp is: experts chosen by tokens, and an MTP head of four
streams, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.model.engine.test_selection import BLOCKS
from urdir.driver.device import Device
from urdir.model.engine.draft_logits import logits_with_draft
from urdir.model.engine.draft_pair import nextn_pair, open_pair
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms

EXPERTS, USED = 5, 2
SHAPE = replace(
    BLOCKS,
    keys={
        **BLOCKS.keys,
        "attention.compress_ratios": np.array([4, 0]),
        "hash_layer_count": 1,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    },
    nextn=1,
)


def test_experts_by_token_and_a_head_of_streams(
    device: Device, random_model: Callable[..., Any], reference_model: Any
) -> None:
    model, rng = random_model(SHAPE, "Q8_0"), np.random.default_rng(4)
    table = model.tensors["blk.0.ffn_gate_tid2eid.weight"].data.view(np.float32)
    chosen = [rng.permutation(EXPERTS)[:USED] for _ in range(SHAPE.vocab)]
    table[:] = np.concatenate(chosen)
    tokens = [int(token) for token in rng.integers(0, SHAPE.vocab, 14)]
    settings = SessionSettings(32, "f32", exact=True)
    with open_pair(pair := nextn_pair(model), device, settings, most=2) as draft:
        logits, drafted = logits_with_draft(draft, tokens)
    reference = reference_model(model, pair.config)
    assert relative_rms(logits, reference.logits(tokens)) < 1e-5
    assert relative_rms(drafted[0], of_head(reference, pair.config, tokens)) < 1e-5


def of_head(reference: Any, config: Any, tokens: list[int]) -> Any:
    """Logits (tokens, vocabulary) of the head, from all streams of the layers."""
    (head,), rows = config.nextn, np.arange(len(tokens))
    streams = np.repeat(reference.matrix(config.embedding)[tokens][:, None], 4, axis=1)
    for index, layer in enumerate(config.layers):
        streams = reference._layer(layer, index, streams, rows, [], None)
    before = np.concatenate([np.zeros_like(streams[:1]), streams[:-1]])
    embedded = reference.norm(head.embedding_norm, reference.matrix(head.embedding)[tokens])
    joined = np.concatenate(
        [
            np.repeat(embedded[:, None], 4, axis=1),
            reference.norm(head.hidden_norm, before),
        ],
        axis=2,
    )
    streams = reference.linear(head.join, joined)
    streams = reference._layer(head.layer, 0, streams, rows, [], None)
    made = reference._joined(config.join, streams)
    return reference.linear(head.output, reference.norm(head.norm, made))
