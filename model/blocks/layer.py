"""The layers of a model, as launches appended to a plan.

A layer is what its description says (`families.layers`): blocks of networks, each with norms
around it, whose results are added to the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.attention_network import (
    append_attention,
    append_keys,
    products_of,
)
from urdir.model.blocks.feed_forward import append_activation, append_dense, append_linear
from urdir.model.blocks.layer_end import append_end, has_end
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.recall import append_bank, append_recall
from urdir.model.families.attention import Attention
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.recurrent import (
    KimiDelta,
    Lightning,
    Recurrence,
    Selective,
    ShortConv,
)
from urdir.model.families.stored import Linear, Normalization
from urdir.model.lower.parts import LayerParts
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activation import Activation

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.lower.rows import OutputRows, Rows


def append_layer(
    plan: Plan,
    parts: LayerParts,
    rows: Rows,
    index: int,
    x: Activations,
    y: Slice | None = None,
    layer: LayerConfig | None = None,
    outputs: OutputRows | None = None,
) -> Activations:
    """Append layer ``index``: the stream x (rows, hidden) f32 before it, and the stream after it,
    in ``y`` (which may be x's buffer) or in a buffer of the workspace. The norm after it is begun.

    With ``outputs`` these rows alone go on after attention, where that `begins_with_attention`: the
    stream after the layer has no others.

    ``layer`` stands for the description's, which it is like: its weights are used with the cache of
    layer ``index``, and no norm is begun. Raises LaunchError, naming launch and parameter, for a
    buffer that is null, closed or too small.
    """
    at = LayerStep(plan, parts, rows, index, y, outputs)
    is_alone, start = layer is not None, x.x
    layer = layer or parts.config.layers[index]
    ends, banked = has_end(layer), parts.config.banked(index)
    for number, block in enumerate(layer.blocks):
        if number + 1 < len(layer.blocks):
            following, target = _beginning(at, layer.blocks[number + 1]), None
        else:
            following = Beginning() if ends or is_alone else _after_layer(at)
            target = None if ends else y
        x = _append_block(at, block, x, start, target, following, banked)
        banked += block.banks
        at = at.after_attention
    if ends:
        return append_end(at, layer, x, y)
    return x if y is None else at.linear.complete(x)


def begins_with_attention(layer: LayerConfig) -> bool:
    """Whether a layer's first block is attention alone, and all that follows is made from its sum:
    other rows of the stream before are not needed after it."""
    first, *others = layer.blocks
    alone = len(first.branches) == 1 and first.post_norm is None
    attention, networks = first.branches[0], [b for block in others for b in block.branches]
    return (
        alone
        and not has_end(layer)
        and not any(block.recalls for block in layer.blocks)
        and isinstance(attention.network, Attention)
        and not attention.reads_layer_input
        and attention.post_norm is None
        and not any(_reads_other_rows(branch) for branch in networks)
    )


def _reads_other_rows(branch: Branch) -> bool:
    """Whether a network after attention reads what the layer began with, or other tokens."""
    network = branch.network
    if isinstance(network, Mixture) and network.router.reads == "layer":
        return True
    return branch.reads_layer_input or isinstance(network, Attention)


def append_layer_keys(
    plan: Plan, parts: LayerParts, rows: Rows, index: int, x: Activations
) -> None:
    """Append what later tokens need of a layer that `begins_with_attention`: keys and values."""
    at = LayerStep(plan, parts, rows, index)
    block = parts.config.layers[index].blocks[0]
    branch = block.branches[0]
    assert isinstance(branch.network, Attention)
    if block.stream_norm is not None:
        x = _normed_stream(at, block.stream_norm, at.linear.complete(x), x.x)
    append_keys(at, branch.network, x, at.norm(branch.norm))


class Beginning(NamedTuple):
    """The norm of the stream that a block begins with, and whether the products after it take few
    rows of it packed."""

    norm: NormLayer | None = None
    takes_packed: bool = False


def _after_layer(at: LayerStep) -> Beginning:
    """What follows a layer: the next one's first block, or the output's norm."""
    config, following = at.parts.config, at.index + 1
    if following == config.n_layers:
        return Beginning(None if config.recalls else at.norm(config.output_norm))
    return _beginning(at, config.layers[following].blocks[0])


def _beginning(at: LayerStep, block: Block) -> Beginning:
    """Without the norm of a sum with other streams."""
    first = block.branches[0]
    norm = None if block.recalls else at.norm(first.norm)
    if norm is None or not _begins_with_product(block):
        return Beginning(norm)
    match first.network:
        case Dense(gate=gate, up=up):
            matrices = [at.matrix(of) for of in (gate, up) if of is not None]
            is_pair = gate is not None
        case Attention(latent=None):
            matrices = [matrix for matrix, _ in products_of(at, first.network)]
            is_pair = False
        case _:
            return Beginning(norm)
    linear = at.after_attention.linear
    return Beginning(norm, linear.takes_few_normed(matrices, norm, is_pair))


def _append_block(
    at: LayerStep,
    block: Block,
    x: Activations,
    start: Slice,
    y: Slice | None,
    following: Beginning,
    banked: int,
) -> Activations:
    """x += scale * the networks' results, one after the other, or x += norm(their sum)."""
    if not _begins_with_product(block):
        x = at.linear.complete(x)
    if block.stream_norm is not None:
        x = _normed_stream(at, block.stream_norm, x, start)
    if block.post_norm is not None:
        return _append_normed_block(at, block, x, start, y, following)
    total, residual = x, None if block.banks else x.x
    if block.recalls is not None:
        is_ffn = isinstance(block.branches[0].network, Dense | Mixture)
        label = "ffn_recall" if is_ffn else "attn_recall"
        x = Activations(append_recall(at, label, block.recalls, banked, x.x))
    if block.banks:
        append_bank(at, banked, total.x)
    for number, branch in enumerate(block.branches):
        is_last = number + 1 == len(block.branches)
        target = (y if is_last else None) or at.free(x.x, start, total.x)
        then = following if is_last else Beginning()
        to = Destination(*(target, residual, then.norm, block.scale), packs_norm=then.takes_packed)
        total = _append_branch(at, branch, x, start, to)
        if not is_last:
            total = at.linear.complete(total)
            residual = total.x
    return total


def _normed_stream(at: LayerStep, norm: Normalization, x: Activations, start: Slice) -> Activations:
    """The norm of the stream, which takes its place."""
    layer, to = at.norm(norm), at.free(x.x, start)
    assert layer is not None
    at.linear.append_norm(at.name("stream_norm"), at.parts.config.hidden, x, layer, to)
    return Activations(to)


def _begins_with_product(block: Block) -> bool:
    """Whether the first launch that reads the stream is a product, and the only one but for the
    block's end."""
    if len(block.branches) > 1 or block.branches[0].reads_layer_input:
        return False
    if block.stream_norm or block.recalls:
        return False
    return isinstance(block.branches[0].network, Attention | Dense | Linear)


def _append_normed_block(
    at: LayerStep,
    block: Block,
    x: Activations,
    start: Slice,
    y: Slice | None,
    following: Beginning,
) -> Activations:
    """A block with a norm after it: what the networks make is no part of the stream before."""
    total: Slice | None = None
    for branch in block.branches:
        used = (x.x, start) if total is None else (x.x, start, total)
        to = Destination(at.free(*used), total, None)
        total = at.linear.complete(_append_branch(at, branch, x, start, to)).x
    norm = at.norm(block.post_norm)
    assert total is not None
    assert norm is not None
    if block.scale != 1.0:
        at.scale("scale", total, total, block.scale)
    target = y or at.free(x.x, start, total)
    hidden = at.parts.config.hidden
    return at.linear.defer_norm_after(
        at.name("post_norm"), hidden, total, norm, x.x, target, following.norm
    )


def _append_branch(
    at: LayerStep, branch: Branch, x: Activations, start: Slice, to: Destination
) -> Activations:
    """A network and the norm after it."""
    source = Activations(start) if branch.reads_layer_input else x
    if branch.post_norm is None:
        return _append_network(at, branch, source, start, to)
    product = Destination(at.work["branch"], None, None)
    made = _append_network(at, branch, source, start, product).x
    norm = at.norm(branch.post_norm)
    assert norm is not None
    hidden, label = at.parts.config.hidden, at.name("branch_norm")
    if to.residual is None:
        at.linear.append_norm(label, hidden, Activations(made), norm, to.y)
        return Activations(to.y)
    return at.linear.defer_norm_after(
        label, hidden, made, norm, to.residual, to.y, to.next_norm, to.scale
    )


def _append_network(
    at: LayerStep, branch: Branch, x: Activations, start: Slice, to: Destination
) -> Activations:
    norm = at.norm(branch.norm)
    match branch.network:
        case Attention():
            return append_attention(at, branch.network, x, norm, to)
        case Dense():
            return append_dense(at, branch.network, x, norm, to)
        case Linear():
            return append_linear(at, branch.network, x, norm, to)
        case Activation():
            return append_activation(at, branch.network, x, norm, to)
    # what fewer models have is imported for them alone
    match branch.network:
        case Mixture():
            from urdir.model.blocks.mixture_network import append_mixture

            return append_mixture(at, branch.network, x, norm, start, to)
        case ShortConv():
            from urdir.model.blocks.recurrent import append_short_conv

            return append_short_conv(at, branch.network, x, norm, to)
        case Recurrence():
            from urdir.model.blocks.recurrent import append_recurrence

            return append_recurrence(at, branch.network, x, norm, to)
        case Selective():
            from urdir.model.blocks.selective import append_selective

            return append_selective(at, branch.network, x, norm, to)
        case KimiDelta():
            from urdir.model.blocks.kimi_delta import append_kimi_delta

            return append_kimi_delta(at, branch.network, x, norm, to)
        case Lightning():
            from urdir.model.blocks.lightning import append_lightning

            return append_lightning(at, branch.network, x, norm, to)
