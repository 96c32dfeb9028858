"""Rests of a draft model by itself: steps without drafts leave it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftRest:
    """What a session knows of the rests of its draft model.

    Tokens of steps without drafts lack keys in the draft's cache, until the draft passes them, just
    before it drafts for their sequence again. ``has_gaps``: a sequence ended before that, so tokens
    that others begin with may lack keys.
    """

    has_gaps: bool = False
