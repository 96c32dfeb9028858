"""A product that is one rank's addend of a sum, given to the others by the kernel that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.exchange.spec import THREADS, check_inbox, check_ranks
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class Gives:
    """The words of the next exchange (see `spec`) of ``rank``, of ``ranks`` whose inboxes have a
    ``capacity``, go to the others' inboxes. `AllReduce` that is ``given`` adds up, and counts the
    epoch.

    So words are on their way before the next kernel begins. A place is written again two epochs
    later, as if `AllReduce` had sent: its rank's kernel of the epoch between is complete.
    """

    ranks: int
    rank: int
    capacity: int

    def check(self, name: str, values: int) -> None:
        """Raise PtxgenError for no such rank or inbox, or one too small for the product."""
        check_ranks(name, self.rank, self.ranks)
        check_inbox(name, values, self.ranks, self.capacity)

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in range(self.ranks) if rank != self.rank)

    @property
    def params(self) -> tuple[Param, ...]:
        """The inboxes, each word as the f32 value and the bits of its epoch; and the epochs."""
        words = (2, self.ranks, self.capacity, 2)
        return (
            *(Param(f"inbox{rank}", "f32", words, Access.INOUT) for rank in self.others),
            Param("epochs", "u32", (self.capacity // THREADS,), Access.IN),
        )

    def reference(self, y: Array, inputs: dict[str, Any]) -> dict[str, Array]:
        """The inboxes with the values y (values,) f32."""
        at = np.arange(y.size)
        epoch = inputs["epochs"][at // THREADS] + np.uint32(1)
        left = {f"inbox{rank}": inputs[f"inbox{rank}"].copy() for rank in self.others}
        for inbox in left.values():
            inbox[epoch & 1, self.rank, at] = np.stack([y, epoch.view(np.float32)], axis=1)
        return left

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Few epochs, whose bits are no NaN."""
        words = np.zeros((2, self.ranks, self.capacity, 2), np.float32)
        epochs = rng.integers(0, 1000, self.capacity // THREADS, np.uint32)
        return {"epochs": epochs, **{f"inbox{rank}": words.copy() for rank in self.others}}

    def bytes_moved(self, values: int) -> int:
        """Words that are written."""
        return 8 * values * len(self.others)
