"""Shapes of steps: rounded up to few, and large enough for what they serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from urdir.model.engine.batch import Batch, Output, Segment, ShapeBuckets, StepShape
from urdir.model.memory.buckets import chunks_of, row_bucket

EXACT = st.booleans()


@given(
    exact=EXACT,
    most=st.integers(1, 4096),
    start=st.integers(0, 4095),
    count=st.integers(1, 2000),
    output=st.sampled_from(Output),
)
def test_prompt_steps_cover_every_token_once(
    exact: bool, most: int, start: int, count: int, output: Output
) -> None:
    shapes = ShapeBuckets.of(chunks_of(exact, most), 8192)
    assert shapes.chunks[-1] >= most or shapes.chunks == chunks_of(exact)
    at, end = start, start + count
    while at < end:
        shape, stop = shapes.prompt(at, end, output)
        assert at < stop <= end
        assert stop - at <= shape.rows
        assert shape.rows in shapes.chunks
        assert stop <= shape.keys
        assert shape.prompt
        assert shape.output is (output if stop == end else Output.NONE)
        if stop < end:
            assert stop - at == shapes.chunks[-1]  # only the last step leaves rows idle
        at = stop


@given(count=st.integers(33, 2048))
def test_a_prompt_is_one_step_not_much_larger(count: int) -> None:
    shape, stop = ShapeBuckets.of(chunks_of(exact=False), 8192).prompt(0, count)
    assert stop == count
    assert shape.rows <= (64 if count <= 64 else 1.5 * count)


def test_a_step_begins_a_sequence_alone_and_from_its_first_token_on() -> None:
    shapes = ShapeBuckets.of(chunks_of(False), 8192, 4, 8, begin_apart=True)
    assert shapes.prompt(0, 30)[0].begins
    assert not shapes.prompt(2048, 2078)[0].begins
    whole, rest = Segment(0, 0, 30), Segment(1, 5, 30)
    for batch, begins in (
        (Batch((), (whole,)), True),
        (Batch((), (rest,)), False),
        (Batch((2,), (whole,)), False),
        (Batch((), (whole, Segment(1, 0, 30))), False),
    ):
        assert shapes.of_batch(batch, 30, Output.NONE).begins == begins
    assert not ShapeBuckets.of(chunks_of(False), 8192).prompt(0, 30)[0].begins


@given(start=st.integers(1, 130_000), count=st.integers(1, 2048))
def test_steps_that_walk_in_blocks_have_work_for_nearly_all_of_them(start: int, count: int) -> None:
    context = 1 << 17
    shapes = ShapeBuckets.of(chunks_of(False), context, begin_apart=True, block=2016)
    end = min(start + count, context)
    shape = shapes.prompt(start, end)[0]
    assert end <= shape.keys <= context
    blocks, needed = -(-shape.keys // 2016), -(-end // 2016)
    assert blocks == needed or 2 * blocks < 3 * needed
    assert shapes.prompt(0, count)[0].keys in shapes.lengths


@given(rows=st.integers(1, 256), length=st.integers(1, 8192), steps=st.integers(1, 4))
def test_decode_steps_have_room(rows: int, length: int, steps: int) -> None:
    shapes = ShapeBuckets.of(chunks_of(False), 8192)
    shape = shapes.decode(rows, length, Output.GREEDY, steps)
    assert rows <= shape.rows < (2 * rows if rows <= 16 else 1.5 * rows)
    assert shape.rows == row_bucket(shape.rows)
    assert length <= shape.keys
    assert shape.keys in shapes.lengths
    assert shape.steps == steps


def test_a_step_is_named_by_what_it_does() -> None:
    outputs = (Output.LOGITS, Output.GREEDY, Output.SAMPLE, Output.LOGPROBS)
    names = ["logits", "greedy", "sample", "logprobs"]
    assert StepShape(8, 64, Output.NONE, prompt=8, begins=True).kind == "beginning"
    assert [StepShape(1, 512, o).kind for o in outputs] == names
    prompts = [StepShape(64, 512, output, prompt=64).kind for output in Output]
    assert prompts == ["prompt", *(f"prompt {name}" for name in names)]
    assert [o for o in Output if o.is_token] == list(outputs[1:])
