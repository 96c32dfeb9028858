"""Arguments of launches."""

from __future__ import annotations

from typing import TypeVar

_Argument = TypeVar("_Argument")


def without_none(**arguments: _Argument | None) -> dict[str, _Argument]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}
