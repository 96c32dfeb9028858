"""The base of operations: frozen records of what is computed, with their evaluation in numpy.

Shapes are checked where an operation is made (ValueError). ``label`` names it as launches are
named. ``evaluate`` takes the float64 values of the tensors that the operation reads, in the order
of ``reads``; weights and the cache are those of an `Evaluation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """Base: an operation with one result ``y``. Its other fields with tensors are what it reads."""

    #: The word by which rules name the kind.
    word: ClassVar[str] = ""

    label: str
    y: Tensor

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The tensors that it is computed from."""
        return tuple(self._tensors())

    @property
    def makes(self) -> tuple[Tensor, ...]:
        """The tensors that it makes."""
        return (self.y,)

    def _tensors(self) -> Iterator[Tensor]:
        for name in self._names():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Tensor))

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        """The values of ``y`` of those that it reads; of several results side by side."""
        raise NotImplementedError

    @classmethod
    @cache
    def _names(cls) -> tuple[str, ...]:
        return tuple(of.name for of in fields(cls) if "Tensor" in str(of.type) and of.name != "y")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            reads = ", ".join(map(str, self.reads))
            raise ValueError(f"{self.label}: {self.word} of {reads} to {self.y}: {what}")

    def _check_same(self, *tensors: Tensor) -> None:
        shape = self.y.rows, self.y.width
        same = all((of.rows, of.width) == shape for of in tensors)
        self._check(same, "the shapes differ")

    def __str__(self) -> str:
        reads = ", ".join(map(str, self.reads))
        return f"{self.label}: {self.word} {reads} -> {self.y}"


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise(Op):
    """Base: each number of ``y`` is computed from the one of ``x`` at its place, and from other
    ``values``, by name."""

    x: Tensor

    @property
    def values(self) -> dict[str, Any]:
        """The fields of its own."""
        others = {field.name for field in fields(Elementwise)}
        return {of.name: getattr(self, of.name) for of in fields(self) if of.name not in others}

    def __post_init__(self) -> None:
        self._check_same(self.x)
