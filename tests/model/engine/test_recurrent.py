"""Sessions of models with recurrent layers: states follow what happens to their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.model.engine.requests.test_service import GREEDY, ask
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.request import Ending, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.recurrent.chunked_recurrence import ChunkedRecurrence

FAMILIES = Path(__file__).parents[2] / "data" / "families"
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 128, 40)]
MODELS = [
    "lfm2-dense",
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in ("mamba2-dense", "jamba-dense", "qwen35-dense", "minimax-01-moe", "kimi-k3-moe")
    ),
]
#: The same tokens in other divisions: rounding differs.
CLOSE = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def engine(
    request: pytest.FixtureRequest, device_name: str, reference_file: Callable[[str], Path]
) -> Iterator[Engine]:
    """Short convolutions beside attention; a state in every layer and no attention at all; a
    selective scan; the delta rule, by head and by channel; a state without a convolution."""
    file = reference_file(request.param)
    with Engine.open(file, device=device_name, context=64, kv_dtype="f32", exact=True) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Three sequences, exact."""
    with Session(
        engine.device, engine.weights, SessionSettings(64, "f32", exact=True, sequences=3, chunk=8)
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


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        (1, {2: 2}),
        pytest.param(1, {0: 0, 1: 1, 3: 3, 4: 3}, marks=pytest.mark.full),
        pytest.param(3, {0: 0, 1: 0, 2: 0, 3: 3, 4: 4, 5: 5, 6: 5}, marks=pytest.mark.full),
    ],
)
def test_a_closed_stream_is_cut_to_what_is_kept(
    engine: Engine, session: Session, prompt: int, kept: dict[int, int]
) -> None:
    """Wherever `kept` says, and nowhere else: steps are undone up to the state of the prompt, which
    a prompt of one token has none of."""
    for length, found in kept.items():
        session.truncate(0)
        session.feed(TOKENS[:prompt])
        answer = list(islice(session.stream(Output.GREEDY), 3))
        assert session.kept(length) == found
        if found != length:
            before = session.sequences[0].length
            with pytest.raises(ModelError, match=f"cannot .* to {length}"):
                session.truncate(length)
            assert session.sequences[0].length == before
        session.truncate(found)
        assert (session.length, session.sequences[0].pending) == (found, 0)
        session.feed([7])
        known = [*TOKENS[:prompt], *answer][:found]
        assert relative_rms(session.logits_step(), logits_of(engine, [*known, 7])) < CLOSE


@pytest.mark.full
def test_undone_steps_have_room_in_pages(engine: Engine) -> None:
    """What is processed again lies in pages of its own: those given back are another's now."""
    settings = SessionSettings(64, "f32", exact=True, sequences=2, page_len=16, chunk=8)
    with Session(engine.device, engine.weights, settings) as session:
        session.feed(TOKENS[:3])
        steps = session.stream(Output.GREEDY)
        answer = [next(steps) for _ in range(20)]
        steps.close()
        session.feed(TOKENS[20:40], 1)
        other = session.forward_gpu_resident((1,))[0]
        assert relative_rms(other, logits_of(engine, TOKENS[20:40])) < CLOSE
        known = [*TOKENS[:3], *answer]
        assert relative_rms(session.logits_step(), logits_of(engine, known)) < CLOSE


@pytest.mark.slow
def test_an_answer_goes_on_from_a_state_of_the_last(engine: Engine, session: Session) -> None:
    """From its end where no step ran beyond it, and else from the end of its prompt."""

    def answer(session: Session, prompt: list[int], limit: int, pieces: int) -> Generation:
        request = Request(prompt=tuple(prompt), settings=GREEDY, limit=limit)
        generation = Generation(session, None, request)
        with closing(generation.pieces()) as made:
            list(islice(made, pieces))
        return generation

    first = answer(session, TOKENS[:9], 5, 9)
    for tokens, limit, pieces, cached in (
        ([*TOKENS[:9], *first.tokens, *TOKENS[20:23]], 9, 1, 13),
        ([*TOKENS[:9], *first.tokens, *TOKENS[20:23], 7], 3, 9, 17),
        ([*TOKENS[:11], 7], 3, 9, 0),
    ):
        found = answer(session, tokens, limit, pieces)
        assert found.statistics.cached_tokens == cached
        engine.session.truncate(0)
        alone = answer(engine.session, tokens, limit, 9)
        assert alone.statistics.cached_tokens == 0
        assert found.tokens == alone.tokens[: len(found.tokens)]


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


