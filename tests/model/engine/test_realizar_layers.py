"""Realizar's layers and forward passes on models made from sizes, against numpy in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.model.stepping import stepping
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.errors import LaunchError
from urdir.driver.execute import BoundPlan
from urdir.driver.memory import Slice
from urdir.driver.stream import Stream
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.realizar import (
    EagerSteps,
    Layers,
    LayerWeights,
    describe,
    flash_decoding_graphed,
    forward_gpu_resident,
    forward_gpu_resident_to_token_id,
    make_weights,
    record,
    transformer_layer_indexed,
    transformer_layer_workspace,
)
from urdir.model.engine.runner import Observer
from urdir.model.errors import ConfigError, ContextFullError, ModelError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense
from urdir.model.families.stored import Linear, StoredMatrix, StoredVector
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Matrix, Weights

Floats = npt.NDArray[Any]

#: Relative to the largest value: f32 throughout, where a GPU's sines are off by 2^-20.5;
#: activations rounded to 16-bit integers and an f16 cache; activations and probabilities of a
#: prompt rounded to f16.
EXACT, ROUNDED, PROMPT = 4e-5, 6e-4, 2e-3


# ---- the independent computation ----


def normed(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def turned(heads: Floats, position: int, interleaved: bool) -> Floats:
    """Heads (heads, head_dim) turned by RoPE of whole heads, base 10,000."""
    y, dim = heads.copy(), heads.shape[1]
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * 10000.0 ** (-2 * i / dim)
        y[:, a] = heads[:, a] * math.cos(angle) - heads[:, b] * math.sin(angle)
        y[:, b] = heads[:, a] * math.sin(angle) + heads[:, b] * math.cos(angle)
    return y


class Reference:
    """A model in float64: a token at a time, with a cache of lists."""

    def __init__(self, config: Config, arrays: dict[str, Floats]) -> None:
        self.config, self.mixer = config, mixer_of(config)
        self.arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
        self.keys: list[list[Floats]] = [[] for _ in config.layers]
        self.values: list[list[Floats]] = [[] for _ in config.layers]

    def layer(self, index: int, x: Floats) -> Floats:
        """x (hidden,) -> (hidden,); keys and values are appended."""
        m, eps = self.mixer, 1e-5

        def get(name: str) -> Floats:
            return self.arrays[f"blk.{index}.{name}"]

        y = normed(x, get("attn_norm.weight"), eps)
        q, k, v = (get(f"attn_{n}.weight") @ y for n in "qkv")
        if m.q.bias is not None:
            q, k, v = (a + get(f"attn_{n}.bias") for a, n in ((q, "q"), (k, "k"), (v, "v")))
        q, k, v = q.reshape(m.heads, -1), k.reshape(m.kv_heads, -1), v.reshape(m.kv_heads, -1)
        if m.qk_norm:
            q, k = (normed(a, get(f"attn_{n}_norm.weight"), eps) for a, n in ((q, "q"), (k, "k")))
        position = len(self.keys[index])
        assert m.rope is not None
        q, k = (turned(a, position, m.rope.style == "interleaved") for a in (q, k))
        self.keys[index].append(k)
        self.values[index].append(v)
        keys, values = np.stack(self.keys[index]), np.stack(self.values[index])
        attended = np.empty_like(q)
        for head in range(m.heads):
            group = head // (m.heads // m.kv_heads)
            scores = keys[:, group] @ q[head] / math.sqrt(m.key_dim)
            weights = np.exp(scores - scores.max())
            attended[head] = weights @ values[:, group] / weights.sum()
        x = x + get("attn_output.weight") @ attended.reshape(-1)
        y = normed(x, get("ffn_norm.weight"), eps)
        gate, up = get("ffn_gate.weight") @ y, get("ffn_up.weight") @ y
        return x + get("ffn_down.weight") @ (gate / (1 + np.exp(-gate)) * up)

    def logits(self, token: int) -> Floats:
        """Logits (vocab,) of the token after ``token``."""
        x = self.arrays["token_embd.weight"][token]
        for index in range(self.config.n_layers):
            x = self.layer(index, x)
        x = normed(x, self.arrays["output_norm.weight"], 1e-5)
        return self.arrays["output.weight"] @ x


def mixer_of(config: Config) -> Attention:
    mixer = config.layers[0].attention
    assert mixer is not None
    return mixer


def check(found: Floats, wanted: Floats, tolerance: float) -> None:
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


# ---- weights from arrays ----


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """GGUF tensor names and shapes, written out."""
    m, hidden, dense = mixer_of(config), config.hidden, config.layers[0].networks[-1]
    assert isinstance(dense, Dense)
    ffn = dense.width
    queries, keys = m.heads * m.key_dim, m.kv_heads * m.key_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (config.vocab_size, hidden),
    }
    for i in range(config.n_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }
        if m.q.bias is not None:
            layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if m.qk_norm:
            layer |= {f"attn_{n}_norm.weight": (m.key_dim,) for n in "qk"}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_arrays(config: Config, kind: str, seed: int = 0) -> dict[str, Floats]:
    """f32 values by tensor name; those of matrices are what ``kind`` can hold."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, shape in shapes_of(config).items():
        array = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("norm.weight"):
            arrays[name] = 1 + array / 4
        elif len(shape) == 1:
            arrays[name] = array / 2
        else:
            blocks = quantize(array / math.sqrt(shape[1]), GGMLQuantizationType[kind])
            arrays[name] = dequantize(blocks, GGMLQuantizationType[kind])
    return arrays


