"""Names of what becomes of the states of a text; importing them is quick."""

from __future__ import annotations

from typing import Literal, get_args

#: The states of a text: all of them, their mean, the first token's, the last one's; "rank": scores.
Pooling = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
