"""Large bodies: what they hold is counted before anything is made of it, and all together are
bounded; texts are prepared in turns, which clients that leave give up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE
from urdir.model.serve.json_reader import JsonReader, JsonTooLargeError
from urdir.model.serve.limits import Limits
from urdir.model.serve.text_thread import TextThread

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


# ---- what is counted -----------------------------------------------------------------------------

_TEXTS = ("", "a", '"', "\\", '\\"', "[1, {", "],}", '","', "\\\\", "é\n", '{"a": [', "\ud800")


def _random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind < 3:
        return rng.choice((rng.choice(_TEXTS) + rng.choice(_TEXTS), 7, -1.5, None, True))
    if kind == 3:
        return rng.choice(([], {}))
    values = [_random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 5:
        return values
    return {rng.choice(_TEXTS) + str(i): value for i, value in enumerate(values)}


def _held(value: Any) -> tuple[int, int]:
    """Lists, objects and strings, and values (of an empty container one, too, as commas count)."""
    if isinstance(value, dict):
        inner = [_held(item) for item in value.values()]
        strings, items = len(value), len(value)
    elif isinstance(value, list):
        inner = [_held(item) for item in value]
        strings, items = 0, len(value)
    else:
        return int(isinstance(value, str)), 0
    parts = 1 + strings + sum(parts for parts, _ in inner)
    return parts, max(1, items) + sum(items for _, items in inner)


@pytest.mark.parametrize("seed", range(200))
def test_what_is_in_a_text_is_counted_exactly(seed: int) -> None:
    rng = random.Random(seed)
    value = {"x": [_random_value(rng, 5) for _ in range(5)]}
    text = json.dumps(value, ensure_ascii=seed % 2 == 0, indent=rng.choice((None, 1)))
    data = text.encode("utf-8", "surrogatepass")
    if "\ud800" in text:
        with pytest.raises(ValueError, match="utf-8"):
            JsonReader(Limits()).read(data)
        return
    parts, items = _held(value)
    assert JsonReader(Limits(parts=parts, items=items + 1)).read(data) == value
    with pytest.raises(JsonTooLargeError, match=f"more than {parts - 1} lists, objects and str"):
        JsonReader(Limits(parts=parts - 1)).read(data)
    with pytest.raises(JsonTooLargeError, match=f"more than {items} values"):
        JsonReader(Limits(items=items)).read(data)


def test_texts_of_one_request_count_together() -> None:
    reader = JsonReader(Limits(parts=5))
    assert reader.read(b'["a"]') == ["a"]
    assert reader.read(b'["[[[[[[", 1]') == ["[[[[[[", 1]
    assert reader.read(b"[]") == []
    with pytest.raises(JsonTooLargeError):
        reader.read(b"[]")


def test_scalars_and_depth() -> None:
    read = JsonReader(Limits(depth=3)).read
    assert (read(b"5"), read(b'"x"'), read(b" [[[1]]] ")) == (5, "x", [[[1]]])
    assert read(b"\xef\xbb\xbf[1.5e1]") == [15.0]
    with pytest.raises(JsonTooLargeError, match="deeper than 3 levels"):
        read(b'[{"a": [[1]]}]')


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": 'x,y [1] {"a": "b\\"} ' * 160_000},
        {"prompt": '"' * 2_000_000},
        {"prompt": "\\" * 2_000_000},
        {"prompt": [128_000 + i for i in range(590_000)]},
        {"prompt": [[100_000 + i for i in range(4096)]] * 128},
        {"messages": [{"role": "user", "content": f"Message {i}."} for i in range(20_000)]},
    ],
    ids=["code", "quotes", "backslashes", "ids", "prompts", "messages"],
)
def test_what_clients_send_is_read_up_to_the_size_of_a_body(value: Any) -> None:
    body = json.dumps(value, separators=(",", ":")).encode()
    assert len(body) < Limits().body
    assert JsonReader(Limits()).read(body) == value


@pytest.mark.parametrize("inside", [b"[],", b"{},", b'{"a":1},', b'"",', b"[[]],"])
@pytest.mark.parametrize("field", [b'"x"', b'"chat_template_kwargs":{"a"'])
def test_bodies_of_many_small_parts(server: Any, inside: bytes, field: bytes) -> None:
    """Of 4 MB, before they become 25 times that."""
    many = inside * (4_000_000 // len(inside))
    end = b"}" * field.count(b"{")
    body = json.dumps(HI).encode()[:-1] + b"," + field + b":[" + many + b"1]" + end + b"}"
    reply = server.http().post(CHAT, content=body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
    assert "more than 131,072 lists, objects and strings" in reply.json()["error"]["message"]
    assert server.service.requests == []


def test_arguments_of_calls_are_bounded_as_the_body_is(server: Any) -> None:
    """They are JSON in a string of JSON; all calls of a conversation together."""
    server.service.model.context = 1 << 20  # a template without tools has them in the prompt

    def status(*arguments: str) -> tuple[int, str]:
        calls = [
            {"type": "function", "function": {"name": "f", "arguments": text}} for text in arguments
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        reply = server.http().post(CHAT, json={**HI, "messages": [*HI["messages"], turn]})
        error = reply.json().get("error", {})
        return reply.status_code, f"{error.get('param')}: {error.get('message')}"

    for text in ("", "none", '{"a": NaN}', '{"a": "' + "[" * 1000 + '"}', '{"a":1e999}', "[1]"):
        assert status(text)[0] == 200, status(text)
    wide = '{"a": [' + "[]," * 50_000 + "1]}"
    assert status(wide, wide)[0] == 200
    code, why = status(wide, wide, wide)
    assert code == 400
    assert "tool_calls[2].function.arguments' has more than 131,072" in why
    for depth in (63, 64, 65, 100, 480, 700, 900, 980, 5000):
        objects = '{"a":' * depth + "1" + "}" * depth
        lists = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
        for text in (objects, lists):
            code, why = status(text)
            assert code == (200 if depth <= 64 else 400), (depth, why)
            assert ("nests deeper than 64 levels" in why) == (depth > 64)


# ---- token ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [5] * 512}),
        (COMPLETIONS, {"prompt": [[5], [5] * 300_000]}),
        (COMPLETIONS, {"prompt": [5] * 500_000, "echo": True}),
        ("/detokenize", {"tokens": [5] * 500_000}),
    ],
)
def test_too_many_ids_are_refused_by_their_number(server: Any, path: str, body: Any) -> None:
    tokenizer = server.service.model.tokenizer  # of which nothing else is known:
    server.service.model.tokenizer = SimpleNamespace(vocab_size=tokenizer.vocab_size)
    reply = server.http().post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_prompts_of_ids_become_text_for_an_echo_alone(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.service.model.tokenizer
    decoded: list[Any] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **more: decoded.append(ids) or decode(ids))
    prompts = [[5, 6], [7] * 511]
    assert server.http().post(COMPLETIONS, json={"prompt": prompts}).status_code == 200
    assert decoded == []
    reply = server.http().post(COMPLETIONS, json={"prompt": prompts, "echo": True}).json()
    assert decoded == [(5, 6), (7,) * 511]
    assert [c["text"].startswith(decode(p)) for c, p in zip(reply["choices"], prompts, strict=True)]
    assert [each.prompt for each in server.service.requests] == [(5, 6), (7,) * 511] * 2


@pytest.mark.parametrize("prompt", [{}, 5, True, [True], [1.5], [5, [5]], [[5], 5], ["a", 5]])
def test_prompts_that_are_none(server: Any, prompt: Any) -> None:
    reply = server.http().post(COMPLETIONS, json={"prompt": prompt})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


# ---- bytes of all clients ------------------------------------------------------------------------


@contextlib.contextmanager
def sending(server: Any, body: bytes, size: int) -> Iterator[socket.socket]:
    """A connection that has announced ``size`` bytes, and sent ``body``."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)
        yield connection