def test_forks_and_cuts_between_steps_of_any_mix(engine: Engine, session: Session) -> None:
    session.feed(TOKENS[:6])
    session.fork(0, 2)
    for own, next_token in ((TOKENS[6:10], 7), (TOKENS[20:22], 9)):
        session.append(own, 2)
        known = session.sequences[2].tokens
        segment = Segment(2, 5, len(known), chooses=True)
        session.stepper.launch_batch(Batch((0,), (segment,)), Output.LOGITS)
        logits = session.parts.work["logits"].download(np.float32, (2, 128))
        expected = logits_of(engine, list(session.sequences[0].tokens))
        assert relative_rms(logits[0], expected) < CLOSE
        assert relative_rms(logits[1], logits_of(engine, list(known))) < CLOSE
        session.append([next_token])
        session.truncate(5, 2)  # what the fork has kept


def test_idle_rows_and_other_sequences_change_no_state(engine: Engine, session: Session) -> None:
    """Of three sequences' four rows one is idle; then one sequence has no row."""
    recurrent, texts = session.parts.recurrent, [TOKENS[:3], TOKENS[4:9], TOKENS[9:10]]
    assert recurrent is not None

    def states() -> list[np.ndarray]:
        parts = [
            part for layer in recurrent.shape.layers for part in recurrent.arguments(layer).values()
        ]
        return [part.download(np.float32).reshape(3, -1)[1] for part in parts]

    for sequence, text in enumerate(texts):
        session.feed(text, sequence)
    session.forward_gpu_resident((1, 2, 0))
    before = states()
    for sequence in (0, 2):
        session.feed([7], sequence)
    session.forward_gpu_resident((0, 2))
    for state, kept in zip(states(), before, strict=True):
        np.testing.assert_array_equal(state, kept)
    for sequence in range(3):
        session.feed([11], sequence)
    for row, logits in enumerate(session.forward_gpu_resident((0, 1, 2))):
        between = [7] if row != 1 else []
        assert relative_rms(logits, logits_of(engine, [*texts[row], *between, 11])) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mamba2-dense",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen35-dense", "minimax-01-moe", "kimi-linear-moe", "falcon-h1-dense")
        ),
    ],
)
def test_default_prompts_divided_anywhere_are_as_near_as_llama_cpp_s(
    name: str, check_divided_prompts: Callable[..., None]
) -> None:
    """By chunks, but where a part of the prompt is short."""

    def look(engine: Engine) -> None:
        steps, shapes = engine.session.steps, engine.session.shapes
        kernels = {type(op.kernel) for op in steps.bound(shapes.prompt(0, 48)[0]).plan}
        assert ChunkedRecurrence in kernels

    check_divided_prompts(name, [[48], [1, 47], [33, 15], [13, 34, 1]], look)


def test_many_users_of_a_model_without_attention(
    device_name: str, reference_file: Callable[[str], Path]
) -> None:
    """There are no pages, copies of states are shared, and the answers are those of one user."""
    request = Request(prompt=tuple(TOKENS[:5]), settings=GREEDY, limit=3)
    file = reference_file("mamba-dense")
    with Engine.open(
        file, device=device_name, context=64, sequences=None, memory_share=0.3
    ) as engine:
        session, recurrent = engine.session, engine.session.parts.recurrent
        assert recurrent is not None
        assert (len(session.sequences) > 1, recurrent.shape.shared) == (True, 256)
        with Service(engine, None) as service:
            asked = [ask(service, request), ask(service, request)]
            assert [isinstance(collected.ended(), Ending) for collected in asked] == [True] * 2
            assert service.metrics().pages_total == 0
        session.feed(TOKENS[:5])
        alone = [session.greedy_step() for _ in range(3)]
    assert [collected.tokens for collected in asked] == [alone, alone]
