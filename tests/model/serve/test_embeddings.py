"""Embeddings and scores over HTTP, of a small encoder on the emulator."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.model.tiny_encoder import BEGIN, CONTEXT, END, HIDDEN, write_encoder
from tests.patience import PATIENCE
from urdir.model.cli import build_parser
from urdir.model.commands.serve_opening import open_service
from urdir.model.engine.engine import Engine
from urdir.model.errors import BusyError
from urdir.model.serve.access import Access
from urdir.model.serve.app import make_app
from urdir.model.serve.embedding_service import EmbeddingService
from urdir.model.serve.embeddings import Embeds
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.ollama_model import show
from urdir.model.serve.request_fields import (
    EMBEDDINGS,
    FIELDS,
    NATIVE_EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    RERANK,
    SCORE,
    Handling,
)
from urdir.model.serve.served_model import EngineModel

Post = Callable[[str, Any], httpx.Response]
LONG = "a " * (CONTEXT + 1)


def _served(path: Path) -> Iterator[tuple[Post, Engine]]:
    engine = Engine.open(path, device="emulator", chunk=64, cache_folder=None)
    model = EngineModel(engine, ["tiny"], engine.encoder.context, Defaults(), embeds=True)
    service = EmbeddingService(engine, model)
    app = make_app(service, Access(), Limits(), ServerMetrics())
    loop = asyncio.new_event_loop()

    def post(path: str, body: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                if isinstance(body, list):
                    return (await asyncio.gather(*(client.post(path, json=b) for b in body)))[-1]
                return await client.post(path, json=body)

        return loop.run_until_complete(ask())

    yield post, engine
    loop.run_until_complete(service.close())
    loop.close()


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Post, Engine]]:
    yield from _served(write_encoder(tmp_path_factory.mktemp("embeds") / "tiny.gguf"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Post, Engine]]:
    yield from _served(write_encoder(tmp_path_factory.mktemp("ranks") / "r.gguf", ranks=True))


def test_texts_and_tokens_have_the_engine_s_embeddings(embeds: tuple[Post, Engine]) -> None:
    post, engine = embeds
    texts = ["a warp has 32 threads.", "the weft crosses"]
    tokens = [engine.tokenizer.encode_whole(text) for text in texts]
    assert [of[0] for of in tokens] == [BEGIN, BEGIN]
    assert [of[-1] for of in tokens] == [END, END]
    wanted = engine.embed(texts)
    assert wanted.shape == (2, HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(wanted, axis=1), 1, atol=1e-6)
    for body in (texts, tokens):
        made = post("/v1/embeddings", {"input": body, "model": "tiny"}).json()
        found = np.array([each["embedding"] for each in made["data"]], np.float32)
        np.testing.assert_array_equal(found, wanted)
        assert made["usage"]["prompt_tokens"] == sum(map(len, tokens))
    one = post("/v1/embeddings", {"input": texts[0], "encoding_format": "base64"}).json()
    raw = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(raw, wanted[0], atol=2e-3)
    made = post("/api/embed", {"model": "tiny:latest", "input": texts}).json()
    np.testing.assert_array_equal(np.array(made["embeddings"], np.float32), wanted)
    made = post("/api/embeddings", {"model": "tiny:latest", "prompt": texts[0]}).json()
    np.testing.assert_allclose(np.array(made["embedding"], np.float32), wanted[0], atol=2e-3)


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_embeddings_as_llama_server_has_them(embeds: tuple[Post, Engine], path: str) -> None:
    """Lists of vectors, by a norm of one's choice: the Euclidean one, or llama.cpp's others."""
    post, engine = embeds
    texts = ["a warp has 32 threads.", "the weft crosses"]
    wanted = engine.embed(texts).astype(np.float64)
    for order in (None, 0, 1, 2, 5):
        sizes = np.linalg.norm(wanted, np.inf if order == 0 else order or 2, axis=1)
        sizes = sizes / (32760 if order == 0 else 1)
        made = post(path, {"content": texts, "embd_normalize": order}).json()
        assert [each["index"] for each in made] == [0, 1]
        found = np.array([each["embedding"] for each in made])
        np.testing.assert_allclose(found[:, 0], wanted / sizes[:, None], rtol=1e-6)
    (one,) = post(path, {"input": texts[1]}).json()
    np.testing.assert_allclose(one["embedding"], wanted[1:], atol=2e-3)
    for order in (-1, 65):
        assert post(path, {"content": "a", "embd_normalize": order}).status_code == 400


def test_fewer_dimensions_have_length_one_again(embeds: tuple[Post, Engine]) -> None:
    post, engine = embeds
    made = post("/v1/embeddings", {"input": "a warp", "dimensions": 8}).json()
    wanted = engine.embed("a warp")[0, :8]
    np.testing.assert_allclose(
        made["data"][0]["embedding"], wanted / np.linalg.norm(wanted), atol=1e-6
    )


def test_requests_that_wait_together_get_their_own(embeds: tuple[Post, Engine]) -> None:
    post, engine = embeds
    texts = ["a", "the weft", "cottons", "a warp ?", "32 threads"]
    last = post("/v1/embeddings", [{"input": text} for text in texts]).json()
    found = np.array(last["data"][0]["embedding"])
    np.testing.assert_allclose(found, engine.embed(texts[-1])[0], atol=2e-3)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[99]]}, "vocabulary"),
        ("/v1/embeddings", {"input": [[]]}, "no tokens"),
        ("/v1/embeddings", {"input": "a", "dimensions": HIDDEN + 1}, f"1 to {HIDDEN}"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "f16"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a " * (CONTEXT + 1)]}, "tokens"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "other"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "no answers"),
        ("/v1/completions", {"prompt": "a"}, "no answers"),
    ],
)
def test_what_cannot_be_is_refused(
    embeds: tuple[Post, Engine], path: str, body: Any, says: str
) -> None:
    answer = embeds[0](path, body)
    assert 400 <= answer.status_code < 500
    assert says in answer.json()["error"]["message"]


def test_ollama_cuts_texts_that_are_too_long(embeds: tuple[Post, Engine]) -> None:
    post, _ = embeds
    long = "a " * (CONTEXT + 5)
    assert len(post("/api/embed", {"input": long}).json()["embeddings"]) == 1
    assert post("/api/embed", {"input": long, "truncate": False}).status_code == 400
    assert len(post("/api/embeddings", {"prompt": long}).json()["embedding"]) > 1
    assert post("/api/embeddings", {"prompt": ""}).status_code == 400
    assert post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["embedding"]


def test_a_decoder_for_embeddings_says_that_it_makes_them(demo_file: Path) -> None:
    """And no answers, whatever its template can."""
    words = ["serve", str(demo_file), "--device", "emulator", "--embeddings"]
    args = build_parser("serve").parse([*words, "--pooling", "mean"])
    service = open_service(args, None)
    try:
        shown = show(Fields({"model": service.model.names[0]}), service.model, Limits())
    finally:
        asyncio.run(service.close())
    assert shown["template"]
    assert shown["capabilities"] == ["embedding"]


def test_documents_are_ranked(ranks: tuple[Post, Engine]) -> None:
    post, engine = ranks
    query, documents = "a warp ?", ["32 threads", "the weft", "cotton"]
    wanted = engine.rerank(query, documents)
    pair = engine.tokenizer.encode_pair(query, documents[0])
    assert pair.count(END) == 2
    assert pair.count(BEGIN) == 1
    asked = {"query": query, "documents": documents, "top_n": 2, "return_documents": True}
    answer = post("/v1/rerank", asked).json()
    made, ids = answer["results"], {answer["id"], post("/rerank", asked).json()["id"]}
    assert len(ids) == 2  # as vLLM's and Cohere's have one
    assert post("/reranking", asked).json()["results"] == made
    order = np.argsort(-wanted)[:2].tolist()
    assert [each["index"] for each in made] == order
    assert [each["document"]["text"] for each in made] == [documents[i] for i in order]
    np.testing.assert_array_equal([each["relevance_score"] for each in made], wanted[order])
    scored = post("/v1/score", {"text_1": query, "text_2": documents}).json()["data"]
    np.testing.assert_array_equal([each["score"] for each in scored], wanted)
    assert "no embeddings" in post("/v1/embeddings", {"input": "a"}).json()["error"]["message"]


def test_scores_of_embeddings_are_cosines(embeds: tuple[Post, Engine]) -> None:
    post, engine = embeds
    query, documents = "a warp ?", ["32 threads", "the weft", "a warp ?", "cotton"]
    first, *others = engine.embed([query, *documents]).astype(np.float64)
    wanted = np.array([first @ other for other in others])
    scored = post("/v1/score", {"text_1": query, "text_2": documents}).json()
    np.testing.assert_allclose([each["score"] for each in scored["data"]], wanted, atol=2e-3)
    assert scored["data"][2]["score"] == pytest.approx(1, abs=1e-6)
    texts = [query, "32 threads", "the weft", "cotton"]  # one is twice in the request
    tokens = sum(len(engine.tokenizer.encode_whole(text)) for text in texts)
    assert scored["usage"]["prompt_tokens"] == tokens
    pairs = post("/v1/score", {"text_1": documents, "text_2": documents[::-1]}).json()["data"]
    assert pairs[0]["score"] == pytest.approx(pairs[3]["score"], abs=1e-6)
    ranked = post("/v1/rerank", {"query": query, "documents": documents}).json()["results"]
    assert [each["index"] for each in ranked] == np.argsort(-wanted, kind="stable").tolist()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/api/embed", {"input": LONG, "truncate": False}, None),
        ("/v1/rerank", {"query": "a", "documents": [LONG]}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": [LONG]}, None),
    ],
)
def test_what_is_too_long_is_named(
    embeds: tuple[Post, Engine], path: str, body: Any, field: str | None
) -> None:
    answer = embeds[0](path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path.startswith("/v1"):
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


#: Good requests, by endpoint of the table of fields.
BODIES = {
    EMBEDDINGS: ("/v1/embeddings", {"input": "a"}),
    NATIVE_EMBEDDINGS: ("/embedding", {"input": "a"}),
    OLLAMA_EMBED: ("/api/embed", {"input": "a"}),
    OLLAMA_EMBEDDINGS: ("/api/embeddings", {"prompt": "a"}),
    RERANK: ("/v1/rerank", {"query": "a", "documents": ["a"]}),
    SCORE: ("/v1/score", {"text_1": "a", "text_2": "a"}),
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_fields_are_served_refused_or_without_effect_as_the_table_says(
    embeds: tuple[Post, Engine], ranks: tuple[Post, Engine], endpoint: str
) -> None:
    post, _ = ranks if endpoint in (RERANK, SCORE) else embeds
    path, body = BODIES[endpoint]
    fields = [field for field in FIELDS if endpoint in field.endpoints]
    assert {field.handling for field in fields} >= {Handling.SERVED, Handling.NO_EFFECT}
    passing: Any = {}
    for field in fields:
        if field.handling is Handling.NO_EFFECT:
            passing[field.name] = [[{}]]
            continue
        wrong = post(path, {**body, field.name: [[{}]]})
        assert wrong.status_code == 400, field.name
        assert field.name in str(wrong.json()["error"])
        if field.handling is Handling.REFUSED:
            assert field.note in wrong.json()["error"]["message"]
            passing[field.name] = field.neutral[-1] if field.neutral else None
    assert post(path, {**body, **passing}).status_code == 200


def _service(engine: Engine) -> EmbeddingService:
    return EmbeddingService(
        engine, EngineModel(engine, ["tiny"], engine.encoder.context, Defaults())
    )


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    path = write_encoder(tmp_path / "tiny.gguf")
    return Engine.open(path, device="emulator", chunk=64, cache_folder=None)


def _asked(*texts: tuple[int, ...]) -> Embeds:
    return Embeds(lambda rows, tokens: {}, texts)


def test_a_large_request_leaves_room_for_others_and_ends_when_it_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have 64 rows: 16 texts of four tokens."""
    steps: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()
    encode = engine.encoder.encode

    def noted(texts: Any, pooling: Any = None) -> Any:
        steps.append(len(texts))
        begun.set()
        assert goes_on.wait(PATIENCE)
        return encode(texts, pooling)

    monkeypatch.setattr(engine.encoder, "encode", noted)
    rows = engine.encoder.settings.rows
    a_step = rows // 4
    large = [(BEGIN, 4 + number % 8, 5, END) for number in range(2 * a_step + 1)]

    async def ask() -> None:
        service = _service(engine)
        first = asyncio.create_task(service.embed(_asked(*large)))
        await asyncio.to_thread(begun.wait, PATIENCE)
        second = asyncio.create_task(service.embed(_asked((5,), (6,))))
        dropped = asyncio.create_task(service.embed(_asked(*large)))
        while (await service.metrics()).queued < 2:
            await asyncio.sleep(0.01)
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        goes_on.set()
        found, tokens = await first
        assert tokens == 4 * len(large)
        short, _ = await second
        await service.drain()
        monkeypatch.undo()
        np.testing.assert_allclose(found, engine.embed(large), atol=2e-3)
        np.testing.assert_allclose(short, engine.embed([[5], [6]]), atol=2e-3)
        await service.close()
        with pytest.raises(BusyError, match="ends"):
            await service.embed(_asked((5,)))

    asyncio.run(ask())
    assert steps[0] == a_step
    assert sum(steps) == len(large) + 2
    assert 3 <= len(steps) <= 4
