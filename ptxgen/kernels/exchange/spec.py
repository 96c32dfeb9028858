"""Common parts of kernels that exchange values between devices.

Every rank has an *inbox*, (2, ranks, capacity) u64: a place for each value of each rank, twice. A
word is an f32 value (its low half) and its epoch. A rank writes its words into the inboxes of all
others (in the exchange, or in the product before it: `Gives`) and waits for theirs in its own, so
that values need no separate flags. Each epoch uses one half. That is enough: a rank rewrites a
place two epochs later, and in between it received a word of the intermediate epoch, which the other
wrote after it had read the place.

``epochs`` (capacity / THREADS,) u32 count the completed epochs of a rank's CTAs, in device memory:
a replayed graph continues counting. All ranks launch the same exchanges in the same order. A place
belongs to one CTA, whatever the number of values, so each CTA counts separately.

If a word does not arrive within ``polls`` reads, the kernel ends: `describe_fault` decodes
``fault`` (1,) u64, which holds the awaited rank and the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

#: Threads per CTA, each with one value.
THREADS = 256
#: Reads of an inbox before a rank gives up: 2.3 seconds on an H200.
POLLS = 1 << 22
#: Maximum values of one rank: offsets in an inbox stay below 2^31 bytes.
MOST = 1 << 23


def rounded(values: int) -> int:
    """The capacity of an inbox for ``values`` values of each rank."""
    return THREADS * ceil_div(values, THREADS)


def inbox_nbytes(ranks: int, capacity: int) -> int:
    """Bytes of an inbox."""
    return 8 * 2 * ranks * capacity


def describe_fault(word: int) -> str:
    """Describe a timeout from the word that a rank left; "" if it left none."""
    awaited, epoch = word & 0xFFFFFFFF, word >> 32
    return f"timed out waiting for rank {awaited - 1}, in epoch {epoch}" if awaited else ""


def check_ranks(name: str, rank: int, ranks: int, polls: int = POLLS) -> None:
    """Raise PtxgenError for a kernel ``name`` with an invalid rank, or without polls."""
    if not 2 <= ranks <= 16 or not 0 <= rank < ranks:
        raise PtxgenError(f"{name}: rank {rank} of {ranks}: of 2 to 16")
    if not 1 <= polls < 2**31:
        raise PtxgenError(f"{name}: {polls} polls, expected 1 ... 2^31 - 1")


def check_inbox(name: str, values: int, ranks: int, capacity: int) -> None:
    """Raise PtxgenError for an invalid inbox, or one too small for ``values`` of a rank."""
    if capacity % THREADS or not 0 < capacity * ranks <= MOST:
        raise PtxgenError(
            f"{name}: an inbox for {capacity} values of {ranks} ranks: a multiple of {THREADS}, "
            f"together at most {MOST}"
        )
    if not 1 <= values <= capacity:
        raise PtxgenError(f"{name}: {values} values of a rank, inboxes have room for {capacity}")


class OneOfRanks:
    """Base class: the part of ``rank`` among ``ranks``, which are fields of the subclass."""

    __slots__ = ()
    ranks: int
    rank: int

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in range(self.ranks) if rank != self.rank)


@dataclass(frozen=True)
class Exchange(OneOfRanks, KernelSpec):
    """Base class: the values (n,) f32 of ``rank`` among ``ranks``, whose inboxes have a
    ``capacity``."""

    n: int
    ranks: int
    rank: int
    capacity: int
    polls: int = POLLS

    #: See `AllReduce`, which has this as a field.
    given = False

    def __post_init__(self) -> None:
        check_ranks(self.name, self.rank, self.ranks, self.polls)
        check_inbox(self.name, self.most, self.ranks, self.capacity)

    @property
    def most(self) -> int:
        """Values of the rank with the most."""
        return self.n

    @property
    def inboxes(self) -> tuple[int, ...]:
        """The ranks whose inboxes are parameters."""
        return (self.rank,) if self.given else tuple(range(self.ranks))

    @property
    def ctas(self) -> int:
        """CTAs for all places of the inbox."""
        return self.capacity // THREADS

    @property
    def exchange_params(self) -> tuple[Param, ...]:
        """Parameters of every exchange, after the kernel's own."""
        inbox = (2, "ranks", "capacity")
        return (
            *(Param(f"inbox{rank}", "u64", inbox, Access.INOUT) for rank in self.inboxes),
            Param("epochs", "u32", ("ctas",), Access.INOUT),
            Param("fault", "u64", (1,), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.most, THREADS), 1, 1), block=(THREADS, 1, 1))

    def exchanged(self, inputs: dict[str, Array]) -> tuple[list[Array], dict[str, Array]]:
        """The values of every rank, (values of the rank,) f32, and the results of the exchange,
        given that all words arrived."""
        epochs = inputs["epochs"].copy()
        epochs[: self.launch_shape.grid[0]] += 1
        at = np.arange(self.most)
        epoch = epochs[at // THREADS]
        left = {f"inbox{rank}": inputs[f"inbox{rank}"].copy() for rank in self.inboxes}
        own = inputs["x"].reshape(-1)
        for rank in () if self.given else self.others:
            place = at[: own.size]
            words = epoch[place].astype(np.uint64) << np.uint64(32) | own.view(np.uint32)
            left[f"inbox{rank}"][epoch[place] & 1, self.rank, place] = words
        values = []
        for rank in range(self.ranks):
            words = left[f"inbox{self.rank}"][epoch & 1, rank, at]
            came = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
            values.append(own if rank == self.rank else came)
        return values, {**left, "epochs": epochs, "fault": inputs["fault"].copy()}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Any epochs; inboxes with the received words of the other ranks."""
        inputs = super().make_inputs(rng)
        inputs["epochs"] = rng.integers(0, 2**32, self.ctas, np.uint32)
        inputs["fault"] = np.zeros(1, np.uint64)
        at = np.arange(self.most)
        epoch = (inputs["epochs"] + np.uint32(1))[at // THREADS]
        for rank in self.inboxes:
            inputs[f"inbox{rank}"] = np.zeros((2, self.ranks, self.capacity), np.uint64)
        for rank in self.others:
            bits = rng.standard_normal(at.size).astype(np.float32).view(np.uint32)
            words = epoch.astype(np.uint64) << np.uint64(32) | bits
            inputs[f"inbox{self.rank}"][epoch & 1, rank, at] = words
        return inputs

    def bytes_moved(self) -> int:
        """Bytes of values and words of the used places."""
        return 4 * self.n + (2 - self.given) * 8 * self.n * (self.ranks - 1)
