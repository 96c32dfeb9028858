"""Folders of encoders as transformers and sentence-transformers write them, made of llama.cpp's
references: the same weights give the same embeddings and scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from tests.model.engine.encoding.test_encoders import DIFFERENCE, DISTANCE, distance
from urdir.model.engine.encoding.budget import EncoderSettings
from urdir.model.engine.encoding.encoder import Encoder
from urdir.model.engine.engine import Engine
from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.memory.weights import Weights
from urdir.model.text.pair import Pair
from urdir.model.verify.conformance import relative_rms

Values = dict[str, Any]

_SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_MODERN = {
    "token_embd": "model.embeddings.tok_embeddings",
    "token_embd_norm": "model.embeddings.norm",
    "output_norm": "model.final_norm",
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
    "cls": "head.dense",
    "cls.norm": "head.norm",
    "cls.output": "classifier",
}


_GEMMA = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: RoBERTa's, a token that texts of bert-labels3 do not have.
_PADDING = 2
_IDENTITY = "torch.nn.modules.linear.Identity"


def _renamed(names: Mapping[str, str], layers: str) -> Callable[[str], str]:
    def of(name: str) -> str:
        prefix = ""
        if name.startswith("blk."):
            _, number, name = name.split(".", 2)
            prefix = f"{layers}.{number}."
        base, _, suffix = name.rpartition(".")
        return f"{prefix}{names[base]}.{suffix}"

    return of


def _bert(values: Values) -> Values:
    names = {f"{name}": f"bert.{to}" for name, to in _BERT.items() if "embd" in name}
    names |= {"token_types": "bert.embeddings.token_type_embeddings"}
    names |= {"cls": "bert.pooler.dense", "cls.output": "classifier"}
    of = _renamed({**_BERT, **names}, "bert.encoder.layer")
    found = {of(name): value for name, value in values.items()}
    return found | {"bert.embeddings.position_ids": np.arange(4.0)}


def _roberta(values: Values) -> Values:
    """Positions begin after that of padding."""
    values = dict(values)
    positions = values["position_embd.weight"]
    unused = np.ones((_PADDING + 1, positions.shape[1]), np.float32)
    values["position_embd.weight"] = np.concatenate([unused, positions])
    names = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
    of = _renamed({**_BERT, **names}, "roberta.encoder.layer")
    return {of(name): value for name, value in values.items()}


def _modern(values: Values) -> Values:
    of = _renamed(_MODERN, "model.layers")
    return {of(name): np.atleast_2d(value) if name == "cls.output.weight" else value
            for name, value in values.items()}  # fmt: skip


def _labels(count: int) -> dict[str, Any]:
    return {"id2label": {str(number): f"label_{number}" for number in range(count)}}


_CASES: dict[str, list[tuple[str, Callable[[Values], Values], dict[str, Any]]]] = {
    "bert-labels3": [
        ("bert", _bert, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "architectures":
                         ["BertForSequenceClassification"], "type_vocab_size": 2, **_labels(3)}),
        ("roberta", _roberta, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "architectures":
                               ["RobertaForSequenceClassification"], "pad_token_id": _PADDING,
                               "max_position_embeddings": 257 + _PADDING, **_labels(3)}),
    ],
    "modern-bert-rerank": [
        ("modernbert", _modern, {"hidden_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5,
                                 "local_attention": 12, "global_rope_theta": 10000.0,
                                 "local_rope_theta": 5000.0, "classifier_pooling": "mean",
                                 "architectures": ["ModernBertForSequenceClassification"],
                                 **_labels(1)}),
    ],
}  # fmt: skip
_PARAMS = [(name, number) for name, cases in _CASES.items() for number in range(len(cases))]


@pytest.fixture
def stored(reference_file: Callable[[str], Path]) -> Callable[[str], tuple[Values, dict[str, Any]]]:
    """The tensors of a golden, and the fields of its sizes."""

    def read(name: str) -> tuple[Values, dict[str, Any]]:
        path = reference_file(name)
        values = {
            tensor.name: np.asarray(reference.quants.dequantize(tensor.data, tensor.tensor_type))
            for tensor in reference.GGUFReader(path).tensors
        }
        with Gguf(path) as file:
            sizes = {
                of: file.metadata.require(f"{file.architecture}.{key}", int)
                for of, key in _SIZES.items()
            }
        return values, sizes

    return read


def _published(values: Values) -> dict[str, Any]:
    return {name: ("F32", np.ascontiguousarray(of, np.float32)) for name, of in values.items()}


def _texts(path: Path) -> tuple[list[list[int]], dict[str, Any]]:
    """The texts of a golden, in tokens, and all that it has."""
    with np.load(path) as file:
        golden = dict(file)
    ends = np.cumsum(golden["lengths"]).tolist()
    starts = [0, *ends[:-1]]
    return [golden["tokens"][a:b].tolist() for a, b in zip(starts, ends, strict=True)], golden


@pytest.mark.parametrize(("name", "number"), _PARAMS)
def test_a_folder_gives_the_scores_and_embeddings_of_the_golden(
    name: str,
    number: int,
    stored: Callable[[str], tuple[Values, dict[str, Any]]],
    make_folder: Callable[..., Path],
    reference_golden: Callable[[str, str], Path],
    device: Any,
) -> None:
    kind, change, fields = _CASES[name][number]
    values, sizes = stored(name)
    folder = make_folder({**sizes, "model_type": kind, **fields}, _published(change(values)))
    texts, golden = _texts(reference_golden("encoders", name))
    with SafetensorsModel(folder) as model:
        config = Config.of(model)
        with (
            Weights.load(model, config, device) as weights,
            Encoder(device, weights, EncoderSettings(64, 64, exact=True)) as encoder,
        ):
            assert encoder.embedding.labels == tuple(fields["id2label"].values())
            scores, means = encoder.encode(texts), encoder.encode(texts[:1], "mean")
    assert np.abs(scores - golden["score"].reshape(scores.shape)).max() < DIFFERENCE
    if "embedding_mean" in golden:
        assert distance(means, golden["embedding_mean"][:1]) < DISTANCE


@pytest.mark.parametrize(("mode", "pooling"), [("cls_token", "cls"), ("lasttoken", "last")])
def test_a_folder_of_sentence_transformers_says_how_it_pools(
    mode: str,
    pooling: str,
    stored: Callable[[str], tuple[Values, dict[str, Any]]],
    make_folder: Callable[..., Path],
) -> None:
    values, sizes = stored("bert-labels3")
    folder = make_folder({**sizes, "model_type": "bert"}, _published(_bert(values)))
    config = {"pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="classifier"):
        SafetensorsModel(folder)
    kept = {name: of for name, of in _bert(values).items() if not name.startswith("classifier")}
    other = make_folder({**sizes, "model_type": "bert"}, _published(kept))
    (folder / "1_Pooling").rename(other / "1_Pooling")
    with SafetensorsModel(other) as model:
        embedding = Config.of(model).embedding_of_texts
    assert embedding is not None
    assert embedding.pooling == pooling
    assert embedding.scorer is None


@pytest.fixture
def encoded(
    make_folder: Callable[..., Path], device: Any
) -> Callable[[dict[str, Any], Values, Any, str], Any]:
    """What an encoder makes of texts, of a folder of those fields and tensors."""

    def encode(fields: dict[str, Any], values: Values, texts: Any, pooling: str) -> Any:
        with (
            SafetensorsModel(make_folder(fields, _published(values))) as model,
            Weights.load(model, Config.of(model), device) as weights,
            Encoder(device, weights, EncoderSettings(64, 64, exact=True)) as encoder,
        ):
            return encoder.encode(texts, pooling)

    return encode


def test_the_second_text_of_a_pair_has_type_1(
    stored: Callable[[str], tuple[Values, dict[str, Any]]], encoded: Callable[..., Any]
) -> None:
    """As if its tokens were others, whose embeddings have the difference of the types."""
    values, sizes = stored("bert-labels3")
    fields = {**sizes, "model_type": "bert", "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
    fields |= {"architectures": ["BertForSequenceClassification"], **_labels(3)}
    rng = np.random.default_rng(3)
    values["token_types.weight"] = rng.normal(size=(2, sizes["hidden_size"])).astype(np.float32)
    table, types = values["token_embd.weight"], values["token_types.weight"]
    tokens, seconds = rng.integers(0, len(table), (2, 11)).tolist(), (4, 9)
    pairs = [Pair(of, second) for of, second in zip(tokens, seconds, strict=True)]
    found = encoded(fields, _bert(values), [*pairs, tokens[0]], "rank")
    others = np.concatenate([table, table + types[1] - types[0]])
    texts = [
        [*of[:at], *(n + len(table) for n in of[at:])]
        for of, at in zip(tokens, seconds, strict=True)
    ]
    wide = {**values, "token_embd.weight": others}
    expected = encoded(fields, _bert(wide), [*texts, tokens[0]], "rank")
    assert np.abs(found - expected).max() < DIFFERENCE
    assert np.abs(found[0] - found[2]).max() > 100 * DIFFERENCE


def test_positions_of_roberta_do_not_count_padding(
    stored: Callable[[str], tuple[Values, dict[str, Any]]], encoded: Callable[..., Any]
) -> None:
    """As if tokens had their positions in their embeddings, padding that of its own."""
    values, sizes = stored("bert-labels3")
    fields = {**sizes, "model_type": "roberta", "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
    fields |= {"architectures": ["RobertaForSequenceClassification"], **_labels(3)}
    fields |= {"pad_token_id": _PADDING, "max_position_embeddings": 257 + _PADDING}
    rng = np.random.default_rng(4)
    texts = [rng.integers(_PADDING + 1, 99, count).tolist() for count in (11, 5)]
    for text, at in zip(texts, [(0, 4, 5), (4,)], strict=True):
        for number in at:
            text[number] = _PADDING
    published = _roberta(values)
    found = encoded(fields, published, texts, "rank")
    table = values["token_embd.weight"]
    positions = published["embeddings.position_embeddings.weight"]
    rows: list[Any] = []
    others = []
    for text in texts:
        others.append([len(table) + len(rows) + i for i in range(len(text))])
        last = _PADDING
        for token in text:
            last += token != _PADDING
            rows.append(table[token] + positions[_PADDING if token == _PADDING else last])
    published["embeddings.word_embeddings.weight"] = np.concatenate([table, rows])
    published["embeddings.position_embeddings.weight"] = np.zeros_like(positions)
    expected = encoded(fields, published, others, "rank")
    assert np.abs(found - expected).max() < DIFFERENCE


@pytest.mark.references("encoder folders", [])
def test_embeddings_and_scores_are_those_of_transformers(
    device_name: str, name: str, pytestconfig: pytest.Config
) -> None:
    folder = pytestconfig.getoption("--references") / name
    with np.load(folder / "golden.npz") as file:
        golden = dict(file)
    tokens = golden["tokens"].tolist()
    if "yes_id" in golden:
        options = {"device": device_name, "context": 64, "kv_dtype": "f32", "exact": True}
        with Engine.open(folder, cache_folder=None, **options) as engine:
            logits = engine.logits(tokens)[-1]
        yes, no = logits[int(golden["yes_id"])], logits[int(golden["no_id"])]
        assert 1 / (1 + np.exp(no - yes)) == pytest.approx(golden["score"], abs=1e-4)
        assert relative_rms(logits, golden["last_logits"]) < 1e-4
        return
    if "token_type_ids" in golden:
        tokens = Pair(tokens, int(np.argmax(golden["token_type_ids"])))
    with Engine.open(
        folder, device=device_name, embeddings=True, context=64, cache_folder=None, exact=True
    ) as engine:
        if "score" in golden:
            found = engine.embed([tokens], pooling="rank", normalize=False)[0]
            assert found == pytest.approx(golden["score"], rel=1e-4)
            return
        assert relative_rms(engine.embed([tokens])[0], golden["embedding"]) < 1e-4
        if "pooled" not in golden:  # states of all tokens would pass through 2_Dense, too
            states = engine.embed([tokens], pooling="none", normalize=False)
            assert relative_rms(states, golden["last_hidden_state"]) < 1e-4


def test_matrices_follow_pooling(
    stored: Callable[[str], tuple[Values, dict[str, Any]]],
    reference_golden: Callable[[str, str], Path],
    make_folder: Callable[..., Path],
    device: Any,
) -> None:
    """EmbeddingGemma: Gemma 3 with attention to both sides, 2_Dense and 3_Dense."""
    name = "gemma-embedding-dense"
    values, sizes = stored(name)
    fields = {**sizes, "model_type": "gemma3_text", "use_bidirectional_attention": True}
    fields |= {"num_key_value_heads": 1, "head_dim": 64, "query_pre_attn_scalar": 64}
    fields |= {"rope_theta": 1e4, "rope_local_base_freq": 5e3, "sliding_window": 10}
    fields |= {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5}
    dense = {number: values.pop(f"dense_{number}.weight") for number in (2, 3)}
    of = _renamed(_GEMMA, "layers")
    tensors = {of(n): v - np.float32("_norm." in n) for n, v in values.items()}
    folder = make_folder(fields, _published(tensors))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for number, matrix in dense.items():
        inner = make_folder(
            {"activation_function": _IDENTITY}, _published({"linear.weight": matrix})
        )
        inner.rename(folder / f"{number}_Dense")
    texts, golden = _texts(reference_golden("encoders", name))
    with (
        SafetensorsModel(folder) as model,
        Weights.load(model, Config.of(model), device) as weights,
        Encoder(device, weights, EncoderSettings(64, 64, exact=True)) as encoder,
    ):
        found = encoder.encode(texts[:1])
    assert distance(found, golden["embedding_mean"][:1]) < DISTANCE


@pytest.mark.parametrize(
    ("activation", "tensors", "error"),
    [
        ("torch.nn.modules.activation.Tanh", ["linear.weight"], "Tanh is not supported"),
        (None, ["linear.weight"], "None is not supported"),
        (_IDENTITY, ["linear.weight", "linear.bias"], r"tensors linear\.bias, linear\.weight"),
    ],
)
def test_other_matrices_after_pooling_are_refused(
    activation: str | None,
    tensors: list[str],
    error: str,
    stored: Callable[[str], tuple[Values, dict[str, Any]]],
    make_folder: Callable[..., Path],
) -> None:
    values, sizes = stored("bert-labels3")
    kept = {name: of for name, of in _bert(values).items() if not name.startswith("classifier")}
    folder = make_folder({**sizes, "model_type": "bert"}, _published(kept))
    shapes = {"linear.weight": np.ones((4, sizes["hidden_size"])), "linear.bias": np.ones(4)}
    inner = make_folder(
        {"activation_function": activation}, _published({name: shapes[name] for name in tensors})
    )
    inner.rename(folder / "2_Dense")
    with pytest.raises(UnsupportedError, match=error):
        SafetensorsModel(folder)


def test_another_pooling_is_refused(
    stored: Callable[[str], tuple[Values, dict[str, Any]]], make_folder: Callable[..., Path]
) -> None:
    values, sizes = stored("bert-labels3")
    kept = {name: of for name, of in _bert(values).items() if not name.startswith("classifier")}
    folder = make_folder({**sizes, "model_type": "bert"}, _published(kept))
    (folder / "1_Pooling").mkdir()
    config = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"pooling 'pooling_mode_mean_tokens \+ pooling"):
        SafetensorsModel(folder)
