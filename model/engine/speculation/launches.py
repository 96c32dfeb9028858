"""The launches of a step with drafts before its layers and after the choice of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.speculation.source import DraftSource, NgramSource, Pieces
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.speculation.accept_drafts import AcceptDrafts
from urdir.ptxgen.kernels.speculation.place_rows import PlaceRows

if TYPE_CHECKING:
    from urdir.driver.plan import Plan
    from urdir.model.lower.parts import StepParts


#: What acceptance takes of the state.
_STATE = ("sequence", "place", "position", "found", "given", "tokens", "known", "settings")


def append_placed_rows(
    plan: Plan, parts: StepParts, shape: StepShape, source: DraftSource | None = None
) -> Pieces:
    """Drafts, if the step has any, from ``source`` (those of the settings), in pieces; then the
    positions of the rows, as far as the host does not know them."""
    state = parts.state
    if state.drafts is None:
        return
    if shape.drafts:
        yield from (source or NgramSource(state.drafts)).append(plan, parts, shape)
    rows = shape.outputs if shape.prompt else shape.rows
    beside = shape.decode if shape.prompt else 0
    kernel = PlaceRows(state.max_len, rows, state.sequences, beside, state.drafts_states)
    plan.launch(kernel, "rows", **{p.name: state[p.name] for p in kernel.params})


def append_acceptance(plan: Plan, parts: StepParts, rows: int, output: Output) -> None:
    """Accept drafts, move the sequences on and tell the host."""
    state, settings = parts.state, parts.state.drafts
    assert settings is not None
    assert state.counts is not None
    kernel = AcceptDrafts(
        *(state.max_len, rows, state.sequences, settings.most, state.slots),
        slices=Argmax(n=parts.config.vocab_size).slices if output is Output.GREEDY else 0,
        chance=settings.chance,
    )
    chosen = "ranks" if kernel.slices else "sampled"
    plan.launch(
        kernel,
        "accept",
        mailbox=state.mailbox,
        counts=state.counts,
        **{chosen: parts.work["ranks"] if kernel.slices else state["sampled"]},
        **{name: state[name] for name in _STATE},
    )
