"""Room for low-rank adapters (LoRA) beside a model's matrices."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.families.stored import Linear, StoredMatrix
from urdir.ptxgen.kernels.linear.epilogue.adapted import Element


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Places for ``slots`` adapters of up to ``rank`` (a multiple of `RANKS`), whose values are
    ``element``, for the tensors ``names``."""

    slots: int
    rank: int
    names: frozenset[str]
    element: Element = "f16"

    def has(self, of: Linear | StoredMatrix) -> bool:
        """Whether a matrix has room for adapters."""
        stored = of.matrix if isinstance(of, Linear) else of
        return stored.name in self.names and can_adapt(stored)

    @property
    def value_nbytes(self) -> int:
        """Bytes of a value."""
        return 2 if self.element == "f16" else 4

    def a_nbytes(self, of: StoredMatrix) -> int:
        """Bytes of A (slots, rank, cols); of experts (slots, experts, rank, cols)."""
        return self.slots * experts_of(of) * self.rank * of.cols * self.value_nbytes

    def b_nbytes(self, of: StoredMatrix) -> int:
        """Bytes of B (slots, rows, rank), of all experts' rows."""
        return self.slots * of.rows * self.rank * self.value_nbytes


def can_adapt(of: StoredMatrix) -> bool:
    """Whether adapters of the tensor are adapters of the matrix: none whose rows and columns are
    exchanged."""
    return not of.transposed


def experts_of(of: StoredMatrix) -> int:
    """Experts whose matrices, one after the other, are the tensor's."""
    return of.shape[0] if len(of.shape) == 3 else 1
