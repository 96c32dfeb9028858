"""Everything but answers: models, tokens, health, metrics, errors, and who may ask."""

from __future__ import annotations

import gzip
import json
import socket
from dataclasses import fields
from typing import Any
from unittest.mock import AsyncMock

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.model.serve.conftest import Gate
from tests.patience import PATIENCE
from urdir.model.errors import ModelError
from urdir.model.serve import version as own
from urdir.model.serve.access import Access
from urdir.model.serve.interface import Metrics

HI = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


# ---- endpoints -----------------------------------------------------------------------------------


def test_models(server: Any) -> None:
    client = server.openai()
    model, also = client.models.list().data
    assert also == model.model_copy(update={"id": "a/b-GGUF"})
    assert (model.id, model.owned_by, model.created) == ("toy", "urdir", 1_700_000_000)
    sizes = {"n_vocab": 2048, "n_params": 2_000_000_000, "size": 1_000_000}
    assert model.meta == sizes | {"n_ctx_train": 2048, "n_embd": 64}
    assert (model.max_model_len, model.max_input_tokens, model.max_tokens) == (512, 512, 512)
    assert client.models.retrieve("toy") == model
    assert client.models.retrieve("a/b-GGUF") == also
    assert client.chat.completions.create(model="a/b-GGUF", **HI).model == "toy"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="this server has 'toy', 'a/b-GGUF'"):
        client.chat.completions.create(model="gpt-4", **HI)
    assert server.http().post(CHAT, json=HI).status_code == 200  # none named: the one there is


