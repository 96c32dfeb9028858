"""Counts and names that whoever sets up the choice of tokens needs to know; no numpy."""

from __future__ import annotations

#: What is chosen where there is no choice: a logit is NaN, or the highest one is infinite.
INVALID_TOKEN = 2**32 - 1
#: The most end ids, biases and likely tokens of a sequence.
MOST_END_IDS, MOST_BIASES, MOST_LIKELY = 16, 300, 20
