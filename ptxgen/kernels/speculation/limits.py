"""Limits of speculation, for code that must not import numpy."""

from __future__ import annotations

#: The most drafts of a sequence in one step: a warp each, and one for the pending token.
MOST_DRAFTS = 31
#: The most tokens that are looked for in earlier text.
MOST_NGRAM = 32
