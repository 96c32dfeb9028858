"""Decode steps of latent attention as wide as DeepSeek's, which `latent_decode` takes on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_speculation import FIXED, few_letters, given
from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode

SHAPE = Shape(
    *("deepseek2", 1, 96, 8, 1, 64, 160, 83, False),
    {
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 96,
        "attention.value_length_mla": 64,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
    },
)
#: Prompts, then steps of single tokens: one passes the end of a tile of 64 keys.
PROMPTS, STEPS = (60, 20), 7
#: Of logits; bf16 rounds what is cached to fewer bits.
TOLERANCES = {"f16": 2e-3, "bf16": 5e-3}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("kv_dtype", "page_len"), [("f16", 0), ("bf16", 16)])
@pytest.mark.usefixtures("on_hopper")
def test_steps_of_rows_beside_each_other(
    kv_dtype: KvDtype,
    page_len: int,
    device: Device,
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    """A long and a short sequence in each step, then one of them alone after tokens were undone."""
    model = random_model(SHAPE, "Q8_0")
    config = Config.of(model)
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, SHAPE.vocab, count + STEPS).tolist() for count in PROMPTS]
    settings = SessionSettings(256, kv_dtype, sequences=2, chunk=128, page_len=page_len)
    found = []
    with (
        Weights.load(model, config, device) as weights,
        stepping(device, weights, settings) as eager,
    ):
        for sequence, count in enumerate(PROMPTS):
            eager.feed(tokens[sequence][:count], sequence)
        for step in range(STEPS):
            found.append(eager.logits((0, 1)))
            for sequence, count in enumerate(PROMPTS):
                eager.feed([tokens[sequence][count + step]], sequence)
        eager.truncate(PROMPTS[0] + 2)
        eager.feed([tokens[0][PROMPTS[0] + 2]])
        plan = eager.session.steps.bound(
            eager.session.shapes.decode(1, PROMPTS[0] + 3, Output.LOGITS)
        ).plan
        alone = eager.logits()[0]
    for sequence, count in enumerate(PROMPTS):
        golden = reference_model(model, config).logits(tokens[sequence][:-1])[count - 1 :]
        made = np.stack([logits[sequence] for logits in found])
        assert relative_rms(made, golden) <= TOLERANCES[kv_dtype]
    golden = reference_model(model, config).logits(tokens[0][: PROMPTS[0] + 3])[-1]
    assert relative_rms(alone, golden) <= TOLERANCES[kv_dtype]
    assert any(isinstance(op, Launch) and isinstance(op.kernel, LatentDecode) for op in plan)


@pytest.mark.full
@pytest.mark.parametrize("page_len", [0, 16])
@pytest.mark.usefixtures("on_hopper")
def test_answers_with_drafts_are_the_same(
    page_len: int, device: Device, random_model: Callable[..., Any]
) -> None:
    """Rows of a sequence attend by the same kernel as one, once their keys are in the cache."""
    model = random_model(SHAPE, seed=1)
    first, second = few_letters(np.random.default_rng(7), 2)
    whole = tuple(np.resize(first.prompt, 58).tolist())  # drafts pass the end of a tile of 64 keys
    requests = [replace(first, prompt=whole, limit=12), replace(second, limit=9)]
    settings = SessionSettings(256, exact=True, sequences=2, chunk=128, page_len=page_len)
    drafts = replace(FIXED, shortest=1)
    with Weights.load(model, Config.of(model), device) as weights:
        with Session(device, weights, settings) as session:
            expected = given(session, requests)
        with Session(device, weights, replace(settings, drafts=drafts)) as session:
            found = given(session, requests)
            shape = session.shapes.decode(8, 100, Output.GREEDY, drafted=True)
            plan = session.steps.bound(shape).plan
    for mine, theirs in zip(found, expected, strict=True):
        mine.check_equal(theirs)
    assert sum(each.ending.accepted_tokens for each in found if each.ending) > 3
    launches = [op for op in plan if isinstance(op, Launch)]
    (kernel,) = [op.kernel for op in launches if op.label.endswith(".attention")]
    assert isinstance(kernel, LatentDecode)
    assert not kernel.appends
