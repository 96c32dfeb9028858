"""Sessions of models with recurrent layers: states follow what happens to their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.requests.test_service import GREEDY, ask
from tests.model.stepping import logits_of
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps
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
        for name in (
            *("mamba2-dense", "jamba-dense", "qwen35-dense", "minimax-01-moe", "kimi-k3-moe"),
            *("rwkv6-dense", "rwkv7-dense"),
        )
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
    settings = SessionSettings(64, "f32", exact=True, sequences=3, chunk=8)
    with Session(engine.device, engine.weights, settings) as opened:
        yield opened


@pytest.fixture
def eager(session: Session) -> Iterator[EagerSteps]:
    """Its sequences."""
    with EagerSteps(session) as opened:
        yield opened


def answer(session: Session, prompt: list[int], limit: int, pieces: int) -> Generation:
    """An answer that is left after so many pieces."""
    request = Request(prompt=tuple(prompt), settings=GREEDY, limit=limit)
    generation = Generation(session, None, request)
    with closing(generation.pieces()) as made:
        list(islice(made, pieces))
    return generation


def whole(engine: Engine, tokens: list[int]) -> Any:
    """The logits after a prompt that nothing has happened to."""
    return logits_of(engine.session, tokens)


def test_a_step_that_chose_nothing_is_done_again(engine: Engine, eager: EagerSteps) -> None:
    """From the state after the prompt: that of the step is wrong."""
    eager.feed(TOKENS[:7])
    chosen = [eager.step()[0] for _ in range(2)]
    assert engine.config.output_norm is not None
    norm = engine.weights.norm(engine.config.output_norm).weight
    kept = norm.download(np.float32)
    norm.upload(np.full_like(kept, np.nan))
    try:
        with pytest.raises(ModelError, match="no token can be chosen"):
            eager.step()
    finally:
        norm.upload(kept)
    assert (eager.lengths[0], eager.tokens[0]) == (7, TOKENS[:7] + chosen)
    assert relative_rms(eager.logits()[0], whole(engine, TOKENS[:7] + chosen)) < CLOSE


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        (1, {2: 0}),
        pytest.param(1, {0: 0, 1: 0, 3: 3, 4: 4, 5: 4}, marks=pytest.mark.full),
        pytest.param(3, {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 5, 6: 6, 7: 6}, marks=pytest.mark.full),
    ],
)
def test_a_sequence_is_cut_to_what_is_kept(
    engine: Engine, eager: EagerSteps, prompt: int, kept: dict[int, int]
) -> None:
    """Wherever `kept` says, and nowhere else: to the state of the prompt, which a prompt of one
    token has none of, to that after the last step, and to tokens that are pending."""
    for length, found in kept.items():
        eager.truncate(0)
        eager.feed(TOKENS[:prompt])
        chosen = [eager.step()[0] for _ in range(3)]
        assert eager.kept(length) == found
        if found != length:
            with pytest.raises(ModelError, match=f"cannot .* to {length}"):
                eager.truncate(length)
            assert (eager.lengths[0], len(eager.tokens[0])) == (prompt + 2, prompt + 3)
        eager.truncate(found)
        known = [*TOKENS[:prompt], *chosen][:found]
        assert eager.tokens[0] == known
        eager.feed([7])
        assert relative_rms(eager.logits()[0], whole(engine, [*known, 7])) < CLOSE


@pytest.mark.slow
def test_an_answer_goes_on_from_a_state_of_the_last(engine: Engine, session: Session) -> None:
    """From its end where no step ran beyond it, and else from the end of its prompt."""
    first = answer(session, TOKENS[:9], 5, 9)
    for tokens, limit, pieces, cached in (
        ([*TOKENS[:9], *first.tokens, *TOKENS[20:23]], 9, 1, 13),
        ([*TOKENS[:9], *first.tokens, *TOKENS[20:23], 7], 3, 9, 17),
        ([*TOKENS[:11], 7], 3, 9, 0),
    ):
        found = answer(session, tokens, limit, pieces)
        assert found.statistics.cached_tokens == cached
        EagerSteps(engine.session).close()  # nothing is left there
        alone = answer(engine.session, tokens, limit, 9)
        assert alone.statistics.cached_tokens == 0
        assert found.tokens == alone.tokens[: len(found.tokens)]


def test_forks_go_on_by_themselves(engine: Engine, eager: EagerSteps) -> None:
    eager.feed(TOKENS[:5])
    eager.fork(0, 2)
    eager.feed(TOKENS[5:7])
    eager.feed(TOKENS[20:23], sequence=2)
    together = eager.logits((0, 2))
    assert relative_rms(together[0], whole(engine, TOKENS[:7])) < CLOSE
    assert relative_rms(together[1], whole(engine, TOKENS[:5] + TOKENS[20:23])) < CLOSE


def test_sequences_in_one_step_are_each_as_if_alone(engine: Engine, eager: EagerSteps) -> None:
    parts = TOKENS[:7], TOKENS[9:11], TOKENS[12:22]
    for sequence, tokens in enumerate(parts):
        eager.feed(tokens, sequence=sequence)
    order = (2, 0, 1)
    for row, logits in enumerate(eager.logits(order)):
        assert relative_rms(logits, whole(engine, parts[order[row]])) < CLOSE


def test_a_sequence_is_cut_to_where_a_state_was_kept(engine: Engine, eager: EagerSteps) -> None:
    eager.feed(TOKENS[:6])
    eager.logits()
    for token in TOKENS[6:9]:
        eager.feed([token])
        eager.logits()
    assert [eager.kept(length) for length in (9, 8, 6, 5)] == [9, 6, 6, 0]
    with pytest.raises(ModelError, match="cannot be cut to 8 tokens"):
        eager.truncate(8)
    assert eager.lengths[0] == 9
    eager.truncate(6)
    eager.feed(TOKENS[30:32])
    expected = whole(engine, TOKENS[:6] + TOKENS[30:32])
    assert relative_rms(eager.logits()[0], expected) < CLOSE


def test_an_emptied_sequence_begins_anew(engine: Engine, eager: EagerSteps) -> None:
    eager.feed(TOKENS[:7])
    eager.logits()
    eager.truncate(0)
    eager.feed(TOKENS[5:9])
    assert relative_rms(eager.logits()[0], whole(engine, TOKENS[5:9])) < CLOSE


def test_forks_and_cuts_between_steps_of_any_mix(engine: Engine, eager: EagerSteps) -> None:
    eager.feed(TOKENS[:6])
    for own, next_token in ((TOKENS[6:10], 7), (TOKENS[20:22], 9)):
        eager.fork(0, 2)
        eager.feed(own, 2)
        known = [*eager.tokens[2]]
        segment = Segment(2, eager.lengths[2], len(known), chooses=True)
        eager.launch(Batch((0,), (segment,)), Output.LOGITS)
        logits = eager.session.parts.work["logits"].download(np.float32, (2, 128))
        assert relative_rms(logits[0], whole(engine, eager.tokens[0])) < CLOSE
        assert relative_rms(logits[1], whole(engine, known)) < CLOSE
        eager.feed([3], 2)
        eager.logits((2,))
        eager.truncate(len(known), 2)  # the state after the segment was kept
        eager.feed([next_token])
        eager.feed([next_token], 2)
        assert relative_rms(eager.logits((2,))[0], whole(engine, [*known, next_token])) < CLOSE


def test_idle_rows_and_other_sequences_change_no_state(engine: Engine, eager: EagerSteps) -> None:
    """Of three sequences' four rows one is idle; then one sequence has no row."""
    recurrent, texts = eager.session.parts.recurrent, [TOKENS[:3], TOKENS[4:9], TOKENS[9:10]]
    assert recurrent is not None

    def states() -> list[np.ndarray]:
        parts = [
            part for layer in recurrent.shape.layers for part in recurrent.arguments(layer).values()
        ]
        return [part.download(np.float32).reshape(3, -1)[1] for part in parts]

    for sequence, text in enumerate(texts):
        eager.feed(text, sequence)
    eager.logits((1, 2, 0))
    before = states()
    for sequence in (0, 2):
        eager.feed([7], sequence)
    eager.logits((0, 2))
    for state, kept in zip(states(), before, strict=True):
        np.testing.assert_array_equal(state, kept)
    for sequence in range(3):
        eager.feed([11], sequence)
    for row, logits in enumerate(eager.logits((0, 1, 2))):
        between = [7] if row != 1 else []
        assert relative_rms(logits, whole(engine, [*texts[row], *between, 11])) < CLOSE


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
        assert (session.sequences > 1, recurrent.shape.shared) == (True, 256)
        with Service(engine, None) as service:
            asked = [ask(service, request), ask(service, request)]
            assert [isinstance(collected.ended(), Ending) for collected in asked] == [True] * 2
            assert service.metrics().pages_total == 0
        with EagerSteps(session) as eager:
            eager.feed(TOKENS[:5])
            alone = [eager.step()[0] for _ in range(3)]
    assert [collected.tokens for collected in asked] == [alone, alone]
