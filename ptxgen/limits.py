"""Limits of a kernel's fields: the values that each may have, whatever the others are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from urdir.ptxgen.errors import PtxgenError

#: Field -> its values: a range, or all of them.
Limits = Mapping[str, Sequence[Any]]

_ENDLESS = 1 << 128
POSITIVE = range(1, _ENDLESS)
POSITIVE_31_BITS = range(1, 1 << 31)
#: The extent of a grid in y or z.
GRID_ROWS = range(1, 1 << 16)
POWERS_OF_TWO = tuple(1 << n for n in range(31))


def up_to(most: int) -> range:
    """Numbers from 1 to ``most``."""
    return range(1, most + 1)


def limited(**fields: Sequence[Any]) -> Limits:
    """Limits by field: `KernelSpec.limits`."""
    return MappingProxyType(fields)


def check_limits(spec: Any) -> None:
    """Raise PtxgenError for a field of a kernel that is beyond its limits."""
    for name, values in spec.limits.items():
        value = getattr(spec, name)
        # a range compares with other numbers one by one, and a text would spell them otherwise
        if isinstance(values, range) and not isinstance(value, int):
            kind = type(value).__name__
            raise PtxgenError(f"{spec.name}: {name} is {value!r}, a {kind}: it must be an int")
        if value not in values:
            raise PtxgenError(f"{spec.name}: {name} is {value}: {_text_of(values)}")


def _text_of(values: Sequence[Any]) -> str:
    if values is POWERS_OF_TWO:
        return "a power of two"
    if not isinstance(values, range):
        return f"one of {', '.join(map(str, values))}"
    if values.stop == _ENDLESS:
        return f"{values.start} or more"
    multiples = f", a multiple of {values.step}" if values.step > 1 else ""
    return f"{values.start} to {values[-1]}{multiples}"
