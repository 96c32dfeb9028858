"""How fast a model can be whose weights are partly streamed from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from urdir.model.figures import rounded
from urdir.model.measure.bandwidth import link_bandwidth, read_bandwidth
from urdir.model.memory.weight_sizes import expert_nbytes, streamed_nbytes, weight_sizes

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
    """``nbytes`` in host memory, which a prompt copies at ``link`` bytes per second, and
    ``resident`` ones on the device, read at ``read``. ``cached`` of the first are experts that have
    a cache there, which is not among the second; a token uses ``used`` of these bytes. Rates are
    ``measured`` on this machine's GPU, or assumed. Bytes are those ``on`` the GPU, on each GPU that
    has a share of all layers (the largest), or on all that have some layers, as one works after the
    other. ``in_files`` of all are read from files, as fast as those are.
    ``caches`` are the bytes of the experts' caches.
    """

    nbytes: int
    resident: int
    cached: int
    used: int
    link: float
    read: float
    measured: bool
    on: str = "the GPU"
    in_files: int = 0
    caches: int = 0

    @classmethod
    def of(cls, file: ModelFile, shares: Sequence[Config], device: Device) -> Streaming:
        """That of a model's shares on devices like this one, whose rates are measured unless it is
        emulated."""
        ranks = [_sizes(file, share) for share in shares]
        each, on = max(ranks), "the GPU" if len(ranks) == 1 else "each GPU"
        if shares[0].stage is not None:
            each, on = [sum(of) for of in zip(*ranks, strict=True)], "all GPUs"
        nbytes, resident, cached, used, *rest = each
        rates = ASSUMED_LINK, ASSUMED_READ
        if not device.is_emulated:
            rates = link_bandwidth(device), read_bandwidth(device)
        return cls(nbytes, resident, cached, used, *rates, not device.is_emulated, on, *rest)

    def tokens_per_second(self, found: float = 1.0) -> float:
        """Tokens of one answer per second, at most, if this share of the experts that a token uses
        are on the device. Copies of layers run beside launches, those of experts do not."""
        layers, missing = self.nbytes - self.cached, (1 - found) * self.used
        read = (self.resident + self.used) / self.read
        return 1 / (max(layers / self.link, read) + missing / self.link)

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens of a long prompt per second, at most, as far as memory limits them: experts that
        are cached come from there, and all weights are read once."""
        copied, read = self.nbytes - self.caches, self.resident + self.nbytes
        return _PROMPT_ROWS / max(copied / self.link, read / self.read)

    def __str__(self) -> str:
        rates = "measured" if self.measured else "assumed, as no GPU was measured"
        answers = f"{rounded(self.tokens_per_second(), 3)} tokens/s of an answer"
        if self.cached:
            shares = (f"{rounded(self.tokens_per_second(x), 3)} with {x:.0%}" for x in (0.9, 0.5))
            answers += f" with all chosen experts in the cache ({', '.join(shares)} of them)"
        files = f" ({self.in_files / 1e9:,.2f} GB of them from files)" if self.in_files else ""
        caches = f" and {self.caches / 1e9:,.2f} GB of cached experts" if self.caches else ""
        return (
            f"{self.nbytes / 1e9:,.2f} GB are streamed from host memory{files} beside "
            f"{self.resident / 1e9:,.2f} GB{caches} on {self.on}, at "
            f"{self.link / 1e9:,.1f} GB/s ({rates}): "
            f"at most {answers}, {self.prompt_tokens_per_second:,.0f} of a prompt"
        )


def _sizes(file: ModelFile, config: Config) -> list[int]:
    """Bytes that are streamed, on the device without caches, of experts with caches, of those that
    a token uses, in files, and of caches."""
    assert config.streaming is not None
    alone = replace(config, streaming=replace(config.streaming, experts=0))
    resident = sum(weight_sizes(file, alone).values())
    nbytes = streamed_nbytes(file, config)
    in_files = nbytes - streamed_nbytes(file, config, in_files=False)
    caches = sum(weight_sizes(file, config).values()) - resident
    return [nbytes, resident, *expert_nbytes(file, config), in_files, caches]


@dataclass(slots=True)
class LinkUse:
    """What tests of a session use of the ``link`` to the host, in bytes per second: that of the
    first device."""

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
        experts that its rows lack, or all of them where many rows choose."""
        weights = self.session.weights
        before, self._seen = self._seen, self._counted()
        pairs, copies, moved = (now - then for now, then in zip(self._seen, before, strict=True))
        caches = weights.expert_caches.values()
        kept = sum(of.slots * of.expert_nbytes for of in caches if of.reader is None)
        copied = max(0, weights.streamed.nbytes - kept)  # caches have biases, too
        nbytes, rows, experts = float(copied), row.sequences, ""
        if row.ms_per_step is None:  # prompts read all experts
            rows *= self.session.shapes.chunks[-1]
        elif caches and not pairs:
            experts = ", with all experts, as many rows choose"
        elif pairs:
            mixtures = [of for layer in self.session.parts.config.layers for of in layer.mixtures]
            of_step = rows * sum(of.router.used for of in mixtures)
            layers = weights.streamed.nbytes - weights.experts_nbytes
            nbytes = layers + moved * of_step / pairs
            experts = f", {1 - copies / pairs:.1%} of the experts were on the device"
        rate = row.tokens_per_second / rows * nbytes
        return (
            f"{row.test}: {nbytes / 1e9:.3f} GB a step{experts}; {rate / 1e9:.1f} of the "
            f"{self.link / 1e9:.1f} GB/s of the link, {rate / self.link:.1%}"
        )