def test_large_bodies_have_a_bound_together(start: Any) -> None:
    server = start(bodies=100_000, small_body=1000)
    model = server.service.model
    model.template = halted = Halted(model.template)
    large = {**HI, "metadata": "x" * 60_000}
    body = json.dumps(large).encode()
    post = server.http().post
    with sending(server, body, len(body)) as first:
        server.wait_for(lambda: halted.rendered == ["Hi"])
        reply = post(CHAT, json=large)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        with sending(server, b"", 60_000) as connection:  # before anything is sent
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
        assert post(CHAT, json={"messages": []}).status_code == 400  # a small one is read
        halted.go.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert post(CHAT, json=large).status_code == 200
    assert post(CHAT, json={**HI, "metadata": "x" * 102_000}).status_code == 429


def test_chunked_bodies_are_counted_as_they_come(start: Any) -> None:
    server = start(bodies=100_000, small_body=1000)

    def parts() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    assert server.http().post(CHAT, content=parts(), headers=JSON).status_code == 429
    assert server.http().post(CHAT, json={**HI, "metadata": "x" * 90_000}).status_code == 200


# ---- turns of the text thread --------------------------------------------------------------------


def test_a_turn_that_is_given_up_leaves_nothing() -> None:
    async def run() -> list[str]:
        text, log, go = TextThread(), [], threading.Event()

        async def work(name: str, *jobs: Callable[[], Any]) -> None:
            async with text.turn() as run:
                for job in jobs:
                    await run(job)
                    log.append(name)

        first = asyncio.create_task(work("first", lambda: go.wait(PATIENCE), lambda: None))
        second = asyncio.create_task(work("second", lambda: None))
        third = asyncio.create_task(work("third", lambda: log.append("runs"), lambda: None))
        await asyncio.sleep(0.05)
        second.cancel()
        first.cancel()
        await asyncio.sleep(0.05)
        assert log == []  # the thread is still at the first job
        go.set()
        await third
        with pytest.raises(ZeroDivisionError):
            await work("bad", lambda: 1 // 0)
        await work("last", lambda: None)
        return log

    assert asyncio.run(run()) == ["runs", "third", "third", "last"]


class Halted:
    """A template whose rendering waits."""

    def __init__(self, template: Any) -> None:
        self.source = template.source
        self._template = template
        self.rendered: list[str] = []
        self.tokenised = 0
        self.go = threading.Event()

    def render(self, messages: Any, *more: Any, **options: Any) -> Any:
        self.rendered.append(messages[-1].content)
        self.go.wait(PATIENCE)
        return self._template.render(messages, *more, **options)

    def tokens(self, prompt: Any) -> Any:
        self.tokenised += 1
        return self._template.tokens(prompt)


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
def test_clients_that_leave_while_their_text_is_prepared(server: Any, padding: int) -> None:
    """One in its turn, whose text is not tokenised then, and one that waits for its turn."""
    model = server.service.model
    model.template = halted = Halted(model.template)
    connections = server.server.server_state.connections
    server.http().get("/health", headers={"Connection": "close"})
    server.wait_for(lambda: not connections)

    def body(text: str) -> bytes:
        messages = [{"role": "user", "content": text}]
        return json.dumps({"messages": messages, "metadata": "x" * padding}).encode()

    def post(text: str) -> Any:
        data = body(text)
        return sending(server, data, len(data))

    with post("first"):
        server.wait_for(lambda: halted.rendered == ["first"])
        with post("second"):
            server.wait_for(lambda: len(connections) == 2)
        server.wait_for(lambda: len(connections) == 1)
    server.wait_for(lambda: not connections)
    with post("third") as connection:
        halted.go.set()
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert halted.rendered == ["first", "third"]
    assert halted.tokenised == 1
    assert len(server.service.requests) == 1
