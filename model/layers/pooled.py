"""What comes after the layers of an embedding or ranking model, as operations."""

from __future__ import annotations

from urdir.model.errors import UnsupportedError
from urdir.model.families.embedding import Embedding, Scorer
from urdir.model.families.pooling import Pooling
from urdir.model.families.stored import Linear
from urdir.model.graph.ops import Activate, Bound, Norm, Product
from urdir.model.graph.pooling import Pool
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.ptxgen.kernels.activation import Activation

#: What is made of each text.
RESULT = "pooled"


def embedding_of(step: StepOps) -> Embedding:
    """What the model makes of texts; a plain decoder makes states."""
    return step.config.embedding_of_texts or Embedding(None)


def pooled_width(of: Embedding, hidden: int, pooling: Pooling) -> int:
    """Values of a result. Raises UnsupportedError for scores of a model without them."""
    if pooling == "rank":
        if of.scorer is None:
            raise UnsupportedError("the model makes no scores: it has no classifier (cls.output)")
        return of.scorer.labels
    return of.dense[-1].rows if of.dense else hidden


def encoded(step: StepOps, texts: int, pooling: Pooling) -> Tensor:
    """The results of a step with rows of ``texts`` texts: embeddings, scores, or where nothing is
    pooled the states of all rows."""
    of, graph, config = embedding_of(step), step.graph, step.config
    reads = _reads(of, pooling)
    picks = reads in ("cls", "last")
    x = layers(step, embedding(step), texts if picks else None)
    assert x is not None
    if config.output_norm is not None:
        y = Tensor("normed", x.rows, x.width)
        x = graph.add(Norm("output_norm", y, x, config.output_norm))
    if reads == "mean":
        x = graph.add(Pool("pooling", Tensor("mean", texts, x.width), x))
    if pooling == "rank":
        assert of.scorer is not None
        return _scores(step, of.scorer, x)
    for number, linear in enumerate(of.dense, 2):
        x = _product(step, f"dense_{number}", x, linear)
    return x


def masked_logits(step: StepOps, count: int) -> Tensor:
    """The logits (count, vocabulary) of the rows that are picked."""
    x = layers(step, embedding(step), count)
    assert x is not None
    return head(step, x)


def _reads(of: Embedding, pooling: Pooling) -> Pooling:
    """The states that are pooled."""
    if pooling != "rank":
        return pooling
    assert of.scorer is not None
    return of.scorer.reads


def _product(step: StepOps, label: str, x: Tensor, of: Linear) -> Tensor:
    return step.graph.add(Product(label, Tensor(label, x.rows, of.rows), x, of))


def _scores(step: StepOps, scorer: Scorer, x: Tensor) -> Tensor:
    graph = step.graph
    if scorer.dense is not None:
        x = _product(step, "cls", x, scorer.dense)
        y = Tensor("cls", x.rows, x.width)
        if scorer.gelu:
            x = graph.add(Activate("cls.activation", y, x, Activation("gelu")))
        else:
            x = graph.add(Bound("cls.activation", y, x, softcap=1.0))
    if scorer.norm is not None:
        x = graph.add(Norm("cls.norm", Tensor("normed", x.rows, x.width), x, scorer.norm))
    return x if scorer.output is None else _product(step, "cls.output", x, scorer.output)
