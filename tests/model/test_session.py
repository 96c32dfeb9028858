"""One sequence: the recorded steps against each other, against eager launches, and at the edges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from urdir.driver import execute
from urdir.model.engine import Engine
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.step import greedy_plan, logits_plan

PROMPT = [3, 141, 59, 26, 5]


@pytest.fixture
def engine(data: Path, device_name: str) -> Iterator[Engine]:
    path = data / "golden" / "nano-llama-q4_k_m.gguf"
    with Engine.open(str(path), device=device_name, context=24) as opened:
        yield opened


@pytest.mark.sanitizer
def test_device_argmax_equals_host_argmax(engine: Engine) -> None:
    session = engine.session
    session.feed(PROMPT)
    on_device = [session.greedy_step() for _ in range(8)]
    session.truncate(0)
    session.feed(PROMPT)
    on_host = []
    for _ in range(8):
        on_host.append(int(np.argmax(session.logits_step())))
        session.feed(on_host[-1:])
    assert on_device == on_host


def test_replay_equals_eager_bit_for_bit(engine: Engine) -> None:
    session = engine.session
    session.feed(PROMPT)
    replayed = [session.logits_step()]
    for token in (7, 300, 12):
        session.feed([token])
        replayed.append(session.logits_step())
    session.truncate(0)
    session.feed(PROMPT)
    engine.device.synchronize()  # the session's stream and the one below are not ordered
    plan = logits_plan(session.parts)
    for index, token in enumerate((7, 300, 12, None)):
        with engine.device.create_stream() as stream:
            execute.run(plan, engine.device, stream)
        logits = session.parts.work["logits"].download(np.float32)
        np.testing.assert_array_equal(logits, replayed[index])
        if token is not None:
            session.parts.state.write_tokens(len(PROMPT) + index, [token])


def test_a_step_is_one_graph_with_a_node_for_every_launch(engine: Engine) -> None:
    session = engine.session
    session.feed([1])
    session.greedy_step()
    plan = greedy_plan(session.parts)
    with execute.record(plan, engine.device) as graph:
        assert graph.node_count == len(plan)


def test_truncating_and_feeding_again_changes_nothing(engine: Engine) -> None:
    session = engine.session
    session.feed(PROMPT)
    first = session.logits_step()
    session.feed([9, 9, 9])
    session.logits_step()
    session.truncate(3)
    session.feed(PROMPT[3:])
    np.testing.assert_array_equal(session.logits_step(), first)


def test_a_full_context_is_refused_and_leaves_the_sequence_as_it_was(engine: Engine) -> None:
    session = engine.session
    with pytest.raises(ContextFullError, match="by 1"):
        session.feed([1] * 25)
    assert session.length == 0
    session.feed([1] * 24)
    session.greedy_step()
    assert session.is_full
    with pytest.raises(ContextFullError):
        session.greedy_step()
    session.truncate(20)
    session.feed([5])
    session.greedy_step()
    assert session.length == 21


def test_token_ids_are_checked_before_anything_is_written(engine: Engine) -> None:
    with pytest.raises(ModelError, match="320"):
        engine.session.feed([1, 320])
    with pytest.raises(ModelError, match="pending"):
        engine.session.greedy_step()


def test_numpy_references_of_the_whole_plan_agree(engine: Engine) -> None:
    session = engine.session
    session.feed(PROMPT)
    expected = session.logits_step()
    session.truncate(4)
    session.feed(PROMPT[4:])
    execute.evaluate(logits_plan(session.parts))
    logits = session.parts.work["logits"].download(np.float32)
    np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())
