"""Shapes of steps: rounded up to few, and large enough for what they serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from urdir.model.engine.batch import Batch, Grain, Output, Segment, ShapeBuckets, StepShape
from urdir.model.memory.buckets import chunks_of, row_bucket
from urdir.model.memory.walk import NO_BLOCKS, Walk
from urdir.ptxgen.kernels.advance import IDLE

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
            assert stop - at in shapes.first_chunks  # only the last step leaves rows idle
        at = stop


@given(count=st.integers(33, 2048))
def test_a_prompt_is_one_step_not_much_larger_or_two(count: int) -> None:
    """Two where these take 5 % less by the time of a row and of a step, which is that of 128."""
    chunks = chunks_of(exact=False)
    first, *others = ShapeBuckets.of(chunks, 8192).prompts(0, count, Output.GREEDY)
    whole = next(rows for rows in chunks if rows >= count)
    assert whole <= (64 if count <= 64 else 1.5 * count)
    ways = [(rows, next(more for more in chunks if more >= count - rows)) for rows in chunks]
    fastest = min((sum(way) + 256 for way in ways if way[0] < count), default=2 * whole + 256)
    if others:
        assert len(others) == 1
        assert first.output is Output.NONE
        assert first.rows + others[0].rows + 256 == fastest < 0.95 * (whole + 128)
    else:
        assert first.rows == whole
        assert fastest >= 0.95 * (whole + 128)


def test_prompts_just_above_a_large_chunk_take_two_steps() -> None:
    shapes = ShapeBuckets.of(chunks_of(exact=False), 8192)
    assert shapes.first_chunks == (512, 768, 1024, 1536, 2048)
    assert [shape.rows for shape in shapes.prompts(0, 1100, Output.GREEDY)] == [1024, 96]
    assert [shape.rows for shape in shapes.prompts(9, 3300, Output.GREEDY)] == [2048, 1024, 256]
    assert [shape.rows for shape in shapes.prompts(0, 1400, Output.GREEDY)] == [1536]


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


@given(start=st.integers(0, 130_000), count=st.integers(1, 2048))
def test_steps_that_walk_have_work_for_nearly_all_blocks(start: int, count: int) -> None:
    context = 1 << 17
    walk = Walk(unit=96, step=672, room=8, most=196, rows=128)
    shapes = ShapeBuckets.of(chunks_of(False), context, walk=walk)
    shape, end = shapes.prompt(start, min(start + count, context))
    if end - start <= 8:
        assert shape.walk == NO_BLOCKS
        assert shape.keys in shapes.lengths
    else:
        assert shape.keys == context
        assert shape.walk.length <= walk.block
        # a quarter more at most, but for what blocks of the same length have too much
        assert end <= shape.walk.tokens < 1.25 * (end + 672) + 672 * shape.walk.count
        assert shape.walk in [walk.blocks([length]) for length in walk.ends(context)]


@given(
    decode=st.integers(0, 3),
    ends=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 60)), min_size=1, max_size=4),
)
def test_each_row_of_a_walk_finds_its_keys(decode: int, ends: list[tuple[int, int]]) -> None:
    """Its own token is where its sequence begins and so many keys further."""
    walk = Walk(unit=112, step=112, room=3, most=9, rows=32)
    shapes = ShapeBuckets.of(chunks_of(False, 256), 1000, 8, 32, walk=walk)
    segments = tuple(Segment(n + 3, start, start + count) for n, (start, count) in enumerate(ends))
    batch = Batch(tuple(range(decode)), segments)
    shape = shapes.of_batch(batch, 1000, Output.NONE)
    rows = shapes.rows_of(batch, shape, [7] * decode)
    if shape.rows <= 8:
        assert rows.begin is None
        return
    assert rows.begin is not None
    assert rows.units is not None
    assert len(rows.units) * walk.unit == shape.walk.tokens
    assert len(rows.units) <= walk.most_units(len(segments))
    assert (rows.begin % walk.unit == 0).all()
    held = [
        (int(sequence), int(first) + at) if at < count else None
        for sequence, first, count, _ in rows.units.tolist()
        for at in range(walk.unit)
    ]
    wanted = [(s.sequence, token) for s in segments for token in range(s.end)]
    assert [key for key in held if key is not None] == wanted
    for row, position in enumerate(rows.position[shape.decode :].tolist()):
        if position != IDLE:
            sequence = int(rows.sequence[shape.decode + row])
            assert held[int(rows.begin[row]) + position] == (sequence, position)
            assert rows.begin[row] == rows.begin[row // 32 * 32]


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


@given(decode=st.integers(0, 256), prompts=st.lists(st.integers(1, 600), min_size=1, max_size=3))
def test_fine_shapes_have_room_and_little_padding(decode: int, prompts: list[int]) -> None:
    shapes = ShapeBuckets.of(chunks_of(exact=False), 1024, 300, 16)
    segments = tuple(Segment(decode + i, 0, count, chooses=True) for i, count in enumerate(prompts))
    batch = Batch(tuple(range(decode)), segments)
    coarse, middle, fine = (shapes.of_batch(batch, 1024, Output.GREEDY, g) for g in Grain)
    rows = shapes.segment_rows(segments)
    for shape in (coarse, middle, fine):
        assert shape.prompt >= rows
        assert shape.decode >= decode
        assert shape.segments >= len(prompts)
        assert shape.outputs >= decode + len(prompts)
    if decode or len(prompts) > 1:
        assert fine.prompt - rows <= max(15, rows / 32)
        assert fine.decode - decode < max(8, decode / 8)
        assert middle.prompt - rows <= max(63, rows / 2)
        assert fine.rows <= middle.rows <= coarse.rows
