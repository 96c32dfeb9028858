"""How much device memory a model needs, told and checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from urdir.model.config import Config
from urdir.model.errors import ModelError
from urdir.model.kv_cache import cache_bytes, rounded_capacity
from urdir.model.layer import workspace_sizes
from urdir.model.weights import STAGING_BYTES, weight_sizes
from urdir.ptxgen.kernels.kv_append import KvDtype

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.gguf import Gguf

#: What modules, graphs and the driver's own bookkeeping may take beside our allocations.
RESERVE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of device memory by owner; ``staging`` is freed once the weights are loaded."""

    weights: int
    kv_cache: int
    workspace: int
    state: int
    staging: int

    @classmethod
    def of(cls, gguf: Gguf, config: Config, context: int, kv_dtype: KvDtype) -> Self:
        """The plan for a context of that many tokens."""
        max_len = rounded_capacity(context)
        weights = weight_sizes(gguf, config)
        return cls(
            weights=sum(weights.values()),
            kv_cache=cache_bytes(config, max_len, kv_dtype),
            workspace=sum(workspace_sizes(config).values()),
            state=4 * max_len,
            staging=STAGING_BYTES,
        )

    @property
    def total(self) -> int:
        """Bytes needed at the fullest moment."""
        return self.weights + self.kv_cache + self.workspace + self.state + self.staging

    def as_dict(self) -> dict[str, int]:
        """Bytes by owner and in total, for printing."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        return {**parts, "total": self.total}

    def check(self, device: Device) -> None:
        """Raise ModelError with needed and available bytes when the device has too little."""
        free, _ = device.memory_info()
        if self.total + RESERVE_BYTES > free:
            raise ModelError(
                f"not enough memory on {device.name}: {self.total + RESERVE_BYTES:,} bytes needed "
                f"(weights {self.weights:,}, KV cache {self.kv_cache:,}, workspace "
                f"{self.workspace:,}, staging {self.staging:,}), {free:,} available: "
                "lower -c or take a smaller model"
            )
