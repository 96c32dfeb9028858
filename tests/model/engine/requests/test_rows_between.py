"""Numbers of sequences whose graphs are not recorded ahead."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from tests.model.engine.requests.paper_session import TOKEN, PaperSession
from tests.model.engine.requests.test_context_ends import run
from urdir.driver.errors import LaunchError
from urdir.model.engine.batch import Batch, Output, Part, Segment, ShapeBuckets, StepShape
from urdir.model.engine.requests.recorded_shapes import RecordedShapes
from urdir.model.engine.requests.request import Ending, Request
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.memory.buckets import COARSE_CHUNKS, chunks_of, common_rows

SEQUENCES, CONTEXT = 70, 300
AHEAD = common_rows(SEQUENCES)


def rows_of_steps(is_recorded: bool) -> set[int]:
    """Rows of the decode steps of 70 answers that begin at once and end one after the other."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, SEQUENCES, 1)
    session = PaperSession(
        shapes,
        CONTEXT,
        SEQUENCES,
        lambda shape: is_recorded or bool(shape.prompt) or shape.rows in AHEAD,
    )
    session.storage.room = SEQUENCES * CONTEXT
    requests = [
        (Request(prompt=(1, 2), settings=GREEDY, limit=20 + number, ignore_end=True), 0)
        for number in range(SEQUENCES)
    ]
    with session.answers() as loop:
        tokens, ends = run(loop, requests)
    assert {token for answer in tokens for token in answer} == {TOKEN}
    assert all(isinstance(end, Ending) for end in ends)
    return {shape.rows for shape in session.launched if not shape.prompt and shape.steps == 1}


def test_steps_take_the_next_larger_graph_until_theirs_is_recorded() -> None:
    recorded, common = rows_of_steps(True), rows_of_steps(False)
    assert {72, 56, 40} <= recorded
    assert common <= set(AHEAD)
    assert {72, 64, 48, 32} <= common


def test_answers_get_a_graph_of_their_rows_where_it_spares_many() -> None:
    """40 answers take steps of 48 rows, until these have lost 256."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, SEQUENCES, 1)
    session = PaperSession(shapes, CONTEXT, SEQUENCES, lambda shape: shape.rows in AHEAD)
    recorded = RecordedShapes(session)  # type: ignore[arg-type]
    batch = Batch(tuple(range(40)))
    plan = StepPlan(batch, batch.decode, (9,) * 40, (), ())
    shape = shapes.of_batch(batch, plan.longest, Output.SAMPLE)
    for number in range(32):
        assert recorded.ready(plan, shape).rows == 48
        assert recorded.wished == (() if number < 31 else (shape,))


def test_a_step_without_any_graph_has_its_own_rows() -> None:
    """As nothing larger is there, its graph is recorded on the way."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, SEQUENCES, 1)
    asked: list[StepShape] = []

    def nothing(shape: StepShape) -> bool:
        asked.append(shape)
        return bool(shape.prompt)

    session = PaperSession(shapes, CONTEXT, SEQUENCES, nothing)
    session.storage.room = SEQUENCES * CONTEXT
    request = Request(prompt=(1, 2), settings=GREEDY, limit=6, ignore_end=True)
    with session.answers() as loop:
        run(loop, [(request, 0)] * SEQUENCES)
    launched = {shape.rows for shape in session.launched if not shape.prompt}
    assert max(launched) == 72
    assert max(shape.rows for shape in asked if not shape.prompt) == 72


