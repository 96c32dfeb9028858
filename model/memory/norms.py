"""A norm with its weights, for the launches that may compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.ptxgen.kernels.norm import Norm

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A norm with its ``weight`` and ``bias`` (n,) f32, None if absent."""

    norm: Norm
    weight: Slice | None = None
    bias: Slice | None = None

    @property
    def is_scaled_rms(self) -> bool:
        """Whether it is an RMSNorm with weights only, which a product can begin."""
        return self.norm.kind == "rms" and self.norm.weight and not self.norm.bias
