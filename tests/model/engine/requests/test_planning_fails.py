"""A step that cannot be planned fails the requests that this is about; the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.engine.requests.paper_session import TOKEN, PaperSession
from tests.model.engine.requests.test_context_ends import run
from urdir.driver.errors import CudaError
from urdir.model.engine.batch import ShapeBuckets, StepShape
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.memory.buckets import chunks_of

CONTEXT, MARK = 300, 9
#: Prompts of three requests, and the middle one's mark.
REQUESTS = [
    Request(prompt=prompt, settings=GREEDY, limit=limit, ignore_end=True)
    for prompt, limit in (((1,) * 5, 60), ((MARK,) * 90, 70), ((1,) * 8, 60))
]
TURNS = [0, 2, 3]


class UnforeseenError(Exception):
    """What no one has thought of."""


@pytest.fixture
def session() -> PaperSession:
    shapes = ShapeBuckets.of(chunks_of(exact=False, most=64), CONTEXT, 4, 16)
    return PaperSession(shapes, CONTEXT, 4)


def marked_slots(session: PaperSession) -> set[int]:
    """The sequence of the marked request, noted when its tokens are written."""
    slots: set[int] = set()
    write = session.parts.state.write_tokens

    def noting(sequence: int, start: int, tokens: Any) -> None:
        slots.discard(sequence)
        if MARK in tokens:
            slots.add(sequence)
        write(sequence, start, tokens)

    session.parts.state.write_tokens = noting
    return slots


def fail_begin(session: PaperSession, patch: pytest.MonkeyPatch, error: Exception) -> None:
    def write(sequence: int, start: int, tokens: Any) -> None:
        if MARK in tokens:
            raise error

    session.parts.state.write_tokens = write


def fail_admission(session: PaperSession, patch: pytest.MonkeyPatch, error: Exception) -> None:
    match = session.storage.match

    def failing(sequence: int, tokens: Any, end: int, spare: int, scope: bytes) -> int:
        if MARK in tokens:
            raise error
        return match(sequence, tokens, end, spare, scope)

    patch.setattr(session.storage, "match", failing)


def fail_of_the_marked(
    *names: str, at: int = 0
) -> Callable[[PaperSession, pytest.MonkeyPatch, Exception], None]:
    """Methods of the storage, from position ``at`` on."""

    def fail(session: PaperSession, patch: pytest.MonkeyPatch, error: Exception) -> None:
        slots = marked_slots(session)
        for name in names:
            works = getattr(session.storage, name)

            def failing(sequence: int, length: int, *more: Any, works: Any = works) -> Any:
                if sequence in slots and length >= at:
                    raise error
                return works(sequence, length, *more)

            patch.setattr(session.storage, name, failing)

    return fail


def fail_mask(session: PaperSession, patch: pytest.MonkeyPatch, error: Exception) -> None:
    works = Answer.mask

    def mask(answer: Answer, vocab: int) -> Any:
        if MARK in answer.request.prompt:
            raise error
        return works(answer, vocab)

    patch.setattr(Answer, "mask", mask)


def fail_shape(session: PaperSession, patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Of the one that is longest."""
    works = ShapeBuckets.of_batch

    def of_batch(
        shapes: ShapeBuckets, batch: Any, length: int, *more: Any, **named: Any
    ) -> StepShape:
        if length >= 100:
            raise error
        return works(shapes, batch, length, *more, **named)

    patch.setattr(ShapeBuckets, "of_batch", of_batch)


def fail_several(session: PaperSession, patch: pytest.MonkeyPatch, error: Exception) -> None:
    works = session.graphs.several

    def several(shape: StepShape, length: int) -> StepShape | None:
        if length >= 100:
            raise error
        return works(shape, length)

    patch.setattr(session.graphs, "several", several)


