"""A whole forward pass of one token: embedding, layers, norm, LM head, replayed as one graph.

The caller supplies every token. The session of the `EagerSteps` may be one of weights that were
made from sizes (`make_weights`). For long answers `Generation` is quicker: its steps run ahead of
the reader.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.errors import ContextFullError, ModelError


def forward_gpu_resident(
    steps: EagerSteps, token: int, *, position: int | None = None, sequence: int = 0
) -> npt.NDArray[np.float32]:
    """Process ``token`` at the end of a sequence: the logits (n_vocab,) f32 of the one after it.

    A ``position`` is compared with the sequence's length. Raises ModelError for another position or
    a token outside the vocabulary, ContextFullError for a full sequence; its length is then as it
    was.
    """
    _append(steps, token, position, sequence)
    logits: npt.NDArray[np.float32] = steps.logits((sequence,))[0]
    return logits


def forward_gpu_resident_to_token_id(
    steps: EagerSteps,
    token: int,
    *,
    position: int | None = None,
    sequence: int = 0,
    correctness: bool = False,
) -> int:
    """The same, and the most likely next token, the lowest id on ties: four bytes come back.

    With ``correctness`` the logits come back and the host chooses.
    """
    if correctness:
        logits = forward_gpu_resident(steps, token, position=position, sequence=sequence)
        return int(np.argmax(logits))  # the first of equals
    _append(steps, token, position, sequence)
    return steps.step((sequence,))[0]


def _append(steps: EagerSteps, token: int, position: int | None, sequence: int) -> None:
    """Make ``token`` the pending one of a sequence."""
    if not 0 <= sequence < len(steps.lengths):
        raise ModelError(f"sequence {sequence}: the session has {len(steps.lengths)}")
    length, context = steps.lengths[sequence], steps.session.context
    if position is not None and position != length:
        raise ModelError(f"position {position}: sequence {sequence} has {length} tokens")
    steps.session.check_tokens([token])
    if length >= context:
        raise ContextFullError(f"sequence {sequence}: the context of {context} is full")
    steps.truncate(length, sequence)  # forgets what an earlier step has chosen
    steps.feed([token], sequence)
