"""Qwen 4: a memory of n-grams, streams of low rank, and tokens that an indexer selects, in steps of
many sequences, with drafts, shared prefixes, preemption, and on several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_recurrent_together import check_preempted
from tests.model.engine.test_shared_states import check_a_prefix_is_found
from tests.model.stepping import answer, loaded_group, logits_of, stepping
from urdir.driver.device import Device
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.lower import ngrams
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weight_sizes import shares_of
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

CLOSE, ROUNDED = 1e-5, 3e-3
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 11, 60)]
#: Two of the pools of three tokens, and the last ones.
SHAPE = Shape(
    *("qwen4exp", 2, 64, 4, 2, 32, 64, 71, False),
    {
        "full_attention_interval": 2,
        "rope.dimension_count": 16,
        "rope.dimension_sections": np.array([4, 2, 2, 0]),
        "attention.compress_ratios": np.array([3, 3]),
        "attention.indexer.head_count": 3,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 6,
        "ssm.conv_kernel": 3,
        "ssm.inner_size": 64,
        "ssm.state_size": 32,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 32,
        "ple.layers": np.array([0]),
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 1,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 3,
        "ple.layer_multipliers": np.array([1, 2**61 - 1, 5]),
        "ple.head_offsets": np.array([0, 31]),
        "ple.head_vocab_sizes": np.array([31, 29]),
        "embedding_length_per_layer_input": 32,
    },
)
EXACT = SessionSettings(64, "f32", exact=True, sequences=3, page_len=16)


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Any]) -> Any:
    return random_model(SHAPE, "Q8_0")


@pytest.fixture
def weights(model: Any, device: Device) -> Iterator[Weights]:
    with Weights.load(model, Config.of(model), device) as loaded:
        yield loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param(EXACT, CLOSE, id="exact", marks=pytest.mark.full),
        pytest.param(replace(EXACT, page_len=0), CLOSE, id="contiguous", marks=pytest.mark.full),
        pytest.param(SessionSettings(64), ROUNDED, id="default", marks=pytest.mark.full),
    ],
)
def test_logits_are_the_reference_s(
    settings: SessionSettings,
    tolerance: float,
    model: Any,
    weights: Weights,
    device: Device,
    reference_model: Any,
) -> None:
    """After a prompt in two parts, and after a token."""
    found = []
    with stepping(device, weights, settings) as eager:
        for start, stop in ((0, 17), (17, 32), (32, 33)):
            eager.feed(TOKENS[start:stop])
            found.append(eager.logits()[0])
    golden = reference_model(model, weights.config).logits(TOKENS[:33])[[16, 31, 32]]
    assert relative_rms(np.stack(found), golden) < tolerance


def test_indexers_of_layers_that_attend_to_all_tokens_are_unused(
    random_model: Callable[..., Any],
) -> None:
    """Where another layer has one that selects."""
    values = {**SHAPE.keys, "attention.compress_ratios": np.array([0, 3, 0, 0])}
    model = random_model(replace(SHAPE, layers=4, keys=values), "Q8_0")
    names = {
        name: name.replace("blk.1.", "blk.3.") for name in model.tensors if ".indexer." in name
    }
    more = {new: replace(model.tensors[name], name=new) for name, new in names.items()}
    config = Config.of(replace(model, tensors={**model.tensors, **more}))
    assert len(more) == 4
    assert set(config.unused_tensors) == set(more)


@pytest.mark.slow
def test_sequences_together_are_as_each_alone(
    model: Any,
    weights: Weights,
    device: Device,
    reference_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of prompts beside decoded tokens, gathered by several launches; a slot begins anew."""
    monkeypatch.setattr(ngrams, "MOST_ROWS", 14)  # cut to 8: at 16 bytes
    reference, found, wanted = reference_model(model, weights.config), [], []
    texts = {0: TOKENS[:24], 1: TOKENS[30:37], 2: TOKENS[8:20]}
    with stepping(device, weights, EXACT) as eager:
        eager.feed(TOKENS[20:40], 1)
        eager.logits((1,))
        eager.truncate(0, 1)
        for slot, text in texts.items():
            eager.feed(text[:-2], slot)
        eager.logits((0, 1, 2))
        for place in (-2, -1):
            for slot, text in texts.items():
                eager.feed([text[place]], slot)
            found.append(eager.logits((0, 1, 2)))
    for text in texts.values():
        wanted.append(reference.logits(text)[-2:])
    assert relative_rms(np.stack(found, axis=1), np.stack(wanted)) < CLOSE


@pytest.mark.slow
def test_drafts_change_no_token(weights: Weights, device: Device) -> None:
    """Of n-grams, some of which are not accepted."""
    prompt = TOKENS[:9] * 2
    with Session(device, weights, EXACT) as session:
        alone = answer(session, prompt, 10)
    drafted = replace(EXACT, drafts=DraftSettings(most=3, least=3, shortest=1))
    with Session(device, weights, drafted) as session:
        assert session.drafting is not None
        before = session.drafting.likely
        assert answer(session, prompt, 10) == alone
        assert session.drafting.likely != before  # some were compared


@pytest.mark.slow
@pytest.mark.usefixtures("short_prompts_are_worth_a_state")
def test_a_prefix_is_shared_with_its_states(weights: Weights, device: Device) -> None:
    settings = replace(EXACT, shared_states=4)
    check_a_prefix_is_found(device, weights, settings, TOKENS[:33], [*TOKENS[:33], 3, 1, 4])


@pytest.mark.full
@pytest.mark.slow
def test_requests_that_are_preempted_go_on(weights: Weights, device: Device) -> None:
    """Too few pages for all."""
    settings = replace(EXACT, pages=4, shared_states=0)
    prompts = [TOKENS[start : start + 8] for start in (0, 0, 30)]
    check_preempted(weights, device, settings, EXACT, prompts)


@pytest.mark.slow
def test_several_devices(
    model: Any, device_name: str, needs_gpus: Callable[[int], None], reference_model: Any
) -> None:
    needs_gpus(2)
    config = Config.of(model)
    shares = shares_of(config, model, 2)
    with (
        loaded_group(device_name, model, shares) as (group, weights),
        Session(group[0], weights[0], EXACT, peers=weights[1:]) as session,
    ):
        found = logits_of(session, TOKENS[:26])
    golden = reference_model(model, config).logits(TOKENS[:26])[-1]
    assert relative_rms(found, golden) < CLOSE
