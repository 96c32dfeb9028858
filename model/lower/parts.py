"""What operations are lowered for: the device, and the owners of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.families.config import Config
from urdir.model.memory.device_state import DecodeState
from urdir.model.memory.exchange import RankExchange
from urdir.model.memory.kv_cache import LayerCaches
from urdir.model.memory.recurrent_state import RecurrentState
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.linear.choice import Limits

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.memory.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The device, and the owners of everything on it that layers read and write.

    ``exact`` keeps activations f32. ``recurrent`` is given where a layer needs it, ``exchange``
    where the device is one of several ranks.
    """

    device: Device
    config: Config
    weights: Weights
    cache: LayerCaches
    work: Workspace
    exact: bool
    recurrent: RecurrentState | None = None
    exchange: RankExchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts(LayerParts):
    """What a step reads and writes: that of its layers, and the rows' tokens and positions."""

    state: DecodeState


def device_limits(device: Device) -> Limits:
    """What the choice of a kernel depends on."""
    properties = device.properties
    return _limits(
        properties.sm_count,
        properties.shared_per_sm,
        properties.shared_per_block_optin,
        properties.max_cluster,
        device.native_target,
    )


@lru_cache(maxsize=16)
def _limits(sms: int, per_sm: int, per_cta: int, cluster: int, target: str) -> Limits:
    return Limits(sms, per_sm, per_cta, cluster, target=target)