PLACES = {
    "begin": fail_begin,
    "admission": fail_admission,
    "cut": fail_of_the_marked("cut", at=64),
    "reserve": fail_of_the_marked("reserve", at=100),
    "state": fail_of_the_marked("keep_prefix"),
    "mask": fail_mask,
    "shape": fail_shape,
    "several": fail_several,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ahead", [1, 64])
def test_one_request_fails_alone(
    session: PaperSession, monkeypatch: pytest.MonkeyPatch, place: str, ahead: int
) -> None:
    """Beside one that came before and one that comes later: these get all their tokens."""
    error = UnforeseenError(place)
    PLACES[place](session, monkeypatch, error)
    limits = Limits(prompt_rows=64, mixed_rows=64, ahead=ahead)
    with session.answers(limits) as loop:
        tokens, ends = run(loop, list(zip(REQUESTS, TURNS, strict=True)))
        assert ends[1] is error
        assert [type(end) for end in ends] == [Ending, UnforeseenError, Ending]
        assert tokens[0] == tokens[2] == [TOKEN] * 60
        # the same again, alone and beside no one
        assert run(loop, [(REQUESTS[1], 0)])[1] == [error]
        assert isinstance(run(loop, [(REQUESTS[0], 0)])[1][0], Ending)
    assert session.storage.held == {}


def test_a_launch_fails_the_requests_of_its_step_alone(
    session: PaperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose constraint waits for its last token has no row in it."""
    error, launch = UnforeseenError("launch"), session.queue.launch

    def failing(shape: StepShape, batch: Any, *rest: Any, **more: Any) -> None:
        if any(s.end == 90 for s in batch.segments):
            assert not batch.decode
            raise error
        launch(shape, batch, *rest, **more)

    monkeypatch.setattr(session.queue, "launch", failing)
    plan = Scheduler._decode_rows
    # answers of one token at a time, which wait for each other
    monkeypatch.setattr(Scheduler, "_decode_rows", lambda s: _wait_for_all(s, plan))
    with session.answers(Limits(prompt_rows=96, mixed_rows=96)) as loop:
        tokens, ends = run(loop, list(zip(REQUESTS[:2], (0, 1), strict=True)))
    assert ends[1] is error
    assert isinstance(ends[0], Ending)
    assert tokens == [[TOKEN] * 60, []]
    assert session.storage.held == {}


def _wait_for_all(scheduler: Scheduler, plan: Callable[[Scheduler], Any]) -> Any:
    """Decode rows, but where one is under way."""
    for task in scheduler.tasks.running.values():
        task.waits = True
    return plan(scheduler)


def test_a_lost_device_fails_all(session: PaperSession, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("begin", "reserve", "state"):
        with monkeypatch.context() as patch:
            error = CudaError("CUDA_ERROR_ILLEGAL_ADDRESS", 700, place)
            PLACES[place](session, patch, error)
            with session.answers() as loop:
                ends = run(loop, list(zip(REQUESTS, TURNS, strict=True)), (CudaError,))[1]
                assert isinstance(loop.lost, DeviceLostError)
                assert ends == [loop.lost] * 3


def test_what_is_prepared_in_advance_may_fail(
    session: PaperSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and answers go on."""

    def failing(*args: Any) -> bool:
        raise UnforeseenError("no such luck")

    monkeypatch.setattr(session.graphs, "prepare", failing)
    with caplog.at_level(logging.ERROR), session.answers() as loop:
        ends = run(loop, list(zip(REQUESTS, TURNS, strict=True)))[1]
    assert [type(end) for end in ends] == [Ending] * 3
    assert "a step could not be prepared in advance" in caplog.text
    assert "no such luck" in caplog.text


def test_a_request_that_is_not_taken_fails_alone(
    session: PaperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, error = Scheduler.add, UnforeseenError("add")

    def failing(scheduler: Scheduler, request: Request) -> int:
        if MARK in request.prompt:
            raise error
        return add(scheduler, request)

    monkeypatch.setattr(Scheduler, "add", failing)
    with session.answers() as loop:
        ends = run(loop, list(zip(REQUESTS, TURNS, strict=True)))[1]
    assert [type(end) for end in ends] == [Ending, UnforeseenError, Ending]


def test_a_token_that_is_refused_is_one_answer_s(
    session: PaperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = UnforeseenError("token")

    def accept(answer: Answer, token: int) -> None:
        if MARK in answer.request.prompt:
            raise error

    monkeypatch.setattr(Answer, "accept", accept)
    with session.answers() as loop:
        ends = run(loop, list(zip(REQUESTS, TURNS, strict=True)))[1]
    assert [type(end) for end in ends] == [Ending, UnforeseenError, Ending]
    assert session.storage.held == {}


def test_an_error_that_no_request_has_alone_ends_what_has_begun(
    session: PaperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, shapes = UnforeseenError("together"), session.shapes

    def of_batch(batch: Any, *more: Any, **named: Any) -> StepShape:
        if len(batch.decode) > 1:
            raise error
        return ShapeBuckets.of_batch(shapes, batch, *more, **named)

    names = ("decode", "chunks", "first", "fine")
    given = {name: getattr(shapes, name) for name in names}
    session.shapes = SimpleNamespace(of_batch=of_batch, **given)  # type: ignore[assignment]
    twice = [REQUESTS[0], REQUESTS[2]]
    with session.answers(Limits()) as loop:
        assert run(loop, list(zip(twice, (0, 0), strict=True)), (UnforeseenError,))[1] == [
            error,
            error,
        ]
        assert isinstance(run(loop, [(twice[0], 0)])[1][0], Ending)
