"""Which tokens heads draft: the first of the vocabulary alone, while texts have few others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model.engine.test_model_drafts import DRAFTS, open_two
from tests.model.engine.test_speculation import PLAIN
from urdir.driver.device import Device
from urdir.model.engine.batch import Output, ShapeBuckets
from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.model_source import Drafter
from urdir.model.files.gguf import Gguf
from urdir.model.memory.draft_scope import DraftScope
from urdir.model.memory.draft_settings import DraftSettings


@pytest.mark.parametrize(("share", "narrow"), [(0.0, True), (0.05, True), (0.3, False)])
def test_the_share_of_other_tokens_decides(share: float, narrow: bool) -> None:
    rng, scope = np.random.default_rng(5), DraftScope(100, adapts=True)
    assert scope.is_narrow
    for length in (400, *[1] * 400):
        others = rng.random(length) < share
        scope.learn([int(token) for token in np.where(others, 100, 99)])
    assert scope.others == pytest.approx(share, abs=0.1)
    assert scope.is_narrow == narrow
    scope.learn([0] * 1000)
    assert scope.is_narrow


def test_a_text_learned_at_once_counts_as_token_by_token() -> None:
    one, each = DraftScope(10, adapts=True), DraftScope(10, adapts=True)
    one.learn([12] * 50)
    for _ in range(50):
        each.learn([12])
    assert one.others == pytest.approx(each.others)
    assert not one.is_narrow


def test_a_set_number_stays_and_all_tokens_are_no_choice() -> None:
    for scope in (DraftScope(10), DraftScope(0, adapts=True)):
        before = scope.is_narrow
        scope.learn([99] * 1000)
        assert scope.is_narrow == before == (scope.tokens > 0)


@pytest.mark.parametrize(
    ("tokens", "vocab", "ranked", "expected"),
    [
        (None, 248_320, True, 65_536),
        (None, 151_552, True, 65_536),
        (None, 131_071, True, 0),
        (None, 248_320, False, 0),
        (0, 248_320, True, 0),
        (9, 32, False, 9),
    ],
)
def test_the_first_tokens_of_a_large_vocabulary(
    tokens: int | None, vocab: int, ranked: bool, expected: int
) -> None:
    assert DraftSettings(tokens=tokens).first_tokens(vocab, ranked=ranked) == expected


def test_steps_with_drafts_are_narrow_alone() -> None:
    scope = DraftScope(10)
    shapes = replace(ShapeBuckets.of((8,), 64, drafts=2), scope=scope)
    found = [shapes.decode(2, 20, Output.GREEDY, drafted=drafted) for drafted in (False, True)]
    assert [shape.narrow for shape in found] == [False, True]
    scope.tokens = 0
    assert not shapes.decode(2, 20, Output.GREEDY, drafted=True).narrow


@pytest.mark.full
def test_answers_decide_and_are_the_same(
    device: Device, reference_file: Callable[[str], Path]
) -> None:
    """A text of other tokens has drafts of all; its tokens are those without drafts."""
    request = Request(prompt=(1, 3, 1, 4), settings=GREEDY, limit=48, ignore_end=True)
    with (
        Gguf(reference_file("mtp-deepseek2-bigram")) as gguf,
        open_two(device, gguf, None) as two,
    ):
        pair, found = two.pair, []
        drafter = Drafter(replace(pair.model, tokens=50), two.own, pair.launches)
        for drafts in (None, replace(DRAFTS, most=1, least=1)):
            settings = replace(PLAIN, sequences=1, drafts=drafts)
            drafters = [] if drafts is None else [drafter]
            with Session(device, two.target, settings, drafters=drafters) as session:
                found.append(_tokens(session, request))
                narrow = {shape.narrow for shape in session.steps._graphs if shape.drafts}
                scope = session.shapes.scope
    assert found[0] == found[1]
    others = np.mean(np.array(found[1]) >= 50)
    assert others > 0.2
    assert not scope.is_narrow
    assert narrow == {False, True}


def _tokens(session: Session, request: Request) -> list[int]:
    generation = Generation(session, None, request)
    for _ in generation.pieces():
        pass
    return list(generation.tokens)