#: Model, weight type, exact arithmetic, tolerance of a step.
CASES = {
    "llama": ({"heads": 4, "kv_heads": 2, "head_dim": 64}, "F32", True, EXACT),
    "qwen2": (
        {"heads": 7, "kv_heads": 1, "head_dim": 64, "rope_style": "half", "qkv_bias": True},
        "Q8_0",
        False,
        ROUNDED,
    ),
    "qwen3": (
        {"heads": 2, "kv_heads": 2, "head_dim": 80, "rope_style": "half", "qk_norm": True},
        "Q4_0",
        False,
        ROUNDED,
    ),
}


class Made:
    """A model of random weights on a device, and its reference."""

    def __init__(self, device: Device, name: str) -> None:
        sizes, kind, self.exact, self.tolerance = CASES[name]
        self.config = describe(layers=2, hidden=192, ffn=256, vocab=100, **sizes)  # type: ignore[arg-type]
        self.arrays = random_arrays(self.config, kind)
        self.weights = make_weights(device, self.config, kind, self.arrays)
        self.device = device

    def layers(self, **sizes: Any) -> Layers:
        kv_dtype = "f32" if self.exact else "f16"
        return Layers(self.device, self.weights, kv_dtype=kv_dtype, exact=self.exact, **sizes)

    def reference(self) -> Reference:
        return Reference(self.config, self.arrays)

    def hidden(self, rows: int, seed: int = 3) -> Floats:
        values = np.random.default_rng(seed).standard_normal((rows, self.config.hidden))
        return values.astype(np.float32)

    def buffer(self, rows: int) -> Slice:
        nbytes = 4 * rows * self.config.hidden
        return self.device.allocate(nbytes, "hidden states").slice(0, nbytes)


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, device_name: str) -> Iterator[Made]:
    with Device.open(device_name) as device:
        model = Made(device, request.param)
        with model.weights:
            yield model


@pytest.fixture(scope="module")
def qwen2(device_name: str) -> Iterator[Made]:
    with Device.open(device_name) as device:
        model = Made(device, "qwen2")
        with model.weights:
            yield model


# ---- layers ----


@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_token_by_token(made: Made, in_place: bool) -> None:
    """From the first position to the last; the input's buffer may be the output's."""
    reference = made.reference()
    with made.layers(max_len=5) as layers:
        x = made.buffer(1)
        y = x if in_place else made.buffer(1)
        for position, row in enumerate(made.hidden(5)):
            x.upload(row)
            assert transformer_layer_indexed(layers, 1, x, y) == [position + 1]
            found = y.download(np.float32)
            check(found, reference.layer(1, row.astype(np.float64)), made.tolerance)
            if not in_place:
                np.testing.assert_array_equal(x.download(np.float32), row)
        assert layers.lengths == [[0], [5]]


