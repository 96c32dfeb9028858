"""HTTP in processes of its own: answers, errors, limits, many streams, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.model.serve.apart import ASKED, Apart, ask_and_drop, figure, server, start
from tests.patience import PATIENCE, in_some_try, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
__all__ = ["server", "start"]  # fixtures


def test_answers(server: Apart) -> None:
    """Of all kinds; a seed repeats one, whichever process is asked, and log-probabilities come."""
    first = server.ask().json()
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["finish_reason"] == "length"
    text = first["choices"][0]["text"]
    for _ in range(6):
        with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as other:
            again = other.post("/v1/completions", json=ASKED | {"n": 2}).json()["choices"]
        assert again[0]["text"] == text != again[1]["text"]
    (choice,) = server.ask(logprobs=2).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 8
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == text
    stop = text[3:6]
    (choice,) = server.ask(stop=[stop], max_tokens=4000).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == (text[: text.index(stop)], stop)
    with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
        )
        chunks = list(client.completions.create(stream=True, **ASKED))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        chat = client.chat.completions.create(
            model="paced", messages=[{"role": "user", "content": "Hi"}], max_tokens=3
        )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 3


HI: list[Any] = [{"role": "user", "content": "Hi"}]


def test_the_openai_client(server: Apart) -> None:
    """Models, texts, chats and responses, whole and streamed alike, whichever front end has the
    connection."""
    found = set()
    for _ in range(3):
        with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
            client = openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
            )
            found.add(_all_of(client))
    assert len(found) == 1


def _all_of(client: openai.OpenAI) -> tuple[str, ...]:
    """The texts of answers; what is around them is checked here."""
    assert [model.id for model in client.models.list()] == ["paced", "poet"]
    given: dict[str, Any] = {"model": "paced", "seed": 5, "n": 2}
    whole = client.completions.create(prompt="By", max_tokens=6, echo=True, **given)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert all(choice.text.startswith("By") for choice in whole.choices)
    asked: dict[str, Any] = {"messages": HI, "max_completion_tokens": 6, **given}
    asked |= {"logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(**asked)
    parts = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert parts[-1].usage == chat.usage
    for choice in chat.choices:
        own = [part.choices[0] for part in parts[:-1] if part.choices[0].index == choice.index]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason == "length"
        tokens = [one for each in own if each.logprobs for one in each.logprobs.content or ()]
        assert choice.logprobs is not None
        assert tokens == choice.logprobs.content
        assert [len(one.top_logprobs) for one in tokens] == [2] * 6
    schema = {"name": "city", "schema": {"type": "object", "properties": {}}}
    form: Any = {"type": "json_schema", "json_schema": schema}
    assert client.chat.completions.create(response_format=form, **asked).choices == chat.choices
    said: dict[str, Any] = {"model": "paced", "input": "Hi", "max_output_tokens": 6}
    said |= {"temperature": 0}
    response = client.responses.create(**said)
    events = list(client.responses.create(stream=True, **said))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert events[-1].type == "response.incomplete"  # the limit is reached
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError, match="this server has"):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="paced", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    texts = [choice.message.content or "" for choice in chat.choices]
    return (*texts, *(choice.text for choice in whole.choices), response.output_text)


def test_a_response_is_known_to_all_front_ends(server: Apart) -> None:
    body = {"model": "paced", "input": "Hi", "max_output_tokens": 3}
    first = server.http.post("/v1/responses", json=body).json()
    for _ in range(8):
        with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as other:
            assert other.get(f"/v1/responses/{first['id']}").json() == first
            follows = {**body, "previous_response_id": first["id"]}
            next_one = other.post("/v1/responses", json=follows)
            assert next_one.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert server.http.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    for _ in range(4):
        with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as other:
            assert other.get(f"/v1/responses/{first['id']}").status_code == 404


def test_a_response_in_the_background_is_known_to_all_front_ends(server: Apart) -> None:
    body = {"input": "Hi", "background": True, "stream": True, "max_output_tokens": 60}

    def get(name: str, **more: Any) -> httpx.Response:
        """By a connection of its own, which reaches any front end."""
        return httpx.get(
            f"{server.url}/v1/responses/{name}", params=more, timeout=PATIENCE, trust_env=False
        )

    with server.http.stream("POST", "/v1/responses", json=body) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    name = json.loads(line[6:])["response"]["id"]
    streams = {get(name, stream=True, starting_after=1).text for _ in range(8)}
    [text] = streams
    kinds = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert (kinds[0], kinds[-1]) == ("response.in_progress", "response.incomplete")
    assert {get(name).json()["status"] for _ in range(8)} == {"incomplete"}
    body |= {"max_output_tokens": 3000, "stream": False}
    names = [server.http.post("/v1/responses", json=body).json()["id"] for _ in range(8)]
    for name in names:
        cancelled = httpx.post(
            f"{server.url}/v1/responses/{name}/cancel", json={}, timeout=PATIENCE, trust_env=False
        )
        assert cancelled.json()["status"] == "cancelled"
    wait_for(lambda: figure(server, "urdir_running") == 0)


def test_adapters_and_slots_are_of_the_engine(server: Apart) -> None:
    """Whichever front end is asked; what the engine refuses is a client's error."""
    scales = [{"id": 0, "scale": 0.5}]
    erase = "/slots/{}?action=erase"
    for _ in range(6):
        with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as other:
            found = other.post("/lora-adapters", json=scales).json()
            assert (found[0]["name"], found[0]["scale"]) == ("poet", 0.5)
            assert other.get("/lora-adapters").json() == found
            assert other.post(erase.format(3), json={}).json() == {"id_slot": 3, "n_erased": 7}
            for slot, status in ((4, 400), (10**9, 404), (10**30, 404)):
                assert other.post(erase.format(slot), json={}).status_code == status
    refused = server.http.post("/lora-adapters", json=[{"id": 1, "scale": 1}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "body[0].id")


def test_no_number_is_too_large(server: Apart) -> None:
    (choice,) = server.ask(max_tokens=10**30, stop=["e"]).json()["choices"]
    assert choice["finish_reason"] == "stop"


def test_errors_have_their_kind(server: Apart) -> None:
    full = server.ask(prompt=[300] * 5000)
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    good = server.ask(structured_outputs={"choice": ["yes"]})
    assert good.status_code == 200
    bad = server.ask(structured_outputs={"choice": ["refused"]})
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_constraint")


def test_counts_are_of_all_processes(server: Apart) -> None:
    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as http:
            assert http.post("/v1/completions", json=ASKED).status_code == 200

    counted = 'urdir_http_responses_total{route="/v1/completions",status="200"}'
    names = ("urdir_time_to_first_token_seconds_count", "urdir_inter_token_seconds_count")
    before = [figure(server, name) for name in (counted, *names, "urdir_generated_tokens_total")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    after = [figure(server, name) for name in (counted, *names, "urdir_generated_tokens_total")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [24, 24, 24 * 7, 24 * 8]
    assert server.http.get("/health").json() == {"status": "ok"}


def test_a_client_that_leaves_is_cancelled(server: Apart) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json=ASKED | {"max_tokens": 4000, "stream": True}
    ) as response:
        lines = response.iter_lines()  # held: its end closes the stream
        next(lines)
        assert figure(server, "urdir_running") == 1
    wait_for(lambda: figure(server, "urdir_running") == 0)


@pytest.mark.slow
def test_limits_are_of_all_processes(start: Callable[..., Apart]) -> None:
    """One answer runs and one waits, for which the queue has room; then three requests are open."""
    server = start("--open", "3", "--sequences", "1", "--queue", "1", "--step", "0.1")
    body = ASKED | {"max_tokens": 4000, "stream": True}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(server.http.stream("POST", "/v1/completions", json=body))
        lines = first.iter_lines()  # held: its end closes the stream
        next(lines)
        waits = threading.Thread(target=ask_and_drop, args=(server, body))
        waits.start()
        wait_for(lambda: figure(server, "urdir_queued") == 1)
        full = server.ask()
        assert (full.status_code, full.headers["Retry-After"]) == (429, "3")

        def third_is_open() -> bool:
            """Without a body it stays so, unless the one before was still counted."""
            third = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            third.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            )
            time.sleep(0.2)
            return server.http.get("/metrics").status_code == 429

        wait_for(third_is_open)
        refused = server.ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "3 requests are open" in refused.text
    server.close()
    waits.join()


@pytest.mark.slow
def test_many_streams(server: Apart) -> None:
    """1,000 at once are whole."""
    expected = server.ask().json()["choices"][0]["text"]

    async def run() -> list[tuple[dict[int, str], int]]:
        return await asyncio.gather(*(streamed(server) for _ in range(1000)))

    assert {texts[0] for texts, _ in asyncio.run(run())} == {expected}


@pytest.mark.slow
def test_a_slow_reader_delays_nobody(server: Apart) -> None:
    """The engine goes on to the end of the answer; what waited comes in few events."""
    more = {"max_tokens": 400, "logprobs": 20, "n": 16}  # 15 MB, more than the system buffers
    expected = server.ask(**more).json()["choices"]

    made = figure(server, "urdir_generated_tokens_total") + 16 * 400

    async def wait() -> None:
        await asyncio.to_thread(
            wait_for, lambda: figure(server, "urdir_generated_tokens_total") >= made
        )

    texts, events = asyncio.run(streamed(server, wait, **more))
    assert texts == {choice["index"]: choice["text"] for choice in expected}
    assert events < 16 * 390


async def streamed(
    server: Apart, until: Callable[[], Awaitable[None]] | None = None, **more: Any
) -> tuple[dict[int, str], int]:
    """The texts of streamed answers and their number of events; nothing is read ``until``."""
    body = json.dumps(ASKED | {"stream": True} | more).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    if until is not None:
        await until()
    lines = (await reader.read()).split(b"\n")
    writer.close()
    await writer.wait_closed()
    assert lines.count(b"data: [DONE]") == 1
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    texts: dict[int, str] = defaultdict(str)
    for (choice,) in (event["choices"] for event in events):
        texts[choice["index"]] += choice["text"]
    return texts, len(events)


@pytest.mark.slow
def test_an_engine_without_its_first_process_waits_for_its_front_ends(
    start: Callable[..., Apart],
) -> None:
    """It does not spin meanwhile, as the pipe of orders stays readable."""
    server = start("--workers", "1")
    engine, (front,) = server.engine, server.fronts
    os.kill(front, signal.SIGSTOP)
    server.process.kill()

    def does_nothing() -> None:
        time.sleep(0.3)
        before = _seconds(engine)
        time.sleep(0.5)
        assert _seconds(engine) - before < 0.1

    in_some_try(does_nothing)
    os.kill(front, signal.SIGCONT)
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    server.end()


def _seconds(pid: int) -> float:
    """What a process has used of the CPU."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
