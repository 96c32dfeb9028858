"""The model's streams that a draft reads, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    DraftParts,
    DraftProduct,
    append_joined,
    append_norm,
    append_product,
)
from urdir.model.families.draft_file import DraftConfig
from urdir.model.families.tapped import tap
from urdir.model.memory.workspace import saved

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.lower.rows import Rows
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
    streams = own.work[STREAMS_READ]
    sources = [(_stream(parts, layer), None) for layer in draft.target_layers]
    append_joined(plan, "draft.streams", rows.count, draft.target_hidden, sources, streams)
    if norm is not None:
        vectors = (streams, streams, draft.fc.cols)
        append_norm(plan, rows.count, "draft.streams_norm", norm, vectors)
    append_product(plan, own, rows, DraftProduct("draft.fc", own.weights, draft.fc), streams, y)


def _stream(parts: DraftParts, layer: int) -> Slice:
    """The model's stream before a layer; zeros of the number of its layers, as in llama.cpp, which
    keeps inputs of layers alone."""
    if layer == parts.target.config.n_layers:
        return parts.own.work[NO_STREAM]
    return parts.target.work[saved(tap(layer))]
