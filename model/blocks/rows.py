"""The rows of a step, as plans see them: how many, where they stand, how far they look back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.memory.device_state import DecodeState

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one plan: ``sequence`` and ``position`` (count,) u32 in device memory.

    Each attends to at most ``keys`` keys; those of a prompt are a chunk of one sequence, the last
    of which that is not idle is number ``last`` (1,) u32.
    """

    count: int
    keys: int
    is_prompt: bool
    sequence: Slice
    position: Slice
    last: Slice | None = None

    @classmethod
    def of(cls, state: DecodeState, count: int, keys: int, *, is_prompt: bool = False) -> Rows:
        """``count`` rows of a decode or of a prompt step, in ``state``."""
        prefix, last = ("chunk_", state["last_row"]) if is_prompt else ("", None)
        at = state[prefix + "sequence"], state[prefix + "position"]
        return cls(count, keys, is_prompt, *at, last)

    @property
    def arguments(self) -> dict[str, Slice]:
        """What kernels that work by row take."""
        return {"sequence": self.sequence, "position": self.position}

    @property
    def recurrent_arguments(self) -> dict[str, Slice]:
        """What kernels that advance states take: of a prompt its last row, too."""
        last = {} if self.last is None else {"last_row": self.last}
        return {**self.arguments, **last}


@dataclass(frozen=True, slots=True)
class LastRow:
    """The one row of a chunk whose results are wanted: number ``index`` (1,) u32, in device memory,
    of the chunk's; ``rows`` is that row alone, as a decode step has it."""

    index: Slice
    rows: Rows

    @classmethod
    def of(cls, state: DecodeState, keys: int) -> LastRow:
        """The last row of a prompt step that is not idle."""
        return cls(state["last_row"], Rows.of(state, 1, keys))
