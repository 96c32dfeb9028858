"""How much device memory a model needs, told and checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from urdir.model.engine.session import chunks_of, row_bucket
from urdir.model.errors import ModelError
from urdir.model.families.description import Config
from urdir.model.memory.device_state import state_sizes
from urdir.model.memory.kv_cache import cache_bytes, kv_layout
from urdir.model.memory.weights import STAGING_BYTES, weight_sizes
from urdir.model.memory.workspace import workspace_sizes
from urdir.ptxgen.kernels.attention.kv_layout import KvDtype

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.files.model_file import ModelFile

#: What modules, graphs and the driver's own bookkeeping may take beside our allocations.
RESERVE_BYTES = 64 << 20
#: SMs of a large GPU, for telling what a model needs where no device is open.
TYPICAL_SM_COUNT = 132


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of device memory by owner; ``staging`` is freed once the weights are loaded."""

    weights: int
    kv_cache: int
    workspace: int
    state: int
    staging: int

    @classmethod
    def of(
        cls,
        gguf: ModelFile,
        config: Config,
        context: int,
        kv_dtype: KvDtype,
        sequences: int = 1,
        sm_count: int = TYPICAL_SM_COUNT,
    ) -> Self:
        """The plan for ``sequences`` sequences, each of up to ``context`` tokens, contiguous, on a
        device of ``sm_count`` SMs.
        """
        layout = kv_layout(config, context, kv_dtype, sequences=sequences)
        rows, chunk = row_bucket(sequences), chunks_of(kv_dtype)[-1]
        return cls(
            weights=sum(weight_sizes(gguf, config).values()),
            kv_cache=cache_bytes(config, layout),
            workspace=sum(workspace_sizes(config, layout, rows, chunk, sm_count).values()),
            state=sum(state_sizes(sequences, layout.max_len, rows, chunk).values()),
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
