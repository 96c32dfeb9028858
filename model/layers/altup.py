"""Layers with several streams (AltUp, LAuReL), as in Gemma 3n, as operations.

    p = predictions of the streams by coefficients of the first one (`PredictStreams`)
    n = norm(p_0),  m = (p_0 + norm(attention n) + n + norm(laurel n)) / sqrt(2)
    y = corrections of p by m + norm(network(norm(m))) (`CorrectStreams`)
    y_i += norm(proj(gelu(gate (y_0 * scale)) * e)) for i > 0, e being the token's embedding

Coefficients are products of tanh(router (norm(x) / hidden)).
"""

from __future__ import annotations

import math

from urdir.model.families.attention import Attention
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import AltUp, LayerConfig
from urdir.model.families.stored import Linear
from urdir.model.graph.altup import CorrectStreams, MatchLength, PredictStreams
from urdir.model.graph.ops import Activate, Add, Product, Scale
from urdir.model.graph.tensor import STREAM, Tensor
from urdir.model.layers.attention import attention
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.dense import dense
from urdir.ptxgen.kernels.activation import Activation


def altup_layer(at: LayerOps, config: LayerConfig, of: AltUp, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first stream after the blocks of a layer, and that which the embedding's gate reads; the
    other streams are ``at.step.streams``."""
    streams = (x, *at.step.streams)
    results = tuple(Tensor(STREAM, x.rows, x.width) for _ in streams)
    coefs = _coefficients(at, "altup_predict", of, of.predict, x)
    op = PredictStreams(at.name("altup_predict"), results[0], streams, coefs, results)
    active = at.graph.add(op)
    made = _network(at, config, _attention(at, config, of, active))
    coefs = _coefficients(at, "altup_correct", of, of.correct, made)
    corrected = tuple(Tensor(STREAM, x.rows, x.width) for _ in streams)
    scaled = Tensor("scaled stream", x.rows, x.width)
    label, scale = at.name("altup_correct"), of.correct_scale
    at.graph.add(
        CorrectStreams(label, corrected[0], results, made, coefs, scale, corrected, scaled)
    )
    at.step.streams = list(corrected[1:])
    return corrected[0], scaled


def _attention(at: LayerOps, config: LayerConfig, of: AltUp, x: Tensor) -> Tensor:
    """(x + norm(attention n) + n + norm(laurel n)) / sqrt(2), n being the norm of x."""
    (branch,) = config.blocks[0].branches
    assert isinstance(branch.network, Attention)
    read = at.norm("attn_norm", x, branch.norm, "attention input")
    low = at.product("laurel_l", read, of.laurel[0], "laurel low")
    laurel = at.product("laurel_r", low, of.laurel[1], "laurel")
    laurel = at.norm("laurel_post_norm", laurel, of.laurel_norm, "normed laurel")
    at.residual = None
    made = attention(at, branch.network, read, 1.0)
    total = at.add("attn_residual", x, at.norm("post_attention_norm", made, branch.post_norm))
    total = at.add("laurel", at.add("laurel_input", total, read), laurel)
    return at.scale("attn_laurel", total, 1.0 / math.sqrt(2.0))


def _network(at: LayerOps, config: LayerConfig, x: Tensor) -> Tensor:
    """x + norm(network(norm(x)))."""
    (branch,) = config.blocks[1].branches
    assert isinstance(branch.network, Dense)
    made = dense(at, branch.network, at.norm("ffn_norm", x, branch.norm), 1.0)
    return at.add("ffn_residual", x, at.norm("post_ffw_norm", made, branch.post_norm))


def _coefficients(at: LayerOps, label: str, of: AltUp, linear: Linear, x: Tensor) -> Tensor:
    """Products of tanh(router (norm(x) / hidden))."""
    read = at.norm(f"{label}.router_norm", x, of.router_norm, "router input")
    y = at.product(f"{label}.router", read, of.router, "modalities")
    y = at.scale(f"{label}.router", y, 1.0 / x.width)
    z = Tensor("modality", y.rows, y.width)
    y = at.graph.add(Activate(at.name(f"{label}.tanh"), z, y, Activation("tanh")))
    return at.product(f"{label}.coefs", y, linear, "coefficients")


def further_streams(step: StepOps, x: Tensor) -> list[Tensor]:
    """The streams beside x at the start."""
    return _products(step, "altup_proj", step.config.streams, [x] * len(step.config.streams), x)


def merged(step: StepOps, x: Tensor) -> Tensor:
    """The mean of x and of what the other streams end as; x without others."""
    if not step.streams:
        return x
    for made in _products(step, "altup_unembd_proj", step.config.merges, step.streams, x):
        y = Tensor(STREAM, x.rows, x.width)
        x = step.graph.add(Add("altup_sum", y, x, made))
    y = Tensor(STREAM, x.rows, x.width)
    return step.graph.add(Scale("altup_mean", y, x, 1.0 / (1 + len(step.streams))))


def _products(
    step: StepOps, label: str, of: tuple[Linear, ...], x: list[Tensor], target: Tensor
) -> list[Tensor]:
    """The product of each stream, as long as the target."""
    found = []
    for number, (linear, stream) in enumerate(zip(of, x, strict=True), 1):
        own = f"{label}.{number}"
        y, z = Tensor("unmatched", stream.rows, linear.rows), step.stream(stream.rows)
        y = step.graph.add(Product(own, y, stream, linear))
        found.append(step.graph.add(MatchLength(f"{own}.length", z, y, target)))
    return found
