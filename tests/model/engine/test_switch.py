"""Adapters that tokens of a text switch on: several in a text, sequences side by side, prefixes,
cuts and forks, preemption, drafts, several devices; and what such models refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_recurrent_together import check_preempted
from tests.model.engine.test_shared_states import check_a_prefix_is_found
from tests.model.stepping import answer, loaded_group, stepping
from urdir.driver.device import Device
from urdir.model.engine.encoding.encoder import check_encodes
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps, Layers
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import ConfigError, ModelError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.families.share import cut_networks
from urdir.model.files.opened import Tensor
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weight_sizes import shares_of
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

#: Every third token switches an adapter on; others count for 0.37 of one.
ADAPTERS = 23
SHAPE = Shape(
    *("graniteswitch", 2, 64, 4, 2, 32, 96, 71, True),
    {
        "logit_scale": 4.0,
        "residual_scale": 1.5,
        "embedding_scale": 0.2,
        "attention.scale": 0.2,
        "adapters.count": ADAPTERS,
        "adapters.lora_rank": 12,
        "adapters.router_gain": 0.5,
        "adapters.token_ids_activate": np.arange(ADAPTERS) * 3 + 1,
        "adapters.token_ids_substitute": np.arange(ADAPTERS)[::-1] * 3,
    },
    ("ffn_gate.weight", "attn_qkv.weight"),
)
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 71, 40)]
EXACT = SessionSettings(64, "f32", exact=True, sequences=2, page_len=16)
CLOSE, ROUNDED = 1e-5, 2e-3


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Any]) -> Any:
    """Adapters are smaller than matrices, and that of rows without one is zeros."""
    made = random_model(SHAPE, "Q8_0")
    for name, tensor in made.tensors.items():
        if ".lora_" in name:
            values = tensor.data.view(np.float32).reshape(tensor.shape) / np.float32(2)
            values[0] = 0.0
            made.tensors[name] = _with(tensor, values)
    return made


def _with(tensor: Tensor, values: np.ndarray[Any, Any]) -> Tensor:
    return replace(tensor, data=values.reshape(-1).view(np.uint8))


def exact_config(model: Any) -> Config:
    """The model with f32 adapters."""
    config = Config.of(model)
    assert config.switch is not None
    return replace(config, adapters=config.switch.room("f32"))


@pytest.fixture(scope="module")
def weights(model: Any, device: Device) -> Iterator[Weights]:
    with Weights.load(model, exact_config(model), device) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def golden(model: Any, reference_model: Any) -> Callable[[list[int]], Any]:
    """Logits of the reference after each token of a text."""
    logits: Callable[[list[int]], Any] = reference_model(model, Config.of(model)).logits
    return logits


def test_sequences_have_adapters_of_their_own(
    weights: Weights, device: Device, golden: Callable[[list[int]], Any]
) -> None:
    """After prompts, in decode steps of both, after a fork and a cut; of a text without any."""
    plain = [token - (token % 3 == 1) for token in TOKENS[20:30]]
    with stepping(device, weights, EXACT) as eager:
        eager.feed(TOKENS[:20])
        eager.feed(plain, 1)
        found, texts = [eager.logits((0, 1))], [TOKENS[:20], plain]
        for token in (7, 3):
            eager.feed([token])
            eager.feed([token - 1], 1)
            found.append(eager.logits((0, 1)))
            texts += [[*texts[-2], token], [*texts[-1], token - 1]]
        eager.fork(0, 1)
        eager.truncate(11)
        eager.feed(TOKENS[30:35])
        eager.feed([40], 1)
        found.append(eager.logits((0, 1)))
        texts += [[*TOKENS[:11], *TOKENS[30:35]], [*TOKENS[:20], 7, 3, 40]]
    wanted = [golden(text)[-1] for text in texts]
    assert relative_rms(np.concatenate(found), np.stack(wanted)) < CLOSE


def test_many_rows_have_the_adapters_of_the_last_ones(
    model: Any, device: Device, golden: Callable[[list[int]], Any]
) -> None:
    """In default mode; rows of a prompt whose results are not wanted, and one that is."""
    text = TOKENS * 2
    settings = SessionSettings(96, sequences=2)
    with (
        Weights.load(model, Config.of(model), device) as weights,
        stepping(device, weights, settings) as eager,
    ):
        eager.feed(text[:-1])
        found = [eager.logits()[0]]
        eager.feed(text[-1:])
        found.append(eager.logits()[0])
    assert relative_rms(np.stack(found), golden(text)[-2:]) < ROUNDED


def test_a_prefix_has_switched_its_adapters_on(weights: Weights, device: Device) -> None:
    check_a_prefix_is_found(device, weights, EXACT, TOKENS[:20], [*TOKENS[:17], 3, 2, 5])


@pytest.mark.slow
def test_answers_with_drafts_are_those_without(weights: Weights, device: Device) -> None:
    """Tokens of the answer, and drafts of it, switch adapters on."""
    asked = TOKENS[:12] * 2, 12, SamplingSettings(temperature=1.5, seed=3)
    with Session(device, weights, EXACT) as session:
        expected = answer(session, *asked)
    assert len({token for token in expected if token % 3 == 1}) > 1
    drafts = DraftSettings(most=3, least=3, shortest=1)
    with Session(device, weights, replace(EXACT, drafts=drafts)) as session:
        assert answer(session, *asked) == expected


@pytest.mark.slow
def test_requests_that_are_preempted_switch_their_adapters_on_again(
    weights: Weights, device: Device
) -> None:
    """With common beginnings, and too few pages for all."""
    settings = replace(EXACT, sequences=3, pages=4)
    prompts = [TOKENS[start : start + 8] for start in (0, 0, 20)]
    check_preempted(weights, device, settings, EXACT, prompts)


@pytest.mark.slow
def test_several_devices_share_the_adapters(
    model: Any,
    device_name: str,
    needs_gpus: Callable[[int], None],
    golden: Callable[[list[int]], Any],
) -> None:
    """Columns of A and rows of B."""
    needs_gpus(2)
    shares = shares_of(exact_config(model), model, 2)
    assert [cut_networks(share) for share in shares] == [(4, 4)] * 2
    with (
        loaded_group(device_name, model, shares) as (group, loaded),
        Session(group[0], loaded[0], EXACT, peers=loaded[1:]) as session,
        EagerSteps(session) as eager,
    ):
        found = []
        for start, stop in ((0, 20), (20, 21)):
            eager.feed(TOKENS[start:stop])
            found.append(eager.logits()[0])
    assert relative_rms(np.stack(found), golden(TOKENS[:21])[-2:]) < CLOSE


def test_what_does_not_go_with_such_a_model(
    model: Any, weights: Weights, device: Device, reference_file: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedError, match="adapters that tokens switch on cannot be split"):
        shares_of(Config.of(model), model, 2, "layers")
    with pytest.raises(UnsupportedError, match="embeddings of 'graniteswitch' models: adapters"):
        check_encodes(weights.config)
    with pytest.raises(ModelError, match="do not run alone: use a Session"):
        Layers(device, weights, max_len=32)
    with pytest.raises(UnsupportedError, match="'graniteswitch' models with LoRA adapters are not"):
        Engine.open(reference_file("graniteswitch"), device="emulator", max_adapters=1)


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        ((0, 3, 5), 1.0, r"'blk.1.attn_k.lora_a': the first of its matrices is that of rows"),
        ((2, 3, 5), 1e6, r"'blk.1.attn_k.lora_a': an adapter has values beyond f16"),
        ((2, 3, 5), np.nan, r"'blk.1.attn_k.lora_a': an adapter has values beyond f16"),
    ],
)
def test_values_that_adapters_cannot_have(
    model: Any, device: Device, at: tuple[int, ...], value: float, match: str
) -> None:
    tensors = dict(model.tensors)
    for name in ("blk.1.attn_k.lora_a", "blk.1.attn_k.lora_b"):
        tensor = tensors[name]
        values = tensor.data.view(np.float32).reshape(tensor.shape).copy()
        values[at] = value
        tensors[name] = _with(tensor, values)
    changed = replace(model, tensors=tensors)
    with pytest.raises(ConfigError, match=match):
        Weights.load(changed, Config.of(changed), device)
