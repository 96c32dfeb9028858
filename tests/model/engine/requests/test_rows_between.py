"""Numbers of sequences whose graphs are not recorded ahead."""

from __future__ import annotations

from tests.model.engine.requests.paper_session import TOKEN, PaperSession
from tests.model.engine.requests.test_context_ends import run
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
    """20 answers, and 12 prompts of 130 tokens beside them, one after the other."""
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
    assert mixed[:3] == [(64, 512)] * 3
    assert mixed[-6:] == [(24, 144)] * 6
    assert [(s.decode, s.prompt) for s in ready if s.prompt] == [(24, 192), (24, 144)]


def test_halves_get_finer_graphs_of_halves() -> None:
    """An answer with logit processors is beside others."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, SEQUENCES, 16)
    session = PaperSession(shapes, CONTEXT, SEQUENCES, lambda shape: False)
    batch = Batch(tuple(range(20)), (Segment(20, 0, 130, chooses=True),))
    plan = StepPlan(batch, batch.decode, (9,) * 20, (20,), ())
    layers, _ = shapes.of_batch(batch, plan.longest, Output.GREEDY).halves
    recorded = RecordedShapes(session)  # type: ignore[arg-type]
    for _ in range(4):
        assert recorded.ready(plan, layers) == layers
    assert recorded.wished is not None
    assert recorded.wished.rows < layers.rows
    assert recorded.wished.part is Part.LAYERS


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


def test_prompts_are_padded_to_a_graph_until_theirs_is_recorded() -> None:
    """Those of 20 tokens to 64, which is recorded; after some of them 32 rows are wished for."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, 4, 16)
    ready: set[int] = {64, 256}

    def prepare(shape: StepShape) -> bool:
        ready.add(shape.prompt)
        return False

    session = PaperSession(shapes, CONTEXT, 4, lambda of: not of.prompt or of.prompt in ready)
    session.steps.prepare = prepare
    request = Request(prompt=(1,) * 20, settings=GREEDY, limit=4, ignore_end=True)
    with session.answers() as loop:
        for _ in range(6):
            run(loop, [(request, 0)])
    prompts = [shape.prompt for shape in session.launched if shape.prompt]
    assert prompts[:4] == [64] * 4
    assert prompts[-1] == 32


def six_prompts_alone(tokens: int, context: int) -> tuple[list[int], set[int]]:
    """Rows of the prompt steps of six requests, one after the other, and the numbers of rows whose
    graphs were wished for beside those of all chunks, which are there."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), context, 4, 16)
    ready = {*shapes.chunks}

    def prepare(shape: StepShape) -> bool:
        ready.add(shape.prompt)
        return False

    def is_recorded(shape: StepShape) -> bool:
        return not shape.prompt or shape.prompt in ready

    session = PaperSession(shapes, context, 4, is_recorded)
    session.steps.prepare = prepare
    request = Request(prompt=(1,) * tokens, settings=GREEDY, limit=4, ignore_end=True)
    with session.answers() as loop:
        for _ in range(6):
            run(loop, [(request, 0)])
    prompts = [shape.prompt for shape in session.launched if shape.prompt]
    return prompts, ready - {0, *shapes.chunks}


def test_prompts_alone_get_finer_graphs_where_they_come_often() -> None:
    """Those of 129 tokens one of 136 rows in place of 192; those of 190 none."""
    for tokens, rows in ((129, 136), (190, 192)):
        prompts, wished = six_prompts_alone(tokens, CONTEXT)
        assert prompts[:4] == [192] * 4
        assert prompts[-1] == rows
        assert (not wished) == (rows == 192)


def test_prompts_alone_take_one_step_once_it_has_a_graph_with_little_padding() -> None:
    """520 tokens are 512 rows and 8, and then 520; 1,100 are 1,024 and 96, and then 1,104."""
    for tokens, before, after in ((520, [512, 8], [520]), (1100, [1024, 96], [1104])):
        prompts, _ = six_prompts_alone(tokens, 2000)
        assert prompts == before * 4 + after * 2


def test_a_graph_of_many_more_rows_serves_one_prompt() -> None:
    """Four times as long a step is worth a graph at once: so is 1,024 rows for 20 tokens."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), 2048, 4, 16)
    session = PaperSession(shapes, 2048, 4, lambda of: of.prompt in (64, 1024))
    recorded = RecordedShapes(session)  # type: ignore[arg-type]
    for tokens, padded, wished in ((40, 64, False), (20, 64, False), (130, 1024, True)):
        batch = Batch((), (Segment(0, 0, tokens, chooses=True),))
        plan = StepPlan(batch, (), (), (0,), ())
        shape = shapes.of_batch(batch, tokens, Output.GREEDY)
        assert recorded.ready(plan, shape).rows == padded
        assert (recorded.wished == shape) is wished
