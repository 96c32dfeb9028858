"""The model's streams that a draft reads, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.draft import DraftParts, append_joined
from urdir.model.families.draft_file import DraftConfig
from urdir.model.families.tapped import tap
from urdir.model.memory.workspace import saved

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.blocks.rows import Rows
    from urdir.model.memory.norms import NormLayer

#: The model's streams side by side, f32, in the draft's workspace, and zeros in place of one.
STREAMS_READ, NO_STREAM = "streams", "no stream"


def append_given_streams(
    plan: Plan,
    parts: DraftParts,
    draft: DraftConfig,
    rows: Rows,
    y: Slice,
    norm: NormLayer | None = None,
) -> None:
    """y (rows, hidden) = fc . the (norm of the) streams before the draft's target layers, side by
    side."""
    own = parts.own
    streams, linear = own.work[STREAMS_READ], own.linear(plan, rows)
    sources = [(_stream(parts, layer), None) for layer in draft.target_layers]
    append_joined(plan, "draft.streams", rows.count, draft.target_hidden, sources, streams)
    if norm is not None:
        x = Activations(streams)
        linear.append_norm("draft.streams_norm", draft.fc.cols, x, norm, streams)
    linear.append("draft.fc", [(own.weights.matrix(draft.fc), y)], Activations(streams))


def _stream(parts: DraftParts, layer: int) -> Slice:
    """The model's stream before a layer; zeros of the number of its layers, as in llama.cpp, which
    keeps inputs of layers alone."""
    if layer == parts.target.config.n_layers:
        return parts.own.work[NO_STREAM]
    return parts.target.work[saved(tap(layer))]
