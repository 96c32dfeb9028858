"""Adapters in their places beside the weights: see `AdapterRoom`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.errors import ConfigError
from urdir.model.families.adapters import AdapterRoom, experts_of
from urdir.model.families.stored import Run, StoredMatrix, StoredVector
from urdir.model.families.switch import Switch
from urdir.model.files.low_rank import Floats, LowRank
from urdir.model.memory.matrix_rows import row_runs

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
        _check_finite(of.name, room, a, b)
        for place, values in ((all_a, a), (all_b, b)):
            part = place.slice(slot * values.nbytes, values.nbytes)
            part.upload(values.reshape(-1))


def write_switched(
    weights: Weights, switch: Switch, values_of: Callable[[StoredVector], Floats]
) -> None:
    """Write all adapters of the model itself, of which tensors have such values. Raises ConfigError
    for values beyond the type of adapters, and if rows without an adapter have one."""
    room = weights.config.adapters
    assert room is not None
    dtype = np.dtype(np.float16 if room.element == "f16" else np.float32)
    for of, all_a, all_b in weights.adapted():
        stored = switch.matrices_of(of)
        a, b = (values_of(each).reshape(each.shape) for each in (stored.a, stored.b))
        if a[0].any() and b[0].any():
            raise ConfigError(
                f"tensor '{stored.a.name}': the first of its matrices is that of rows without an "
                "adapter: expected zeros"
            )
        if of.columns is not None:
            a = a[..., _numbers(of.columns)]
        b = b[:, _numbers(tuple(row_runs(of))) - stored.first]
        more = room.rank - switch.rank
        with np.errstate(over="ignore"):
            a = np.pad(a[1:], ((0, 0), (0, more), (0, 0))).astype(dtype)
            b = np.pad(b[1:], ((0, 0), (0, 0), (0, more))).astype(dtype)
        _check_finite(stored.a.name, room, a, b)
        all_a.upload(a.reshape(-1))
        all_b.upload(b.reshape(-1))


def _check_finite(name: str, room: AdapterRoom, a: np.ndarray, b: np.ndarray) -> None:
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError(f"tensor '{name}': an adapter has values beyond {room.element}")


def _columns(of: StoredMatrix, a: Floats) -> Floats:
    """A for the columns of x that the matrix takes."""
    if of.columns is None:
        return a
    return a[..., _numbers(of.columns)]


def _rows(of: StoredMatrix, b: Floats) -> Floats:
    """B of the rows of a matrix."""
    rows = b.reshape(-1, b.shape[-1])
    return rows if of.is_whole else rows[_numbers(tuple(row_runs(of)))]


def _numbers(runs: Sequence[Run]) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in runs])
