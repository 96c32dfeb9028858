"""How fast a model can be whose weights are partly streamed from host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from urdir.model.measure.bandwidth import link_bandwidth, read_bandwidth
from urdir.model.memory.weights import streamed_nbytes, weight_sizes

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.session import Session
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.measure.bench import BenchRow

#: Bytes per second where no GPU can be measured: what 16 lanes of PCIe 4 carry, and an L4's memory.
ASSUMED_LINK, ASSUMED_READ = 25e9, 300e9
#: Rows of a prompt that use a transfer.
_PROMPT_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Streaming:
    """``nbytes`` in host memory, all of which a step copies at ``link`` bytes per second, and
    ``resident`` ones on the device, read at ``read``. ``measured``: on this machine's GPU."""

    nbytes: int
    resident: int
    link: float
    read: float
    measured: bool

    @classmethod
    def of(cls, file: ModelFile, config: Config, device: Device) -> Streaming:
        """That of a model on a device, whose rates are measured unless it is emulated."""
        nbytes, resident = streamed_nbytes(file, config), sum(weight_sizes(file, config).values())
        if device.is_emulated:
            return cls(nbytes, resident, ASSUMED_LINK, ASSUMED_READ, False)
        return cls(nbytes, resident, link_bandwidth(device), read_bandwidth(device), True)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one answer per second, at most: transfers run beside launches."""
        return 1 / max(self.nbytes / self.link, self.resident / self.read)

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens of a long prompt per second, at most, as far as transfers limit them."""
        return _PROMPT_ROWS * self.link / self.nbytes

    def __str__(self) -> str:
        rates = "measured" if self.measured else "assumed, as no GPU was measured"
        return (
            f"{self.nbytes / 1e9:,.2f} GB of {(self.nbytes + self.resident) / 1e9:,.2f} GB are "
            f"streamed from host memory for every step, at {self.link / 1e9:,.1f} GB/s ({rates}): "
            f"at most {self.tokens_per_second:.3g} tokens/s of an answer and "
            f"{self.prompt_tokens_per_second:,.0f} of a prompt"
        )


@dataclass(slots=True)
class LinkUse:
    """What tests of a session use of the ``link`` to the host, in bytes per second."""

    session: Session
    link: float
    _seen: tuple[int, int, int] = field(default=(0, 0, 0))

    @classmethod
    def of(cls, session: Session) -> LinkUse:
        """That of the tests from now on."""
        use = cls(session, link_bandwidth(session.parts.device))
        use._seen = use._counted()
        return use

    def _counted(self) -> tuple[int, int, int]:
        """Pairs of rows and experts so far, experts that were copied, and their bytes."""
        caches = [*self.session.weights.expert_caches.values()]
        counts = [cache.statistics() for cache in caches]
        nbytes = sum(
            copies * cache.expert_nbytes for cache, (_, copies) in zip(caches, counts, strict=True)
        )
        return sum(pairs for pairs, _ in counts), sum(copies for _, copies in counts), nbytes

    def during(self, row: BenchRow) -> str:
        """What a test used that has ended just now: a step copies all that it streams once, and the
        experts that its rows lack."""
        streamed = self.session.weights.streamed
        before, self._seen = self._seen, self._counted()
        pairs, copies, moved = (now - then for now, then in zip(self._seen, before, strict=True))
        nbytes, rows, experts = float(streamed.nbytes), row.sequences, ""
        if row.ms_per_step is None:  # prompts read all experts
            rows *= self.session.shapes.chunks[-1]
        elif pairs:
            mixtures = [of for layer in self.session.parts.config.layers for of in layer.mixtures]
            of_step = rows * sum(of.router.used for of in mixtures)
            nbytes += moved * of_step / pairs - self.session.weights.experts_nbytes
            experts = f", {1 - copies / pairs:.1%} of the experts were on the device"
        rate = row.tokens_per_second / rows * nbytes
        return (
            f"{row.test}: {nbytes / 1e9:.3f} GB a step{experts}; {rate / 1e9:.1f} of the "
            f"{self.link / 1e9:.1f} GB/s of the link, {rate / self.link:.1%}"
        )