@pytest.mark.turns(2, which=1)
def test_a_layer_of_several_sequences(made: Made) -> None:
    """A prompt of three tokens of one sequence, then a token each of three."""
    with made.layers(max_len=32, sequences=3, tokens=3, page_len=16) as layers:
        references = [made.reference() for _ in range(3)]
        prompt = made.hidden(3, seed=9)
        layers.hidden.upload(prompt)
        assert transformer_layer_workspace(layers, 0, sequences=(1,), tokens=3) == [3]
        wanted = [references[1].layer(0, row.astype(np.float64)) for row in prompt]
        tolerance = made.tolerance if made.exact else PROMPT
        check(layers.hidden.download(np.float32, (3, 192)), np.stack(wanted), tolerance)
        for length in (1, 2):
            rows = made.hidden(3, seed=length)
            layers.hidden.upload(rows)
            order = (2, 1, 0)
            found = transformer_layer_workspace(layers, 0, sequences=order)
            assert found == [length, length + 3, length]
            wanted = [
                references[s].layer(0, row.astype(np.float64))
                for s, row in zip(order, rows, strict=True)
            ]
            check(layers.hidden.download(np.float32, (3, 192)), np.stack(wanted), tolerance)


@pytest.mark.slow
def test_a_prompt_on_tensor_cores(qwen2: Made) -> None:
    reference = qwen2.reference()
    with qwen2.layers(max_len=40, tokens=20) as layers:
        for rows in (qwen2.hidden(20), qwen2.hidden(20, seed=1)):
            layers.hidden.upload(rows)
            transformer_layer_workspace(layers, 0, tokens=20)
            wanted = np.stack([reference.layer(0, row.astype(np.float64)) for row in rows])
            check(layers.hidden.download(np.float32, (20, 192)), wanted, PROMPT)
        with pytest.raises(ContextFullError):
            transformer_layer_workspace(layers, 0)


@pytest.mark.turns(2)
def test_all_layers_recorded(made: Made) -> None:
    """One graph of both layers: equal to eager bit for bit, one node a launch."""
    reference, rows, found = made.reference(), made.hidden(4), []
    for is_recorded in (False, True):
        with made.layers(max_len=8) as layers:

            def both(to: Any) -> list[int]:
                transformer_layer_workspace(to, 0)
                return transformer_layer_workspace(to, 1)

            with record(layers, both) as step:
                assert step.node_count == len(step.plan)
                for length, row in enumerate(rows, 1):
                    layers.hidden.upload(row)
                    assert (step.launch() if is_recorded else both(layers)) == [length]
                    found.append(layers.hidden.download(np.float32))
                assert layers.lengths == [[4], [4]]
    np.testing.assert_array_equal(found[:4], found[4:])
    for row, y in zip(rows, found, strict=False):
        wanted = reference.layer(1, reference.layer(0, row.astype(np.float64)))
        check(y, wanted, 2 * made.tolerance)


def test_a_layer_with_the_callers_weights(qwen2: Made) -> None:
    """Those of the other layer, and the cache of this one; attention operations go on from it."""
    reference, row = qwen2.reference(), qwen2.hidden(1)
    with qwen2.layers(max_len=4) as layers:
        x, y = qwen2.buffer(1), qwen2.buffer(1)
        x.upload(row)
        transformer_layer_indexed(layers, 0, x, y, weights=LayerWeights(qwen2.weights, 1))
        check(y.download(np.float32), reference.layer(1, row[0].astype(np.float64)), ROUNDED)
        q, out = (layers.device.allocate(4 * 7 * 64, name) for name in ("q", "out"))
        q.upload(np.ones((7, 64), np.float32))
        assert flash_decoding_graphed(layers, 0, q, out) == [1]
        check(out.download(np.float32, (7, 64)), np.tile(reference.values[1][0], (7, 1)), ROUNDED)


# ---- the whole model ----


TOKENS = (5, 99, 0, 42)