def test_steps_with_prompts_get_finer_graphs_where_they_come_often() -> None:
    """20 answers, and 12 prompts of 130 tokens beside them, one after the other: the first takes
    576 rows, of which 168 would do."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, SEQUENCES, 16)
    ready: list[StepShape] = []

    def is_recorded(shape: StepShape) -> bool:
        return not shape.prompt or shape.prompt in COARSE_CHUNKS or shape in ready

    def prepare(shape: StepShape) -> bool:
        if shape not in ready:
            ready.append(shape)
        return False

    session = PaperSession(shapes, CONTEXT, SEQUENCES, is_recorded)
    session.steps.prepare = prepare
    session.storage.room = SEQUENCES * CONTEXT
    answer = Request(prompt=(1, 2), settings=GREEDY, limit=200, ignore_end=True)
    newcomer = Request(prompt=(1,) * 130, settings=GREEDY, limit=1)
    requests = [(answer, 0)] * 20 + [(newcomer, 10 + 6 * number) for number in range(12)]
    with session.answers() as loop:
        run(loop, requests)
    mixed = [(s.decode, s.prompt) for s in session.launched if s.decode and s.prompt > 128]
    assert len(mixed) == 12
    assert mixed == [(64, 512)] + [(24, 144)] * 11


def test_halves_get_finer_graphs_of_halves() -> None:
    """An answer with logit processors is beside others."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, SEQUENCES, 16)
    batch = Batch(tuple(range(20)), (Segment(20, 0, 130, chooses=True),))
    plan = StepPlan(batch, batch.decode, (9,) * 20, (20,), ())
    layers, _ = shapes.of_batch(batch, plan.longest, Output.GREEDY).halves
    session = PaperSession(shapes, CONTEXT, SEQUENCES, lambda shape: shape == layers)
    recorded = RecordedShapes(session)  # type: ignore[arg-type]
    assert recorded.ready(plan, layers) == layers
    assert recorded.wished
    assert all(of.rows < layers.rows and of.part is Part.LAYERS for of in recorded.wished)


def test_greedy_answers_take_steps_that_draw_until_theirs_are_recorded() -> None:
    """Which include them: nobody waits for a graph."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, 4, 16)
    ready: set[StepShape] = set()

    def is_recorded(shape: StepShape) -> bool:
        return shape.output is Output.SAMPLE or shape in ready

    session = PaperSession(shapes, CONTEXT, 4, is_recorded)
    session.steps.prepare = lambda shape: bool(ready.add(shape))
    request = Request(prompt=(1,) * 20, settings=GREEDY, limit=60, ignore_end=True)
    with session.answers() as loop:
        run(loop, [(request, 0)])
    outputs = [shape.output for shape in session.launched]
    assert outputs[:4] == [Output.SAMPLE] * 4
    assert outputs[-4:] == [Output.GREEDY] * 4


def prompts_alone(
    lengths: Iterable[int], context: int, ahead: tuple[int, ...] = ()
) -> tuple[list[int], set[int]]:
    """Rows of the prompt steps of requests with so many tokens, one after the other, and the
    numbers of rows whose graphs were wished for beside those ``ahead``, or of all chunks."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), context, 4, 16)
    ahead = ahead or shapes.chunks
    ready = {*ahead}

    def prepare(shape: StepShape) -> bool:
        ready.add(shape.prompt)
        return False

    def is_recorded(shape: StepShape) -> bool:
        return not shape.prompt or shape.prompt in ready

    session = PaperSession(shapes, context, 4, is_recorded)
    session.steps.prepare = prepare
    with session.answers() as loop:
        for tokens in lengths:
            request = Request(prompt=(1,) * tokens, settings=GREEDY, limit=4, ignore_end=True)
            run(loop, [(request, 0)])
    prompts = [shape.prompt for shape in session.launched if shape.prompt]
    return prompts, ready - {0, *ahead}


def test_prompts_are_padded_to_a_graph_until_theirs_is_recorded() -> None:
    """Those of 20 tokens to 64, which is recorded; after 256 rows of padding 32 is, too."""
    prompts, _ = prompts_alone([20] * 10, CONTEXT, (64, 256))
    assert prompts == [64] * 8 + [32] * 2


def test_prompts_alone_get_finer_graphs_where_they_come_often() -> None:
    """Those of 129 tokens one of 136 rows in place of 192; those of 190 none."""
    for tokens, rows in ((129, 136), (190, 192)):
        prompts, wished = prompts_alone([tokens] * 6, CONTEXT)
        assert prompts[:4] == [192] * 4
        assert prompts[-1] == rows
        assert (not wished) == (rows == 192)


