"""Answers that reach the end of the context end there, at every context, and no other one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.model.engine.requests.paper_session import TOKEN, PaperSession
from urdir.driver.device import Device
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.decode_graphs import DecodeGraphs
from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request
from urdir.model.engine.requests.warm_up import likely_shapes
from urdir.model.engine.run_ahead import AT_ONCE
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.buckets import chunks_of
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.walk import Walk
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.attention.choice import length_buckets

#: The last positions of each bucket of lengths, and of contexts between them.
CONTEXTS = sorted({*length_buckets(12_000), 64, 250, 300, 8_190})
WALK = Walk(unit=96, step=672, room=8, most=49, rows=16)

CONTEXT = st.sampled_from(CONTEXTS)
#: How many tokens short of the context a prompt is, the answer's length, and when it comes.
REQUEST = st.tuples(
    st.integers(0, 20) | st.integers(0, 12_000),
    st.none() | st.integers(1, 24),
    st.integers(0, 12),
)


def ends_of(prompt: int, limit: int | None, context: int) -> tuple[Finish, int]:
    """How an answer ends that nothing but its length ends, and its tokens."""
    room = context + 1 - prompt
    return (Finish.LENGTH, limit) if limit and limit <= room else (Finish.FULL, room)


def run(
    loop: AnswerLoop,
    requests: list[tuple[Request, int]],
    expected: tuple[type[Exception], ...] = (),
) -> tuple[list[list[int]], list[Ending | Exception]]:
    """The tokens and the ends of answers, which come in the turns given; a turn fails by nothing
    but ``expected`` errors."""
    open_answers = dict[Answer, int]()
    ends: dict[int, Ending | Exception] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    turns = 0
    while len(ends) < len(requests):
        for number, (request, turn) in enumerate(requests):
            if turn == turns:
                loop.add(answer := loop.answer_to(request))
                open_answers[answer] = number
        turns += 1
        try:
            loop.turn()
        except expected as error:
            loop.fail(error)
        for answer, items in loop.take_items().items():
            for item in items:
                if isinstance(item, Piece):
                    tokens[open_answers[answer]] += [choice.token for choice in item.choices]
                else:
                    ends[open_answers.pop(answer)] = item
    for number, end in ends.items():
        assert not isinstance(end, Ending) or end.generated_tokens == len(tokens[number])
    return tokens, [ends[number] for number in range(len(requests))]


@given(
    context=CONTEXT,
    spare=st.sampled_from([0, 0, 1, 50]),
    wanted=st.lists(REQUEST, min_size=1, max_size=6),
    walk=st.sampled_from([None, WALK]),
    recorded=st.booleans(),
)
@example(context=256, spare=0, wanted=[(1, None, 0)], walk=None, recorded=True)
@example(context=512, spare=0, wanted=[(5, None, 0), (400, 20, 0)], walk=None, recorded=True)
@settings(max_examples=60, deadline=None)
def test_answers_end_by_their_length_alone(
    context: int,
    spare: int,
    wanted: list[tuple[int, int | None, int]],
    walk: Walk | None,
    recorded: bool,
) -> None:
    """Alone and among others, with several steps at once; a cache may have room for more."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), context + spare, 6, 16, walk=walk)
    session = PaperSession(shapes, context, 4, lambda shape: recorded)
    requests, expected = [], []
    for short, limit, turn in wanted:
        prompt = context - short % context
        if limit is None and prompt < context - 40:
            limit = 24  # steps of longer answers are all alike
        request = Request(prompt=(1,) * prompt, settings=GREEDY, limit=limit, ignore_end=True)
        requests.append((request, turn))
        expected.append(ends_of(prompt, limit, context))
    with session.answers() as loop:
        tokens, ends = run(loop, requests)
    assert {token for answer in tokens for token in answer} == {TOKEN}
    assert [e for e in ends if isinstance(e, Exception)] == []
    found = [(e.finish, e.generated_tokens) for e in ends if isinstance(e, Ending)]
    assert found == expected


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_length_has_graphs_that_reach_it(context: int, rows: int) -> None:
    shapes = ShapeBuckets.of(chunks_of(exact=False), context, 8)
    steps = PaperSession(shapes, context, 1).steps
    graphs = DecodeGraphs(steps, shapes)
    for length in {n for bucket in shapes.lengths for n in range(max(1, bucket - 9), bucket + 1)}:
        one = shapes.decode(rows, length, Output.GREEDY)
        assert one.keys >= length
        several = graphs.several(one, length)
        last = length + AT_ONCE - 1
        fits = last <= context and shapes.decode(rows, last, Output.GREEDY).keys == one.keys
        assert (several is not None) == fits
        assert several is None or (several.keys, several.steps) == (one.keys, AT_ONCE)
        for end in range(length, context + 1)[:140]:
            assert not graphs.prepare(rows, Output.GREEDY, length, end, AT_ONCE)
    graphs.prepare_all(rows, Output.GREEDY, 0, context, AT_ONCE)
    assert all(shape.keys in shapes.lengths for shape in likely_shapes(shapes))


@pytest.fixture(scope="module")
def session(device_name: str) -> Iterator[Session]:
    """A small model's, whose caches have room for no token beyond the context."""
    data = Path(__file__).parents[3] / "data"
    with (
        Device.open(device_name) as device,
        Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Weights.load(gguf, replace(Config.of(gguf), context_length=1024), device) as weights,
        Session(device, weights, SessionSettings(256, sequences=4, page_len=16)) as opened,
    ):
        assert opened.shapes.lengths == (opened.context,)
        several = [StepShape(rows, 256, Output.GREEDY, AT_ONCE) for rows in (1, 2, 4)]
        opened.steps.record(several)
        yield opened


PROMPTS = [tuple((3 * n * n + k) % 61 for n in range(256 - k)) for k in (0, 8)]


@pytest.mark.slow
def test_real_answers_end_with_the_context(session: Session) -> None:
    """Whoever comes meanwhile, each has the tokens that it has alone; one of few tokens, too."""
    requests = [Request(prompt=prompt, ignore_end=True, settings=GREEDY) for prompt in PROMPTS]
    requests.append(Request(prompt=(5, 6, 7), limit=20, ignore_end=True, settings=GREEDY))
    alone = []
    for request in requests:
        no_tokenizer: Any = None
        made = Generation(session, no_tokenizer, request)
        assert "".join(made.text()) == ""
        alone.append(made.tokens)
        finish, count = ends_of(len(request.prompt), request.limit, session.context)
        assert (made.statistics.finish, len(made.tokens)) == (finish, count)
    turns = [0, 4, 0]
    with AnswerLoop(session, None, Limits.for_latency(session.shapes)) as loop:
        together, ends = run(loop, list(zip(requests, turns, strict=True)))
        assert [type(end) for end in ends] == [Ending] * len(requests)
        assert together == alone
        assert loop.metrics().pages_used == 0
