"""Rests of a draft model: steps without drafts leave it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftRest:
    """What a session knows of the rests of its draft model.

    Tokens of steps without drafts lack keys in the draft's cache, until the draft passes them, just
    before it drafts for their sequence again. A draft ``of_tokens`` alone, a model by itself, also
    passes the token before the pending one as it drafts. ``has_gaps``: a sequence ended before
    that, so tokens that others begin with may lack keys, which it makes of the tokens again.
    """

    of_tokens: bool = False
    has_gaps: bool = False
