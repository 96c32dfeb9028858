"""A layer as operations: blocks of networks, and what happens to the stream after them."""

from __future__ import annotations

from importlib import import_module

from urdir.model import layers
from urdir.model.families.attention import Attention
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import (
    Block,
    Branch,
    HyperConnection,
    LayerConfig,
    LayerEmbedding,
    LowRankConnection,
    SharedTransformer,
)
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.stored import Linear, Normalization
from urdir.model.graph.ops import Add, Columns, Concat, Copy, Gate, Recall, ScaleBy
from urdir.model.graph.streams import AddToStreams, ReadStreams, WriteStreams
from urdir.model.graph.tensor import BRANCH, STREAM, Tensor
from urdir.model.layers.altup import altup_layer
from urdir.model.layers.attention import attention, cached_keys
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.compression import cached_blocks, compressed_attention
from urdir.model.layers.dense import activation, dense, linear
from urdir.model.layers.mla import cached_latents, latent_attention
from urdir.model.layers.moe import mixture
from urdir.model.layers.streams import gated_mean
from urdir.ptxgen.kernels.activation import Activation

#: The name under which the stream is saved as it begins, where shared transformers read it.
EMBEDDING = "embedding"


def layer(
    step: StepOps,
    index: int,
    x: Tensor,
    outputs: int | None = None,
    of: LayerConfig | None = None,
) -> Tensor:
    """The stream after layer ``index``, of the stream x before it.

    With ``outputs`` this many rows alone go on after attention, where that `begins_with_attention`.
    ``of`` stands for the description's layer, which it is like.
    """
    step.graph.begin_layer()
    config = of or step.config.layers[index]
    at, start = LayerOps(step, index, outputs), x
    if config.altup is not None:
        x, read = altup_layer(at, config, config.altup, x)
        if config.embedding is not None:
            made = _of_embedding(at, config.embedding, read)
            step.streams = [at.add("post_norm", other, made) for other in step.streams]
        return x
    for block in config.blocks:
        x = _block(at, block, x, start)
        at.outputs = None
    return _end(at, config, x)


def layer_keys(step: StepOps, index: int, x: Tensor) -> None:
    """What later tokens need of a layer that begins with attention alone: keys and values."""
    step.graph.begin_layer()
    at, block = LayerOps(step, index), step.config.layers[index].blocks[0]
    branch = block.branches[0]
    assert isinstance(branch.network, Attention)
    x = at.norm("stream_norm", x, block.stream_norm, STREAM)
    if block.hyper is not None:
        x, _ = _read_streams(at, block.hyper, "hc_attn", x)
    x, mixer = at.norm("attn_norm", x, branch.norm), branch.network
    if mixer.compression is not None:
        cached_blocks(at, mixer, mixer.compression, x)
        return
    keys = cached_keys if mixer.latent is None else cached_latents
    keys(at, mixer, x)


def begins_with_attention(layer: LayerConfig) -> bool:
    """Whether a layer's first block is attention alone, and all that follows is made from its sum:
    other rows of the stream before are not needed after it."""
    first, *others = layer.blocks
    alone = len(first.branches) == 1 and first.post_norm is None
    branch, networks = first.branches[0], [b for block in others for b in block.branches]
    return (
        alone
        and not _ends_with_other_rows(layer)
        and first.hyper is None
        and not any(block.recalls for block in layer.blocks)
        and isinstance(branch.network, Attention)
        and not branch.reads_layer_input
        and branch.post_norm is None
        and not any(_reads_other_rows(branch) for branch in networks)
    )


def _ends_with_other_rows(layer: LayerConfig) -> bool:
    """Whether more than a norm of each row happens after the blocks."""
    ends = (layer.embedding, layer.output_scale, layer.saves, layer.adds)
    return layer.altup is not None or any(end is not None for end in ends)


def recalled(at: LayerOps, label: str, block_norm: object, x: Tensor) -> Tensor:
    """The sum of the stream x and of the banked ones; x itself if none are banked."""
    from urdir.model.families.stored import Normalization

    if not isinstance(block_norm, Normalization) or not at.step.banked:
        return x
    y = Tensor("recalled", x.rows, x.width)
    return at.graph.add(Recall(at.name(label), y, x, tuple(at.step.banked), block_norm))


