"""The memory in which ranks exchange values: an inbox on each, written by the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from urdir.model.families.description import Config, Share
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.exchange.spec import MOST, describe_fault, inbox_nbytes, rounded

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import PinnedBuffer, Slice

#: Values of a rank that are exchanged at once, at most: 8 MiB of an inbox, twice. What is more goes
#: in several launches.
MOST_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """Inboxes for ``capacity`` values of each of ``ranks``."""

    ranks: int
    capacity: int

    @classmethod
    def of(cls, config: Config, rows: int, most_rows: int) -> Self | None:
        """For steps of up to ``most_rows`` rows, ``rows`` of which choose a token; None for a model
        that one device has as a whole."""
        if config.share is None:
            return None
        values = max(config.hidden * most_rows, max(config.share.vocabulary) * rows)
        most = min(MOST_VALUES, MOST // config.share.ranks)
        return cls(config.share.ranks, rounded(min(values, most)))

    def sizes(self) -> dict[str, int]:
        """Bytes on each device, by name."""
        return {"inbox": inbox_nbytes(self.ranks, self.capacity), "epochs": self.capacity // 64}


@dataclass(frozen=True, slots=True)
class RankExchange:
    """What kernels of one rank take: the inboxes of all, its own epochs and place for a fault."""

    share: Share
    shape: ExchangeShape
    arguments: dict[str, Slice | PinnedBuffer]


class Exchange(Owner):
    """The inboxes of all ranks, one on each of ``devices``, which are a group."""

    def __init__(self, devices: Sequence[Device], shape: ExchangeShape) -> None:
        self.shape = shape
        with ExitStack() as owners:
            self._memory = [
                owners.enter_context(device.arena(shape.sizes(), "exchange")) for device in devices
            ]
            self._faults = [
                owners.enter_context(device.pinned(8, "exchange fault")) for device in devices
            ]
            for arena in self._memory:
                for part in arena.values():
                    part.fill(0)
            for fault in self._faults:
                fault.array[:] = 0
            for device in devices:
                device.synchronize()  # before any rank writes into another's inbox
            self._owners = owners.pop_all()

    def of(self, share: Share) -> RankExchange:
        """One rank's."""
        own = self._memory[share.rank]
        given: dict[str, Slice | PinnedBuffer] = {
            f"inbox{rank}": arena["inbox"] for rank, arena in enumerate(self._memory)
        }
        given |= {"epochs": own["epochs"], "fault": self._faults[share.rank]}
        return RankExchange(share, self.shape, given)

    def describe_faults(self) -> str:
        """Which ranks waited in vain, and for whom; "" where none did."""
        if self._faults[0].closed:
            return ""
        words = (int(fault.view(np.uint64, 1)[0]) for fault in self._faults)
        found = ((rank, describe_fault(word)) for rank, word in enumerate(words))
        return "\n".join(f"rank {rank} {text}" for rank, text in found if text)

    def close(self) -> None:
        """Free the inboxes; closing twice does nothing."""
        self._owners.close()
