"""Limits and constants of sampling, without numpy."""

from __future__ import annotations

#: The result if no token can be chosen: a logit is NaN, or the highest one is infinite.
INVALID_TOKEN = 2**32 - 1
#: Maximum end ids, biases and likely tokens of a sequence.
MOST_END_IDS, MOST_BIASES, MOST_LIKELY = 16, 300, 20
