"""The share of each rank: what is cut where, what stays whole, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.cut import Span, head_spans, rows_of_each, spans
from urdir.model.families.feed_forward import Dense
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.share import shared
from urdir.model.families.stored import Linear, StoredMatrix, StoredVector, stored_in
from urdir.model.files.metadata import Metadata

#: Shapes whose attention and networks all GPUs share evenly, by how many.
EVEN = [
    *(("llama-3.1-8b", n) for n in (2, 4, 8)),
    *(("llama-3.1-70b", n) for n in (2, 4, 8)),
    *(("qwen3-8b", n) for n in (2, 4)),
    *(("qwen2.5-32b", n) for n in (2, 4)),
    ("gemma-3-27b", 4),
    ("mistral-small-24b", 8),
]


def config_of(shape: Shape) -> Config:
    metadata = Metadata(shape.metadata("shape"), "shape")
    return describe(Reader(metadata, shape.arch, shape.stored(), shape.layers))


def shares(shape: Shape, ranks: int, block: int) -> tuple[Config, list[Config]]:
    config = config_of(shape)
    blocks = {of.name: block for of in stored_in(config) if isinstance(of, StoredMatrix)}
    return config, [shared(config, blocks, rank, ranks) for rank in range(ranks)]


def mask_of(linear: Linear, width: int) -> np.ndarray:
    """Which elements (rows, columns) of its tensor a matrix has."""
    matrix = linear.matrix
    rows = np.arange(np.prod(matrix.shape[:-1])).reshape(-1, matrix.period)
    taken = rows[:, matrix.first : matrix.first + matrix.each].ravel()
    mask = np.zeros((rows.size, width), np.int64)
    for first, last in matrix.runs or ((0, taken.size),):
        for start, stop in matrix.columns or ((0, width),):
            mask[taken[first:last], start:stop] = 1
    return mask


def attention(config: Config) -> Attention:
    return config.attentions[0]


def dense(config: Config) -> Dense:
    found = config.layers[0].networks[-1]
    assert isinstance(found, Dense)
    return found


@pytest.mark.parametrize(("name", "ranks"), EVEN)
def test_ranks_have_equal_parts_of_published_models(name: str, ranks: int) -> None:
    whole, parts = shares(replace(SHAPES[name], layers=1), ranks, 256)
    for part in parts:
        assert attention(part).heads == attention(whole).heads // ranks
        assert attention(part).kv_heads == max(1, attention(whole).kv_heads // ranks)
        assert attention(part).o.matrix.columns is not None
        assert dense(part).width == pytest.approx(dense(whole).width / ranks, abs=256)
        assert part.output.rows == pytest.approx(whole.output.rows / ranks, abs=16)
        assert part.embedding == whole.embedding


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_parts_of_all_ranks_are_the_whole(ranks: int) -> None:
    shape = Shape("llama", 1, 256, 12, 12, 32, 416, 1000, False)
    whole, parts = shares(shape, ranks, 32)
    for of in (
        lambda c: (attention(c).q, attention(c).k, attention(c).v, attention(c).o),
        lambda c: (dense(c).gate, dense(c).up, dense(c).down, c.output),
    ):
        for linears in zip(*map(of, (whole, *parts)), strict=True):
            first, *own = linears
            total = sum(mask_of(linear, first.cols) for linear in own)
            assert (total == 1).all()


def test_few_keys_are_on_several_ranks() -> None:
    _, parts = shares(replace(SHAPES["glm-4-9b"], layers=1), 4, 256)
    assert [attention(p).heads for p in parts] == [8] * 4
    assert [attention(p).kv_heads for p in parts] == [1] * 4
    keys = [attention(p).k for p in parts]
    assert [k and k.matrix.first for k in keys] == [4096, 4096, 4224, 4224]


def test_cuts_are_between_blocks() -> None:
    _, parts = shares(replace(SHAPES["qwen2.5-7b"], layers=1), 2, 256)
    assert [dense(p).down.matrix.columns for p in parts] == [((0, 9472),), ((9472, 18944),)]
    shape = Shape("llama", 1, 256, 4, 2, 64, 768, 2048, False)
    _, parts = shares(shape, 2, 256)
    assert [dense(p).down.matrix.columns for p in parts] == [((0, 256),), ((256, 768),)]
    assert [attention(p).o.matrix.columns for p in parts] == [None, None]  # one block


def test_what_cannot_be_cut_is_whole_on_every_rank() -> None:
    shape = Shape("llama", 1, 256, 4, 2, 64, 256, 2048, False)
    whole, parts = shares(shape, 2, 256)
    assert all(part.layers == whole.layers for part in parts)
    assert [part.output.rows for part in parts] == [1024, 1024]
    keys = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
    tensors = ("attn_qkv.weight", "attn_qkv.bias")
    alibi = Shape("bloom", 1, 256, 8, 8, 32, 512, 512, True, keys, tensors)
    whole, parts = shares(alibi, 2, 1)
    assert parts[1].attentions == whole.attentions  # slopes are of all heads
    assert dense(parts[1]).width == 256


def test_networks_whose_last_columns_are_in_an_order_are_whole_on_every_rank() -> None:
    """Of the values of x that some columns are multiplied with, any rank may have some."""

    def ordered(network: Any) -> Any:
        name = "o" if isinstance(network, Attention) else "down"
        of = getattr(network, name)
        return replace(
            network, **{name: replace(of, order=StoredVector.whole("order", of.matrix.cols))}
        )

    config, _ = shares(replace(SHAPES["llama-3.1-8b"], layers=1), 2, 32)
    (layer,) = config.layers
    blocks = [
        replace(of, branches=tuple(replace(b, network=ordered(b.network)) for b in of.branches))
        for of in layer.blocks
    ]
    config = replace(config, layers=(replace(layer, blocks=tuple(blocks)),))
    names = {of.name: 32 for of in stored_in(config) if isinstance(of, StoredMatrix)}
    for rank in range(2):
        assert shared(config, names, rank, 2).layers == config.layers


def test_every_expert_is_cut() -> None:
    whole, parts = shares(replace(SHAPES["mixtral-8x7b"], layers=1), 2, 256)
    (of,) = whole.layers[0].mixtures
    for rank, part in enumerate(parts):
        (mixture,) = part.layers[0].mixtures
        assert mixture.width == of.width // 2
        assert mixture.gate is not None
        for linear in (mixture.gate, mixture.up):
            stored = linear.matrix
            assert (stored.first, stored.each, stored.period) == (7168 * rank, 7168, 14336)
            assert stored.rows == 8 * 7168
        assert mixture.down.matrix.columns == ((7168 * rank, 7168 * (rank + 1)),)
        assert mixture.router == of.router


def test_experts_in_one_tensor_and_their_biases_are_cut() -> None:
    both = Linear(StoredMatrix.whole("both", 4, 128, 32), StoredVector.whole("bias", 4, 128))
    up, gate = both.part(64, 64, 128), both.part(0, 64, 128)
    for linear, start in ((up, 64), (gate, 0)):
        cut = rows_of_each(linear, 64, Span(32, 32))
        stored, bias = cut.matrix, cut.bias
        assert (stored.first, stored.each, stored.period, stored.rows) == (start + 32, 32, 128, 128)
        assert bias is not None
        values = np.arange(4 * 128).reshape(4, 128)
        wanted = values[:, start + 32 : start + 64].ravel()
        assert (bias.of(values) == wanted).all()
        assert bias.size == wanted.size
    alone = Linear(StoredMatrix.whole("up", 4, 64, 32), StoredVector.whole("up bias", 4, 64))
    cut = rows_of_each(alone, 64, Span(0, 32))
    assert (cut.matrix.first, cut.matrix.each, cut.matrix.period) == (0, 32, 64)
    assert cut.bias is not None
    values = np.arange(4 * 64).reshape(4, 64)
    assert (cut.bias.of(values) == values[:, :32].ravel()).all()


def test_the_bias_of_a_sum_is_added_once() -> None:
    shape = replace(SHAPES["gpt2-xl"], layers=1)
    _, parts = shares(shape, 5, 1)
    assert [attention(p).o.bias is not None for p in parts] == [True] + 4 * [False]
    assert [dense(p).down.bias is not None for p in parts] == [True] + 4 * [False]
    assert [dense(p).up.bias for p in parts] == [
        StoredVector("blk.0.ffn_up.bias", (6400,), 1280 * rank, 1280) for rank in range(5)
    ]


def test_heads_of_a_latent_vector_are_cut_and_the_vector_is_not() -> None:
    whole, parts = shares(SHAPES["deepseek-v2-lite"], 4, 256)
    of = attention(whole)
    for part in map(attention, parts):
        assert (part.heads, part.kv_heads, part.key_dim) == (4, 1, of.key_dim)
        assert (part.k, part.v) == (of.k, of.v)
        assert part.latent is not None
        assert part.latent.down == of.latent.down
        assert (part.q.rows, part.latent.q_still.rows) == (4 * 64, 4 * 128)
        assert (part.latent.absorb.rows, part.latent.expand.rows) == (4 * 512, 4 * 128)
    total = sum(mask_of(attention(p).latent.q_still, of.q.cols) for p in parts)
    assert (total == mask_of(of.latent.q_still, of.q.cols)).all()


def test_heads_with_a_state_are_cut_with_their_keys() -> None:
    """Of Qwen 3.5, where heads h and h + 16 have the same keys."""
    whole, parts = shares(replace(SHAPES["qwen3.5-4b"], layers=1), 2, 256)
    (of,) = whole.recurrents
    masks = []
    for rank, part in enumerate(parts):
        (mixer,) = part.recurrents
        assert (mixer.heads, mixer.key_heads) == (16, 8)
        assert mixer.conv.channels == mixer.mixed.rows == of.mixed.rows // 2
        assert mixer.state["state"] == of.state["state"] // 2
        assert mixer.o.matrix.columns == tuple(
            (128 * (at + 8 * rank), 128 * (at + 8 * rank + 8)) for at in (0, 16)
        )
        heads = [*range(8 * rank, 8 * rank + 8), *range(16 + 8 * rank, 24 + 8 * rank)]
        assert mixer.a.of(np.arange(32)).tolist() == heads
        masks.append(mask_of(mixer.mixed, 2560))
    assert (sum(masks) == 1).all()


@pytest.mark.parametrize(
    ("name", "ranks", "cut"),
    [
        ("mamba-2.8b", 4, True),
        ("mamba2-2.7b", 2, False),  # a norm of all heads
        ("nemotron-h-8b", 8, True),  # eight groups
        ("falcon-h1-7b", 4, True),  # no norm
        ("lfm2-8b-a1b", 4, True),
        ("kimi-linear-48b-a3b", 8, True),
        ("qwen3-next-80b-a3b", 4, True),
    ],
)
def test_mixers_with_a_state_are_cut_alike_on_all_ranks(name: str, ranks: int, cut: bool) -> None:
    whole, parts = shares(SHAPES[name], ranks, 256)
    of, *_ = whole.recurrents
    for part in parts:
        mixer, *_ = part.recurrents
        assert (mixer.o.matrix.columns is not None) == cut
        states = [mixer.state[name] for name in mixer.state if name != "tail" or not cut]
        whole_states = [of.state[name] for name in of.state if name != "tail" or not cut]
        assert sum(whole_states) == sum(states) * (ranks if cut else 1)


@pytest.mark.parametrize(
    ("heads", "group", "unit", "ranks", "expected"),
    [
        (32, 4, 1, 3, [8, 12, 12]),
        (12, 6, 1, 3, [3, 3, 6]),
        (32, 16, 1, 8, [4] * 8),
        (28, 7, 2, 2, [14, 14]),
        (28, 7, 2, 4, None),
        (40, 8, 1, 8, [4, 4, 4, 4, 4, 4, 8, 8]),
        (2, 2, 1, 4, None),
    ],
)
def test_heads_are_whole_groups_or_a_part_of_one(
    heads: int, group: int, unit: int, ranks: int, expected: Any
) -> None:
    found = head_spans(heads, group, unit, ranks)
    assert (None if found is None else [span.count for span in found]) == expected


@pytest.mark.parametrize(
    ("things", "ranks", "step", "expected"),
    [
        (8, 2, 1, [4, 4]),
        (10, 4, 1, [2, 3, 2, 3]),
        (768, 2, 256, [256, 512]),
        (160, 4, 32, [32, 32, 64, 32]),
        (3, 4, 1, None),
        (256, 2, 256, None),
    ],
)
def test_things_are_given_out_evenly(things: int, ranks: int, step: int, expected: Any) -> None:
    found = spans(things, ranks, lambda at: at % step == 0)
    assert (None if found is None else [span.count for span in found]) == expected


def test_spans_have_widths() -> None:
    assert Span(2, 3).times(64) == Span(128, 192)
    assert Span(2, 3).stop == 5
