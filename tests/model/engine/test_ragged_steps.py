"""Steps of any mix: decoded tokens of some sequences beside chunks of the prompts of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from tests.model.engine.test_prompts import EXACT, ROUNDED
from tests.model.stepping import stepping
from urdir.driver import Device
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

CONTEXT, LONG = 160, 76
RNG = np.random.default_rng(12)
PROMPTS = [[int(t) for t in RNG.integers(3, 250, n)] for n in (5, 37, 1, LONG, 18)]

Logits = dict[int, list[npt.NDArray[np.float32]]]


@pytest.fixture(scope="module")
def weights(device: Device) -> Iterator[Weights]:
    path = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q8_0.gguf"
    with Gguf(path) as gguf, Weights.load(gguf, Config.of(gguf), device) as loaded:
        yield loaded


def alone(device: Device, weights: Weights, tokens: list[int], exact: bool, kind: Any) -> Any:
    """The logits after the last token of a sequence that has the device for itself."""
    with stepping(device, weights, SessionSettings(CONTEXT, kind, exact=exact)) as eager:
        eager.feed(tokens)
        return eager.logits()[0]


def mixed(eager: EagerSteps) -> Logits:
    """Feed `PROMPTS` in steps of several segments and decoded tokens, then a token more each."""
    found: Logits = {s: [] for s in range(len(PROMPTS))}

    def step(batch: Batch) -> None:
        eager.launch(batch, Output.LOGITS)
        rows, vocab = len(batch.choosing), eager.session.parts.config.vocab_size
        if rows:
            logits = eager.session.parts.work["logits"].download(np.float32, (rows, vocab))
            for sequence, row in zip(batch.choosing, logits, strict=True):
                found[sequence].append(row)
                eager.feed([int(np.argmax(row))], sequence)

    for sequence, prompt in enumerate(PROMPTS):
        eager.feed(prompt, sequence)
    chunk = min(32, eager.session.shapes.chunks[-1])
    whole = [Segment(s, 0, len(PROMPTS[s]), chooses=True) for s in (0, 1, 2)]
    if chunk == 8:  # exact
        step(Batch((), (whole[0],)))
        eager.process(36, 1)
        step(Batch((0,), (Segment(1, 36, 37, chooses=True),)))
        step(Batch((0, 1), (whole[2],)))
    else:
        step(Batch((), (whole[0], whole[2])))
        step(Batch((2, 0), (whole[1],)))
    step(Batch((0, 1, 2), (Segment(3, 0, chunk),)))
    start = chunk
    while start < LONG:
        end = min(start + chunk, LONG)
        step(Batch((1,), (Segment(3, start, end, chooses=end == LONG),)))
        start = end
    step(Batch((), (Segment(4, 0, min(17, chunk)),)))
    eager.process(17, 4)
    step(Batch((3, 0, 1, 2), (Segment(4, 17, 18, chooses=True),)))
    step(Batch((4, 3)))
    return found


@pytest.mark.parametrize(
    ("exact", "kind", "page_len"),
    [
        (False, "f16", 16),
        pytest.param(False, "f16", 0, marks=[pytest.mark.full, pytest.mark.slow]),
        pytest.param(False, "q8_0", 32, marks=[pytest.mark.full, pytest.mark.slow]),
        pytest.param(True, "f32", 0, marks=[pytest.mark.full, pytest.mark.slow]),
    ],
)
def test_a_row_is_what_it_is_alone(
    device: Device, weights: Weights, exact: bool, kind: Any, page_len: int
) -> None:
    pages = cast("dict[str, Any]", {"page_len": page_len} if page_len else {})
    with stepping(
        device, weights, SessionSettings(CONTEXT, kind, exact=exact, sequences=6, **pages)
    ) as eager:
        found = mixed(eager)
        tokens = [list(eager.tokens[s]) for s in range(len(PROMPTS))]
    for s, prompt in enumerate(PROMPTS):
        assert len(found[s]) == len(tokens[s]) - len(prompt) > 1
        for at, logits in ((0, found[s][0]), (-1, found[s][-1])):
            length = len(prompt) if at == 0 else len(tokens[s]) - 1
            wanted = alone(device, weights, tokens[s][:length], exact, kind)
            assert relative_rms(logits[None], wanted[None]) < (EXACT if exact else ROUNDED), (s, at)


@pytest.mark.full
@pytest.mark.slow
def test_steps_are_the_same_again(device: Device, weights: Weights) -> None:
    """Bit for bit, and a device that chooses greedily chooses what the host would."""
    runs = []
    for _ in range(2):
        with stepping(device, weights, SessionSettings(CONTEXT, sequences=6)) as eager:
            runs.append(mixed(eager))
    for s, logits in runs[0].items():
        for one, other in zip(logits, runs[1][s], strict=True):
            np.testing.assert_array_equal(one, other)


def test_shapes_are_few(device: Device, weights: Weights) -> None:
    with stepping(device, weights, SessionSettings(CONTEXT, sequences=40, chunk=CONTEXT)) as eager:
        shapes = eager.session.shapes
        assert shapes.rows == 40
        made = {
            shapes.of_batch(
                Batch(
                    tuple(range(n)),
                    (Segment(38, 0, rows, chooses=True), Segment(39, 0, 1)),
                ),
                CONTEXT,
                Output.GREEDY,
            )
            for n in range(38)
            for rows in range(1, 120)
        }
        assert {(s.decode, s.prompt, s.outputs) for s in made} == {
            (decode, prompt, outputs)
            for decode, outputs in ((0, 16), (16, 16), (16, 40), (40, 40))
            for prompt in (128, 192)
        }


@pytest.mark.slow
def test_rows_of_packed_norms_are_what_they_are_alone(device: Device) -> None:
    """Five sequences of Q4_K and Q6_K: norms that products begin are packed."""
    path = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q4_k_m.gguf"
    with Gguf(path) as gguf, Weights.load(gguf, Config.of(gguf), device) as weights:
        with stepping(device, weights, SessionSettings(CONTEXT, sequences=5)) as eager:
            for sequence in range(5):
                eager.feed([sequence + 5], sequence)
            eager.launch(Batch(tuple(range(5))), Output.LOGITS)
            vocab = eager.session.parts.config.vocab_size
            logits = eager.session.parts.work["logits"].download(np.float32, (5, vocab))
        for sequence in range(5):
            wanted = alone(device, weights, [sequence + 5], False, "f16")
            assert relative_rms(logits[sequence][None], wanted[None]) < ROUNDED
