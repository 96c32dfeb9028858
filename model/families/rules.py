"""Recurrences of mixers as their kernels describe them."""

from __future__ import annotations

from typing import Any

from urdir.model.families.recurrent import KimiDelta, Lightning, Recurrence, Recurrent, Selective


def rule_of(mixer: Recurrent) -> dict[str, Any] | None:
    """Fields of `RecurrentHeads`; None for a mixer without decaying heads."""
    match mixer:
        case Recurrence():
            return {
                "heads": mixer.heads,
                "key_heads": mixer.key_heads,
                "key_dim": mixer.key_dim,
                "value_dim": mixer.value_dim,
                "delta": mixer.beta is not None,
                "eps": mixer.eps,
                "order": mixer.order,
                "tiled": mixer.tiled,
            }
        case KimiDelta():
            return {
                **_square(mixer.heads, mixer.dim),
                "delta": True,
                "eps": mixer.eps,
                "channels": True,
                "floor": mixer.floor,
                "negated": mixer.negated,
            }
        case Lightning():
            return {**_square(mixer.heads, mixer.dim), "delta": False, "steady": True}
        case Selective() if mixer.heads:
            return {
                "heads": mixer.heads,
                "key_heads": 1,
                "key_dim": mixer.size,
                "value_dim": mixer.conv.channels // mixer.heads,
                "delta": False,
                "order": "apart",
            }
    return None


def _square(heads: int, dim: int) -> dict[str, Any]:
    """Heads with square states, in separate arrays."""
    sizes = {"heads": heads, "key_heads": heads, "key_dim": dim, "value_dim": dim}
    return {**sizes, "order": "apart"}
