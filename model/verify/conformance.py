"""How far logits are from golden ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[Any]


def relative_rms(logits: Logits, golden: Logits) -> float:
    """sqrt(mean((logits - golden)^2)) / std(golden), over all positions and tokens. Logits that are
    the lowest number (`Description.hides`) must be just that: else infinity."""
    hidden = golden == np.finfo(np.float32).min
    if hidden.any():
        if np.any(logits[hidden] != golden[hidden]):
            return float("inf")
        logits, golden = logits[~hidden], golden[~hidden]
    difference = logits.astype(np.float64) - golden
    return float(np.sqrt(np.mean(difference * difference)) / np.std(golden.astype(np.float64)))


def kl_divergence(logits: Logits, golden: Logits) -> float:
    """Mean over positions (rows) of KL(softmax(golden) || softmax(logits)), in nats."""
    p, q = _log_softmax(golden), _log_softmax(logits)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True)
    normalised: npt.NDArray[np.float64] = shifted - np.log(
        np.sum(np.exp(shifted), axis=-1, keepdims=True)
    )
    return normalised
