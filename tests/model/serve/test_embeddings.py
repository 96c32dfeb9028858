"""Embeddings and scores over HTTP, of a small encoder on the emulator."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.model.tiny_encoder import BEGIN, CONTEXT, END, HIDDEN, write_encoder
from urdir.model.engine.encoding.encoder import Floats
from urdir.model.engine.engine import Engine
from urdir.model.serve.access import Access
from urdir.model.serve.app import make_app
from urdir.model.serve.embedding_service import EmbeddingService
from urdir.model.serve.embeddings import Embeds
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.served_model import EngineModel

Post = Callable[[str, Any], httpx.Response]


def _served(path: Path) -> Iterator[tuple[Post, Engine]]:
    engine = Engine.open(path, device="emulator", chunk=64, cache_folder=None)
    model = EngineModel(engine, ["tiny"], engine.encoder.context, Defaults())
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
        ("/v1/embeddings", {"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "f16"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a " * (CONTEXT + 1)]}, "tokens"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "other"),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}, "no scores"),
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
    assert post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["embedding"]


def test_documents_are_ranked(ranks: tuple[Post, Engine]) -> None:
    post, engine = ranks
    query, documents = "a warp ?", ["32 threads", "the weft", "cotton"]
    wanted = engine.rerank(query, documents)
    pair = engine.tokenizer.encode_pair(query, documents[0])
    assert pair.count(END) == 2
    assert pair.count(BEGIN) == 1
    asked = {"query": query, "documents": documents, "top_n": 2, "return_documents": True}
    made = post("/v1/rerank", asked).json()["results"]
    order = np.argsort(-wanted)[:2].tolist()
    assert [each["index"] for each in made] == order
    assert [each["document"]["text"] for each in made] == [documents[i] for i in order]
    np.testing.assert_array_equal([each["relevance_score"] for each in made], wanted[order])
    scored = post("/v1/score", {"text_1": query, "text_2": documents}).json()["data"]
    np.testing.assert_array_equal([each["score"] for each in scored], wanted)
    assert "no embeddings" in post("/v1/embeddings", {"input": "a"}).json()["error"]["message"]


def test_requests_of_clients_that_left_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while they wait they take no step, and a drain does not wait for them."""
    engine = Engine.open(
        write_encoder(tmp_path / "tiny.gguf"), device="emulator", chunk=64, cache_folder=None
    )
    service = EmbeddingService(engine, EngineModel(engine, ["tiny"], CONTEXT, Defaults()))
    begun, goes_on, ran = threading.Event(), threading.Event(), list[int]()

    def encode(texts: Sequence[Sequence[int]], pooling: str) -> Floats:
        ran.append(len(texts))
        begun.set()
        assert goes_on.wait(10)
        return np.ones((len(texts), HIDDEN), np.float32)

    monkeypatch.setattr(engine.encoder, "encode", encode)

    async def run() -> None:
        first = asyncio.create_task(service.embed(Embeds(lambda *_: {}, ("a",))))
        await asyncio.to_thread(begun.wait, 10)
        others = [
            asyncio.create_task(service.embed(Embeds(lambda *_: {}, (text,)))) for text in "ab"
        ]
        while (await service.metrics()).queued < 2:
            await asyncio.sleep(0.001)
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        assert (await service.metrics()).queued == 0
        goes_on.set()
        await asyncio.wait_for(service.drain(), 10)
        assert (await first)[0].shape == (1, HIDDEN)
        await service.close()

    asyncio.run(run())
    assert ran == [1]
