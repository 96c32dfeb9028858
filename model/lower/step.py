"""From operations to launches: one pass over a graph, in order, by rules."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError
from urdir.model.graph.adapters import with_adapters
from urdir.model.graph.graph import Graph
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.experts.cached import append_settled
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.repeats import Repeats
from urdir.model.lower.rows import OutputRows, Rows
from urdir.model.lower.rule import MOST_OPERATIONS, words_of
from urdir.model.lower.rules import RULES
from urdir.model.lower.sheet import Sheet

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan


def lowering(
    plan: Plan | Sheet,
    parts: LayerParts,
    rows: Rows,
    graph: Graph,
    outputs: OutputRows | None = None,
    fixed: Mapping[Tensor, Slice] | None = None,
) -> Generator[None, None, None]:
    """Append the launches of a graph of these ``rows`` to a plan, in pieces that take well
    below a millisecond, except the choice of a product; to a sheet, whose registers then go on to
    what else is appended there.

    ``fixed`` are the places of tensors that are read or made outside; ``outputs`` are the rows of
    `Gather`. Raises LaunchError, naming launch and parameter, for a buffer that is null, closed or
    too small; ModelError for an operation that no rule takes.
    """
    sheet = plan if isinstance(plan, Sheet) else Sheet(parts.work)
    graph = with_adapters(graph, parts.config.adapters)
    at, first = Lowering(sheet, parts, rows, graph, outputs, fixed), len(sheet)
    words = words_of(graph.ops)
    repeats = Repeats(at)
    bounds = [*graph.starts, len(graph)]
    yield from _lower_until(at, words, bounds[0])
    for index, end in enumerate(bounds[1:]):
        if not repeats.begin(index):
            yield from _lower_until(at, words, end)
            repeats.end()
        yield
    append_settled(at, first)
    if not isinstance(plan, Sheet):
        yield from sheet.placing(plan)


def _lower_until(at: Lowering, words: Sequence[str], end: int) -> Generator[None, None, None]:
    """Lower the operations up to ``end``, and later ones that fuse with them."""
    while at.position < end:
        following = words[at.position : at.position + MOST_OPERATIONS]
        for rule, count in RULES.matches(tuple(following)):
            at.end = at.position + count
            if rule.lower(at, at.ops[at.position : at.end]):
                break
        else:
            raise ModelError(f"no rule for {at.ops[at.position]}")
        at.position = at.end
        yield


def lower(
    plan: Plan | Sheet,
    parts: LayerParts,
    rows: Rows,
    graph: Graph,
    outputs: OutputRows | None = None,
    fixed: Mapping[Tensor, Slice] | None = None,
) -> None:
    """Run `lowering` to its end."""
    for _ in lowering(plan, parts, rows, graph, outputs, fixed):
        pass
