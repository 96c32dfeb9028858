"""Fused all-reduce: products that send their results, and products that add received ones.

A product that is one rank's addend is sent to the other ranks by the kernel that computes it
(`Gives`). A ``given`` `AllReduce` adds the parts; or the next product does, in each of its CTAs
(`SumOfRanks`).

A CTA that receives must know the epoch while another may advance it. So there are two counts:
``epochs``, read by senders and advanced by receivers, and ``sent``, the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.spec import POLLS, THREADS, OneOfRanks, check_inbox, check_ranks
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class Inboxes(OneOfRanks):
    """Base class: the inboxes of ``ranks`` with a ``capacity`` (see `spec`), as used by
    ``rank``."""

    ranks: int
    rank: int
    capacity: int

    def inbox(self, rank: int, access: Access) -> Param:
        """The inbox of a rank: each word as the f32 value and the bits of its epoch."""
        return Param(f"inbox{rank}", "f32", (2, self.ranks, self.capacity, 2), access)

    def counts(self, read: str, moved: str) -> tuple[Param, Param]:
        """The two counts, one of which is advanced."""
        shape = (self.capacity // THREADS,)
        return Param(read, "u32", shape, Access.IN), Param(moved, "u32", shape, Access.INOUT)

    def empty(self) -> Array:
        """An inbox without received words."""
        return np.zeros((2, self.ranks, self.capacity, 2), np.float32)

    def bytes_moved(self, values: int) -> int:
        """Words that are written, or read."""
        return 8 * values * len(self.others)


@dataclass(frozen=True, slots=True)
class Gives(Inboxes):
    """Send a product to the other ranks' inboxes as it is computed, before the next kernel starts.
    A place is rewritten two epochs later, when the kernels of the epoch between are complete.
    """

    def check(self, name: str, values: int) -> None:
        """Raise PtxgenError for an invalid rank or inbox, or one too small for the product."""
        check_ranks(name, self.rank, self.ranks)
        check_inbox(name, values, self.ranks, self.capacity)

    @property
    def params(self) -> tuple[Param, ...]:
        """The other ranks' inboxes, and the counts."""
        inboxes = (self.inbox(rank, Access.INOUT) for rank in self.others)
        return (*inboxes, *self.counts("epochs", "sent"))

    def reference(self, y: Array, inputs: dict[str, Any]) -> dict[str, Array]:
        """The inboxes with the values y (values,) f32, and the counts."""
        at = np.arange(y.size)
        epoch = inputs["epochs"][at // THREADS] + np.uint32(1)
        left = {f"inbox{rank}": inputs[f"inbox{rank}"].copy() for rank in self.others}
        for inbox in left.values():
            inbox[epoch & 1, self.rank, at] = np.stack([y, epoch.view(np.float32)], axis=1)
        sent = inputs["sent"].copy()
        sent[at // THREADS] = epoch
        return left | {"sent": sent}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Small epochs, whose bits are not NaN."""
        epochs, sent = rng.integers(0, 1000, (2, self.capacity // THREADS), np.uint32)
        inboxes = {f"inbox{rank}": self.empty() for rank in self.others}
        return {"epochs": epochs, "sent": sent, **inboxes}


@dataclass(frozen=True, slots=True)
class SumOfRanks(Inboxes):
    """A product's input as the sum of the ranks' x, in rank order, from words sent by `Gives`; x is
    this rank's own. See `spec` for polls."""

    polls: int = POLLS

    #: As in a `Norm`: the sum has no factor.
    weight = bias = False

    def check(self, name: str, values: int) -> None:
        """Raise PtxgenError as `Gives` does, and for values that are not whole units of 32."""
        check_ranks(name, self.rank, self.ranks, self.polls)
        check_inbox(name, values, self.ranks, self.capacity)
        if values % 32:
            raise PtxgenError(f"{name}: a sum of {values} values of each rank: a multiple of 32")

    @property
    def params(self) -> tuple[Param, ...]:
        """This rank's inbox, the counts, and the place for a fault."""
        counts = self.counts("sent", "epochs")
        fault = Param("fault", "u64", (1,), Access.INOUT)
        return (self.inbox(self.rank, Access.IN), *counts, fault)

    def total(self, x: Array, inputs: dict[str, Any]) -> Array:
        """The sum (values,) in float64."""
        at = np.arange(x.size)
        epoch = inputs["sent"][at // THREADS]
        words = inputs[f"inbox{self.rank}"][epoch & 1, :, at, 0].astype(np.float64)
        words[:, self.rank] = x
        total: Array = words.sum(axis=1)
        return total

    def left(self, values: int, inputs: dict[str, Any]) -> dict[str, Array]:
        """The counts, advanced."""
        epochs, used = inputs["epochs"].copy(), -(-values // THREADS)
        epochs[:used] = inputs["sent"][:used]
        return {"epochs": epochs, "fault": inputs["fault"].copy()}

    def make_inputs(self, values: int, rng: np.random.Generator) -> dict[str, Any]:
        """Words of the other ranks that have come."""
        epochs, sent = rng.integers(1, 1000, (2, self.capacity // THREADS), np.uint32)
        inbox = self.empty()
        at = np.arange(values)
        epoch = sent[at // THREADS]
        for rank in self.others:
            came = rng.standard_normal(values).astype(np.float32)
            inbox[epoch & 1, rank, at] = np.stack([came, epoch.view(np.float32)], axis=1)
        fault = np.zeros(1, np.uint64)
        return {f"inbox{self.rank}": inbox, "sent": sent, "epochs": epochs, "fault": fault}
