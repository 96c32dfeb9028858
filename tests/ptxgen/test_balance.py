"""How many tiles of each matrix a CTA takes: against a search of all numbers."""

from __future__ import annotations

import itertools
import operator

import numpy as np

from urdir.ptxgen.kernels.linear.balance import balanced
from urdir.ptxgen.spec import ceil_div


def test_tiles_are_balanced_as_well_as_can_be() -> None:
    """No other numbers fit with less for the last CTA, nor with fewer of any matrix."""
    rng = np.random.default_rng(12)
    for _ in range(60):
        count, ctas = int(rng.integers(1, 4)), int(rng.integers(1, 12))
        bands = [int(n) for n in rng.integers(1, 12, count)]
        costs = [int(n) for n in rng.integers(1, 6, count)]
        fitting = [
            tiles
            for tiles in itertools.product(*(range(1, n + 1) for n in bands))
            if sum(map(ceil_div, bands, tiles)) <= ctas
        ]
        found = balanced(bands, costs, ctas)
        if not fitting:
            assert ctas < count
            assert found == (ceil_div(sum(bands), ctas),) * count
            continue
        assert found in fitting
        last = [max(map(operator.mul, tiles, costs)) for tiles in (found, *fitting)]
        assert last[0] == min(last)
        fewer = (t for t in fitting if t != found and all(map(operator.le, t, found)))
        assert not list(fewer)
