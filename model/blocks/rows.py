"""The rows of a step, as plans see them: how many, where they stand, how far they look back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from urdir.model.memory.device_state import DecodeState

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


class Ending(Enum):
    """What a step does once the layers are through."""

    PROMPT = "prompt"  # nothing: the next tokens are known
    LOGITS = "logits"  # leaves logits for the host, which supplies the next token
    GREEDY = "greedy"  # the most likely token becomes the next one
    SAMPLE = "sample"  # a token drawn by the sequence's settings becomes the next one


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a plan is made for: everything that is fixed while its graph is replayed.

    ``rows`` tokens a step (1 ... 64; a prompt step's are consecutive tokens of one sequence), each
    with at most ``keys`` keys to attend to. ``steps`` decode steps follow one another, each with
    the tokens that the one before has chosen.
    """

    rows: int
    keys: int
    ending: Ending
    steps: int = 1

    @property
    def is_prompt(self) -> bool:
        """True where the rows are a chunk of one sequence."""
        return self.ending is Ending.PROMPT


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one plan: ``sequence`` and ``position`` (count,) u32 in device memory."""

    count: int
    keys: int
    is_prompt: bool
    sequence: Slice
    position: Slice

    @classmethod
    def of(cls, shape: StepShape, state: DecodeState) -> Rows:
        """The rows that ``shape`` is about, in ``state``."""
        prefix = "chunk_" if shape.is_prompt else ""
        return cls(
            shape.rows,
            shape.keys,
            shape.is_prompt,
            state[prefix + "sequence"],
            state[prefix + "position"],
        )

    @property
    def arguments(self) -> dict[str, Slice]:
        """What kernels that work by row take."""
        return {"sequence": self.sequence, "position": self.position}
