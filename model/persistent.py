"""A plan's layers as one persistent kernel: a rewrite of a step's plan.

The launches of all layers of a decode step of one row become the stages of one kernel
(`FusedLayers`), which does the same on the same memory, within the kernels' tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from urdir.driver.operation import Launch, Operation
from urdir.driver.plan import Plan
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.fused_layers import FusedLayers, LayerAt
from urdir.ptxgen.kernels.tile_matvec import TileMatvec

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.layer import StepParts

#: Launches of a layer that can become stages: Q, K and V; attention; output; gate and up; down.
KERNELS = (TileMatvec, Attention, TileMatvec, TileMatvec, TileMatvec)
#: Values that pass between stages live in these parts of the workspace.
CHANNELS, EPOCH = "channels", "epoch"


def persistent_layers(plan: Plan, parts: StepParts) -> Plan | None:
    """The plan with one launch in place of those of its layers; None where that kernel does not
    serve them (other kernels, types or shapes)."""
    count = len(KERNELS) * parts.config.n_layers
    first = next((i for i, op in enumerate(plan) if _kernel(op) is KERNELS[0]), len(plan))
    launches = [op for op in plan[first : first + count] if isinstance(op, Launch)]
    if tuple(map(_kernel, launches)) != KERNELS * parts.config.n_layers:
        return None
    try:
        kernel = _fused(launches, parts)
    except PtxgenError:
        return None
    rewritten = Plan(plan.name, plan[:first])
    weights = parts.weights.layers[0].q.data.buffer
    rewritten.launch(
        kernel,
        "layers",
        weights=weights,
        caches=parts.cache.keys(0).buffer,
        x=parts.work["hidden"],
        sent=parts.work[CHANNELS],
        epoch=parts.work[EPOCH],
        stall=parts.state.stall,
        sequence=parts.state["sequence"],
        position=parts.state["position"],
    )
    rewritten.extend(plan[first + count :])
    return rewritten


def channel_sizes(hidden: int, ffn: int, q_rows: int, kv_rows: int) -> dict[str, int]:
    """Bytes that the kernel needs of a workspace, all zeros before the first launch."""
    values = 2 * hidden + 2 * q_rows + 2 * kv_rows + ffn
    return {CHANNELS: 4 * values, EPOCH: 4}


def _kernel(operation: Operation) -> type[Any] | None:
    return type(operation.kernel) if isinstance(operation, Launch) else None


def _fused(launches: Sequence[Launch], parts: StepParts) -> FusedLayers:
    """The kernel whose stages those launches are. Raises PtxgenError where there is none."""
    config, each = parts.config, len(KERNELS)
    layers = [launches[i : i + each] for i in range(0, len(launches), each)]
    qkv, attention, *_ = (launch.kernel for launch in layers[0])
    for launch in launches:
        if isinstance(launch.kernel, TileMatvec) and launch.kernel.activations != "i16":
            raise PtxgenError(f"{launch.label}: activations are not rounded to 16 bits")
        if isinstance(launch.kernel, Attention) and launch.kernel != attention:
            raise PtxgenError(f"{launch.label}: layers attend in different ways")
    properties = parts.weights.device.properties
    frequencies = cast("Slice", layers[0][1].args["frequencies"])
    return FusedLayers(
        config.hidden,
        config.ffn,
        cast("Attention", attention),
        tuple(_layer(*layer) for layer in layers),
        cast("TileMatvec", qkv).eps or 0.0,
        parts.weights.nbytes,
        frequencies.offset,
        sms=properties.sm_count,
        shared=properties.shared_per_block_optin,
    )


def _layer(qkv: Launch, _: Launch, output: Launch, gate_up: Launch, down: Launch) -> LayerAt:
    """Where a layer's weights are."""

    def places(launch: Launch, *names: str) -> tuple[int, ...]:
        return tuple(cast("Slice", launch.args[n]).offset for n in names if n in launch.args)

    matrices = (
        *places(qkv, "weights", "weights1", "weights2"),
        *places(output, "weights"),
        *places(gate_up, "weights", "up"),
        *places(down, "weights"),
    )
    formats = (
        *cast("TileMatvec", qkv.kernel).formats,
        cast("TileMatvec", output.kernel).format,
        *[cast("TileMatvec", gate_up.kernel).format] * 2,
        cast("TileMatvec", down.kernel).format,
    )
    norms = (*places(qkv, "norm"), *places(gate_up, "norm"))
    if len(matrices) != 7 or len(formats) != 7 or len(norms) != 2:
        raise PtxgenError(f"{qkv.label}: the launches are not those of a layer")
    return LayerAt(matrices, formats, norms, places(qkv, "bias", "bias1", "bias2"))  # type: ignore[arg-type]
