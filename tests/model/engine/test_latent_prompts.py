"""Prompts of attention by a latent vector: written out where they begin a sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.driver.group import Group
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.families.shapes import Shape
from urdir.model.memory.session_settings import SessionSettings, Split
from urdir.model.memory.weight_sizes import shares_of
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock
from urdir.ptxgen.kernels.attention.prompt import PromptAttention


def kv_heads(session: Session, shape: StepShape) -> set[int]:
    """KV heads of attention over prompts in a step."""
    kernels = (op.kernel for op in session.steps.bound(shape).plan if isinstance(op, Launch))
    return {kernel.layout.kv_heads for kernel in kernels if isinstance(kernel, PromptAttention)}


def random_tokens() -> list[int]:
    """The tokens of a prompt for `SHAPE`."""
    return [int(t) for t in np.random.default_rng(3).integers(0, SHAPE.vocab, sum(PARTS))]


def logits_of_parts(eager: EagerSteps) -> Any:
    """Logits after each of the `PARTS` of the prompt."""
    found, tokens = [], random_tokens()
    for start, count in zip(np.cumsum((0, *PARTS)).tolist(), PARTS, strict=False):
        eager.feed(tokens[start : start + count])
        shape, _ = eager.session.shapes.prompt(start, start + count, Output.LOGITS)
        assert blocks(eager.session, shape) == -(-(start + count) // 224)
        found.append(eager.logits()[0])
    return np.stack(found)


def blocks(session: Session, shape: StepShape) -> int:
    """Blocks of cached tokens that a layer walks over in a step."""
    launches = [op.kernel for op in session.steps.bound(shape).plan if isinstance(op, Launch)]
    count = sum(isinstance(kernel, PrefillBlock) for kernel in launches)
    return count // session.parts.config.n_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek2-moe",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("kimi-linear-moe", "kimi-k3-moe", "mistral4-moe", "bailingmoe3-moe")
        ),
    ],
)
def test_default_prompts_divided_anywhere_are_as_near_as_llama_cpp_s(
    name: str, check_divided_prompts: Callable[..., None]
) -> None:
    """A prompt's first step has keys and values for each head, those after it one latent vector."""

    def look(engine: Engine) -> None:
        session = engine.session
        (heads,) = {mixer.heads for mixer in engine.config.attentions}
        assert kv_heads(session, session.shapes.prompt(0, 44)[0]) == {heads}
        assert kv_heads(session, session.shapes.prompt(1, 45)[0]) == {1}

    check_divided_prompts(name, [[31, 12, 1], [1, 13]], look)


#: Heads that the kernel of blocks takes, of 96 values, of which 32 rotate, and 64.
SHAPE = Shape(
    *("deepseek2", 1, 96, 3, 1, 64, 160, 83, False),
    {
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 96,
        "attention.key_length_mla": 96,
        "attention.value_length_mla": 64,
        "rope.dimension_count": 32,
        "leading_dense_block_count": 1,
    },
)
#: Rows are processed in these parts: the last walks over two blocks of 224.
PARTS = (128, 71, 14, 85)
#: Of logits; bf16 and q8_0 round what is cached to fewer bits.
TOLERANCES = {"f16": 2e-3, "f32": 2e-3, "bf16": 5e-3, "q8_0": 1.2e-2, "fp8": 6e-2}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("kv_dtype", "page_len"),
    [("f16", 0), ("f32", 0), ("bf16", 16), ("q8_0", 0), ("q8_0", 32), ("fp8", 32)],
)
@pytest.mark.usefixtures("on_hopper", "small_blocks")
def test_prompts_walk_over_cached_tokens_in_blocks(
    kv_dtype: KvDtype,
    page_len: int,
    device: Device,
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    model = random_model(SHAPE, "Q8_0")
    config = Config.of(model)
    settings = SessionSettings(512, kv_dtype, chunk=128, page_len=page_len)
    with (
        Weights.load(model, config, device) as weights,
        stepping(device, weights, settings) as eager,
    ):
        found = logits_of_parts(eager)
    golden = reference_model(model, config).logits(random_tokens())[np.cumsum(PARTS) - 1]
    assert relative_rms(found, golden) <= TOLERANCES[kv_dtype]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("split", "ranks"), [("tensors", 3), ("layers", 2)])
@pytest.mark.usefixtures("small_blocks")
def test_ranks_walk_with_their_own_heads_or_layers(
    split: Split,
    ranks: int,
    device_name: str,
    needs_gpus: Callable[[int], None],
    needs_wgmma: Callable[[Device], None],
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    needs_gpus(ranks)
    layers = 1 if split == "tensors" else 2
    keys = {**SHAPE.keys, "leading_dense_block_count": layers}
    model = random_model(replace(SHAPE, layers=layers, keys=keys), "Q8_0")
    config = Config.of(model)
    with ExitStack() as owners:
        group = owners.enter_context(Group.open(device_name, ranks))
        needs_wgmma(group[0])
        weights = [
            owners.enter_context(Weights.load(model, share, device))
            for share, device in zip(shares_of(config, model, ranks, split), group, strict=True)
        ]
        settings = SessionSettings(512, chunk=128)
        with (
            Session(group[0], weights[0], settings, peers=weights[1:]) as session,
            EagerSteps(session) as eager,
        ):
            found = logits_of_parts(eager)
    golden = reference_model(model, config).logits(random_tokens())[np.cumsum(PARTS) - 1]
    assert relative_rms(found, golden) <= TOLERANCES["f16"]