def test_version(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As clients of vLLM ask for it."""
    monkeypatch.setattr(own, "version", lambda package: f"{package} 1.2")
    own.installed.cache_clear()
    assert server.http().get("/version").json() == {"version": "urdir 1.2"}
    own.installed.cache_clear()


def test_tokenize_and_back(server: Any) -> None:
    http, tokenizer = server.http(), server.service.model.tokenizer
    text = "What is 2 plus 3? Ünïcode <|im_end|>"
    vllm = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text, parse_special=True, add_bos=True)
    assert (vllm["tokens"], vllm["count"], vllm["max_model_len"]) == (ids, len(ids), 512)
    assert vllm["token_strs"] == [tokenizer.token_text(i) for i in ids]
    assert http.post("/tokenize", json={"content": text}).json()["tokens"] == tokenizer.encode(
        text, parse_special=True
    )
    back = http.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": text, "content": text}
    chat = http.post("/tokenize", json=HI).json()["tokens"]
    http.post(CHAT, json=HI)
    assert server.service.requests[0].prompt == tuple(chat)
    bad = http.post("/detokenize", json={"tokens": [10**9]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens")


def test_tokens_with_their_pieces(server: Any) -> None:
    http, tokenizer = server.http(), server.service.model.tokenizer
    text = "Hi é<|im_end|>"
    tokens = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    ids = tokenizer.encode(text, parse_special=True)
    assert [token["id"] for token in tokens] == ids
    raw = [
        piece.encode() if isinstance(piece, str) else bytes(piece)
        for piece in (token["piece"] for token in tokens)
    ]
    assert raw == [tokenizer.token_bytes(i) for i in ids]
    assert any(isinstance(token["piece"], list) for token in tokens)  # half of é
    plain = http.post("/tokenize", json={"content": text, "parse_special": False}).json()
    assert plain["tokens"] == tokenizer.encode(text)
    assert plain["count"] > len(ids)
    bad = http.post("/tokenize", json={**HI, "add_special_tokens": True})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "add_special_tokens")


def test_health(server: Any) -> None:
    """test_lost_device.py has the other answer."""
    assert server.http().get("/health").json() == {"status": "ok"}
    server.service.metrics = AsyncMock(return_value=Metrics(graphs_recorded=12, graphs_wanted=192))
    with_graphs = {"status": "ok", "graphs": {"recorded": 12, "of": 192}}
    assert server.http().get("/health").json() == with_graphs


def test_metrics(start: Any) -> None:
    server = start()
    server.service.delay = 0.002
    by_place = {"drafted_tokens": (9, 5), "accepted_tokens": (7, 2)}
    counts = {each.name: 100 + i for i, each in enumerate(fields(Metrics))}
    now = Metrics(**(counts | by_place))
    server.service.metrics = AsyncMock(return_value=now)
    server.openai().chat.completions.create(model="toy", **HI)
    list(server.openai().chat.completions.create(model="toy", stream=True, n=2, **HI))
    server.http().get("/nowhere")
    samples = {}
    for family in text_string_to_metric_families(server.http().get("/metrics").text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    of_now = ("running", "sequences", "queued")
    of_now += ("pages_used", "pages_total", "states_kept", "states_total")
    for name, values in by_place.items():
        for place, value in enumerate(values, 1):
            assert samples[f"urdir_{name}_total", (("place", str(place)),)] == value
    for each in (each for each in fields(Metrics) if each.name not in by_place):
        is_gauge = each.name in of_now or each.name.startswith("graph")
        name = f"urdir_{each.name}" if is_gauge else f"urdir_{each.name}_total"
        assert samples[name, ()] == getattr(now, each.name)
    assert samples["urdir_time_to_first_token_seconds_count", ()] == 3
    assert samples["urdir_inter_token_seconds_count", ()] == 3 * 7
    assert samples["urdir_inter_token_seconds_sum", ()] >= 3 * 7 * 0.002
    assert samples["urdir_http_responses_total", (("route", CHAT), ("status", "200"))] == 2
    assert samples["urdir_http_responses_total", (("route", "other"), ("status", "404"))] == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/embeddings", 400, "no embeddings"),
        ("POST", "/v1/audio/speech", 404, "no audio"),
        ("POST", "/v1/images/generations", 404, "no image generation"),
        ("POST", "/v1/moderations", 404, "no moderation"),
        ("GET", "/v1/files", 404, "no files"),
        ("POST", "/embeddings", 400, "no embeddings"),
        ("GET", "/elsewhere", 404, "no such endpoint: GET /elsewhere"),
        ("GET", CHAT, 405, f"{CHAT} takes no GET, but POST"),
        ("PUT", "/health", 405, "/health takes no PUT, but GET"),
        ("GET", "/api/chat", 405, "/api/chat takes no GET, but POST"),
        ("POST", "/api/pull", 404, "takes its models from its flags"),
    ],
)
def test_what_there_is_not(server: Any, method: str, path: str, status: int, words: str) -> None:
    reply = server.http().request(method, path, json={})
    assert reply.status_code == status
    error = reply.json()["error"]
    if path.startswith("/api/"):
        assert words in error
        return
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    if status == 405:  # as OpenAI has it
        kind = ("invalid_request_error", "method_not_supported")
        assert (error["type"], error["code"]) == kind
        assert "allow" in reply.headers


def test_request_ids_and_times(server: Any) -> None:
    http = server.http()
    mine = http.post(CHAT, json=HI, headers={"X-Request-Id": "mine 1"})
    assert mine.headers["x-request-id"] == "mine 1"
    for given in ("é", "x" * 129, "a\tb"):
        reply = http.get("/health", headers={"x-request-id": given.encode()})
        assert len(reply.headers["x-request-id"]) == 32
    refused = http.post(CHAT, json={}, headers={"X-Request-Id": "bad"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "bad")
    times, tokens = mine.json()["timings"], mine.json()["usage"]
    assert times["cache_n"] + times["prompt_n"] == tokens["prompt_tokens"]
    assert times["predicted_n"] == tokens["completion_tokens"]
    speed = times["predicted_n"] / times["predicted_ms"] * 1e3
    assert times["predicted_per_second"] == pytest.approx(speed)
    assert min(times["prompt_ms"], times["predicted_per_token_ms"]) > 0


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_ends_with_times(server: Any, usage: bool) -> None:
    body: Any = {**HI, "model": "toy", "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    *_, last = server.openai().chat.completions.create(**body)
    assert last.timings["predicted_n"] == 8
    assert bool(last.usage) == usage


@pytest.mark.parametrize("fails", [False, True])
def test_comments_keep_a_silent_stream_open(start: Any, service: Any, fails: bool) -> None:
    service.gate = gate = Gate()
    if fails:
        service.error, service.good = ModelError("late"), 1
    server = start(pulse_seconds=0.03)
    with server.http().stream("POST", CHAT, json={**HI, "stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["x-accel-buffering"] == "no"
        lines = reply.iter_lines()
        silent = [next(lines) for _ in range(6)]
        gate.open()
        rest = list(lines)
    assert silent == [": still here", ""] * 3
    assert rest[1::2] == [""] * (len(rest) // 2)
    events = [line for line in rest[::2] if line != ": still here"]
    assert all(line.startswith("data: ") for line in events)
    if fails:
        assert "late" in events[-1]
    else:
        assert events[-1] == "data: [DONE]"


# ---- who may ask ---------------------------------------------------------------------------------


def test_api_keys(start: Any) -> None:
    server = start(Access(api_keys=("first-key", "schlüssel")))
    http = server.http()
    for path in ("/v1/models", "/metrics"):
        assert http.get(path).status_code == 401
    assert http.get("/health").status_code == 200
    assert http.get("/").status_code == 200
    for header in ("Bearer wrong", "Bearer first-key2", "Basic first-key", "first-key", "Bearer"):
        refused = http.post(CHAT, json=HI, headers={"Authorization": header})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        server.openai().models.list()
    assert server.openai(api_key="first-key").models.list().data[0].id == "toy"
    other = {"Authorization": "Bearer schlüssel".encode()}
    assert http.get("/v1/models", headers=other).status_code == 200
    assert server.service.requests == []


def test_a_server_without_the_page(start: Any) -> None:
    http = start(Access(page=False)).http()
    root = http.get("/")
    assert (root.status_code, root.text) == (200, "urdir is running")
    assert http.head("/").status_code == 200  # as ollama's command asks
    assert http.get("/health").status_code == 200


def test_pages_of_other_origins(start: Any) -> None:
    asks = {
        "Origin": "https://there.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    closed = start()
    reply = closed.http().options(CHAT, headers=asks)
    assert reply.status_code == 405
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert "access-control-allow-origin" not in closed.http().get("/health", headers=asks).headers
    origins = ("https://there.example", "localhost")
    opened = start(Access(api_keys=("key",), origins=origins))
    reply = opened.http().options(CHAT, headers=asks)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://there.example"
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    allowed = "access-control-allow-origin"
    for origin in ("http://localhost:5173", "https://else.example", "http://localhost.example"):
        reply = opened.http().options(CHAT, headers={**asks, "Origin": origin})
        assert (allowed in reply.headers) is origin.endswith(":5173")


SIMPLE: list[dict[str, str]] = [
    *({"Content-Type": f"{kind}"} for kind in ("text/plain", "multipart/form-data", "")),
    {"Content-Type": "application/x-www-form-urlencoded"},
    {},
]


@pytest.mark.parametrize(
    "page", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}]
)
def test_a_simple_request_of_another_page_is_refused(server: Any, page: dict[str, str]) -> None:
    """Browsers send these content types to any server without asking first, and name the origin."""
    for kind in SIMPLE:
        reply = server.http().post(CHAT, content=json.dumps(HI).encode(), headers={**kind, **page})
        assert reply.status_code == 415
        assert "Content-Type: application/json" in reply.json()["error"]["message"]
    assert server.service.requests == []


def test_clients_that_do_not_say_json(server: Any) -> None:
    """curl, and LiteLLM's ollama."""
    for kind in SIMPLE:
        reply = server.http().post(CHAT, content=json.dumps(HI).encode(), headers=kind)
        assert reply.status_code == 200


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("Identity", 200), ("", 200)])
def test_bodies_come_as_they_are(server: Any, coding: str, status: int) -> None:
    body = json.dumps(HI).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    content = gzip.compress(body) if coding == "gzip" else body
    reply = server.http().post(CHAT, content=content, headers=headers)
    assert reply.status_code == status
    assert coding != "gzip" or "'gzip'" in reply.json()["error"]["message"]


def test_other_names_of_a_local_server_are_refused(start: Any) -> None:
    server = start(Access(hosts=frozenset({"127.0.0.1", "[::1]", "model.example"})))
    port = server.port
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]", "Model.Example:80"):
        assert server.http().get("/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example"):
        reply = server.http().get("/health", headers={"Host": host})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "unknown_host")
    # health checks of load balancers, by HTTP/1.0
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").readline().split()[1] == b"200"
