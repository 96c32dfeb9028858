"""Recurrences of mixers as their kernels describe them."""

from __future__ import annotations

from urdir.model.families.recurrent import KimiDelta, Lightning, Recurrence, Recurrent, Selective
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule


def rule_of(mixer: Recurrent) -> HeadsRule | None:
    """The rule of a mixer's heads; None for a mixer without decaying heads."""
    match mixer:
        case Recurrence():
            return HeadsRule(
                *(mixer.heads, mixer.key_heads, mixer.key_dim, mixer.value_dim),
                delta=mixer.beta is not None,
                eps=mixer.eps,
                order=mixer.order,
                tiled=mixer.tiled,
            )
        case KimiDelta(heads=heads, dim=dim):
            return HeadsRule(
                *(heads, heads, dim, dim),
                delta=True,
                eps=mixer.eps,
                order="apart",
                channels=True,
                floor=mixer.floor,
                negated=mixer.negated,
            )
        case Lightning(heads=heads, dim=dim):
            return HeadsRule(heads, heads, dim, dim, delta=False, order="apart", steady=True)
        case Selective(heads=heads) if heads:
            value_dim = mixer.conv.channels // heads
            return HeadsRule(heads, 1, mixer.size, value_dim, delta=False, order="apart")
    return None
