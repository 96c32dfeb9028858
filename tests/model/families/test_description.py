"""Sizes from metadata, checked against every tensor; what does not fit is refused by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from urdir.model.errors import ConfigError, ModelError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.check import VECTOR_TYPES
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import LayerConfig
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.files.gguf import Gguf
from urdir.ptxgen.weights.formats import FORMATS

Maker = Callable[..., Path]
Files = tuple[dict[str, Any], dict[str, Any]]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 64, 4, 2, 16, 96, 50, 2
F32, Q8_0, Q8_1, I8, I32 = 0, 8, 9, 24, 26


def small_model() -> Files:
    """Metadata and tensors, (type, shape, data), of a small llama model that is in order."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return metadata, {name: tensor(shape) for name, shape in shapes.items()}


def tensor(shape: tuple[int, ...], type_id: int = F32) -> tuple[int, tuple[int, ...], bytes]:
    """A tensor of zeros."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
    elements = 1
    for n in shape:
        elements *= n
    return type_id, shape, b"\0" * (elements // block * nbytes)


def read(make_gguf: Maker, files: Files) -> Config:
    with Gguf(make_gguf(*files)) as file:
        return Config.of(file)


def heads(mixer: Attention) -> tuple[int, int, int, int]:
    return mixer.heads, mixer.kv_heads, mixer.key_dim, mixer.value_dim


def mixer_of(layer: LayerConfig) -> Attention:
    mixer, _ = layer.networks
    assert isinstance(mixer, Attention)
    return mixer


def width_of(layer: LayerConfig) -> int:
    _, ffn = layer.networks
    assert isinstance(ffn, Dense)
    return ffn.width


def has_qkv_bias(mixer: Attention) -> bool:
    biases = [part is not None and part.bias is not None for part in (mixer.q, mixer.k, mixer.v)]
    assert len(set(biases)) == 1
    return biases[0]


def refused(make_gguf: Maker, files: Files, error: type[ModelError] = ConfigError) -> str:
    path = make_gguf(*files)
    with Gguf(path) as file, pytest.raises(error) as caught:
        Config.of(file)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert "\n" not in message
    return message


def test_sizes_of_a_small_model(make_gguf: Maker) -> None:
    config = read(make_gguf, small_model())
    assert (config.n_layers, config.hidden) == (LAYERS, HIDDEN)
    for layer in config.layers:
        mixer = mixer_of(layer)
        assert width_of(layer) == FFN
        assert heads(mixer) == (HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
        assert (has_qkv_bias(mixer), mixer.qk_norm) == (False, None)
    assert (config.vocab_size, config.context_length) == (VOCAB, 128)
    assert config.output_norm is not None
    assert config.output_norm.norm.eps == pytest.approx(1e-5)
    assert (config.tied, config.output.bias) == (False, None)
    (rope,) = config.ropes
    assert (rope.dim, rope.style, rope.factors) == (HEAD_DIM, "interleaved", None)
    assert rope.freq_base == 10000.0
    with pytest.raises(FrozenInstanceError):
        config.hidden = 1  # type: ignore[misc]


def test_the_demo_model(demo_file: Path) -> None:
    with Gguf(demo_file) as file:
        config = Config.of(file)
    assert (config.n_layers, config.hidden, config.vocab_size) == (6, 256, 2048)
    assert {width_of(layer) for layer in config.layers} == {768}
    assert {heads(mixer_of(layer)) for layer in config.layers} == {(4, 2, 64, 64)}
    assert config.tied


def test_a_description_names_every_tensor_of_every_model_once(
    data: Path, demo_file: Path, reference_file: Callable[[str], Path]
) -> None:
    names = sorted(path.stem for path in (data / "golden").glob("*.npz"))
    assert len(names) >= 15
    others = ("gemma3-dense", "phi3-dense", "llama-dense")  # two ropes, stacked matrices, factors
    for path in (*map(reference_file, (*names, *others)), demo_file):
        with Gguf(path) as file:
            config = Config.of(file)
            table = list(stored_in(config))
            found = {
                name: (tensor.shape, tensor.type_name) for name, tensor in file.tensors.items()
            }
        values: Counter[str] = Counter()
        for of in table:  # parts of a fused tensor are references of their own
            values[of.name] += of.rows * of.cols if isinstance(of, StoredMatrix) else of.size
        assert values == {name: math.prod(shape) for name, (shape, _) in found.items()}
        for reference in table:
            shape, type_name = found[reference.name]
            assert reference.shape == shape
            is_matrix = isinstance(reference, StoredMatrix)
            assert type_name in (FORMATS if is_matrix else VECTOR_TYPES)
            assert is_matrix == (len(shape) > 1)  # of experts three
        ways = 2 if "gemma3" in path.name else 1  # its layers with windows have a base of their own
        has_factors = any("rope_f" in name for name in found)
        assert [rope.factors is not None for rope in config.ropes] == [has_factors] * ways


@pytest.mark.parametrize(
    ("name", "style", "qkv_bias", "qk_norm"),
    [
        ("nano-llama-q4_k_m", "interleaved", False, False),
        ("nano-qwen2-q4_k_m", "half", True, False),
        ("qwen3-dense", "half", True, True),
    ],
)
def test_what_tells_the_families_apart(
    reference_file: Callable[[str], Path], name: str, style: str, qkv_bias: bool, qk_norm: bool
) -> None:
    with Gguf(reference_file(name)) as file:
        config = Config.of(file)
    assert config.architecture in name
    for layer in config.layers:
        mixer = mixer_of(layer)
        assert mixer.rope is not None
        assert mixer.rope.style == style
        assert (has_qkv_bias(mixer), mixer.qk_norm is not None) == (qkv_bias, qk_norm)


def test_layers_are_described_one_by_one(make_gguf: Maker) -> None:
    """Shapes of each, and one RoPE for those that rotate alike."""
    metadata, tensors = small_model()
    metadata |= {
        "llama.attention.head_count": np.array([HEADS, 8], np.uint32),
        "llama.attention.head_count_kv": np.array([KV_HEADS, 4], np.uint32),
        "llama.feed_forward_length": np.array([FFN, 32], np.uint32),
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 8,
    }
    expected = {}
    for layer, queries, keys, width in ((0, HEADS, KV_HEADS, FFN), (1, 8, 4, 32)):
        for name, shape in (
            ("attn_q.weight", (queries * 16, HIDDEN)),
            ("attn_k.weight", (keys * 16, HIDDEN)),
            ("attn_v.weight", (keys * 8, HIDDEN)),
            ("attn_q.bias", (queries * 16,)),
            ("attn_k.bias", (keys * 16,)),
            ("attn_v.bias", (keys * 8,)),
            ("attn_output.weight", (HIDDEN, queries * 8)),
            ("ffn_gate.weight", (width, HIDDEN)),
            ("ffn_up.weight", (width, HIDDEN)),
            ("ffn_down.weight", (HIDDEN, width)),
        ):
            expected[f"blk.{layer}.{name}"] = shape
    tensors |= {name: tensor(shape) for name, shape in expected.items()}
    tensors["rope_freqs.weight"] = tensor((8,))
    config = read(make_gguf, (metadata, tensors))
    shapes = {reference.name: reference.shape for reference in stored_in(config)}
    assert {name: shapes[name] for name in expected} == expected
    assert shapes["rope_freqs.weight"] == (8,)

    first, second = config.layers
    assert [heads(mixer_of(layer)) for layer in config.layers] == [
        (HEADS, KV_HEADS, 16, 8),
        (8, 4, 16, 8),
    ]
    (rope,) = config.ropes
    other = replace(rope, freq_base=5e5)
    block = second.blocks[0]
    branch = replace(block.branches[0], network=replace(mixer_of(second), rope=other))
    second = replace(second, blocks=(replace(block, branches=(branch,)), second.blocks[1]))
    assert replace(config, layers=(first, second, first)).ropes == (rope, other)


def test_a_tied_model(make_gguf: Maker) -> None:
    metadata, tensors = small_model()
    del tensors["output.weight"]
    assert read(make_gguf, (metadata, tensors)).tied


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_of_the_output(make_gguf: Maker, tied: bool) -> None:
    metadata, tensors = small_model()
    tensors["output.bias"] = tensor((VOCAB,))
    if tied:
        del tensors["output.weight"]
    config = read(make_gguf, (metadata, tensors))
    assert config.tied == tied
    assert config.output.bias is not None
    assert (config.output.bias.name, config.output.bias.size) == ("output.bias", VOCAB)
    assert (config.output.matrix == config.embedding) == tied


@pytest.mark.parametrize("missing", ["blk.0.attn_k.bias", "blk.1.attn_q.bias", "blk.1.attn_v.bias"])
def test_biases_of_queries_keys_and_values_come_together(make_gguf: Maker, missing: str) -> None:
    metadata, tensors = small_model()
    for layer in range(LAYERS):
        for name, count in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            tensors[f"blk.{layer}.{name}.bias"] = tensor((count * HEAD_DIM,))
    config = read(make_gguf, (metadata, dict(tensors)))
    assert all(has_qkv_bias(mixer_of(layer)) for layer in config.layers)
    del tensors[missing]
    assert f"tensor '{missing}' " in refused(make_gguf, (metadata, tensors))


def test_norms_of_heads_are_qwen3_s(make_gguf: Maker) -> None:
    metadata, tensors = small_model()
    for layer in range(LAYERS):
        for name in ("attn_q_norm", "attn_k_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = tensor((HEAD_DIM,))
    message = refused(make_gguf, (metadata, tensors), UnsupportedError)
    assert "tensor 'blk.0.attn_q_norm.weight' is not supported in a 'llama' model" in message
    metadata = {key.replace("llama.", "qwen3."): value for key, value in metadata.items()}
    metadata["general.architecture"] = "qwen3"
    layers = read(make_gguf, (metadata, tensors)).layers
    assert all(mixer_of(layer).qk_norm for layer in layers)


def test_the_vocabulary_size_is_the_embedding_s(make_gguf: Maker) -> None:
    metadata, tensors = small_model()
    metadata["llama.vocab_size"] = 7
    assert read(make_gguf, (metadata, tensors)).vocab_size == VOCAB


def test_kv_heads_default_to_heads(make_gguf: Maker) -> None:
    metadata, tensors = small_model()
    del metadata["llama.attention.head_count_kv"]
    for layer in range(LAYERS):
        for name in ("attn_k", "attn_v"):
            tensors[f"blk.{layer}.{name}.weight"] = tensor((HEADS * HEAD_DIM, HIDDEN))
    assert mixer_of(read(make_gguf, (metadata, tensors)).layers[0]).kv_heads == HEADS


def test_a_head_dim_of_its_own(make_gguf: Maker) -> None:
    metadata, tensors = small_model()
    metadata |= {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    for layer in range(LAYERS):
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            tensors[f"blk.{layer}.{name}.weight"] = tensor((heads * 32, HIDDEN))
        tensors[f"blk.{layer}.attn_output.weight"] = tensor((HIDDEN, HEADS * 32))
    config = read(make_gguf, (metadata, tensors))
    mixer = mixer_of(config.layers[0])
    assert mixer.rope is not None
    assert (mixer.key_dim, mixer.value_dim, mixer.rope.dim) == (32, 32, 32)


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(make_gguf: Maker, key: str) -> None:
    metadata, tensors = small_model()
    del metadata[key]
    assert f"metadata key '{key}' is missing" in refused(make_gguf, (metadata, tensors))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 0, "'llama.block_count' is 0, expected a positive number"),
        ("llama.block_count", -2, "'llama.block_count' is -2"),
        ("llama.block_count", "2", "'llama.block_count' is str '2', expected an integer"),
        ("llama.block_count", True, "'llama.block_count' is bool 'True', expected an integer"),
        ("llama.block_count", 4_000_000_000, "beyond what 32 bits hold"),
        ("llama.block_count", 2_000_000_000, "2,000,000,000 layers, at most 512 are supported"),
        ("llama.block_count", 512, "tensor 'blk.2.attn_q.weight' (64, 64) is missing"),
        ("llama.embedding_length", 0, "embedding_length"),
        ("llama.attention.head_count", 0, "head_count"),
        ("llama.attention.head_count_kv", 3, "4 query heads are not a multiple of 3 KV heads"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "rms_epsilon' is 0.0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "not a finite number"),
        ("llama.rope.dimension_count", 0, "dimension_count is 0"),
        ("llama.rope.dimension_count", 7, "dimension_count is 7, expected an even number"),
        ("llama.rope.dimension_count", 32, "dimension_count is 32"),
        ("llama.rope.freq_base", 1.0, "freq_base is 1.0"),
        ("llama.rope.freq_base", float("inf"), "freq_base' is inf, not a finite number"),
        ("llama.rope.scaling.factor", -2.0, "metadata key 'llama.rope.scaling.factor' is -2.0"),
        ("general.architecture", 3, "'general.architecture' is int '3', expected a string"),
    ],
)
def test_a_bad_value_is_named(make_gguf: Maker, key: str, value: object, message: str) -> None:
    metadata, tensors = small_model()
    metadata[key] = value
    assert message in refused(make_gguf, (metadata, tensors))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "pockettts", "architecture 'pockettts' is not supported"),
        ("general.architecture", "x\ny", r"architecture 'x\ny'"),
        ("llama.rope.scaling.type", "dynamic", "scaling.type is 'dynamic'"),
        ("llama.attention.causal", False, "llama.attention.causal is false"),
    ],
)
def test_what_is_not_supported_is_named(
    make_gguf: Maker, key: str, value: object, message: str
) -> None:
    metadata, tensors = small_model()
    metadata[key] = value
    assert message in refused(make_gguf, (metadata, tensors), UnsupportedError)


def test_every_missing_tensor_is_named(make_gguf: Maker) -> None:
    _, complete = small_model()
    for name in complete.keys() - {"output.weight"}:
        metadata, tensors = small_model()
        del tensors[name]
        message = refused(make_gguf, (metadata, tensors))
        assert f"tensor '{name}'" in message
        assert message.endswith("is missing")


def test_every_wrong_shape_is_named_with_both_shapes(make_gguf: Maker) -> None:
    _, complete = small_model()
    for name in complete.keys() - {"token_embd.weight"}:
        metadata, tensors = small_model()
        shape = tensors[name][1]
        tensors[name] = tensor((shape[0] + 1, *shape[1:]))
        expected = ", ".join(map(str, shape))
        found = ", ".join(map(str, tensors[name][1]))
        assert (
            f"tensor '{name}' has shape ({found}), the metadata require ({expected})"
        ) in refused(make_gguf, (metadata, tensors))


@pytest.mark.parametrize(
    ("name", "type_id", "type_name"),
    [
        ("blk.1.ffn_down.weight", Q8_1, "Q8_1"),
        ("token_embd.weight", I8, "I8"),
        ("output.weight", I32, "I32"),
        ("output_norm.weight", Q8_0, "Q8_0"),
    ],
)
def test_a_tensor_type_that_is_not_supported_is_named(
    make_gguf: Maker, name: str, type_id: int, type_name: str
) -> None:
    metadata, tensors = small_model()
    tensors[name] = tensor(tensors[name][1], type_id)
    message = refused(make_gguf, (metadata, tensors), UnsupportedError)
    assert f"tensor '{name}' has type {type_name}; supported here: " in message


@pytest.mark.parametrize(
    "name",
    ["blk.0.ffn_norm.bias", "blk.0.ffn_gate_inp.weight", "blk.2.attn_norm.weight", "extra"],
)
def test_a_tensor_that_would_be_ignored_is_refused(make_gguf: Maker, name: str) -> None:
    metadata, tensors = small_model()
    tensors[name] = tensor((HIDDEN,))
    assert f"tensor '{name}' is not supported in a 'llama' model" in refused(
        make_gguf, (metadata, tensors), UnsupportedError
    )


def test_a_vocabulary_without_a_model_is_refused(vocab_file: Callable[[str], Path]) -> None:
    with Gguf(vocab_file("llama-spm")) as file, pytest.raises(ConfigError, match="token_embd"):
        Config.of(file)
