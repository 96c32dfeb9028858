"""Virtual tensors: values that operations read and make, without a place in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Names of tensors of the stream: what layers hand on, what a network adds to it, and one rank's
#: part of that.
STREAM, BRANCH, PART = "stream", "branch", "delta"

Dtype = Literal["f32", "u32"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """(rows, width) values of ``dtype``, made once; two tensors are equal only if they are one.

    The ``name`` says what the values are ("q", "logits"). Tensors of different layers share names.
    Raises ValueError for a shape without values.
    """

    name: str
    rows: int
    width: int
    dtype: Dtype = "f32"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.width < 1:
            raise ValueError(f"tensor {self.name!r} of {self.rows} x {self.width}: both from 1")

    @property
    def is_stream(self) -> bool:
        """Whether these are values of the stream, or are added to it."""
        return self.name in (STREAM, BRANCH, PART)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return 4 * self.rows * self.width

    def __str__(self) -> str:
        return f"{self.name} ({self.rows}, {self.width})"
