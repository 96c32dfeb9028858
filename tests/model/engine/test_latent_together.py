"""Prompts of latent attention that walk over what is cached, beside others and beside answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_golden import Eager
from tests.model.engine.test_latent_prompts import SHAPE, TOLERANCES, blocks
from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.config import Config
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

#: Tokens of each sequence's prompt, and of its whole text.
PROMPTS, TEXTS = (201, 130, 7, 340, 66), (207, 134, 15, 344, 70)
Found = list[tuple[int, int, np.ndarray[Any, Any]]]


def texts() -> list[list[int]]:
    """The tokens of each sequence."""
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, SHAPE.vocab, count)] for count in TEXTS]


def ragged(eager: EagerSteps, seed: int) -> tuple[Found, set[tuple[int, int]]]:
    """Logits after tokens of `texts` in steps of random segments and decoded tokens, by text and
    length, and how many decoded tokens and segments steps had. A sequence may be cancelled
    anywhere, and another begins in its place."""
    rng, waiting = np.random.default_rng(seed), list(range(len(TEXTS)))
    session = eager.session
    held: dict[int, int] = {}
    found, mixes, tokens = Found(), set(), texts()
    while waiting or held:
        room, decode, segments = session.shapes.chunks[-1], list[int](), list[Segment]()
        for slot in rng.permutation(len(eager.lengths)).tolist():
            if slot in held and rng.random() < 0.03:
                waiting.append(held.pop(slot))
                eager.truncate(0, slot)
            if slot not in held and waiting:
                held[slot] = waiting.pop(0)
                eager.feed(tokens[held[slot]][: PROMPTS[held[slot]]], slot)
            if slot not in held or rng.random() < 0.1:
                continue
            start, end = eager.lengths[slot], len(eager.tokens[slot])
            if end - start == 1 and start:
                decode.append(slot)
            elif (count := min(int(rng.integers(1, 180)), end - start, room)) > 0:
                segments.append(Segment(slot, start, start + count, start + count == end))
                room -= session.shapes.alignment * -(-count // session.shapes.alignment)
        batch = Batch(tuple(decode), tuple(segments))
        if not decode and not segments:
            continue
        mixes.add((len(decode), len(segments)))
        eager.launch(batch, Output.LOGITS)
        logits = session.parts.work["logits"].download(np.float32).reshape(-1, SHAPE.vocab)
        for slot, row in zip(batch.choosing, logits, strict=False):
            length, text = eager.lengths[slot], held[slot]
            found.append((text, length, row))
            if length == TEXTS[text]:
                del held[slot]
                eager.truncate(0, slot)
            else:
                eager.feed(tokens[text][length : length + 1], slot)
    return found, mixes


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("kv_dtype", "page_len", "sequences"), [("f16", 16, 4), ("f16", 0, 3), ("q8_0", 32, 4)]
)
@pytest.mark.usefixtures("on_hopper", "small_blocks")
def test_a_row_is_what_it_is_alone(
    kv_dtype: KvDtype,
    page_len: int,
    sequences: int,
    device: Device,
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    """Within tolerance; launch by launch and as graphs bit for bit."""
    model = random_model(SHAPE, "Q8_0")
    config = Config.of(model)
    settings = SessionSettings(512, kv_dtype, chunk=384, page_len=page_len, sequences=sequences)
    runs = []
    with Weights.load(model, config, device) as weights:
        for observer in (None, Eager()):
            with stepping(device, weights, settings, observer=observer) as eager:
                assert eager.session.shapes.alignment == 128
                found, mixes = ragged(eager, sequences)
                runs.append(found)
    for (*one, row), (*other, same) in zip(*runs, strict=True):
        assert one == other
        np.testing.assert_array_equal(row, same)
    assert {min(count, 2) for _, count in mixes} == {0, 1, 2}
    assert any(decode and segments for decode, segments in mixes)
    golden = [reference_model(model, config).logits(text) for text in texts()]
    rows = np.stack([row for *_, row in runs[0]])
    wanted = np.stack([golden[text][length - 1] for text, length, _ in runs[0]])
    assert relative_rms(rows, wanted) <= TOLERANCES[kv_dtype]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.usefixtures("on_hopper", "small_blocks")
def test_a_prompt_has_the_same_bits_beside_others(
    device: Device, random_model: Callable[..., Any]
) -> None:
    """Its rows see their own keys alone, wherever in a walk these are."""
    model = random_model(SHAPE, "Q8_0")
    config = Config.of(model)
    one, other = (texts()[n] for n in (0, 3))
    found = []
    with Weights.load(model, config, device) as weights:
        for beside in (33, 330):
            settings = SessionSettings(512, chunk=384, sequences=3)
            with stepping(device, weights, settings) as eager:
                session = eager.session
                eager.feed(other[:beside], 1)
                eager.feed(one[:200], 0)
                eager.process(120, 0)
                eager.process(beside - 9, 1)
                segments = Segment(1, beside - 9, beside), Segment(0, 120, 200, chooses=True)
                shape = session.shapes.of_batch(Batch((), segments), 512, Output.LOGITS)
                assert blocks(session, shape) == 1 + (beside > 100)
                eager.launch(Batch((), segments), Output.LOGITS)
                found.append(session.parts.work["logits"].download(np.float32, (SHAPE.vocab,)))
    np.testing.assert_array_equal(*found)
