"""Whether the layers of a decode step are launches of a graph or one persistent kernel: a table of
what was measured, and a default for the rest. Nothing is timed at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.kernels.fused_layers import FusedLayers


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens/s of one model shape, tg128 of ``urdir bench --layers graph`` and ``fused``.

    ``gpu`` is in the device's name; ``types`` are those of the layers' matrices.
    """

    gpu: str
    hidden: int
    ffn: int
    layers: int
    types: frozenset[str]
    graph: float
    fused: float

    def fits(self, device: str, kernel: FusedLayers) -> bool:
        """Whether it is about that kernel on that device."""
        shape = (kernel.hidden, kernel.ffn, len(kernel.layers))
        types = frozenset(fmt.name for fmt in kernel.formats)
        return self.gpu in device and (self.hidden, self.ffn, self.layers, self.types) == (
            *shape,
            types,
        )


_MIXED, _Q6, _Q8 = frozenset({"Q4_K", "Q6_K"}), frozenset({"Q6_K"}), frozenset({"Q8_0"})
#: Measured on 2026-11-20, driver 580.159.04, random weights.
CASES = (Case("H200", 4096, 14336, 32, _MIXED, 760.0, 690.0),)


def fuses(device: str, kernel: FusedLayers) -> bool:
    """Whether ``kernel`` serves a step on a device of that name. Where nothing was measured the
    graph does, which won in most cases."""
    return any(case.fused > case.graph for case in CASES if case.fits(device, kernel))
