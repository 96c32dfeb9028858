"""Embeddings and scores of a model of every kind, against llama.cpp's (`tests/data/encoders`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import Eager
from urdir.model.engine.encoding import encoder as encoder_module
from urdir.model.engine.encoding.budget import EncoderSettings
from urdir.model.engine.encoding.encoder import Encoder
from urdir.model.engine.engine import Engine
from urdir.model.families.pooling import Pooling
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.attention.short_texts import ShortTexts

#: The contract: cosine distance of embeddings, difference of scores, in exact mode.
DISTANCE, DIFFERENCE = 1e-6, 1e-4
NAMES = [
    "bert-labels3",
    "nomic-bert-moe",
    "modern-bert-rerank",
    "jina-bert-v2-code",
    "gemma-embedding-dense",
    "t5encoder",
    "qwen3-rerank",
]


@dataclass(frozen=True)
class Golden:
    """An engine, texts, and what llama.cpp makes of them by pooling; ``native``: the error of its
    own kernels."""

    engine: Engine
    texts: list[list[int]]
    wanted: dict[Pooling, Any]
    native: float

    def encoder(self, *, exact: bool = False, observer: Any = None) -> Encoder:
        """An encoder for a few rows on the engine's weights."""
        settings = EncoderSettings(64, 64, exact)
        return Encoder(self.engine.device, self.engine.weights, settings, observer)


@pytest.fixture(scope="module")
def golden(
    request: pytest.FixtureRequest,
    device_name: str,
    reference_file: Callable[[str], Path],
    reference_golden: Callable[[str, str], Path],
) -> Iterator[Golden]:
    with np.load(reference_golden("encoders", request.param)) as file:
        ends = np.cumsum(file["lengths"]).tolist()
        starts = [0, *ends[:-1]]
        texts = [file["tokens"][a:b].tolist() for a, b in zip(starts, ends, strict=True)]
        native = float(file["native"])
        wanted: dict[Pooling, Any] = {}
        for name in file.files:
            if name == "score":
                wanted["rank"] = file[name]
            elif name.startswith("embedding_"):
                wanted[name.removeprefix("embedding_")] = file[name]  # type: ignore[index]
    with Engine.open(
        reference_file(request.param), device=device_name, embeddings=True, context=64, chunk=64
    ) as engine:
        yield Golden(engine, texts, wanted, native)


def distance(a: Any, b: Any) -> float:
    """The largest cosine distance of two rows."""
    a, b = (np.asarray(of, np.float64) for of in (a, b))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.max(1 - (a * b).sum(axis=1) / lengths))


of_each = pytest.mark.references("encoders", NAMES, argument="golden")


@of_each
@pytest.mark.turns(4)
def test_exact_results_are_llama_cpp_s(golden: Golden) -> None:
    with golden.encoder(exact=True) as encoder:
        for pooling, wanted in golden.wanted.items():
            found = encoder.encode(golden.texts, pooling)
            if pooling == "rank":
                assert np.abs(found - wanted).max() <= DIFFERENCE
            else:
                assert distance(found, wanted) <= DISTANCE
                assert relative_rms(found, wanted) <= DIFFERENCE


@of_each
@pytest.mark.turns(3, which=1)
def test_default_results_are_at_least_as_near_as_llama_cpp_s(golden: Golden) -> None:
    for pooling, wanted in golden.wanted.items():
        found = golden.engine.embed(golden.texts, pooling=pooling, normalize=False)
        if pooling == "rank":
            scale = max(1.0, float(np.abs(wanted).max()))
            assert np.abs(found - wanted).max() <= scale * max(2e-3, 1.1 * golden.native)
        else:
            assert relative_rms(found, wanted) <= max(2e-3, 1.1 * golden.native)


class Numbered:
    """A vocabulary whose texts are numbers of a golden's; a pair is that of both together."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.texts[int(text)] for text in texts]

    def encode_pair(self, query: str, document: str) -> list[int]:
        return self.texts[int(query + document)]


@pytest.mark.references("encoders", NAMES[2:3], argument="golden")
def test_pairs_have_scores(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranking model's, as llama.cpp has them; with another pooling the cosine of two texts."""
    if "rank" not in golden.wanted:
        pytest.skip("no ranking model")
    engine, count = golden.engine, len(golden.texts)
    monkeypatch.setattr(engine._texts, "_tokenizer", Numbered(golden.texts))
    numbers = [str(number) for number in range(count)]
    wanted = golden.wanted["rank"][:, 0]
    scale = max(1.0, float(np.abs(wanted).max()))
    for found in (engine.score([("", of) for of in numbers]), engine.rerank("", numbers)):
        assert found.shape == (count,)
        assert np.abs(found - wanted).max() <= scale * max(2e-3, 1.1 * golden.native)
    pairs = [text for of in golden.texts for text in (of, golden.texts[0])]
    rows = engine.embed(pairs, pooling="cls", normalize=False).astype(np.float64)
    found = engine.score([(of, numbers[0]) for of in numbers], pooling="cls")
    assert found == pytest.approx(
        1
        - np.array(
            [distance(rows[i : i + 1], rows[i + 1 : i + 2]) for i in range(0, len(rows), 2)]
        ),
        abs=1e-6,
    )
    assert engine.score([], pooling="rank").shape == (0,)


#: Whether `ShortTexts` serves attention: not with biases by distance or norms of heads.
SERVED = {name: name != "gemma-embedding-dense" for name in (*NAMES[:3], "gemma-embedding-dense")}


@pytest.mark.references("encoders", list(SERVED), argument="golden")
@pytest.mark.turns(2)
def test_short_texts_attend_without_a_cache(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """From heads in f16, and the results are those of longer texts' kernels."""
    pooling: Pooling = "none" if "none" in golden.wanted else "last"
    used, found = [], []
    for most in (128, 0):
        monkeypatch.setattr(encoder_module, "MOST_TOKENS", most)
        plan = golden.engine.encoder.plan([40, 3], pooling)
        used.append({kernel.name for kernel in plan.kernels()})
        attention = [kernel for kernel in plan.kernels() if isinstance(kernel, ShortTexts)]
        assert all(kernel.halves for kernel in attention)
        found.append(golden.engine.encoder.encode(golden.texts, pooling))
    serves = "short_texts" in used[0]
    name = request.node.callspec.params["golden"]
    assert serves == SERVED.get(name, serves)
    assert ("prepare_tokens" in used[0]) != serves
    assert "short_texts" not in used[1]
    assert relative_rms(found[0], found[1]) <= 1e-3


@pytest.mark.references("encoders", NAMES[2:3], argument="golden")
def test_a_batch_equals_its_texts_and_a_graph_its_launches(golden: Golden) -> None:
    """What is beside a text decides kernels, and where its keys lie in tiles, not what it is."""
    pooling: Pooling = "mean" if "mean" in golden.wanted else "last"
    together = golden.engine.embed(golden.texts, pooling=pooling)
    alone = [golden.engine.embed([text], pooling=pooling) for text in golden.texts]
    assert relative_rms(np.concatenate(alone), together) <= 1e-3
    again = golden.engine.embed(golden.texts, pooling=pooling)
    np.testing.assert_array_equal(again, together)
    with golden.encoder(observer=Eager()) as launches:
        eager = launches.encode(golden.texts, pooling)
    lengths = np.linalg.norm(eager.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(eager / lengths, together, rtol=0, atol=1e-7)
