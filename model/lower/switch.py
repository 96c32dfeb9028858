"""The rule for adapters that tokens of a text switch on (Granite Switch)."""

from __future__ import annotations

from urdir.model.graph.switch import SwitchRows
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rule import alone
from urdir.ptxgen.kernels import switch_rows

#: Of all rows of a step, and after them of those whose results are wanted: the tokens that they are
#: embedded as, their numbers, scales, and adapters.
TOKENS, ROWS = "switched token", "switched row"
SCALES, ADAPTERS = "switched scale", "switched adapter"


def lower_switch_rows(at: Lowering, of: SwitchRows) -> None:
    """switch_rows: tokens, and the adapters of all rows of the step."""
    assert isinstance(at.parts, StepParts)
    state, rows, outputs = at.parts.state, at.rows, at.outputs
    kernel = switch_rows.SwitchRows(
        *(of.vocab, state.max_len, rows.count, state.sequences),
        outputs=0 if outputs is None else outputs.rows.count,
        other_weight=of.of.other_weight,
    )
    more = {} if outputs is None else outputs.rows.arguments
    adapters, embedded = at.parts.weights.switch_tables
    at.launch(
        kernel,
        of.label,
        adapters=adapters,
        embedded=embedded,
        tokens=state["tokens"],
        **rows.arguments,
        **{f"output_{name}": place for name, place in more.items()},
        token=at.work[TOKENS],
        adapter=at.work[ADAPTERS],
        row=at.work[ROWS],
        scale=at.work[SCALES],
    )
    at.move(of.y, at.work[TOKENS].slice(0, 4 * rows.count))


RULES = (alone("switch_rows", lower_switch_rows),)
