"""Shapes of steps: rounded up to few, and large enough for what they serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.memory.budget import chunks_of, row_bucket

EXACT = st.booleans()


@given(exact=EXACT, start=st.integers(0, 4095), count=st.integers(1, 2000))
def test_prompt_steps_cover_every_token_once(exact: bool, start: int, count: int) -> None:
    shapes = ShapeBuckets.of(chunks_of(exact), 8192)
    at, end = start, start + count
    while at < end:
        shape, stop = shapes.prompt(at, end)
        assert at < stop <= end
        assert stop - at <= shape.rows
        assert shape.rows in shapes.chunks
        assert stop <= shape.keys
        if stop < end:
            assert stop - at == shapes.chunks[-1]  # only the last step leaves rows idle
        at = stop


@given(rows=st.integers(1, 256), length=st.integers(1, 8192), steps=st.integers(1, 4))
def test_decode_steps_have_room(rows: int, length: int, steps: int) -> None:
    shapes = ShapeBuckets.of(chunks_of(False), 8192)
    shape = shapes.decode(rows, length, Output.GREEDY, steps)
    assert rows <= shape.rows < 2 * rows
    assert shape.rows == row_bucket(shape.rows)
    assert length <= shape.keys
    assert shape.keys in shapes.lengths
    assert shape.steps == steps


def test_a_step_is_named_by_what_it_does() -> None:
    kinds = {output: StepShape(1, 512, output).kind for output in Output}
    assert kinds == {
        Output.NONE: "prompt",
        Output.LOGITS: "logits",
        Output.GREEDY: "greedy",
        Output.SAMPLE: "sample",
    }
    assert [o for o in Output if o.is_token] == [Output.GREEDY, Output.SAMPLE]
