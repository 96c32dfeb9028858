"""A norm with its weights, as layers hand it to whatever launch computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.ptxgen.kernels.norm import Norm

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


@dataclass(frozen=True, slots=True)
class NormLayer:
    """What a norm computes, and its ``weight`` and ``bias`` (n,) f32, None where it has none."""

    norm: Norm
    weight: Slice | None = None
    bias: Slice | None = None

    @property
    def is_scaled_rms(self) -> bool:
        """Whether it is an RMSNorm with weights alone, which a product can begin."""
        return self.norm.kind == "rms" and self.norm.weight and not self.norm.bias
