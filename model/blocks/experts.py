"""Mixtures of experts: the products of each row with those that the router has chosen.

Nothing here depends on the choice, which stays on the device. Of few rows each reads the matrices
of its experts, as a decode step of one does (`experts_alone`), or those with the same expert read
it together (`experts_together`); many rows are grouped by expert first (`experts_grouped`).
"""

from __future__ import annotations

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.expert_products import MixtureCall
from urdir.model.blocks.experts_alone import ExpertsAlone
from urdir.model.blocks.experts_grouped import ExpertsGrouped
from urdir.model.blocks.experts_together import ExpertsTogether
from urdir.model.blocks.linear import LinearLayers


def append_experts(linear: LinearLayers, call: MixtureCall) -> Activations:
    """Append the launches of a mixture, for the experts in the buffers "expert" and "expert weight"
    of `mixture_workspace`; with its other buffers, and ``work["normed"]``.

    Raises PtxgenError for shapes that no kernel takes: see `ExpertsSpec`.
    """
    call = call.completed
    together = ExpertsTogether(linear)
    if linear.takes_gemm:
        ExpertsGrouped(linear).append(call)
    elif together.serves(call.mixture, call.norm):
        together.append(call)
    else:
        ExpertsAlone(linear).append(call)
    return Activations(call.y)
