"""What the rows of a convolution read of their sequences, in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from urdir.ptxgen.spec import Array


class Convolution(Protocol):
    """See `causal_conv.CausalConv`."""

    @property
    def rows(self) -> int: ...
    @property
    def segments(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def taps(self) -> int: ...
    @property
    def before(self) -> int: ...
    @property
    def slots(self) -> int: ...
    def tokens(self, inputs: Mapping[str, Any]) -> Iterator[tuple[int, int, bool]]: ...


def shifted(spec: Convolution, inputs: Mapping[str, Any], u: Array) -> tuple[Array, Array]:
    """The values that each row reads (rows, taps, channels), and the tails after them."""
    tails = inputs["tail"].astype(np.float64)
    windows = np.zeros((spec.rows, spec.taps, spec.channels))
    for row, sequence, is_first in spec.tokens(inputs):
        tail = tails[sequence] * (not is_first)
        windows[row] = np.concatenate([tail, u[row : row + 1]])
        tails[sequence] = windows[row, 1:]
    return windows, tails


def ring(spec: Convolution, inputs: Mapping[str, Any], u: Array) -> tuple[Array, Array]:
    """The same of tails by position. Of a prompt's segment only the last values are stored."""
    before, after = (inputs["tail"].astype(np.float64) for _ in range(2))
    windows = np.zeros((spec.rows, spec.taps, spec.channels))
    rows = {(s, int(inputs["position"][row])): row for row, s, _ in spec.tokens(inputs)}
    for (s, position), row in rows.items():
        for tap in range(spec.taps):
            at = position - spec.before + tap
            if (s, at) in rows:
                windows[row, tap] = u[rows[s, at]]
            elif at >= 0:
                windows[row, tap] = before[s, at % spec.slots]
        if not spec.segments or (s, position + spec.before) not in rows:
            after[s, position % spec.slots] = u[row]
    return windows, after
