"""Limits of a scheduler that fit a session's steps."""

from __future__ import annotations

import pytest

from urdir.model.engine.batch import ShapeBuckets
from urdir.model.engine.requests.limits import SOME_ROWS, Limits
from urdir.model.memory.buckets import chunks_of


@pytest.mark.parametrize("alignment", [1, 16, 48, 128])
@pytest.mark.parametrize("chunk", [100, 1000, 2048])
def test_rows_are_whole_segments_of_a_step(chunk: int, alignment: int) -> None:
    shapes = ShapeBuckets.of(chunks_of(False, chunk), 4096, 8, alignment)
    latency, throughput = Limits.for_latency(shapes), Limits.for_throughput(shapes, 3000)
    for limits in (latency, throughput):
        assert limits.alignment == alignment
        assert limits.prompt_rows % alignment == limits.mixed_rows % alignment == 0
        assert shapes.chunks[-1] - alignment < limits.prompt_rows <= shapes.chunks[-1]
    assert latency.mixed_rows <= SOME_ROWS
    assert latency.mixed_rows > min(SOME_ROWS, shapes.chunks[-1]) - alignment
    assert throughput.mixed_rows == throughput.prompt_rows
    assert (throughput.queue, throughput.wait_seconds) == (3000, float("inf"))


def test_a_step_that_is_smaller_than_a_segment_takes_one() -> None:
    shapes = ShapeBuckets.of(chunks_of(True), 64, 2, 64)
    limits = Limits.for_latency(shapes)
    assert limits.prompt_rows == limits.alignment == shapes.chunks[-1] == 8
    assert Limits.for_throughput(shapes, 0).queue == 1
