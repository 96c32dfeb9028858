"""The logits of a model and of its draft after each token of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from urdir.model.engine.block_drafts import BlockDraft
from urdir.model.engine.chain_drafts import ChainDraft
from urdir.model.engine.realizar.eager import EagerSteps

Values = npt.NDArray[np.float32]


def logits_with_draft(
    draft: ChainDraft, tokens: Sequence[int], advance: Callable[[], None] = lambda: None
) -> tuple[Values, Values]:
    """The logits (tokens, n_vocab) f32 after each token, and those of each head of the draft,
    (heads, tokens, n_vocab) f32, which is given the model's hidden states.

    A draft without a lag predicts the next token as the model does, from the hidden state of the
    token before; the others know the token after theirs, the last one that which the model chooses,
    and predict the one after that. ``advance`` is called after each token. Raises ContextFullError,
    ModelError for a token outside the vocabulary, DriverError.
    """
    heads, lag = draft.launches.heads, draft.launches.lag
    rows: list[Values] = []
    drafted: list[list[Values]] = []
    with EagerSteps(draft.session) as eager:
        draft.begin()
        for position in range(len(tokens) + lag):
            known = position < len(tokens)
            eager.feed([tokens[position] if known else int(np.argmax(rows[-1]))])
            if position >= lag:
                drafted.append([draft.logits(0, position, head) for head in range(heads)])
            if known:
                rows.append(eager.logits()[0])
                draft.take()
                advance()
    return np.stack(rows), np.stack(drafted, axis=1)


def logits_with_block(
    draft: BlockDraft, tokens: Sequence[int], advance: Callable[[], None] = lambda: None
) -> tuple[Values, Values]:
    """The logits (tokens, n_vocab) f32 after each token, and those of the rows of the block that is
    drafted after the last one, (slots, n_vocab) f32: of the token that the model chooses, and of
    masks. Raises as `logits_with_draft`."""
    rows: list[Values] = []
    with EagerSteps(draft.session) as eager:
        draft.begin()
        for position, token in enumerate(tokens):
            eager.feed([token])
            if position:
                draft.keep(0, position, position + 1)
            rows.append(eager.logits()[0])
            draft.take()
            advance()
    draft.propose([(0, len(tokens), int(np.argmax(rows[-1])))], 1)
    return np.stack(rows), draft.block_logits


def scattered(drafted: Values, token_map: npt.NDArray[np.uint32] | None, size: int) -> Values:
    """Logits (rows, n) f32 of a draft by the model's tokens, (rows, size) f32: -inf for those that
    the draft does not have. Of several that are the same token the last one counts."""
    if token_map is None:
        return drafted
    rows = np.full((len(drafted), size), -np.inf, np.float32)
    rows[:, token_map] = drafted
    return rows
