"""How much memory the largest steps of a session need for their values: measured by lowering them
for parts of paper."""

from __future__ import annotations

from collections.abc import Iterator

from urdir.driver.parallel import completed
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.stages import append_head, stage_launches
from urdir.model.engine.step import model_launches
from urdir.model.lower.paper import Needs, needs_of
from urdir.model.lower.parts import StepParts
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.buckets import row_buckets
from urdir.ptxgen.kernels.linear.epilogue.shared_adapted import MOST_VECTORS
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.spec import ceil_div


def step_needs(parts: StepParts, shapes: ShapeBuckets, rows: int) -> Needs:
    """What all steps need of which up to ``rows`` rows choose a token."""
    needs, most = Needs(), 0
    for shape in largest_steps(shapes, rows):
        most = max(most, shape.rows)
        for sheet in _sheets(parts, shape):
            needs = needs.most(needs_of(sheet))
    has_routers = any(layer.mixtures for layer in parts.config.layers)
    return needs.for_rows(most) if has_routers else needs


def largest_steps(shapes: ShapeBuckets, rows: int) -> Iterator[StepShape]:
    """Shapes whose values need the most memory: one row, the most of few rows, of several and of
    many, since their kernels differ. One row with few keys, too: other numbers of CTAs count its
    launches."""
    keys, buckets = shapes.lengths[-1], row_buckets(rows)
    if shapes.lengths[0] < keys:
        yield StepShape(1, shapes.lengths[0], Output.SAMPLE)
    few = [count for count in buckets if count <= MAX_BATCH]
    several = [count for count in buckets if count <= MOST_VECTORS]
    for count in dict.fromkeys((1, few[-1], several[-1], buckets[-1])):
        yield StepShape(count, keys, Output.SAMPLE)
    if shapes.drafts:
        yield StepShape(buckets[-1], keys, Output.SAMPLE, drafts=shapes.drafts)
    several = [chunk for chunk in shapes.chunks if chunk <= MOST_VECTORS]
    for chunk in dict.fromkeys((shapes.chunks[0], *several[-1:], shapes.chunks[-1])):
        yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk)
        if shapes.begin_apart:
            yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk, begins=True)
        if (walk := shapes.walked(chunk, [keys])).count:
            yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk, walk=walk)
    chunk = shapes.chunks[-1]
    segments = min(shapes.rows, ceil_div(chunk, shapes.alignment))
    beside = StepShape(
        shapes.rows + chunk,
        keys,
        Output.SAMPLE,
        prompt=chunk,
        outputs=shapes.rows,
        segments=segments,
        walk=shapes.walked(shapes.rows + chunk, [keys]),
    )
    if shapes.rows > 1:
        yield beside


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
