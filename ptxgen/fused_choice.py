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
        types = {fmt.name for fmt in kernel.formats}
        same_shape = shape == (self.hidden, self.ffn, self.layers)
        return self.gpu in device and same_shape and types == self.types


_Q4_K_M, _Q6_K, _Q8_0 = frozenset({"Q4_K", "Q6_K"}), frozenset({"Q6_K"}), frozenset({"Q8_0"})
#: Measured on 2026-11-20, driver 580.159.04, random weights.
CASES = (
    Case("H200", 1536, 8960, 28, _Q4_K_M, 2040.3, 1357.6),  # Qwen2.5-1.5B
    Case("H200", 2048, 8192, 16, _Q4_K_M, 3181.3, 2570.0),  # Llama-3.2-1B
    Case("H200", 2048, 8192, 16, _Q8_0, 2422.9, 2188.0),
    Case("H200", 3072, 8192, 28, _Q4_K_M, 1418.5, 1035.8),  # Llama-3.2-3B
    Case("H200", 4096, 14336, 32, _Q4_K_M, 770.6, 699.9),  # Llama-3.1-8B
    Case("H200", 4096, 14336, 32, _Q6_K, 600.5, 569.7),
    Case("H200", 4096, 14336, 32, _Q8_0, 492.0, 478.0),
    Case("H200", 8192, 28672, 80, _Q4_K_M, 93.3, 89.1),  # Llama-3.1-70B
)


def fuses(device: str, kernel: FusedLayers) -> bool:
    """Whether ``kernel`` serves a step on a device of that name. Where nothing was measured the
    graph does, which won wherever something was."""
    return any(case.fused > case.graph for case in CASES if case.fits(device, kernel))
