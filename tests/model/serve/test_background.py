"""Responses in the background, by the official client."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.model.serve.conftest import Gate
from tests.model.serve.test_responses import HERMES, TOOLS
from tests.patience import wait_for
from urdir.model.errors import BusyError
from urdir.model.serve.access import Access
from urdir.model.serve.kept import ENTRY_BYTES, KeepingHere, Store

ANSWER = "2 plus 3 is 5."


def ask(server: Any, **body: Any) -> Any:
    given = {"model": "toy", "input": "Hi", "background": True, **body}
    return server.openai().responses.create(**given)


def wait(server: Any, name: str, *statuses: str) -> Any:
    """The response once it has one of ``statuses``."""
    retrieve = server.openai().responses.retrieve
    wait_for(lambda: retrieve(name).status in statuses, show=lambda: retrieve(name).status)
    return retrieve(name)


def test_a_response_is_asked_for_later(server: Any) -> None:
    server.service.gate = gate = Gate(1)
    queued = ask(server, metadata={"a": "b"})
    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    assert queued.usage is None
    begun = wait(server, queued.id, "in_progress")
    assert (begun.output, begun.metadata) == ([], {"a": "b"})
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        server.openai().responses.create(model="toy", input="B", previous_response_id=queued.id)
    gate.open()
    done = wait(server, queued.id, "completed")
    assert (done.output_text, done.usage.output_tokens) == (ANSWER, 8)
    assert done.created_at == queued.created_at
    more = server.openai().responses.create(
        model="toy", input="More", previous_response_id=queued.id
    )
    assert more.background is False
    with pytest.raises(openai.BadRequestError, match="is streamed"):
        server.openai().responses.retrieve(queued.id, stream=True)
    assert server.openai().responses.cancel(queued.id) == done


def test_a_stream_goes_on_from_any_event(server: Any) -> None:
    server.service.delay = 0.02
    whole = []
    with ask(server, stream=True) as stream:
        for event in stream:
            whole.append(event)
            if event.type == "response.output_text.delta":
                break  # the client leaves
    assert [event.type for event in whole[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    assert whole[0].response.status == "queued"
    name, last = whole[0].response.id, whole[-1].sequence_number
    client = server.openai()
    whole += client.responses.retrieve(name, stream=True, starting_after=last)
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert whole[-1].type == "response.completed"
    texts = [e.delta for e in whole if e.type == "response.output_text.delta"]
    assert "".join(texts) == whole[-1].response.output_text == ANSWER
    assert whole[-1].response == client.responses.retrieve(name)
    assert [*client.responses.retrieve(name, stream=True)] == whole
    assert [*client.responses.retrieve(name, stream=True, starting_after=len(whole) - 1)] == []
    reply = server.http().get(f"/v1/responses/{name}?stream=true&starting_after=x")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "starting_after")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_cancelled(server: Any, stream: bool) -> None:
    server.service.delay, server.service.repeat = 0.02, 1000
    found = ask(server, stream=stream)
    name = next(iter(found)).response.id if stream else found.id
    wait(server, name, "in_progress")
    cancelled = server.openai().responses.cancel(name)
    assert (cancelled.status, server.service.cancelled) == ("cancelled", 1)
    assert server.service.answer.startswith(cancelled.output_text[: len(ANSWER)])
    assert [item.status for item in cancelled.output] == ["incomplete"]
    assert server.openai().responses.cancel(name) == cancelled
    if stream:
        *_, last = found  # the stream ends
        assert last.type == "response.output_text.delta"
    server.wait_for(lambda: server.service.running == 0)


def test_a_call_that_is_cut_off_is_left_out(server: Any) -> None:
    server.service.model.answer_format, usual = HERMES, server.service.gate
    call = '<tool_call>{"name": "weather", "arguments": {"city": "'
    server.service.gate, server.service.answer = Gate(100), "Well." + call + "Ur and " * 300
    body = {"tools": TOOLS, "stream": True, "max_output_tokens": 500}
    events = ask(server, **body)
    name = next(iter(events)).response.id
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            break
    cancelled = server.openai().responses.cancel(name)
    events.close()
    assert [item.type for item in cancelled.output] == ["message"]
    server.service.gate, server.service.answer = usual, ANSWER
    more = {"model": "toy", "input": "More", "previous_response_id": name}
    assert server.openai().responses.create(**more).output_text == ANSWER


def test_a_response_that_is_deleted_ends(server: Any) -> None:
    server.service.gate = Gate(1)
    name = ask(server).id
    wait(server, name, "in_progress")
    server.openai().responses.delete(name)
    server.wait_for(lambda: server.service.cancelled == 1)
    for _ in range(3):
        with pytest.raises(openai.NotFoundError):
            server.openai().responses.retrieve(name)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("secret"), "server_error"), (BusyError("full", 1), "rate_limit_exceeded")],
)
def test_a_response_that_fails(server: Any, error: Exception, code: str) -> None:
    server.service.error, server.service.good = error, 3
    failed = wait(server, ask(server).id, "failed")
    assert failed.error.code == code
    assert "secret" not in failed.error.message
    *_, last = ask(server, stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", code)


def test_there_are_so_many_and_a_server_waits_for_them(start: Any, service: Any) -> None:
    service.gate = Gate()
    server = start(background=2)
    for _ in range(2):
        ask(server)
    server.wait_for(lambda: service.running == 2)
    with pytest.raises(openai.RateLimitError):
        ask(server)
    server.server.should_exit = True
    time.sleep(0.3)
    assert service.running == 2  # the server waits for them
    server.server.force_exit = True


def test_those_that_begin_together_are_counted(
    start: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = KeepingHere.keep

    async def later(self: Any, *given: Any) -> Any:
        await asyncio.sleep(0.02)  # as if another process kept it
        return await keep(self, *given)

    monkeypatch.setattr(KeepingHere, "keep", later)
    service.gate = Gate()
    server = start(background=2)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server) for _ in range(8)]
        errors = [each.exception() for each in asked]
    assert sum(isinstance(error, openai.RateLimitError) for error in errors) == 6
    assert errors.count(None) == 2
    server.server.force_exit = True


def test_a_cancel_after_the_end_changes_nothing(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, late = KeepingHere.keep, []

    async def cancelled(self: Any, action: Any, name: bytes, value: bytes = b"", *of: int) -> Any:
        found = await keep(self, action, name, value, *of)
        if b'"status":"completed"' in value.replace(b" ", b"") and action == "put":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            late.append(name)
            await asyncio.sleep(0)
        return found

    monkeypatch.setattr(KeepingHere, "keep", cancelled)
    name = ask(server).id
    server.wait_for(lambda: late and server.service.running == 0)
    time.sleep(0.05)
    found = server.openai().responses.retrieve(name)
    assert (found.status, found.output_text) == ("completed", ANSWER)


def test_another_key_finds_nothing(start: Any) -> None:
    server = start(Access(api_keys=("a", "b")))
    mine, other = server.openai(api_key="a").responses, server.openai(api_key="b").responses
    name = mine.create(model="toy", input="Hi", background=True).id
    for ask_other in (other.retrieve, other.cancel, other.delete):
        with pytest.raises(openai.NotFoundError):
            ask_other(name)
    assert mine.retrieve(name).id == name


def test_one_that_nobody_writes_has_failed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.service.delay, server.service.repeat = 0.02, 1000
    name = ask(server).id
    wait(server, name, "in_progress")
    monkeypatch.setattr("urdir.model.serve.background._ALIVE_SECONDS", -1.0)
    found = server.openai().responses.retrieve(name)
    assert (found.status, found.error.code) == ("failed", "server_error")
    server.openai().responses.delete(name)


def test_what_is_too_large_is_refused(start: Any) -> None:
    server = start(kept_bytes=16_000)
    for body in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="too large"):
            ask(server, metadata={"a": "b" * 900}, **body)


def test_a_store_appends_to_what_has_that_length() -> None:
    store = Store(16_000, 60.0)  # 1,000 bytes each

    def found() -> bytes | None:
        return store.do("get", b"a")

    store.do("append", b"a", b"xyz", 1)
    assert found() is None
    store.do("append", b"a", b"xyz", 0)
    store.do("append", b"a", b"12", 3)
    store.do("append", b"a", b"again", 3)
    assert found() == b"xyz12"
    assert store.do("get", b"a", start=4) == b"2"
    assert store.do("get", b"a", start=99) == b""
    store.do("append", b"a", bytes(996), 5)  # too large
    store.do("append", b"a", b"x", 5)
    assert found() is None


def test_a_store_bounds_how_many_values_it_has() -> None:
    """Signs of life and orders have few bytes, and events may have none."""
    store, names = Store(10 * ENTRY_BYTES, 60.0), [bytes([number]) for number in range(40)]
    for name in names:
        store.do("put", name)
    assert [name for name in names if store.do("get", name) is not None] == names[-10:]
    for name in names[-10:]:
        store.do("drop", name)
    for name in names:  # what was dropped takes nothing
        store.do("append", name, b"", 0)
    assert [name for name in names if store.do("get", name) is not None] == names[-10:]


def test_a_full_store_is_as_quick_as_an_empty_one() -> None:
    """Front ends look for events and orders many times a second."""

    def seconds(values: int) -> float:
        store, times = Store(1 << 30, 60.0), []
        for number in range(values):
            store.do("put", b"%d" % number)
        for _ in range(5):
            begun = time.thread_time()
            for _ in range(50):
                store.do("get", b"0")
            times.append(time.thread_time() - begun)
        return min(times)

    assert seconds(3_000) < 20 * seconds(10)