def _reads_other_rows(branch: Branch) -> bool:
    """Whether a network after attention reads what the layer began with, or other tokens."""
    network = branch.network
    if isinstance(network, Mixture) and network.router.reads == "layer":
        return True
    return branch.reads_layer_input or isinstance(network, Attention)


def _block(at: LayerOps, block: Block, x: Tensor, start: Tensor) -> Tensor:
    """x += scale * the networks' results, one after the other, or x += norm(their sum)."""
    x = at.norm("stream_norm", x, block.stream_norm, STREAM)
    if block.hyper is not None:
        return _hyper_block(at, block, block.hyper, x)
    if block.post_norm is not None:
        at.residual = x if block.sums_stream else None
        for branch in block.branches:
            _add_branch(at, branch, x, start, 1.0)
        assert at.residual is not None
        total = at.scale("scale", at.residual, block.scale)
        normed = at.norm("post_norm", total, block.post_norm)
        return at.add("post_norm", x, normed)
    at.residual, read = None if block.banks else x, x
    if block.transformer is not None:
        read = _with_transformer(at, block.transformer, x)
        at.residual = x
    if block.recalls is not None:
        is_ffn = isinstance(block.branches[0].network, Dense | Mixture)
        read = recalled(at, "ffn_recall" if is_ffn else "attn_recall", block.recalls, x)
    if block.banks:
        number = len(at.step.banked)
        y = Tensor(f"banked {number}", x.rows, x.width)
        at.step.banked.append(at.graph.add(Copy(at.name("bank"), y, x)))
    for branch in block.branches:
        _add_branch(at, branch, read, start, block.scale)
    assert at.residual is not None
    return at.residual


def _with_transformer(at: LayerOps, of: SharedTransformer, x: Tensor) -> Tensor:
    """The sum of x and of the shared transformer's result."""
    both = Tensor("both", x.rows, 2 * x.width)
    both = at.graph.add(Concat(at.name("concat"), both, x, at.step.saved[EMBEDDING]))
    at.residual = None
    made = attention(at, of.attention, at.norm("attn_norm_2", both, of.norm, "normed both"), 1.0)
    made = dense(at, of.ffn, at.norm("ffn_norm", made, of.ffn_norm), 1.0)
    return at.add("transformer", x, linear(at, of.linear, made, 1.0))


def _hyper_block(
    at: LayerOps, block: Block, of: HyperConnection | LowRankConnection, x: Tensor
) -> Tensor:
    """The streams x after a block that reads a weighted sum of them, or a gated mean."""
    is_ffn = isinstance(block.branches[0].network, Dense | Mixture)
    label = "hc_ffn" if is_ffn else "hc_attn"
    read, mixes = _read_streams(at, of, label, x)
    at.residual = None
    for branch in block.branches:
        _add_branch(at, branch, read, read, block.scale)
    assert at.residual is not None
    y, written = Tensor(STREAM, x.rows, x.width), at.name(f"{label}_write")
    if isinstance(of, LowRankConnection):
        return at.graph.add(AddToStreams(written, y, x, at.residual, mixes))
    return at.graph.add(WriteStreams(written, y, x, at.residual, mixes, of))


def _read_streams(
    at: LayerOps, of: HyperConnection | LowRankConnection, label: str, x: Tensor
) -> tuple[Tensor, Tensor]:
    """What a block reads of the streams x, and the numbers that its weights are made of."""
    if isinstance(of, LowRankConnection):
        assert of.inject is not None
        read = Tensor("streams read", x.rows, at.config.hidden)
        read, normed = gated_mean(at.graph, at.name, label, of, x, read)
        return read, at.product(f"{label}_inject", normed, of.inject, "mixes")
    normed = at.norm(f"{label}_norm", x, of.norm, "normed streams")
    mixes = at.product(label, normed, of.mixes, "mixes")
    read = Tensor("streams read", x.rows, at.config.hidden)
    return at.graph.add(ReadStreams(at.name(f"{label}_read"), read, x, mixes, of)), mixes


