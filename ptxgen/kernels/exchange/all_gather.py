"""All-gather: the ranks' columns of every row, concatenated on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.spec import Exchange
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class AllGather(Exchange):
    """Rows y (rows, sum of widths) of the ranks' columns x (rows, widths[rank]), f32.

    ``n`` is ``rows * widths[rank]``.
    """

    widths: tuple[int, ...] = ()

    name = "all_gather"

    def __post_init__(self) -> None:
        if len(self.widths) != self.ranks or min(self.widths) < 1:
            raise PtxgenError(f"all_gather: widths {self.widths} of {self.ranks} ranks")
        if self.n % self.width:
            raise PtxgenError(
                f"all_gather: {self.n} values do not divide into rows of {self.width}"
            )
        super().__post_init__()

    @classmethod
    def of(
        cls, rows: int, widths: tuple[int, ...], rank: int, capacity: int, **fields: Any
    ) -> AllGather:
        """The exchange of ``rows`` rows."""
        return cls(rows * widths[rank], len(widths), rank, capacity, widths=widths, **fields)

    @property
    def width(self) -> int:
        """Columns of this rank."""
        return self.widths[self.rank]

    @property
    def rows(self) -> int:
        """Rows on every rank."""
        return self.n // self.width

    @property
    def total(self) -> int:
        """Columns of all ranks."""
        return sum(self.widths)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first column of each rank."""
        return (0, *accumulate(self.widths[:-1]))

    @property
    def most(self) -> int:
        return self.rows * max(self.widths)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "f32", ("rows", "width"), Access.IN),
            Param("y", "f32", ("rows", "total"), Access.OUT),
            *self.exchange_params,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        values, left = self.exchanged(inputs)
        parts = [
            part[: self.rows * width].reshape(self.rows, width)
            for part, width in zip(values, self.widths, strict=True)
        ]
        return {"y": np.concatenate(parts, axis=1), **left}

    @classmethod
    def examples(cls) -> dict[str, AllGather]:
        return {
            "two halves": cls.of(1, (40, 40), 0, 256),
            "uneven rows": cls.of(3, (100, 101, 37), 2, 512),
            "four": cls.of(2, (64, 64, 32, 1), 1, 256),
        }
