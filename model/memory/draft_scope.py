"""Which tokens a model's own heads draft: the first ones of its vocabulary, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Weight of the latest token in the share of others; above which share all tokens are drafted.
_WEIGHT, _MOST = 1 / 64, 1 / 8


@dataclass(slots=True)
class DraftScope:
    """The first ``tokens`` of a vocabulary (0: all), which heads draft alone while texts have few
    others. A product with all of a large vocabulary is a third of a draft's time; on the other
    hand a token that is not among the first is never drafted. Where it ``adapts``, prompts and
    answers decide (`learn`); ``others`` is an exponential mean of their share of such tokens.
    """

    tokens: int = 0
    adapts: bool = False
    others: float = 0.0

    @property
    def is_narrow(self) -> bool:
        """Whether the first tokens alone are drafted."""
        return self.tokens > 0 and self.others <= _MOST

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the latest tokens of a text."""
        if self.adapts and self.tokens and tokens:
            share = float(np.mean(np.asarray(tokens) >= self.tokens))
            self.others += (1 - (1 - _WEIGHT) ** len(tokens)) * (share - self.others)
