"""Sessions of models with recurrent layers: states follow what happens to their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from urdir.model.engine.batch import Output
from urdir.model.engine.engine import Engine
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.verify.conformance import relative_rms

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 128, 40)]
MODELS = [
    "lfm2-dense",
    pytest.param("mamba2-dense", marks=pytest.mark.full),
    pytest.param("minimax-01-moe", marks=pytest.mark.full),
]
#: The same tokens in other divisions: rounding differs.
CLOSE = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def engine(
    request: pytest.FixtureRequest, device_name: str, family_file: Callable[[str], Path]
) -> Iterator[Engine]:
    """Short convolutions beside attention; a state in every layer and no attention at all; a state
    without a convolution."""
    file = family_file(request.param)
    with Engine.open(file, device=device_name, context=64, kv_dtype="f32", exact=True) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Three sequences, exact."""
    with Session(
        engine.device, engine.weights, 64, "f32", exact=True, sequences=3, chunk=8
    ) as session:
        yield session


def logits_of(engine: Engine, tokens: list[int]) -> np.ndarray:
    """After a prompt that nothing has happened to."""
    engine.session.truncate(0)
    engine.session.feed(tokens)
    return engine.session.logits_step()


def test_steps_that_ran_ahead_are_undone(engine: Engine, session: Session) -> None:
    """The state after the prompt is kept; what was answered is processed again."""
    session.feed(TOKENS[:9])
    answer = list(islice(session.stream(Output.GREEDY), 2))
    assert session.sequences[0].length == 8  # the ninth shared a step with the first answered
    session.feed(TOKENS[20:23])
    known = TOKENS[:9] + answer + TOKENS[20:23]
    assert session.sequences[0].tokens == known
    assert relative_rms(session.logits_step(), logits_of(engine, known)) < CLOSE
    session.feed([7])
    again = list(islice(session.stream(Output.GREEDY), 2))
    assert relative_rms(session.logits_step(), logits_of(engine, [*known, 7, *again])) < CLOSE


def test_a_long_answer_is_processed_again_as_far_as_it_exceeds_a_step(session: Session) -> None:
    session.feed(TOKENS[:3])
    answer = list(islice(session.stream(Output.GREEDY), 10))
    sequence = session.sequences[0]
    assert 1 <= sequence.pending <= 8
    assert sequence.tokens == TOKENS[:3] + answer
    assert list(islice(session.stream(Output.GREEDY), 2))


def test_forks_go_on_by_themselves(engine: Engine, session: Session) -> None:
    session.feed(TOKENS[:5])
    session.fork(0, 2)
    session.feed(TOKENS[5:7])
    session.feed(TOKENS[20:23], sequence=2)
    together = session.forward_gpu_resident((0, 2))
    assert relative_rms(together[0], logits_of(engine, TOKENS[:7])) < CLOSE
    assert relative_rms(together[1], logits_of(engine, TOKENS[:5] + TOKENS[20:23])) < CLOSE


def test_sequences_in_one_step_are_each_as_if_alone(engine: Engine, session: Session) -> None:
    parts = TOKENS[:7], TOKENS[9:11], TOKENS[12:22]
    for sequence, tokens in enumerate(parts):
        session.feed(tokens, sequence=sequence)
    order = (2, 0, 1)
    for row, logits in enumerate(session.forward_gpu_resident(order)):
        assert relative_rms(logits, logits_of(engine, parts[order[row]])) < CLOSE


def test_a_sequence_is_cut_to_where_a_state_was_kept(engine: Engine, session: Session) -> None:
    session.feed(TOKENS[:6])
    session.logits_step()
    for token in TOKENS[6:9]:
        session.feed([token])
        session.logits_step()
    assert [session.kept(length) for length in (9, 8, 6, 5)] == [9, 6, 6, 0]
    with pytest.raises(ModelError, match="cannot be cut to 8 tokens"):
        session.truncate(8)
    assert session.length == 9
    session.truncate(6)
    session.feed(TOKENS[30:32])
    expected = logits_of(engine, TOKENS[:6] + TOKENS[30:32])
    assert relative_rms(session.logits_step(), expected) < CLOSE


def test_an_emptied_sequence_begins_anew(engine: Engine, session: Session) -> None:
    session.feed(TOKENS[:7])
    session.logits_step()
    session.truncate(0)
    session.feed(TOKENS[5:9])
    assert relative_rms(session.logits_step(), logits_of(engine, TOKENS[5:9])) < CLOSE
