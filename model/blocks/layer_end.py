"""What happens to the stream after a layer's blocks, as launches appended to a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.layers import LayerConfig, LayerEmbedding
from urdir.model.memory.workspace import saved
from urdir.ptxgen.kernels.activate import Activate

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def has_end(layer: LayerConfig) -> bool:
    """Whether anything happens after the blocks."""
    ends = (layer.embedding, layer.output_scale, layer.output_norm, layer.saves, layer.adds)
    return any(end is not None for end in ends)


def append_end(
    at: LayerStep, layer: LayerConfig, stream: Activations, y: Slice | None
) -> Activations:
    """Everything in the order that `LayerConfig` says; the result is in ``y`` where it is given."""
    hidden = at.parts.config.hidden
    if layer.embedding is not None:
        stream = _append_embedding(at, layer.embedding, stream)
    if layer.output_scale is not None:
        stream = _scaled(at, stream, at.vector(layer.output_scale))
    if y is None and layer.output_norm is None and layer.saves is None and layer.adds is None:
        return stream
    x = at.linear.complete(stream).x
    if layer.output_norm is not None:
        norm = at.norm(layer.output_norm)
        assert norm is not None
        to = at.free(x)
        at.linear.append_norm(at.name("layer_output_norm"), hidden, Activations(x), norm, to)
        x = to
    if layer.saves is not None:
        at.scale(f"saves.{layer.saves}", x, at.work[saved(layer.saves)], 1.0)
    if layer.adds is not None:
        addend = at.work[saved(layer.adds)]
        if layer.adds_scale is not None:
            scale = at.vector(layer.adds_scale)
            addend = at.multiply(f"adds.{layer.adds}.scale", addend, scale, at.work["branch"])
        to = at.free(x)
        at.linear.append_sum(at.name(f"adds.{layer.adds}"), hidden, x, addend, to)
        x = to
    if y is not None and y is not x:
        at.scale("result", x, y, 1.0)
        x = y
    return Activations(x)


def _scaled(at: LayerStep, x: Activations, factor: Slice) -> Activations:
    """factor * x, with the sum that is due where there is one."""
    if x.due is not None:
        return replace(x, due=replace(x.due, scale=factor))
    return Activations(at.multiply("layer_output_scale", x.x, factor, at.free(x.x)))


def _append_embedding(at: LayerStep, of: LayerEmbedding, x: Activations) -> Activations:
    """x += norm(proj(f(gate x) * e)), with the token's embedding e for this layer."""
    gate, norm, to = at.work["layer gate"], at.norm(of.norm), at.free(x.x)
    assert norm is not None
    label, hidden = at.name("inp_gate"), at.parts.config.hidden
    at.linear.append(label, [(at.matrix(of.gate), gate)], x)
    extra = at.parts.config.layer_embeddings
    assert extra is not None
    width, stride = extra.width, extra.proj.rows
    kernel = Activate(at.rows.count * width, of.activation, gated=True, width=width, stride=stride)
    mine = at.work["layer embeddings"]
    first = 4 * at.index * width
    mine = mine.slice(first, mine.nbytes - first)
    at.plan.launch(kernel, f"{label}.activation", gate=gate, up=mine, y=gate)
    product = [(at.matrix(of.proj), at.work["branch"])]
    at.linear.append(at.name("proj"), product, Activations(gate), ends_block=True)
    return at.linear.defer_norm_after(
        at.name("post_norm"), hidden, at.work["branch"], norm, x.x, to, None
    )
