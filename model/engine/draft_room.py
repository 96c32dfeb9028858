"""Room in a session's workspace for the values of its draft, measured like that of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from urdir.driver.parallel import completed
from urdir.model.engine.speculation.open_source import open_source
from urdir.model.engine.step import rows_of
from urdir.model.engine.step_needs import largest_steps
from urdir.model.lower.paper import Needs, PaperSheet, PaperWorkspace, needs_of
from urdir.model.lower.parts import StepParts

if TYPE_CHECKING:
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.batch import ShapeBuckets
    from urdir.model.engine.speculation.model_source import Drafter
    from urdir.model.memory.kv_cache import KvCache
    from urdir.model.memory.workspace import Workspace, WorkspaceShape


def with_draft_room(
    drafter: Drafter,
    parts: StepParts,
    cache: KvCache,
    stream: Stream,
    shapes: ShapeBuckets,
    work: WorkspaceShape,
) -> WorkspaceShape:
    """The workspace ``work`` of the steps of ``parts`` with room for what the draft launches in
    them."""
    paper = replace(parts, work=cast("Workspace", PaperWorkspace(work)))
    needs, most = Needs(), 0
    with open_source(drafter, paper, cache, stream) as source:
        steps = [*largest_steps(shapes, parts.state.rows)]
        if drafter.model.tokens:
            steps += [replace(shape, narrow=True) for shape in steps if shape.drafts]
        for shape in steps:
            most, sheet = max(most, shape.rows), PaperSheet(paper.work)
            plan = cast("Plan", sheet)  # what is appended is lowered into it
            if shape.drafts:
                completed(source.append(plan, paper, shape))
            completed(source.append_kept(plan, paper, shape, rows_of(paper, shape)[0]))
            needs = needs.most(needs_of(sheet))
    zeroed = {**work.zeroed, **needs.for_rows(most).zeroed}
    return replace(work, zeroed=zeroed, room=max(work.room, needs.room))
