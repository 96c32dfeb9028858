"""How much memory the largest steps of a session need for their values: measured by lowering them
for parts of paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from urdir.driver.parallel import completed
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.stages import append_head, stage_launches
from urdir.model.engine.step import model_launches
from urdir.model.lower.paper import Needs, needs_of
from urdir.model.lower.parts import StepParts
from urdir.model.lower.requests import MOST_BEGUN
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.buckets import row_buckets
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.spec import ceil_div


def step_needs(parts: StepParts, shapes: ShapeBuckets, rows: int) -> Needs:
    """What all steps need of which up to ``rows`` rows choose a token."""
    needs, most = Needs(), 0
    for shape in largest_steps(shapes, rows):
        most = max(most, shape.rows)
        for sheet in _sheets(parts, shape):
            needs = needs.most(needs_of(sheet))
    return needs.for_rows(most)


def largest_steps(shapes: ShapeBuckets, rows: int) -> Iterator[StepShape]:
    """Shapes whose values need the most memory: one row, the most of few rows, of those whose norms
    products begin, and of all, since their kernels differ."""
    keys, buckets = shapes.lengths[-1], row_buckets(rows)
    for count in dict.fromkeys((1, *_largest(buckets), buckets[-1])):
        yield StepShape(count, keys, Output.SAMPLE)
    if shapes.drafts:
        yield StepShape(buckets[-1], keys, Output.SAMPLE, drafts=shapes.drafts)
    for chunk in dict.fromkeys((shapes.chunks[0], *_largest(shapes.chunks), shapes.chunks[-1])):
        yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk)
        if shapes.begin_apart:
            yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk, begins=True)
        if (walk := shapes.walked(chunk, [keys])).count:
            yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk, walk=walk)
    chunk = shapes.chunks[-1]
    if shapes.rows > 1:
        yield _mixed(shapes, shapes.rows, chunk)
        begun = MOST_BEGUN - min(shapes.rows, MOST_BEGUN // 2)
        if shapes.rows + chunk > MOST_BEGUN and begun <= chunk:
            yield _mixed(shapes, MOST_BEGUN - begun, begun)


def _mixed(shapes: ShapeBuckets, decode: int, chunk: int) -> StepShape:
    """Rows of prompts beside answers, all of which choose a token."""
    keys, rows = shapes.lengths[-1], decode + chunk
    segments = min(shapes.rows, ceil_div(chunk, shapes.alignment))
    walk = shapes.walked(rows, [keys])
    return StepShape(
        rows, keys, Output.SAMPLE, prompt=chunk, outputs=decode, segments=segments, walk=walk
    )


def _largest(buckets: Sequence[int]) -> Iterator[int]:
    """The largest bucket of few rows, and of rows whose norms products begin."""
    for most in (MAX_BATCH, MOST_BEGUN):
        yield from [count for count in buckets if count <= most][-1:]


def _sheets(parts: StepParts, shape: StepShape) -> Iterator[Sheet]:
    """The launches of a step that have values in the workspace, apart if they are of two plans."""
    sheet = Sheet(parts.work)
    if parts.config.stage is None:
        completed(model_launches(sheet, parts, shape))
        yield sheet
        return
    completed(stage_launches(sheet, parts, shape))
    yield sheet
    if parts.config.stage.rank == 0:
        output = Sheet(parts.work)
        append_head(output, parts, shape)
        yield output
