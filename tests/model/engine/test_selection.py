"""Tokens that an indexer selects: prefixes, cuts and forks of sequences, the wgmma kernel, and
steps in which all are selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_recurrent_together import check_preempted
from tests.model.engine.test_shared_states import check_a_prefix_is_found
from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.encoding.encoder import check_encodes
from urdir.model.engine.realizar import Layers
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.errors import ModelError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.lower import selection
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

#: Prompts in other divisions; activations rounded to f16.
CLOSE, ROUNDED = 1e-5, 2e-3
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 67, 60)]
#: The widths of DeepSeek's heads, for which there is a kernel on wgmma.
WIDE = Shape(
    *("deepseek32", 1, 64, 8, 1, 96, 96, 67, False),
    {
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 96,
        "attention.value_length_mla": 32,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 9,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
    },
)


#: The second layer selects as the first.
NARROW = Shape(
    *("glm-dsa", 2, 64, 2, 1, 48, 64, 71, False),
    {
        **WIDE.keys,
        "attention.kv_lora_rank": 64,
        "attention.key_length_mla": 48,
        "attention.indexer.head_count": 3,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 6,
        "attention.indexer.types": np.array([1, 0]),
        "rope.dimension_count": 16,
        "leading_dense_block_count": 2,
    },
)
#: The first and the last layer have a window and smaller latent vectors, the second selects.
WINDOWED = Shape(
    *("dots3note", 3, 64, 2, 1, 48, 64, 71, False),
    {
        **NARROW.keys,
        "attention.indexer.types": np.array([0, 1, 0]),
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": np.array([1, 0, 1]),
        "attention.kv_lora_rank_swa": 32,
        "attention.key_length_mla_swa": 48,
        "attention.value_length_mla_swa": 16,
        "rope.freq_base_swa": 5000.0,
        "expert_gating_func": 2,
    },
)
#: The last five tokens, and two of the blocks of four.
BLOCKS = Shape(
    *("deepseek4", 1, 64, 2, 1, 32, 64, 71, False),
    {
        "attention.q_lora_rank": 64,
        "attention.sliding_window": 5,
        "attention.compress_ratios": np.array([4]),
        "attention.output_group_count": 1,
        "attention.output_lora_rank": 32,
        "attention.indexer.head_count": 3,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 2,
        "rope.dimension_count": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 5.0,  # 1 / (1 + log 5 / 10) times its reciprocal is not 1
        "rope.scaling.original_context_length": 16,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 1,
        "hyper_connection.epsilon": 1e-6,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": 0.5,
    },
    ("ffn_gate.weight", "ffn_gate_shexp.weight"),
)
EXACT = SessionSettings(64, "f32", exact=True, sequences=2, page_len=16)


@pytest.fixture(
    scope="module",
    params=[NARROW, BLOCKS, pytest.param(WINDOWED, marks=pytest.mark.full)],
    ids=lambda shape: shape.arch,
)
def narrow(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> Any:
    return random_model(request.param, "Q8_0")


@pytest.fixture
def weights(narrow: Any, device: Device) -> Iterator[Weights]:
    with Weights.load(narrow, Config.of(narrow), device) as loaded:
        yield loaded


def test_a_prefix_has_its_index_keys(weights: Weights, device: Device) -> None:
    check_a_prefix_is_found(device, weights, EXACT, TOKENS[:20], [*TOKENS[:17], 3, 1, 4])


def test_a_sequence_is_cut_and_forked(
    narrow: Any, weights: Weights, device: Device, reference_model: Any
) -> None:
    """Keys of tokens that are gone are not selected."""
    with stepping(device, weights, EXACT) as eager:
        eager.feed(TOKENS[:20])
        eager.logits()
        eager.fork(0, 1)
        eager.truncate(11)
        eager.feed(TOKENS[40:45])
        eager.feed(TOKENS[20:22], 1)
        found = eager.logits((0, 1))
    reference = reference_model(narrow, weights.config)
    for row, text in zip(found, ([*TOKENS[:11], *TOKENS[40:45]], TOKENS[:22]), strict=True):
        assert relative_rms(row, reference.logits(text)[-1]) < CLOSE


def test_layers_that_select_run_neither_alone_nor_without_a_cache(
    weights: Weights, device: Device
) -> None:
    with pytest.raises(UnsupportedError, match=r"latent attention|compressed blocks"):
        check_encodes(weights.config)
    with pytest.raises(ModelError, match="do not run alone: use a Session"):
        Layers(device, weights, max_len=32)


def test_a_window_is_no_longer_than_the_keys_of_a_step(
    device: Device, random_model: Callable[..., Any]
) -> None:
    keys = {**BLOCKS.keys, "attention.sliding_window": 2**31 - 1}
    model = random_model(replace(BLOCKS, keys=keys), "Q8_0")
    with (
        Weights.load(model, Config.of(model), device) as weights,
        Session(device, weights, EXACT) as session,
    ):
        plan = build_plan(session.parts, StepShape(1, 256, Output.GREEDY))
    (slots,) = (op.kernel for op in plan if isinstance(op, Launch) and "slots" in op.label)
    assert slots.width == 256 + 2


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", ROUNDED), ("fp8", 6e-2)])
def test_wide_heads_attend_on_wgmma(
    dtype: Any,
    tolerance: float,
    device: Device,
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    """After a prompt and after a token, beside another sequence. Index keys are of the cache's
    type."""
    model = random_model(WIDE, "Q8_0")
    config, tokens = Config.of(model), TOKENS[:26]
    with (
        Weights.load(model, config, device) as weights,
        stepping(device, weights, SessionSettings(32, dtype, sequences=2)) as eager,
    ):
        assert eager.session.parts.cache.shape.index_layout(0).dtype == dtype
        eager.feed(tokens[:12], 1)
        eager.feed(tokens[:25])
        found = [eager.logits((0, 1))[0]]
        eager.feed(tokens[25:])
        found.append(eager.logits()[0])
        kernels = kernels_of(eager.session, 2, 256)
    golden = reference_model(model, config).logits(tokens)[-2:]
    assert relative_rms(np.stack(found), golden) < tolerance
    if device.native_target == "sm_90a" and dtype == "f16":
        assert "latent_decode" in kernels


def kernels_of(session: Session, rows: int, keys: int) -> set[str]:
    """The names of the kernels of a decode step."""
    plan = build_plan(session.parts, StepShape(rows, keys, Output.GREEDY))
    return {op.kernel.name for op in plan if isinstance(op, Launch)}


@pytest.mark.parametrize("most", [100, 256])
def test_nothing_is_selected_where_all_would_be(
    most: int, device: Device, random_model: Callable[..., Any]
) -> None:
    """Steps of up to 256 tokens."""
    shape = replace(WIDE, keys={**WIDE.keys, "attention.indexer.top_k": most})
    model = random_model(shape, "Q8_0")
    with (
        Weights.load(model, Config.of(model), device) as weights,
        Session(device, weights, SessionSettings(300)) as session,
    ):
        assert ("select_keys" in kernels_of(session, 1, 256)) == (most < 256)
        assert "select_keys" in kernels_of(session, 1, 512)


def test_scores_of_a_long_prompt_are_made_in_parts(
    narrow: Any,
    weights: Weights,
    device: Device,
    reference_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of seven rows there would be room for the scores, in a bucket of that size."""
    tokens = 1 if narrow.architecture != "deepseek4" else 4  # that have a score together
    monkeypatch.setattr(selection, "SCORES_NBYTES", 4 * 64 * 7 // tokens)
    with stepping(device, weights, EXACT) as eager:
        eager.feed(TOKENS[:11])
        found = eager.logits()[0]
        plan = build_plan(eager.session.parts, StepShape(12, 64, Output.LOGITS, prompt=12))
    labels = [op.label for op in plan if isinstance(op, Launch) and "select" in op.label]
    mixers = enumerate(weights.config.attentions)
    layer = next(i for i, of in mixers if of.indexer is not None or of.compression is not None)
    assert labels == [f"blk.{layer}.indexer.select rows {first}" for first in (0, 4, 8)]
    assert (
        relative_rms(found, reference_model(narrow, weights.config).logits(TOKENS[:11])[-1]) < CLOSE
    )


@pytest.mark.full
@pytest.mark.slow
def test_requests_that_are_preempted_find_their_index_keys_again(
    weights: Weights, device: Device
) -> None:
    """With common beginnings, and too few pages for all."""
    settings = replace(EXACT, sequences=3, pages=4, shared_states=0)
    prompts = [TOKENS[start : start + 8] for start in (0, 0, 30)]
    check_preempted(weights, device, settings, EXACT, prompts)
