"""How far the predictions of a model are from those of a base model on the same text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Self

import numpy as np
import numpy.typing as npt

from urdir.model.engine.sampling import Logits
from urdir.model.measure.perplexity import Chunk, Estimate, Floats, log_probabilities

#: Percentiles of the KL divergence that are shown.
PERCENTILES = (0, 10, 50, 90, 99, 99.9, 100)


@dataclass(frozen=True, slots=True)
class Divergence:
    """For each scored token: KL divergence of the model from the base (nats), -ln p of both,
    whether both have the same likeliest token."""

    kl: Floats
    losses: Floats
    base_losses: Floats
    is_same: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, chunk: Chunk, base: Floats, logits: Logits) -> Self:
        """Of a chunk, from the base's log-probabilities and logits, both (n_scored, n_vocab)."""
        rows = np.stack([log_probabilities(row) for row in logits])
        tokens = np.arange(len(rows)), np.array(chunk.scored)
        return cls(
            kl=(np.exp(base) * (base - rows)).sum(1),
            losses=-rows[tokens],
            base_losses=-base[tokens],
            is_same=base.argmax(1) == rows.argmax(1),
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Of several chunks together."""
        found = list(parts)
        return cls(
            np.concatenate([part.kl for part in found]),
            np.concatenate([part.losses for part in found]),
            np.concatenate([part.base_losses for part in found]),
            np.concatenate([part.is_same for part in found]),
        )

    def table(self) -> dict[str, float]:
        """Figures by name: perplexities, KL divergence, difference of the probability of the text's
        tokens, and how often the likeliest token is the same."""
        difference = np.exp(-self.losses) - np.exp(-self.base_losses)
        count = max(1, self.kl.size - 1)
        shares = {f"kl_{each:g}%": float(np.percentile(self.kl, each)) for each in PERCENTILES}
        return {
            "perplexity": Estimate.of(self.losses).value,
            "base_perplexity": Estimate.of(self.base_losses).value,
            "kl_mean": float(self.kl.mean()),
            "kl_error": sqrt(float(self.kl.var()) / count),
            **shares,
            "p_difference_mean": float(difference.mean()),
            "p_difference_rms": sqrt(float((difference**2).mean())),
            "same_top": float(self.is_same.mean()),
        }
