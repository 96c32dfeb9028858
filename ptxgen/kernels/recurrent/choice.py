"""Which kernel serves a recurrence: a function of the rows, the heads and what is asked for."""

from __future__ import annotations

from typing import Any

from urdir.ptxgen.kernels.recurrent.chunked_recurrence import ChunkedRecurrence
from urdir.ptxgen.kernels.recurrent.gated_recurrence import GatedRecurrence

#: Rows of prompts from which on chunks pay.
CHUNKED_ROWS = 32


def recurrence(target: str, *, exact: bool, **fields: Any) -> GatedRecurrence:
    """The kernel for a device of native target ``target``; ``fields`` are `GatedRecurrence`'s.

    ``exact`` asks for f32 throughout: token by token. Raises PtxgenError for shapes that no kernel
    handles.
    """
    whole = GatedRecurrence(**fields)
    if exact or not whole.segments or whole.rows < CHUNKED_ROWS:
        return whole
    if not ChunkedRecurrence.serves(whole.key_dim, whole.delta):
        return whole
    chunked = ChunkedRecurrence(**fields)
    return chunked if chunked.target_on(target) else whole
