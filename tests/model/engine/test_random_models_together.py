"""Models with windows and with experts: sequences stepped together, and caches in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

#: Exact products of one row and of several add in another order.
TOLERANCE = 1e-5
_QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
SHAPES = {
    "experts": Shape(
        *("qwen3moe", 2, 64, 3, 1, 32, 96, 83, True),
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 96},
        ("attn_q_norm.weight", "attn_k_norm.weight"),
    ),
    "windows": Shape(
        *("gemma2", 2, 64, 4, 2, 32, 96, 79, True),
        {
            "attention.sliding_window": 5,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "seven of the tokens": Shape(
        *("deepseek32", 2, 64, 4, 1, 48, 96, 83, False),
        {
            "attention.q_lora_rank": 64,
            "attention.kv_lora_rank": 64,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
            "attention.indexer.head_count": 9,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 7,
            "rope.dimension_count": 16,
            "leading_dense_block_count": 1,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
        },
        ("ffn_gate.weight", "ffn_gate_shexp.weight"),
    ),
    "five of the tokens and three blocks": Shape(
        *("deepseek4", 2, 64, 4, 1, 32, 96, 83, False),
        {
            "attention.q_lora_rank": 64,
            "attention.sliding_window": 5,
            "attention.compress_ratios": np.array([4, 0]),
            "attention.output_group_count": 2,
            "attention.output_lora_rank": 32,
            "attention.indexer.head_count": 3,
            "attention.indexer.key_length": 32,
            "attention.indexer.top_k": 3,
            "rope.dimension_count": 16,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_gating_func": 4,
            "swiglu_clamp_exp": 0.5,
        },
        ("ffn_gate.weight", "ffn_gate_shexp.weight"),
    ),
    "windows, sinks and experts": Shape(
        *("gpt-oss", 2, 64, 4, 2, 32, 64, 89, False),
        {
            "attention.sliding_window": 18,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
        },
        (*_QKV_BIAS, "attn_output.bias"),
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> Any:
    return random_model(SHAPES[request.param], "Q8_0")


@pytest.fixture
def weights(model: Any, device: Device) -> Iterator[Weights]:
    with Weights.load(model, Config.of(model), device) as loaded:
        yield loaded


@pytest.mark.turns(4)
@pytest.mark.slow
def test_sequences_together_are_as_each_alone(
    model: Any, device: Device, weights: Weights, reference_model: Any
) -> None:
    """The longest goes round its rings, the shortest does not."""
    rng = np.random.default_rng(2)
    texts = [
        [int(t) for t in rng.integers(0, weights.config.vocab_size, n + 2)] for n in (3, 36, 12)
    ]
    together, alone = [], []
    with stepping(device, weights, SessionSettings(40, "f32", exact=True, sequences=3)) as eager:
        for step in (-1, 0):
            for sequence, text in enumerate(texts):
                eager.feed(text[eager.lengths[sequence] : len(text) + step], sequence)
            together.append(eager.logits((0, 1, 2)))
            rows = []
            for sequence, text in enumerate(texts):
                length = eager.lengths[sequence]
                eager.truncate(length - 1, sequence)
                eager.feed(text[length - 1 : length], sequence)
                rows.append(eager.logits((sequence,))[0])
            alone.append(np.stack(rows))
    assert relative_rms(np.stack(together), np.stack(alone)) <= TOLERANCE
    reference = reference_model(model, weights.config)
    golden = np.stack([reference.logits(text)[-2:] for text in texts], axis=1)
    assert relative_rms(np.stack(together), golden) <= TOLERANCE


@pytest.mark.turns(4, which=1)
@pytest.mark.slow
def test_pages_hold_what_a_contiguous_cache_does(device: Device, weights: Weights) -> None:
    """Bit for bit; with windows the last chunk of the prompt goes round the rings."""
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, weights.config.vocab_size, 50)]
    results = []
    for page_len in (0, 16):
        with stepping(
            device, weights, SessionSettings(64, exact=True, sequences=2, page_len=page_len)
        ) as eager:
            eager.feed(tokens[40:], 1)  # so that the pages of the other are not the first
            eager.feed(tokens[:39])
            rows = [*eager.logits((0, 1))]
            eager.feed(tokens[39:40])
            rows.append(eager.logits()[0])
            results.append(np.stack(rows))
    np.testing.assert_array_equal(results[0], results[1])
