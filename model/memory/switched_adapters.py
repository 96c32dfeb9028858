"""Adapters of the model itself in their places beside the weights (`families.switch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from urdir.model.errors import ConfigError
from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.stored import Run, StoredMatrix, StoredVector
from urdir.model.families.switch import Switch
from urdir.model.memory.matrix_rows import row_runs

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

Floats = npt.NDArray[np.float32]


def write_switched(
    switch: Switch,
    room: AdapterRoom,
    places: Iterable[tuple[StoredMatrix, Slice, Slice]],
    values_of: Callable[[StoredVector], Floats],
) -> None:
    """Write all adapters of the model itself, whose tensors have such values, to the ``places`` of
    matrices' A and B. Raises ConfigError for values beyond the type of adapters, and if rows
    without an adapter have one."""
    dtype = np.dtype(np.float16 if room.element == "f16" else np.float32)
    for of, all_a, all_b in places:
        stored = switch.matrices_of(of)
        a, b = (values_of(each).reshape(each.shape) for each in (stored.a, stored.b))
        if a[0].any() and b[0].any():
            raise ConfigError(
                f"tensor '{stored.a.name}': the first of its matrices is that of rows without an "
                "adapter: expected zeros"
            )
        if of.columns is not None:
            a = a[..., numbers_in(of.columns)]
        b = b[:, numbers_in(row_runs(of)) - stored.first]
        more = room.rank - switch.rank
        with np.errstate(over="ignore"):
            a = np.pad(a[1:], ((0, 0), (0, more), (0, 0))).astype(dtype)
            b = np.pad(b[1:], ((0, 0), (0, 0), (0, more))).astype(dtype)
        check_finite(stored.a.name, room, a, b)
        all_a.upload(a.reshape(-1))
        all_b.upload(b.reshape(-1))


def check_finite(name: str, room: AdapterRoom, *values: npt.NDArray[np.floating[Any]]) -> None:
    """Raise ConfigError for values of a tensor's adapter that its type does not have."""
    if not all(np.isfinite(each).all() for each in values):
        raise ConfigError(f"tensor '{name}': an adapter has values beyond {room.element}")


def numbers_in(runs: Iterable[Run]) -> npt.NDArray[np.intp]:
    """The numbers in some ranges, one after the other."""
    return np.concatenate([np.arange(start, stop) for start, stop in runs])
