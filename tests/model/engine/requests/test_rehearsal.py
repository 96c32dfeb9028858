"""A rehearsal of a step writes what a step writes, launches nothing, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.memory.queued_writes import QueuedWrites

DRAWN = SamplingSettings(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=11)
#: The second begins as the first one does; its pages are found.
REQUESTS = [
    Request(prompt=tuple(range(5, 5 + count)), settings=DRAWN, limit=3, ignore_end=True)
    for count in (18, 21)
]


@pytest.fixture(scope="module", params=[{"page_len": 16, "pages": 12}, {"pages": None}])
def engine(device_name: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With pages, and without."""
    with Engine.open(device=device_name, text=True, sequences=2, **request.param) as opened:
        yield opened


def answers(loop: AnswerLoop, *, rehearses: bool) -> list[list[int]]:
    found = []
    for request in REQUESTS:
        items: list[Item] = []
        answer = loop.answer_to(request)
        before = loop.metrics()
        for _ in loop.rehearse() if rehearses else ():
            assert loop.metrics() == before
        loop.add(answer)
        while not items or not isinstance(items[-1], Ending):
            loop.turn()
            items += loop.take_items().get(answer, ())
        found.append([of.token for each in items if isinstance(each, Piece) for of in each.choices])
    return found


def test_answers_are_the_same(engine: Engine) -> None:
    """Of steps that were rehearsed, also with another step's rows on the device."""
    limits = Limits.for_latency(engine.session.shapes)
    with AnswerLoop(engine.session, engine.tokenizer, limits) as loop:
        expected = answers(loop, rehearses=False)
        assert answers(loop, rehearses=True) == expected
        assert len(expected[0]) == len(expected[1]) == 3


def test_it_writes_and_does_not_launch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pieces the first one alone."""
    written: list[int] = []
    write = QueuedWrites.write

    def noted(self: QueuedWrites, to: object, values: object, offset: int = 0) -> None:
        written.append(offset)
        write(self, to, values, offset)  # type: ignore[arg-type]

    def refused(*_: object) -> None:
        raise AssertionError("a rehearsal launches a step")

    limits = Limits.for_latency(engine.session.shapes)
    with AnswerLoop(engine.session, engine.tokenizer, limits) as loop:
        monkeypatch.setattr(QueuedWrites, "write", noted)
        monkeypatch.setattr(engine.session.steps, "launch", refused)
        counts = [len(written) for _ in loop.rehearse()]
        assert counts == [1, 1]
