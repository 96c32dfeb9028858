"""The memory of n-grams of streams in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.model.mixers.mixer import Floats, sigmoid, silu
from urdir.model.families.ngrams import NgramMemory

if TYPE_CHECKING:
    from tests.model.reference import Reference


def ngram_memory(model: Reference, of: NgramMemory, x: Floats) -> Floats:
    """What is added to the streams x (rows, 4, hidden)."""
    n, rows = len(of.hash.multipliers), []
    per = len(of.hash.offsets) // (n - 1)
    for row in range(len(x)):
        last = [int(token) for token in model.tokens[max(0, row + 1 - n) : row + 1]][::-1]
        for place in range(1, len(last)):
            if last[place] == of.hash.boundary:
                del last[place:]
                break
        last += [of.hash.boundary] * (n - len(last))
        terms = [t * m % 2**64 for t, m in zip(last, of.hash.multipliers, strict=True)]
        found, number = [], terms[0]
        for gram, term in enumerate(terms[1:]):
            number ^= term
            for head in range(gram * per, gram * per + per):
                found.append(number % of.hash.sizes[head] + of.hash.offsets[head])
        rows.append(found)
    e = model.matrix(of.table)[rows].reshape(len(x), -1)
    key = model.norm(of.key_norm, model.linear(of.key, e).reshape(x.shape))
    like = (key * model.norm(of.query_norm, x)).sum(axis=2) / np.sqrt(x.shape[2])
    gate = sigmoid(np.sign(like) * np.sqrt(np.maximum(np.abs(like), 1e-6)))
    gated = gate[:, :, None] * model.linear(of.o, e)[:, None]
    z = model.norm(of.conv_norm, gated).reshape(len(x), -1)
    weight, made = model.vector(of.conv).reshape(z.shape[1], -1), np.zeros_like(z)
    for row in range(len(x)):
        for tap in range(weight.shape[1]):
            if (place := row - (weight.shape[1] - 1 - tap) * n) >= 0:
                made[row] += weight[:, tap] * z[place]
    return gated + silu(made).reshape(x.shape)


MIXERS = {NgramMemory: ngram_memory}
