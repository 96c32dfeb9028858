"""The layers of a model, as launches appended to a plan.

A layer is what its description says (`families.description`): blocks of networks, each with norms
around it, whose results are added to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.blocks.attention_network import append_attention
from urdir.model.blocks.feed_forward import append_dense, append_mixture
from urdir.model.blocks.linear import Activations
from urdir.model.blocks.norms import append_norm
from urdir.model.blocks.parts import Destination, LayerParts, LayerStep
from urdir.model.families.description import (
    Attention,
    Block,
    Branch,
    Dense,
    LayerConfig,
    Mixture,
)
from urdir.model.memory.weights import NormWeights
from urdir.ptxgen.kernels.add import Add

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.blocks.rows import Rows


def append_layer(
    plan: Plan,
    parts: LayerParts,
    rows: Rows,
    index: int,
    x: Activations,
    y: Slice | None = None,
) -> Activations:
    """Append layer ``index``: the stream x (rows, hidden) f32 before it, and the stream after it,
    in ``y`` (which may be x's buffer) or in a buffer of the workspace. The norm after it, if it is
    known, is begun.

    Raises LaunchError, naming launch and parameter, for a buffer that is null, closed or too small.
    """
    at = LayerStep(plan, parts, rows, index)
    layer = parts.config.layers[index]
    start, has_end = x.x, _has_end(layer)
    for number, block in enumerate(layer.blocks):
        is_last = number + 1 == len(layer.blocks)
        if is_last:
            following = None if has_end else _norm_after(at)
        else:
            following = at.norm(layer.blocks[number + 1].branches[0].norm)
        x = _append_block(at, block, x, start, y if is_last and not has_end else None, following)
    return _append_end(at, layer, x, y) if has_end else x


def _norm_after(at: LayerStep) -> NormWeights | None:
    """The first norm after a layer: the next one's, or the output's."""
    config, following = at.parts.config, at.index + 1
    if following == config.n_layers:
        return at.norm(config.output_norm)
    return at.norm(config.layers[following].blocks[0].branches[0].norm)


def _append_block(
    at: LayerStep,
    block: Block,
    x: Activations,
    start: Slice,
    y: Slice | None,
    following: NormWeights | None,
) -> Activations:
    if block.post_norm is not None or any(b.post_norm is not None for b in block.branches):
        return _append_normed_block(at, block, x, start, y, following)
    total = x
    for number, branch in enumerate(block.branches):
        is_last = number + 1 == len(block.branches)
        target = (y if is_last else None) or at.free(x.x, start, total.x)
        to = Destination(target, total.x, following if is_last else None, block.scale)
        total = _append_network(at, branch, x, start, to)
    return total


def _append_normed_block(
    at: LayerStep,
    block: Block,
    x: Activations,
    start: Slice,
    y: Slice | None,
    following: NormWeights | None,
) -> Activations:
    """A block with a norm after it, or after its networks: their results are no part of the stream
    before they are normed."""
    total: Slice | None = None
    *others, last = block.branches
    for branch in others:
        used = (x.x, start) if total is None else (x.x, start, total)
        total = _append_branch(at, branch, x, start, total, at.free(*used))
    target = y or at.free(x.x, *(() if total is None else (total,)))
    if block.post_norm is None:
        raise NotImplementedError("a block whose networks are normed, but not their sum")
    if total is None and last.post_norm is None:
        made = _append_product(at, last, x, start)
    else:
        made = _append_branch(at, last, x, start, total, at.work["delta"])
    if block.scale != 1.0:
        made = at.rescale("scale", made, block.scale)
    return append_norm(at, "post_norm", made, at.norm(block.post_norm), x.x, target, following)


def _append_branch(
    at: LayerStep, branch: Branch, x: Activations, start: Slice, total: Slice | None, y: Slice
) -> Slice:
    """y = total + the normed result of a branch, where there is a total; y is no other buffer."""
    if branch.post_norm is None:
        to = Destination(y, total, None)
        return _append_network(at, branch, x, start, to).x
    made = _append_product(at, branch, x, start)
    return append_norm(at, "branch_norm", made, at.norm(branch.post_norm), total, y).x


def _append_product(at: LayerStep, branch: Branch, x: Activations, start: Slice) -> Slice:
    """The result of a branch alone, in the workspace."""
    return _append_network(at, branch, x, start, Destination(at.work["delta"], None, None)).x


def _append_network(
    at: LayerStep, branch: Branch, x: Activations, start: Slice, to: Destination
) -> Activations:
    source = Activations(start) if branch.reads_layer_input else x
    norm = at.norm(branch.norm)
    match branch.network:
        case Attention():
            return append_attention(at, branch.network, source, norm, to)
        case Dense():
            return append_dense(at, branch.network, source, norm, to)
        case Mixture():
            return append_mixture(at, branch.network, source, norm, start, to)


# ---- after the blocks ----


def _has_end(layer: LayerConfig) -> bool:
    ends = (layer.embedding, layer.output_scale, layer.output_norm, layer.saves, layer.adds)
    return any(end is not None for end in ends)


def _append_end(
    at: LayerStep, layer: LayerConfig, x: Activations, y: Slice | None
) -> Activations:
    """What happens to the stream after the blocks, ending in ``y`` where it is given."""
    stream = x.x
    if layer.embedding is not None:
        e = layer.embedding
        gate, mine = at.work["layer gate"], at.layer_embedding
        at.linear.append(at.name("inp_gate"), [(at.matrix(e.gate), gate)], Activations(stream))
        at.activate("inp_gate.activation", e.activation, e.gate.rows, gate, mine, gate)
        at.linear.append(at.name("proj"), [(at.matrix(e.proj), at.work["delta"])], Activations(gate))
        norm, target = at.norm(e.norm), at.free(stream)
        stream = append_norm(at, "post_norm", at.work["delta"], norm, stream, target).x
    if layer.output_scale is not None:
        stream = at.rescale("layer_output_scale", stream, at.vector(layer.output_scale))
    if layer.output_norm is not None:
        norm = at.norm(layer.output_norm)
        stream = append_norm(at, "layer_output_norm", stream, norm, None, at.free(stream)).x
    if layer.saves is not None:
        at.copy(f"saves {layer.saves}", stream, at.work[f"saved {layer.saves}"])
    if layer.adds is not None:
        stream = at.add(f"adds {layer.adds}", stream, layer.adds, layer.adds_scale)
    if y is not None and y is not stream:
        at.copy("result", stream, y)
        stream = y
    return Activations(stream)
