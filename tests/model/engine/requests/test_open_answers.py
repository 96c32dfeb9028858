"""Ends of open answers that the scheduler does not have any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.request import Item, Request
from urdir.model.errors import BusyError


def test_a_stop_string_after_a_drop_leaves_the_error() -> None:
    """Its text and its end cross: somebody is told."""
    error = BusyError("it waited too long", 1.0)
    scheduler: Any = SimpleNamespace(
        add=lambda request: 7, cancel=lambda *given: None, dropped=lambda: {7: error}
    )
    told: list[Item] = []
    answer = Answer(Request(prompt=(1,)), (), None, told.append)
    answers = OpenAnswers(scheduler)
    answers.add(answer)
    answers.stop(answer)
    answers.fail_dropped()
    assert answers.take_items() == {answer: [error]}
    assert len(answers) == 0