class Eager:
    """Runs a session's steps launch by launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.launches: list[int] = []

    def run(self, bound: BoundPlan, stream: Stream) -> None:
        self.launches.append(len(bound))
        execute.run(bound, self.device, stream)


@contextmanager
def open_steps(
    made: Made, sequences: int = 1, observer: Observer | None = None
) -> Iterator[EagerSteps]:
    kv_dtype = "f32" if made.exact else "f16"
    settings = SessionSettings(16, kv_dtype, exact=made.exact, sequences=sequences)
    with stepping(made.device, made.weights, settings, observer) as eager:
        yield eager


@pytest.mark.turns(2, which=1)
def test_forward_gpu_resident(made: Made) -> None:
    """Logits of every token; recorded and eager are equal bit for bit."""
    reference, found = made.reference(), []
    with open_steps(made) as eager:
        for position, token in enumerate(TOKENS):
            found.append(forward_gpu_resident(eager, token, position=position))
            check(found[-1], reference.logits(token), 3 * made.tolerance)
        assert eager.lengths == [4]
        shape = StepShape(1, 256, Output.LOGITS)
        launches = len(eager.session.steps.bound(shape))
        assert eager.session.steps.graph(shape).node_count == launches
    observer = Eager(made.device)
    with open_steps(made, observer=observer) as eager:
        for token, logits in zip(TOKENS, found, strict=True):
            np.testing.assert_array_equal(forward_gpu_resident(eager, token), logits)
    assert observer.launches == [launches] * 4


@pytest.mark.turns(2)
def test_forward_gpu_resident_to_token_id(made: Made) -> None:
    """On the device and on the host, in two sequences, the caller free to go on otherwise."""
    references = [made.reference(), made.reference()]
    with open_steps(made, sequences=2) as eager:
        for position, token in enumerate(TOKENS):
            for sequence, correctness in ((0, False), (1, True)):
                found = forward_gpu_resident_to_token_id(
                    eager,
                    token + sequence * (token < 99),
                    position=position,
                    sequence=sequence,
                    correctness=correctness,
                )
                logits = references[sequence].logits(token + sequence * (token < 99))
                assert logits[found] >= logits.max() - 3 * made.tolerance * np.abs(logits).max()
        assert eager.lengths == [4, 4]
        logits = forward_gpu_resident(eager, 7)
        check(logits, references[0].logits(7), 3 * made.tolerance)


def test_ties_go_to_the_lowest_id(device: Device) -> None:
    """Three rows of the output matrix are the winner's."""
    config = describe(layers=1, hidden=64, heads=1, ffn=64, vocab=90)
    arrays = random_arrays(config, "F32")
    output = arrays["output.weight"]
    output[[17, 60, 89]] = output[Reference(config, arrays).logits(3).argmax()]
    winner = int(Reference(config, arrays).logits(3).argmax())
    output[winner] = output[17] if winner >= 17 else output[winner] / 2
    assert Reference(config, arrays).logits(3).argmax() == 17
    with (
        make_weights(device, config, "F32", arrays) as weights,
        stepping(device, weights, SessionSettings(8)) as eager,
    ):
        logits = forward_gpu_resident(eager, 3)
        assert logits[17] == logits[60] == logits[89] == logits.max()
        for correctness in (False, True):
            eager.truncate(0)
            assert forward_gpu_resident_to_token_id(eager, 3, correctness=correctness) == 17


def test_a_forward_pass_refuses(qwen2: Made) -> None:
    with stepping(qwen2.device, qwen2.weights, SessionSettings(2)) as eager:
        for run in (forward_gpu_resident, forward_gpu_resident_to_token_id):
            with pytest.raises(ModelError, match="position 3: sequence 0 has 0 tokens"):
                run(eager, 1, position=3)
            with pytest.raises(ModelError, match="100 is outside"):
                run(eager, 100)
            with pytest.raises(ModelError, match="sequence 1: the session has 1"):
                run(eager, 1, sequence=1)
            assert eager.lengths == [0]
        for token in (1, 2):
            forward_gpu_resident_to_token_id(eager, token)
        cache = eager.session.parts.cache.arguments(0)["k_cache"]
        keys = cache.download(np.uint8)
        for run in (forward_gpu_resident, forward_gpu_resident_to_token_id):
            with pytest.raises(ContextFullError):
                run(eager, 1)
        assert eager.lengths == [2]
        np.testing.assert_array_equal(cache.download(np.uint8), keys)


# ---- what is refused ----


class Broken:
    """Weights, but for the bytes of one tensor."""

    def __init__(self, weights: Weights, name: str, value: Any) -> None:
        self.config, self.rope_tables = weights.config, weights.rope_tables
        self._weights, self._name, self._value = weights, name, value

    def matrix(self, of: Linear) -> Matrix:
        found = self._weights.matrix(of)
        return replace(found, data=self._value) if of.matrix.name == self._name else found

    def vector(self, of: StoredVector) -> Any:
        return self._value if of.name == self._name else self._weights.vector(of)


