"""How fast a model can be whose weights are partly streamed from host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.measure.bandwidth import link_bandwidth, read_bandwidth
from urdir.model.memory.weights import streamed_nbytes, weight_sizes

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile

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
