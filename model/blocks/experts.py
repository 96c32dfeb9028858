"""Mixtures of experts: the products of each row with those that the router has chosen.

Nothing here depends on the choice, which stays on the device. Of few rows each reads the matrices
of its experts, as a decode step of one does (`experts_alone`), or those with the same expert read
it together (`experts_together`); many rows are grouped by expert first (`experts_grouped`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.expert_products import MixtureCall
from urdir.model.blocks.experts_alone import ExpertsAlone
from urdir.model.blocks.experts_grouped import ExpertsGrouped
from urdir.model.blocks.experts_together import ExpertsTogether
from urdir.model.blocks.linear import LinearLayers
from urdir.model.blocks.mixtures import MixtureLayer
from urdir.model.memory.norms import NormLayer

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_experts(
    linear: LinearLayers,
    label: str,
    mixture: MixtureLayer,
    x: Activations,
    norm: NormLayer | None,
    residual: Slice | None,
    y: Slice,
) -> Activations:
    """See `MixtureCall`, for the experts in the buffers "expert" and "expert weight" of
    `mixture_workspace`; with its other buffers, and ``work["normed"]``.

    Raises PtxgenError for shapes that no kernel takes: see `ExpertsSpec`.
    """
    call = MixtureCall(label, mixture, x, norm, residual, y).completed
    together = ExpertsTogether(linear)
    if linear.takes_gemm:
        ExpertsGrouped(linear).append(call)
    elif together.serves(mixture, call.norm):
        together.append(call)
    else:
        ExpertsAlone(linear).append(call)
    return Activations(y)
