"""A plan's layers as one persistent kernel: a rewrite of a step's plan.

The launches of all layers of a decode step of one row become the stages of one kernel
(`FusedLayers`), which does the same on the same memory, within the kernels' tolerances. Whoever
looks at single launches has the plan as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from urdir.driver.errors import DriverError
from urdir.driver.operation import Launch, Operation
from urdir.driver.plan import Plan
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.fused_choice import fuses
from urdir.ptxgen.kernels._decode_attention import WARPS
from urdir.ptxgen.kernels._layers import LayerAt, channel_sizes
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.fused_layers import FusedLayers
from urdir.ptxgen.kernels.tile_matvec import TileMatvec

if TYPE_CHECKING:
    from urdir.driver.memory import PinnedBuffer, Slice
    from urdir.model.layer import StepParts

#: Launches of a layer that can become stages: Q, K and V; attention; output; gate and up; down.
KERNELS = (TileMatvec, Attention, TileMatvec, TileMatvec, TileMatvec)
#: What the kernel's products are called, and attention with the one behind it.
STAGES = ("attn_qkv", "attention and attn_output", "ffn_gate_up", "ffn_down")
#: Values that pass between stages live in these parts of the workspace.
CHANNELS, EPOCH = "channels", "epoch"


def persistent_layers(plan: Plan, parts: StepParts) -> Plan:
    """The plan with one launch in place of those of its layers, or the plan as it is: where
    ``parts.persistent`` says so, or leaves it to `fuses`, and where that kernel does not serve them
    (other kernels, types or shapes)."""
    if parts.persistent is False:
        return plan
    count = len(KERNELS) * parts.config.n_layers
    first = next((i for i, op in enumerate(plan) if _kernel(op) is KERNELS[0]), len(plan))
    launches = [op for op in plan[first : first + count] if isinstance(op, Launch)]
    if tuple(map(_kernel, launches)) != KERNELS * parts.config.n_layers:
        return plan
    try:
        kernel = _fused(launches, parts)
    except PtxgenError:
        return plan
    if parts.persistent is None and not fuses(parts.weights.device.name, kernel):
        return plan
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


@contextmanager
def named_stalls(stall: PinnedBuffer) -> Iterator[None]:
    """Says where a persistent kernel has waited in vain, if that is why the device has failed.

    Raises DriverError in place of the driver's own error.
    """
    try:
        yield
    except DriverError as exc:
        stage, cta, value, waited = (int(word) for word in stall.view(np.uint32, 4))
        if not waited:
            raise
        raise DriverError(
            f"layer {stage // 4}, {STAGES[stage % 4]}: CTA {cta} waited in vain for activation "
            f"{value} of the channels: another CTA has stopped, or was never there ({exc})"
        ) from exc


def persistent_sizes(hidden: int, ffn: int, q_rows: int, kv_rows: int) -> dict[str, int]:
    """Bytes that the kernel needs of a workspace, all zeros before the first launch."""
    return {CHANNELS: 4 * sum(channel_sizes(hidden, ffn, q_rows, kv_rows).values()), EPOCH: 4}


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
    kernel = FusedLayers(
        config.hidden,
        config.ffn,
        _spread(cast("Attention", attention), properties.sm_count),
        tuple(_layer(*layer) for layer in layers),
        cast("TileMatvec", qkv).eps or 0.0,
        parts.weights.nbytes,
        frequencies.offset,
        sms=properties.sm_count,
        shared=properties.shared_per_block_optin,
    )
    if properties.compute_capability >= (9, 0) and kernel.least_blocks >= 2 * WARPS:
        kernel = replace(kernel, cta_warps=2 * WARPS)
    for index in range(config.n_layers):
        caches = (parts.cache.keys(index).offset, parts.cache.values(index).offset)
        first = 2 * index * kernel.cache_nbytes
        if caches != (first, first + kernel.cache_nbytes):
            raise PtxgenError(f"layer {index}: keys and values do not follow those before")
    return kernel


def _spread(attention: Attention, sms: int) -> Attention:
    """The same attention in as many CTAs as there are SMs for: they have nothing else to do."""
    ways = [replace(attention, most_heads=heads) for heads in (1, 2)]
    return next((way for way in ways if way.launch_shape.grid[0] <= sms), attention)


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
    return LayerAt(matrices, formats, norms, places(qkv, "bias", "bias1", "bias2"))
