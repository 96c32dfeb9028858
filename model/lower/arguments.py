"""Arguments of launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def given(**arguments: Slice | None) -> dict[str, Slice]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}
