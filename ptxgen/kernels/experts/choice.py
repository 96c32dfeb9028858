"""Whether rows of a decode step that chose the same expert read its weights together."""

from __future__ import annotations

from urdir.ptxgen.kernels.experts.gemm_small import expected_experts


def pays_together(rows: int, experts: int, used: int) -> bool:
    """Whether `ExpertsGemmSmall` is faster than `ExpertsUp` and `ExpertsDown`."""
    return rows > 1