@pytest.mark.parametrize("wrong", ["null", "closed", "too small", "another device"])
def test_buffers_and_weights_are_refused_by_name(qwen2: Made, device_name: str, wrong: str) -> None:
    with qwen2.layers(max_len=4) as layers, Device.open(device_name) as other:
        layers.hidden.fill(0)
        transformer_layer_workspace(layers, 0)
        before = [memory.download(np.uint8) for memory in layers.cache.arguments(0).values()]
        closed = layers.device.allocate(1 << 20, "closed one")
        bit = layers.hidden.slice(0, 16, "bit")
        bad: dict[str, tuple[Any, str]] = {
            "null": (None, "null"),
            "closed": (closed.slice(0, 1 << 20), "is closed"),
            "too small": (bit, "'bit' has 16"),
            "another device": (other.allocate(1 << 20, "far one"), "'far one' belongs to another"),
        }
        closed.close()
        value, text = bad[wrong]
        x = qwen2.buffer(1)
        for arguments, name in (((value, x), "x"), ((x, value), "y")):
            with pytest.raises(LaunchError, match=rf"blk\.0: argument '{name}'.*{text}"):
                transformer_layer_indexed(layers, 0, *arguments)
        kinds = ("attn_norm", "attn_output", "attn_k", "ffn_down")
        for name in (*(f"blk.0.{kind}.weight" for kind in kinds), "blk.0.attn_v.bias"):
            broken = LayerWeights(cast(Weights, Broken(qwen2.weights, name, value)), 0)
            with pytest.raises(LaunchError, match=rf"tensor '{re.escape(name)}'.*{text}"):
                transformer_layer_indexed(layers, 0, x, x, weights=broken)
        assert layers.lengths == [[1], [0]]
        for memory, old in zip(layers.cache.arguments(0).values(), before, strict=True):
            np.testing.assert_array_equal(memory.download(np.uint8), old)


@pytest.mark.slow
def test_a_layer_refuses_what_does_not_fit(qwen2: Made) -> None:
    with qwen2.layers(max_len=2, tokens=2, sequences=2) as layers:
        for change, text in (
            ({"heads": 1}, r"attn_q\.weight'.*\(64, 192\) given, \(448, 192\)"),
            ({"rms_eps": 1e-6}, r"blk\.0: layer 0 of the given weights is no such layer"),
        ):
            sizes: dict[str, Any] = {**CASES["qwen2"][0], **change}
            other = describe(layers=1, hidden=192, ffn=256, vocab=100, **sizes)
            with make_weights(qwen2.device, other, "Q8_0") as weights:
                given = LayerWeights(weights, 0)
                with pytest.raises(LaunchError, match=text):
                    transformer_layer_indexed(
                        layers, 0, layers.hidden, layers.hidden, weights=given
                    )
        with pytest.raises(ModelError, match="up to 2"):
            transformer_layer_workspace(layers, 0, tokens=3)
        with pytest.raises(ModelError, match="of one sequence"):
            transformer_layer_workspace(layers, 0, tokens=2, sequences=(0, 1))
        layers.hidden.fill(0)
        transformer_layer_workspace(layers, 0, tokens=2)
        with pytest.raises(ContextFullError, match="exceed the cache's 2"):
            transformer_layer_workspace(layers, 0)
        assert layers.lengths == [[2, 0], [0, 0]]


def test_made_weights_are_checked(device: Device) -> None:
    config = describe(layers=1, hidden=64, heads=1, ffn=64, vocab=8)
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight' has shape \(3, 64\)"):
        make_weights(device, config, "F32", {"blk.0.attn_q.weight": np.zeros((3, 64))})
    with pytest.raises(UnsupportedError, match=r"'blk\.1\.attn_q\.weight' is not supported"):
        make_weights(device, config, "F32", {"blk.1.attn_q.weight": np.zeros((64, 64))})
    with pytest.raises(ConfigError, match="multiples of 256"):
        make_weights(device, config, "Q4_K")
    with pytest.raises(ConfigError, match="none of"):
        make_weights(device, config, "Q9")
    with pytest.raises(ConfigError, match="not a multiple of 2"):
        describe(layers=1, hidden=64, heads=3, kv_heads=2, ffn=64, vocab=8)
    wide = describe(layers=1, hidden=256, heads=4, ffn=256, vocab=8)
    with pytest.raises(ConfigError, match=r"'token_embd\.weight'.*give its blocks"):
        make_weights(device, wide, "Q4_K", {"token_embd.weight": np.zeros((8, 256))})
    for kind in ("Q4_K", "BF16"):
        with make_weights(device, wide, kind) as weights:
            q = weights.matrix(StoredMatrix.whole("blk.0.attn_q.weight", 256, 256))
            assert q.format.name == kind
