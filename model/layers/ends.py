"""What comes before the layers of a model and after them, as operations."""

from __future__ import annotations

from urdir.model.families.description import LayerEmbeddings
from urdir.model.families.layers import LowRankConnection
from urdir.model.graph.ops import (
    Add,
    AddVector,
    AllGather,
    Bound,
    Embed,
    Hide,
    Norm,
    Product,
    Scale,
)
from urdir.model.graph.streams import JoinStreams
from urdir.model.graph.switch import SwitchRows
from urdir.model.graph.tensor import STREAM, Tensor
from urdir.model.layers.altup import further_streams, merged
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.layer import recalled, save
from urdir.model.layers.streams import gated_mean


def embedding(step: StepOps) -> Tensor:
    """The stream as it begins (`Config`)."""
    config, graph = step.config, step.graph
    table, scale, tokens = config.embedding, config.embedding_scale, None
    if config.switch is not None:
        tokens = Tensor("tokens", step.rows, 1, "u32")
        graph.add(SwitchRows("switch", tokens, config.switch, config.vocab_size))
    y = step.stream()
    x = graph.add(Embed("token_embd", y, table, scale, config.positions, tokens=tokens))
    if config.token_type is not None:
        x = graph.add(AddVector("token_types", step.stream(), x, config.token_type))
    if config.token_types is not None:
        types = Tensor("token types", x.rows, x.width)
        types = graph.add(Embed("token_types", types, config.token_types, types=True))
        x = graph.add(Add("token_types", step.stream(), x, types))
    if config.embedding_norm is not None:
        x = graph.add(Norm("token_embd_norm", step.stream(), x, config.embedding_norm))
    if config.layer_embeddings is not None:
        step.embeddings = _layer_embeddings(step, config.layer_embeddings, x)
    step.streams = further_streams(step, x)
    if config.saves is not None:
        save(step, f"saves.{config.saves}", config.saves, x)
    if config.adds is not None:
        x = graph.add(AddVector("adds", step.stream(), x, config.adds))
    return x


def _layer_embeddings(step: StepOps, of: LayerEmbeddings, x: Tensor) -> Tensor:
    """Those of all layers (rows, layers * width): see `LayerEmbeddings`."""
    graph, width = step.graph, of.proj.rows

    def tensor(name: str) -> Tensor:
        return Tensor(name, x.rows, width)

    mine, projected = "layer embeddings", "layer projections"
    scale = of.scale * of.input_scale
    own = graph.add(Embed("per_layer_token_embd", tensor(mine), of.table, scale))
    y = graph.add(Product("per_layer_model_proj", tensor(projected), x, of.proj))
    if of.proj_scale != 1.0:
        y = graph.add(Scale("per_layer_model_proj", tensor(projected), y, of.proj_scale))
    label = "per_layer_proj_norm"
    y = graph.add(Norm(label, tensor(projected), y, of.norm, of.width))
    if of.input_scale != 1.0:
        y = graph.add(Scale(label, tensor(projected), y, of.input_scale))
    return graph.add(Add(label, tensor(mine), own, y))


def output_stream(step: StepOps, x: Tensor) -> Tensor:
    """The stream that the output's norm is of."""
    if step.config.has_streams:
        return joined_streams(step, x)
    last = LayerOps(step, step.config.n_layers - 1)
    return recalled(last, "output_recall", step.config.recalls, merged(step, x))


def joined_streams(step: StepOps, x: Tensor) -> Tensor:
    """One stream, of several."""
    graph, of = step.graph, step.config.join
    if of is None:
        return graph.add(JoinStreams("streams.mean", step.stream(x.rows), x))
    if isinstance(of, LowRankConnection):
        return gated_mean(graph, str, "output_hc", of, x, step.stream(x.rows))[0]
    normed = graph.add(
        Norm("output_hc_norm", Tensor("normed streams", x.rows, x.width), x, of.norm)
    )
    mixes = graph.add(
        Product("output_hc", Tensor("mixes", x.rows, of.mixes.rows), normed, of.mixes)
    )
    return graph.add(JoinStreams("output_hc_join", step.stream(x.rows), x, mixes, of))


def head(step: StepOps, x: Tensor, logits: str = "logits") -> Tensor:
    """The ``logits`` (rows, vocabulary) of the stream x."""
    config, graph, name = step.config, step.graph, logits
    if config.share is not None:
        name = "own logits"
    if config.output_norm is not None:
        y = Tensor("normed", x.rows, x.width)
        x = graph.add(Norm("output_norm", y, x, config.output_norm))
    width = config.output.rows

    def tensor() -> Tensor:
        return Tensor(name, x.rows, width)

    y = graph.add(Product("output", tensor(), x, config.output))
    if config.logit_scale != 1.0:
        y = graph.add(Scale("output", tensor(), y, config.logit_scale))
    if config.softcap:
        y = graph.add(Bound("output", tensor(), y, softcap=config.softcap))
    if config.share is not None:
        whole = Tensor(logits, x.rows, config.vocab_size)
        y = graph.add(AllGather("logits_of_ranks", whole, y))
    if config.hides is not None:
        y = graph.add(Hide("output.hidden", Tensor(logits, y.rows, y.width), y, *config.hides))
    return y


def received(step: StepOps) -> Tensor:
    """The stream of the rank before, as an input."""
    return step.graph.input(Tensor(STREAM, step.rows, step.config.hidden))
