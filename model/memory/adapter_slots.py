"""Adapters in their places beside the weights: see `AdapterRoom`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.errors import ConfigError
from urdir.model.families.adapters import experts_of
from urdir.model.families.stored import StoredMatrix
from urdir.model.files.low_rank import Floats, LowRank
from urdir.model.memory.matrix_rows import row_runs
from urdir.model.memory.switched_adapters import check_finite, numbers_in

if TYPE_CHECKING:
    from urdir.model.memory.weights import Weights


def write_slot(
    weights: Weights, slot: int, adapters: Sequence[tuple[Mapping[str, LowRank], float]]
) -> None:
    """Write the sum of some adapters, each times a scale, to a slot: their ranks side by side.
    Raises ConfigError for more than its rank, and for values beyond its type."""
    room = weights.config.adapters
    assert room is not None
    dtype = np.dtype(np.float16 if room.element == "f16" else np.float32)
    for of, all_a, all_b in weights.adapted():
        experts = experts_of(of)
        a = np.zeros((experts, room.rank, of.cols), dtype)
        b = np.zeros((of.rows, room.rank), dtype)
        first = 0
        for matrices, scale in adapters:
            if (own := matrices.get(of.name)) is None:
                continue
            stop = first + own.rank
            if stop > room.rank:
                raise ConfigError(
                    f"tensor '{of.name}': adapters of rank {stop} together: there is room for "
                    f"{room.rank}"
                )
            with np.errstate(over="ignore"):
                a[:, first:stop] = _columns(of, own.a)
                b[:, first:stop] = _rows(of, own.b) * np.float32(scale)
            first = stop
        check_finite(of.name, room, a, b)
        for place, values in ((all_a, a), (all_b, b)):
            part = place.slice(slot * values.nbytes, values.nbytes)
            part.upload(values.reshape(-1))


def _columns(of: StoredMatrix, a: Floats) -> Floats:
    """A for the columns of x that the matrix takes."""
    if of.columns is None:
        return a
    return a[..., numbers_in(of.columns)]


def _rows(of: StoredMatrix, b: Floats) -> Floats:
    """B of the rows of a matrix."""
    rows = b.reshape(-1, b.shape[-1])
    return rows if of.is_whole else rows[numbers_in(row_runs(of))]
