"""Prompts: any division into steps gives the same logits, which come with the last step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.model.stepping import set_sampling, stepping
from urdir.driver.device import Device
from urdir.driver.stream import Stream
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.budget import RESERVE_BYTES
from urdir.model.engine.fitting import Place
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.sampling import sample
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 320, 25)]
#: Steps of many rows round activations to f16, those of few to 16-bit integers.
ROUNDED, EXACT = 2e-3, 1e-5


@pytest.fixture(scope="module")
def gguf() -> Iterator[Gguf]:
    path = Path(__file__).parent.parent.parent / "data" / "golden" / "nano-llama-q8_0.gguf"
    with Gguf(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def weights(gguf: Gguf, device: Device) -> Iterator[Weights]:
    with Weights.load(gguf, Config.of(gguf), device) as loaded:
        yield loaded


def watch(eager: EagerSteps) -> list[StepShape]:
    """The shapes that are launched from now on."""
    shapes: list[StepShape] = []
    launch = eager.session.steps.launch

    def watched(shape: StepShape, stream: Stream) -> None:
        shapes.append(shape)
        launch(shape, stream)

    eager.session.steps.launch = watched  # type: ignore[method-assign]
    return shapes


def singly(device: Device, weights: Weights, exact: bool) -> Any:
    """The logits after the last token, a step each."""
    kv_dtype = "f32" if exact else "f16"
    with stepping(device, weights, SessionSettings(48, kv_dtype, exact=exact)) as eager:
        for token in TOKENS:
            eager.feed([token])
            logits = eager.logits()[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_any_division_into_steps_gives_the_same_logits(
    device: Device, weights: Weights, exact: bool
) -> None:
    wanted, kv_dtype = singly(device, weights, exact), "f32" if exact else "f16"
    odd, nearly = (5, 1, 9, 8, 2), (24, 1)
    for chunk, pieces in ((64, (25,)), (8, (25,)), (64, odd), (16, nearly)):
        with stepping(
            device, weights, SessionSettings(48, cast("Any", kv_dtype), exact=exact, chunk=chunk)
        ) as eager:
            shapes = watch(eager)
            at = 0
            for count in pieces:
                eager.feed(TOKENS[at : at + count])
                at += count
            logits = eager.logits()[0]
            assert eager.lengths == [len(TOKENS)]
            assert eager.session.parts.state.positions() == {0: len(TOKENS)}
        assert relative_rms(logits, wanted) < (EXACT if exact else ROUNDED)
        assert [shape.output for shape in shapes[:-1]] == [Output.NONE] * (len(shapes) - 1)
        assert shapes[-1].output is Output.LOGITS
        assert len(shapes) == -(-len(TOKENS) // min(chunk, 8 if exact else chunk))


def test_a_short_prompt_is_one_step(device: Device, weights: Weights) -> None:
    """Sampling included; its token is what numpy takes from the logits, and steps go on from it."""
    settings = SamplingSettings(temperature=1.2, seed=3)
    with stepping(device, weights, SessionSettings(48)) as eager:
        set_sampling(eager, settings)
        shapes = watch(eager)
        eager.feed(TOKENS[:11])
        assert (eager.lengths, shapes) == ([0], [])
        found = [eager.step(output=Output.SAMPLE)[0] for _ in range(3)]
        assert shapes[0] == StepShape(16, 256, Output.SAMPLE, prompt=16)
        assert {bool(shape.prompt) for shape in shapes[1:]} == {False}
        eager.truncate(0)
        known = list(TOKENS[:11])
        eager.feed(known)
        for _ in range(3):
            known.append(sample(eager.logits()[0], settings, len(known), known))
            eager.feed(known[-1:])
    assert found == known[11:]


def test_what_is_pending_is_forked_cut_and_stepped_together(
    device: Device, weights: Weights
) -> None:
    with stepping(device, weights, SessionSettings(48, sequences=2)) as eager:
        eager.feed(TOKENS[:11])
        eager.fork(0, 1)
        assert eager.lengths == [10, 10]
        eager.feed(TOKENS[11:14])
        shapes = watch(eager)
        one, other = eager.step((0, 1))
        assert [(bool(shape.prompt), shape.output) for shape in shapes] == [
            (True, Output.NONE),
            (False, Output.GREEDY),
        ]
        assert eager.lengths == [14, 11]
        eager.truncate(0, 0)
        eager.feed(TOKENS[:14])
        assert eager.step()[0] == one
        eager.truncate(0, 1)
        eager.feed(TOKENS[:12], 1)
        eager.truncate(11, 1)
        assert (eager.lengths[1], len(eager.tokens[1])) == (0, 11)
        eager.truncate(10, 1)
        eager.feed(TOKENS[10:11], 1)
        assert eager.step((1,)) == [other]


def test_a_small_device_gets_smaller_steps(gguf: Gguf, emulator: Device) -> None:
    """The largest that fit beside weights and cache; where none does, the smallest is named."""
    config = Config.of(gguf)
    wanted = SessionSettings(config.context_length)

    def place(free: int) -> Place:
        device = SimpleNamespace(
            name="small",
            usable_memory=lambda: free,
            memory_info=lambda: (free, 1 << 40),
            properties=emulator.properties,
            native_target=emulator.native_target,
        )
        return Place(gguf, config, cast("Device", device))

    def rows_with(free: int) -> int:
        return place(free).largest_chunk(wanted)

    def needed(rows: int) -> int:
        return place(0).plan(wanted, chunk=rows).total + RESERVE_BYTES

    most = place(0).budget(wanted, chunk=2048).shapes.chunks[-1]
    assert config.context_length <= most
    assert rows_with(1 << 40) == rows_with(needed(most)) == most
    assert rows_with(needed(64)) == rows_with(needed(96) - 1) == 64
    with pytest.raises(ModelError, match=f"{needed(8):,} bytes needed"):
        rows_with(needed(8) - 1)
