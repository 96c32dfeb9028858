"""Choosing tokens on the host by `SamplingSettings`; the mathematics is ``ptxgen.sampling``'s.

The order is that of the reference, `urdir.ptxgen.kernels.sampling`, and of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ModelError
from urdir.ptxgen.kernels import sampling as reference
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Words = NDArray[np.uint32]


def sample(
    logits: Logits,
    settings: SamplingSettings,
    position: int,
    previous: Sequence[int] = (),
    *,
    answer_at: int = 0,
    end_ids: Iterable[int] = (),
    mask: Words | None = None,
) -> int:
    """The next token id.

    `logits` (n_vocab,) f32; `position` is the place of the token in the sequence: the random number
    depends on it, the seed and the nonce alone, so that a sequence can be repeated from anywhere;
    `previous` are the tokens before it, those of the answer from `answer_at` on, which the
    `end_ids` would end; `mask` has a bit for each token that is allowed. Raises ModelError for
    logits that are no distribution, and where no token is allowed.
    """
    words = settings.words(answer_at, end_ids)
    adjusted = reference.adjust(_checked(logits), words, np.asarray(previous, np.int64), mask)
    token = reference.sample(adjusted, words, position)
    if token == INVALID_TOKEN:
        raise ModelError("no token is allowed: mask and biases leave none")
    return token


def distribution(
    logits: Logits, settings: SamplingSettings, previous: Sequence[int] = ()
) -> tuple[Ids, NDArray[np.float64]]:
    """What `sample` draws from: ids (n,), most likely first, and their probabilities (n,) f64."""
    words = settings.words()
    adjusted = reference.adjust(_checked(logits), words, np.asarray(previous, np.int64))
    return reference.distribution(adjusted, words)


def uniform(seed: int, position: int, nonce: int = 0) -> float:
    """A random number in [0, 1), a function of (seed, nonce, position) alone."""
    return reference.uniform(seed, nonce, position)


def _checked(logits: Logits) -> Logits:
    highest = logits.max()
    if not np.isfinite(highest):  # NaN spreads into the maximum
        raise ModelError(f"the highest logit is {highest}: the forward pass went wrong")
    return logits
