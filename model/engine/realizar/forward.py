"""A whole forward pass of one token: embedding, layers, norm, LM head, replayed as one graph.

The caller supplies every token, and a `Session` holds the cache; it may be one of weights that were
made from sizes (`make_weights`). For long answers `Session.stream` is quicker: its steps run ahead
of the reader.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from urdir.model.engine.session import Session
from urdir.model.errors import ContextFullError, ModelError


def forward_gpu_resident(
    session: Session, token: int, *, position: int | None = None, sequence: int = 0
) -> npt.NDArray[np.float32]:
    """Process ``token`` at the end of a sequence: the logits (n_vocab,) f32 of the one after it.

    A ``position`` is compared with the sequence's length. Raises ModelError for another position or
    a token outside the vocabulary, ContextFullError for a full sequence; its length is then as it
    was.
    """
    _append(session, token, position, sequence)
    logits: npt.NDArray[np.float32] = session.forward_gpu_resident((sequence,))[0]
    return logits


def forward_gpu_resident_to_token_id(
    session: Session,
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
        logits = forward_gpu_resident(session, token, position=position, sequence=sequence)
        return int(np.argmax(logits))  # the first of equals
    _append(session, token, position, sequence)
    return session.forward_gpu_resident_to_token_id((sequence,))[0]


def _append(session: Session, token: int, position: int | None, sequence: int) -> None:
    """Make ``token`` the pending one of a sequence."""
    if not 0 <= sequence < len(session.lengths):
        raise ModelError(f"sequence {sequence}: the session has {len(session.lengths)}")
    length, vocab = session.lengths[sequence], session.parts.config.vocab_size
    if position is not None and position != length:
        raise ModelError(f"position {position}: sequence {sequence} has {length} tokens")
    if not 0 <= token < vocab:
        raise ModelError(f"token id {token} is outside the vocabulary of {vocab} tokens")
    if length >= session.context:
        raise ContextFullError(f"sequence {sequence}: the context of {session.context} is full")
    session.truncate(length, sequence)  # forgets what an earlier step has chosen
    session.feed([token], sequence)