def _add_branch(at: LayerOps, branch: Branch, x: Tensor, start: Tensor, scale: float) -> None:
    """Add a network's result to the residual, after the norm that follows it."""
    source = start if branch.reads_layer_input else x
    if branch.reads_sibling:
        assert at.sibling is not None
        source = at.sibling
    if branch.post_norm is None:
        made = _network(at, branch, source, start, scale)
        label = "sum"
    else:
        before, at.residual = at.residual, None
        made = _network(at, branch, source, start, 1.0)
        if at.residual is not None:
            made = at.add("sum", at.residual, made)
        name = STREAM if before is None else "normed"
        made = at.norm("branch_norm", made, branch.post_norm, name)
        made, at.residual, label = at.scale("branch_norm", made, scale), before, "branch_norm"
    at.sibling = made
    at.residual = made if at.residual is None else at.add(label, at.residual, made)


def _network(at: LayerOps, branch: Branch, x: Tensor, start: Tensor, scale: float) -> Tensor:
    """scale * the network of the norm of x."""
    network = branch.network
    if isinstance(network, Mixture):
        return mixture(at, network, x, branch.norm, start, scale)
    if isinstance(network, Recurrent):
        return _state_mixer(at, network, x, branch.norm, scale)
    if isinstance(network, Dense | Linear | Activation):
        return _feed_forward(at, network, at.norm("ffn_norm", x, branch.norm), scale)
    x = at.norm("attn_norm", x, branch.norm)
    if network.compression is not None:
        return compressed_attention(at, network, network.compression, x, scale)
    made = attention if network.latent is None else latent_attention
    return made(at, network, x, scale)


def _feed_forward(
    at: LayerOps, network: Dense | Linear | Activation, x: Tensor, scale: float
) -> Tensor:
    """scale * a network of each row by itself."""
    match network:
        case Dense():
            return dense(at, network, x, scale)
        case Linear():
            return linear(at, network, x, scale)
        case Activation():
            return activation(at, network, x, scale)


def _end(at: LayerOps, config: LayerConfig, x: Tensor) -> Tensor:
    """Everything after the blocks, in the order that `LayerConfig` says."""
    if config.embedding is not None:
        x = at.add("post_norm", x, _of_embedding(at, config.embedding, x))
    if config.output_scale is not None:
        y = Tensor(STREAM, x.rows, x.width)
        x = at.graph.add(ScaleBy(at.name("layer_output_scale"), y, x, config.output_scale))
    x = at.norm("layer_output_norm", x, config.output_norm, STREAM)
    if config.saves is not None:
        save(at.step, at.name(f"saves.{config.saves}"), config.saves, x)
    if config.adds is not None:
        addend = at.step.saved[config.adds]
        label = at.name(f"adds.{config.adds}")
        if config.adds_scale is not None:
            y = Tensor(BRANCH, x.rows, x.width)
            addend = at.graph.add(ScaleBy(f"{label}.scale", y, addend, config.adds_scale))
        x = at.graph.add(Add(label, Tensor(STREAM, x.rows, x.width), x, addend))
    return x


def save(step: StepOps, label: str, name: str, x: Tensor) -> None:
    """Keep the stream under a name."""
    y = Tensor(f"saved {name}", x.rows, x.width)
    step.saved[name] = step.graph.add(Copy(label, y, x))


def _of_embedding(at: LayerOps, of: LayerEmbedding, x: Tensor) -> Tensor:
    """norm(proj(f(gate x) * e)), with the token's embedding e for this layer."""
    gate = at.product("inp_gate", x, of.gate, "layer gate")
    every = at.step.embeddings
    assert every is not None
    mine = Tensor("layer embedding", x.rows, gate.width)
    label = at.name("inp_gate.activation")
    at.graph.add(Columns(label, mine, every, at.index * gate.width))
    gated = Tensor("layer gate", x.rows, gate.width)
    at.graph.add(Gate(label, gated, gate, mine, of.activation))
    made = at.product("proj", gated, of.proj, BRANCH)
    return at.norm("post_norm", made, of.norm, "normed embedding")


def _state_mixer(
    at: LayerOps, mixer: Recurrent, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * a mixer of the norm of x: records of `families/x.py` have functions in
    `layers/x.py`, listed in its ``MIXERS``."""
    kind = type(mixer)
    module = import_module(f"{layers.__name__}.{kind.__module__.rpartition('.')[2]}")
    made: Tensor = module.MIXERS[kind](at, mixer, x, norm, scale)
    return made
