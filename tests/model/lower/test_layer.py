"""What a layer may have beside its two blocks, and a model beside its layers, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.model.engine.realizar import describe
from urdir.model.engine.realizar.from_sizes import MadeFile
from urdir.model.families.config import Config
from urdir.model.families.description import LayerEmbeddings
from urdir.model.families.layers import Block, Branch, LayerConfig, LayerEmbedding
from urdir.model.families.stored import Linear, Normalization, StoredMatrix, StoredVector
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm

HIDDEN, VOCAB = 64, 40
RMS = Norm("rms", 1e-5)
TOLERANCE = 1e-4


def norm(name: str, kind: Norm = RMS, width: int = HIDDEN) -> Normalization:
    bias = StoredVector.whole(f"{name}.bias", width) if kind.bias else None
    return Normalization(kind, StoredVector.whole(f"{name}.weight", width), bias)


def factor(name: str) -> StoredVector:
    return StoredVector.whole(name, 1)


def matrix(name: str, *shape: int) -> Linear:
    return Linear(StoredMatrix.whole(f"{name}.weight", *shape))


def layers(config: Config, *changes: dict[str, Any]) -> Config:
    """Other fields of the first layers."""
    changed = [replace(layer, **c) for layer, c in zip(config.layers, changes, strict=False)]
    return replace(config, layers=(*changed, *config.layers[len(changed) :]))


def output_scale(config: Config) -> Config:
    return layers(config, {"output_scale": factor("blk.0.scale")}, {})


def output_norm(config: Config) -> Config:
    with_bias = Norm("layer", 1e-5, bias=True)
    return layers(config, {}, {"output_norm": norm("blk.1.output_norm", with_bias)})


def saves_and_adds(config: Config) -> Config:
    """The stream of layer 0 after its scale is added twice, once weighted."""
    return layers(
        config,
        {"output_scale": factor("blk.0.scale"), "saves": "a"},
        {"adds": "a", "adds_scale": factor("blk.1.adds"), "saves": "b"},
        {"adds": "b"},
    )


def saved_embedding(config: Config) -> Config:
    """The model's beginning is kept, and a vector added to the stream."""
    config = replace(config, saves="start", adds=StoredVector.whole("adds.weight", HIDDEN))
    return layers(config, {}, {"adds": "start"})


def layer_embeddings(config: Config) -> Config:
    width = 32
    extra = LayerEmbeddings(
        table=StoredMatrix.whole("per_layer.weight", VOCAB, 3 * width),
        scale=4.0,
        proj=matrix("per_layer_proj", 3 * width, HIDDEN),
        proj_scale=0.5,
        norm=norm("per_layer_norm", width=width),
        input_scale=0.75,
        width=width,
    )
    ends = (
        LayerEmbedding(
            gate=matrix(f"blk.{i}.inp_gate", width, HIDDEN),
            proj=matrix(f"blk.{i}.proj", HIDDEN, width),
            norm=norm(f"blk.{i}.post_norm"),
            activation=Activation("gelu"),
        )
        for i in range(3)
    )
    changes = [{"embedding": end} for end in ends]
    changes[1]["output_scale"] = factor("blk.1.scale")  # type: ignore[assignment]
    return layers(replace(config, layer_embeddings=extra), *changes)


def parallel(config: Config) -> Config:
    """Both networks read the layer's input, each after a norm of its own; scaled together."""
    changed = []
    for layer in config.layers:
        before, after = (block.branches[0] for block in layer.blocks)
        changed.append(LayerConfig((Block((before, after), None, 0.5),)))
    return replace(config, layers=tuple(changed))


def sum_normed(config: Config) -> Config:
    """Norms of each result, and of the sum of two, the first of which reads the layer's input."""
    changed = []
    for i, layer in enumerate(config.layers):
        before, after = (block.branches[0] for block in layer.blocks)
        before = replace(before, post_norm=norm(f"blk.{i}.post_attention"))
        after = replace(after, reads_layer_input=True, post_norm=norm(f"blk.{i}.post_ffn"))
        beside = Branch(Activation("relu2"), norm(f"blk.{i}.beside"))
        both = Block((after, beside), norm(f"blk.{i}.post_sum"), 1.5)
        changed.append(LayerConfig((Block((before,), None, 0.7), both)))
    return replace(config, layers=tuple(changed))


def lone_networks(config: Config) -> Config:
    """A matrix in the place of attention, an activation in that of the other network."""
    first = LayerConfig(
        (
            Block((Branch(matrix("blk.0.attn_output", HIDDEN, HIDDEN), norm("blk.0.attn_norm")),)),
            Block((Branch(Activation("relu2"), norm("blk.0.ffn_norm")),), None, 0.5),
        )
    )
    return replace(config, layers=(*config.layers[1:], first))


def outside(config: Config) -> Config:
    """Learned positions, a norm and a scale at the beginning; a scale and a cap at the end."""
    return replace(
        config,
        positions=StoredMatrix.whole("positions.weight", 256, HIDDEN),
        embedding_scale=1.5,
        embedding_norm=norm("embedding_norm", Norm("layer", 1e-5, bias=True)),
        logit_scale=0.4,
        softcap=2.0,
    )


CASES = [
    *(output_scale, output_norm, saves_and_adds, saved_embedding, layer_embeddings, parallel),
    *(sum_normed, lone_networks, outside),
]


@pytest.fixture(scope="module")
def device(device_name: str) -> Iterator[Device]:
    with Device.open(device_name) as opened:
        yield opened


def made(config: Config) -> MadeFile:
    rng = np.random.default_rng(3)
    shapes = {name: t.shape for name, t in MadeFile(config, "F32", {}).tensors.items()}
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32) / 4 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    return MadeFile(config, "F32", arrays)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_logits_are_the_references(
    case: Callable[[Config], Config], device: Device, reference_model: Any
) -> None:
    """After a prompt in two steps, single tokens, and rows of two sequences in one step."""
    sizes = {"layers": 3, "hidden": HIDDEN, "heads": 2, "ffn": 96, "vocab": VOCAB}
    config = case(describe(**sizes, context=256))
    file = made(config)
    reference = reference_model(file, config)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 14)]
    wanted, other = reference.logits(tokens), reference.logits([7, 3])
    plain = reference_model(file, describe(**sizes, context=256))

    def check(found: Any, expected: Any) -> None:
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()

    with (
        Weights.load(file, config, device) as weights,
        stepping(device, weights, SessionSettings(256, "f32", exact=True, sequences=2)) as eager,
    ):
        eager.feed(tokens[:11])
        check(eager.logits()[0], wanted[10])
        eager.feed(tokens[11:12])
        check(eager.logits()[0], wanted[11])
        eager.feed([7], 1)
        eager.feed(tokens[12:13], 0)
        rows = eager.logits((1, 0))
        check(rows[0], other[0])
        check(rows[1], wanted[12])
        eager.feed([3], 1)
        check(eager.logits((1,))[0], other[1])
    if case is not lone_networks:  # it has no weights of layer 0's kind
        assert np.abs(plain.logits(tokens) - wanted).max() > 0.01 * np.abs(wanted).max()
