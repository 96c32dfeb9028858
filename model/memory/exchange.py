"""Memory for exchange between ranks: the inbox and stage of each, written by the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from urdir.model.errors import SettingsError
from urdir.model.families.config import Config
from urdir.model.families.description import Share
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.exchange.all_reduce_two_shot import MOST_PART, part_of, stage_sizes
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.exchange.spec import MOST, describe_fault, inbox_nbytes, rounded

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.pinned import PinnedBuffer
    from urdir.ptxgen.spec import KernelSpec

#: Maximum values of a rank in a one-shot exchange: 8 MiB of an inbox, twice. More are exchanged in
#: several launches.
MOST_VALUES = 1 << 20
#: Number of values from which sums are two-shot, by number of ranks. Two H200, us a launch in a
#: graph of 32:
#:
#:     values      8,192  65,536  131,072  262,144  524,288  1,048,576  2,097,152  4,194,304
#:     one shot      2.2     3.5      5.0      7.9     13.6       24.9      (two)     (four)
#:     two shots     5.5     6.2      7.2      9.0     13.2       19.6       30.9       55.6
#:
#: That is 2.2 us and 8 (ranks - 1) bytes a value, 5.5 us and 8 (ranks - 1) / ranks, at 370 GB/s.
#: The numbers for more ranks are extrapolated, not measured.
TWO_SHOTS_FROM = {2: 1 << 19, 4: 1 << 16, 16: 1 << 15}


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """Inboxes for ``capacity`` values of each of ``ranks``, and stages for two-shot sums: ``part``
    of each rank, 0 if no step needs them."""

    ranks: int
    capacity: int
    part: int = 0

    @classmethod
    def of(cls, config: Config, rows: int, most_rows: int) -> Self | None:
        """The exchange for steps of up to ``most_rows`` rows, ``rows`` of which choose a token;
        None for a model on one device."""
        if config.share is None:
            return None
        ranks, values = config.share.ranks, config.hidden * most_rows
        many = values if values >= two_shots_from(ranks) and values % 4 == 0 else 0
        few = min(values, two_shots_from(ranks)) if many else values
        most = max(few, max(config.share.vocabulary) * rows)
        capacity = rounded(min(most, MOST_VALUES, MOST // ranks))
        return cls(ranks, capacity, min(part_of(many, ranks), MOST_PART))

    def takes_two_shots(self, values: int) -> bool:
        """Whether a sum of ``values`` values is two-shot."""
        return self.part > 0 and values >= two_shots_from(self.ranks) and values % 4 == 0

    def takes_one_launch(self, values: int) -> bool:
        """Whether one one-shot launch computes a sum of ``values`` values."""
        return values <= self.capacity and not self.takes_two_shots(values)

    def sizes(self) -> dict[str, int]:
        """Bytes on each device, by name."""
        counts = self.capacity // 64
        inbox = inbox_nbytes(self.ranks, self.capacity)
        sizes = {"inbox": inbox, "epochs": counts, "sent": counts}
        return sizes | (stage_sizes(self.ranks, self.part) if self.part else {})


def two_shots_from(ranks: int) -> int:
    """Number of values from which a sum of ``ranks`` ranks is two-shot. Raises SettingsError for
    too many ranks."""
    for most, values in TWO_SHOTS_FROM.items():
        if ranks <= most:
            return values
    raise SettingsError(f"{ranks} GPUs: at most {max(TWO_SHOTS_FROM)} share a model")


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Arguments of one rank's kernels: all inboxes with its own epochs; all stages and flags with
    its own rounds, if any; and a slot for a fault."""

    share: Share
    shape: ExchangeShape
    arguments: dict[str, Slice | PinnedBuffer]
    stage_arguments: dict[str, Slice | PinnedBuffer]

    @classmethod
    def of(
        cls,
        share: Share,
        shape: ExchangeShape,
        memory: Sequence[Mapping[str, Slice]],
        fault: Slice | PinnedBuffer,
    ) -> Self:
        """The exchange of one rank, in the ``memory`` of all ranks."""
        own = memory[share.rank]

        def of_all(*names: str) -> dict[str, Slice | PinnedBuffer]:
            ranks = enumerate(memory)
            return {f"{name}{rank}": arena[name] for rank, arena in ranks for name in names}

        counts = {name: own[name] for name in ("epochs", "sent")}
        inboxes = {**of_all("inbox"), **counts, "fault": fault}
        stages: dict[str, Slice | PinnedBuffer] = {}
        if shape.part:
            stages = {**of_all("stage", "flags"), "rounds": own["rounds"], "fault": fault}
        return cls(share, shape, inboxes, stages)

    @property
    def gives(self) -> Gives:
        """How a product of this rank is sent to the others."""
        return Gives(self.share.ranks, self.share.rank, self.shape.capacity)

    @property
    def takes(self) -> SumOfRanks:
        """How the next product adds what the ranks sent each other."""
        return SumOfRanks(self.share.ranks, self.share.rank, self.shape.capacity)

    def arguments_of(self, kernel: KernelSpec) -> dict[str, Slice | PinnedBuffer]:
        """The arguments that a kernel takes."""
        return {p.name: self.arguments[p.name] for p in kernel.params if p.name in self.arguments}


class Exchange(Owner):
    """The inboxes and stages of all ranks, on each of ``devices``, which are a group."""

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
                device.synchronize()  # before any rank writes to another's inbox
            self._owners = owners.pop_all()

    def of(self, share: Share) -> RankExchange:
        """The exchange of one rank."""
        return RankExchange.of(share, self.shape, self._memory, self._faults[share.rank])

    def describe_faults(self) -> str:
        """Which ranks timed out waiting for which others; "" if none did."""
        if self._faults[0].closed:
            return ""
        words = (int(fault.view(np.uint64, 1)[0]) for fault in self._faults)
        found = ((rank, describe_fault(word)) for rank, word in enumerate(words))
        return "\n".join(f"rank {rank} {text}" for rank, text in found if text)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owners.close()
