"""Mamba's mixer as a network: the products of what was convolved, and the scan, whose channels
decay each by itself or by heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.recurrent import SILU, gated_by_silu
from urdir.model.blocks.states import (
    StateStep,
    convolution,
    launch_heads,
    recurrent_state,
)
from urdir.model.families.recurrent import Selective
from urdir.model.families.stored import Linear
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.recurrent.choice import selective_scan
from urdir.ptxgen.kernels.recurrent.prefill_conv import PrefillConv
from urdir.ptxgen.kernels.recurrent.prefill_scan import PrefillScan
from urdir.ptxgen.weights.packed import packed_nbytes

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.memory.weights import Matrix


def append_selective(
    at: LayerStep, mixer: Selective, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """o (scan(...) * silu(gate x')), x' being the norm of x; see `Selective`."""
    work, linear, y = at.work, at.linear, at.work["heads"]
    wide = [
        (at.matrix(mixer.mixed), work["mixed"]),
        (at.matrix(mixer.gate), work["recurrent gate"]),
    ]
    tail, convolved = recurrent_state(at)["tail"], work["convolved"]
    mixed = [at.matrix(of) for of in (mixer.low, mixer.b, mixer.c)]
    packed = None
    if PrefillConv.can_pack(mixer.conv.channels):
        packed = _packed(at, mixer.conv.channels, *mixed)
    conv = convolution(at, "ssm_conv1d", mixer.conv, SILU, tail, convolved, packed)
    if not linear.append(at.name("ssm_in"), wide, x, norm, then=conv.following(at)):
        conv.append(at, work["mixed"])
    parts = [
        (mixer.low, mixer.low_norm, "low"),
        (mixer.b, mixer.b_norm, "scan b"),
        (mixer.c, mixer.c_norm, "scan c"),
    ]
    products = [(matrix, work[name]) for matrix, (_, _, name) in zip(mixed, parts, strict=True)]
    linear.append(at.name("ssm_x"), products, Activations(convolved, packed=packed))
    for of, part_norm, name in parts:
        if at.matrix(of).is_partial:
            at.add_ranks(at.name(f"ssm_{name}"), of.rows, work[name], work[name])
        if (layer := at.norm(part_norm)) is not None:
            part = Activations(work[name])
            linear.append_norm(at.name(f"ssm_{name}_norm"), of.rows, part, layer, work[name])
    append_scan = _append_scan_by_head if mixer.heads else _append_scan_by_channel
    return at.finish("ssm_out", at.matrix(mixer.o), append_scan(at, mixer, y), to)


def _append_scan_by_channel(at: LayerStep, mixer: Selective, y: Slice) -> Activations:
    work, sms = at.work, at.parts.device.properties.sm_count
    channels, size = mixer.conv.channels, mixer.size
    packed = None
    if PrefillScan.can_pack(channels, size):
        packed = _packed(at, channels, at.matrix(mixer.o))
    arguments = {
        "x": work["convolved"],
        "gate": work["recurrent gate"],
        "b": work["scan b"],
        "c": work["scan c"],
        "a": at.vector(mixer.a),
        "skip": at.vector(mixer.skip),
        "state": recurrent_state(at)["state"],
    }
    kernel = partial(selective_scan, sms, channels=channels, size=size, packs=packed is not None)
    y = packed or y
    scan = StateStep("ssm_scan", kernel, "step", arguments, y)
    step = [(at.matrix(mixer.step), work["alpha"])]
    low = Activations(work["low"])
    if not at.linear.append(at.name("ssm_dt"), step, low, then=scan.following(at)):
        scan.append(at, work["alpha"])
    return Activations(y, packed=packed)


def _packed(at: LayerStep, channels: int, *matrices: Matrix) -> Slice | None:
    """Where a kernel over prompts leaves vectors packed for the product with these matrices, if
    that takes them so and all rows are of prompts."""
    if at.rows.decode or not at.linear.packs(*matrices):
        return None
    return at.work["packed"].slice(0, packed_nbytes(at.rows.count, channels))


def _append_scan_by_head(at: LayerStep, mixer: Selective, y: Slice) -> Activations:
    work, bias = at.work, mixer.step.bias
    assert bias is not None  # which the kernel adds
    step = [(at.matrix(Linear(mixer.step.matrix)), work["alpha"])]
    at.linear.append(at.name("ssm_dt"), step, Activations(work["low"]))
    launch_heads(
        at,
        "ssm_scan",
        mixer,
        q_heads=work["scan c"],
        k_heads=work["scan b"],
        v_heads=work["convolved"],
        alpha=work["alpha"],
        a=at.vector(mixer.a),
        dt_bias=at.vector(bias),
        skip=at.vector(mixer.skip),
        y=y,
    )
    return gated_by_silu(at, y, mixer.conv.channels)