def prompt_alone(shapes: ShapeBuckets, tokens: int) -> tuple[StepPlan, StepShape]:
    """A step with all of a prompt, and its coarse shape."""
    batch = Batch((), (Segment(0, 0, tokens, chooses=True),))
    return StepPlan(batch, (), (), (0,), ()), shapes.of_batch(batch, tokens, Output.GREEDY)


def few_recorded() -> tuple[PaperSession, RecordedShapes, set[int]]:
    """Of prompts alone those of all chunks are recorded, and of the numbers of rows returned."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), 2048, 4, 16)
    ready = {*shapes.chunks}
    session = PaperSession(shapes, 2048, 4, lambda shape: shape.rows in ready)
    return session, RecordedShapes(session), ready  # type: ignore[arg-type]


def test_prompts_of_any_length_share_graphs_with_some_padding() -> None:
    """Of 113 shapes for 129 to 1,024 tokens a quarter is recorded, which leave 4 % of padding."""
    session, recorded, ready = few_recorded()
    lengths = np.random.default_rng(4).integers(129, 1024, 900, endpoint=True).tolist()
    rows = []
    for tokens in lengths:
        rows.append(recorded.ready(*prompt_alone(session.shapes, tokens)).rows)
        assert tokens <= rows[-1]
        ready |= {shape.rows for shape in recorded.wished}
    assert len(ready) <= 28 + len(session.shapes.chunks)
    assert sum(rows[-300:]) <= 1.04 * sum(lengths[-300:])


def test_a_graph_takes_the_place_of_one_that_no_step_takes_any_more() -> None:
    """Where there is no more memory for graphs of such shapes."""
    session, recorded, ready = few_recorded()
    forgotten: list[int] = []
    session.steps.forget = lambda shape: forgotten.append(shape.rows)
    for number in range(2100):
        tokens = 129 if number < 20 else 257
        plan, coarse = prompt_alone(session.shapes, tokens)
        recorded.ready(plan, coarse)
        wished = [shape.rows for shape in recorded.wished]
        if number == 10:
            assert wished == [136]
            ready.add(136)
            session.steps.free_share = 0.2
        assert (forgotten == [136]) == (number >= 19 + 1024)
    assert wished == [264]


def test_a_shape_that_cannot_be_recorded_gives_way_to_others() -> None:
    session, recorded, _ = few_recorded()

    def fails(shape: StepShape) -> bool:
        raise LaunchError(f"{shape.rows} rows")

    session.steps.prepare = fails
    for tokens in (129, 257) * 5:
        recorded.ready(*prompt_alone(session.shapes, tokens))
    assert {264, 136} <= {shape.rows for shape in recorded.wished}
    while recorded.wished:
        with pytest.raises(LaunchError):
            recorded.prepare()
    assert not recorded.prepare()


def test_prompts_alone_take_one_step_once_it_has_a_graph_with_little_padding() -> None:
    """520 tokens are 512 rows and 8, and then 520; 1,100 are 1,024 and 96, and then 1,104."""
    for tokens, before, after in ((520, [512, 8], [520]), (1100, [1024, 96], [1104])):
        prompts, _ = prompts_alone([tokens] * 6, 2000)
        assert prompts == before * 2 + after * 4


def test_a_graph_of_many_more_rows_serves_one_prompt() -> None:
    """As many rows of padding as 1,024 rows have for 130 tokens are worth a graph at once."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), 2048, 4, 16)
    session = PaperSession(shapes, 2048, 4, lambda of: of.prompt in (64, 1024))
    recorded = RecordedShapes(session)  # type: ignore[arg-type]
    for tokens, padded, wished in ((40, 64, []), (20, 64, []), (130, 1024, [136])):
        plan, shape = prompt_alone(shapes, tokens)
        assert recorded.ready(plan, shape).rows == padded
        assert [of.rows for of in recorded.wished] == wished
