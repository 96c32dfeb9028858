"""Who finds what is known of a prompt's beginning: requests of one API key and one salt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncAnswers, AsyncService
from urdir.model.engine.requests.limits import Limits
from urdir.model.serve.access import Access
from urdir.model.serve.interface import Defaults
from urdir.model.serve.served_model import EngineModel

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
KEYS = ("first-key", "schlüssel")


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + key.encode()}


def scopes(server: Any, *asked: tuple[str, dict[str, Any]]) -> list[bytes]:
    """Of chats by these keys with these fields."""
    for key, fields in asked:
        headers = {"Content-Type": "application/json", **bearer(key)}
        reply = server.http().post(CHAT, content=json.dumps(HI | fields), headers=headers)
        assert reply.status_code == 200, reply.text
    return [request.scope for request in server.service.requests]


def test_every_key_and_every_salt_is_a_scope_of_its_own(start: Any) -> None:
    server = start(Access(api_keys=KEYS))
    kinds: list[tuple[str, dict[str, Any]]] = [
        (key, {} if salt is None else {"cache_salt": salt})
        for key in KEYS
        for salt in (None, "a", "b", "é", "\ud800")
    ]
    found = scopes(server, *kinds, *kinds)
    assert found[: len(kinds)] == found[len(kinds) :]
    assert len(set(found)) == len(kinds)
    assert b"" not in found
    for key in KEYS:  # digests alone
        assert not any(key.encode() in scope for scope in found)


def test_without_keys_all_share_unless_they_salt(server: Any) -> None:
    """What a client sends as a key counts for nothing where none is asked for."""
    salted = {"cache_salt": "a"}
    found = scopes(server, ("x", {}), ("y", {}), ("x", salted), ("y", salted))
    assert found[:2] == [b"", b""]
    assert found[2] == found[3] != b""


def test_names_of_users_are_no_scopes(server: Any) -> None:
    """OpenAI's hints: any client may send any of them."""
    hints = ({"user": "a"}, {"prompt_cache_key": "a"}, {"safety_identifier": "a"})
    assert scopes(server, *(("x", hint) for hint in hints)) == [b""] * 3


def test_all_answers_of_a_completion_are_of_one_scope(server: Any) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "cache_salt": "s", "max_tokens": 1}
    assert server.http().post(TEXT, json=body).status_code == 200
    found = {request.scope for request in server.service.requests}
    assert len(found) == 1
    assert b"" not in found


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("salt", ["", 5, ["a"], {}, True, "a" * 257])
def test_bad_salts_are_refused(server: Any, path: str, salt: Any) -> None:
    reply = server.http().post(path, json={**HI, "prompt": "Hi", "cache_salt": salt})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")
    assert not server.service.requests


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    many: Any = {"sequences": 2, "page_len": 16, "pages": 40}
    with Engine.open("demo", device="emulator", context=48, **many) as opened:
        yield opened


Cached = Callable[..., int]


@pytest.fixture
def begin(engine: Engine, run_server: Any) -> Iterator[Callable[..., Cached]]:
    """Start a server of the demo model; what it returns asks, and says what was found."""
    with ExitStack() as owners:

        def start(access: Access, **limits: Any) -> Cached:
            service = AsyncService(
                engine,
                EngineModel(engine, (), engine.session.context, Defaults()),
                Limits.for_latency(engine.session.shapes, **limits),
            )
            owners.callback(lambda: asyncio.run(AsyncAnswers.close(service)))
            server = owners.enter_context(run_server(service, access))

            def cached(key: str, **fields: Any) -> int:
                body = {"prompt": [7] * 20, "max_tokens": 1, "temperature": 0} | fields
                reply = server.http().post(TEXT, json=body, headers=bearer(key)).json()
                found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                return found

            return cached

        yield start


@pytest.mark.slow
def test_a_stranger_learns_nothing_of_what_others_asked(begin: Callable[..., Cached]) -> None:
    cached = begin(Access(api_keys=KEYS))
    mine, other = KEYS
    assert (cached(mine), cached(other)) == (0, 0)
    assert cached(mine, cache_salt="s") == cached(other, cache_salt="s") == 0
    assert cached(mine, cache_salt="t") == 0
    for key, fields in ((mine, {}), (other, {}), (mine, {"cache_salt": "s"})):
        assert cached(key, **fields) == 16  # a page


@pytest.mark.slow
def test_nothing_is_shared_where_the_server_says_so(begin: Callable[..., Cached]) -> None:
    cached = begin(Access(), share_prefixes=False)
    assert [cached("x"), cached("x"), cached("x", n=2)] == [0, 0, 0]
