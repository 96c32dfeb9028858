"""HTTP in processes of its own: answers, errors, ends of processes, many streams, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from tests.patience import PATIENCE, in_some_try, wait_for
from tests.processes import beginning, end_of, kill, start_python
from urdir.model import demo_model
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.measure.http_events import HttpServer, ServerError
from urdir.model.serve.apart import desks as apart_desks
from urdir.model.serve.apart import supervisor, wire
from urdir.model.serve.apart.desks import Desks
from urdir.model.serve.apart.link import EngineLink
from urdir.model.serve.kept import Store
from urdir.model.serve.loops import run_in_loop
from urdir.model.text.constraints import Constraint
from urdir.model.text.thought_limit import ThoughtLimit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROGRAM = Path(__file__).with_name("apart_server.py")
ASKED: dict[str, Any] = {"model": "paced", "prompt": "By the old mill", "max_tokens": 8, "seed": 5}
STREAMED: dict[str, Any] = {"stream": True}
DEADLY = 666


class Apart:
    """A server of `apart_server`, in processes of its own."""

    def __init__(self, *flags: str) -> None:
        pipe = subprocess.PIPE
        self.process = start_python(str(PROGRAM), *flags, stdout=pipe, stderr=pipe)
        assert self.process.stdout is not None
        with beginning(self.process):
            self.url = self.process.stdout.readline().strip()
            assert self.url, end_of(self.process)
        self.port = int(self.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def ask(self, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=ASKED | more)

    @property
    def engine(self) -> int:
        """The engine's process, which has front ends."""
        (engine,) = (pid for pid in children(self.process.pid) if children(pid))
        return engine

    @property
    def fronts(self) -> list[int]:
        return children(self.engine)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, once all processes have ended."""
        code, _, errors = end_of(self.process)
        return code, errors

    def close(self) -> None:
        """End it in any case."""
        self.http.close()
        kill(self.process)


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


@pytest.fixture
def start() -> Iterator[Callable[..., Apart]]:
    servers: list[Apart] = []

    def begin(*flags: str) -> Apart:
        servers.append(Apart(*flags))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Apart]:
    """One for the tests that leave it whole."""
    server = Apart("--sequences", "1000", "--step", "0.005")
    with contextlib.closing(server):
        yield server
        body = ASKED | {"max_tokens": 100, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.terminate()  # what is open is answered
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.http.close()
        code, errors = server.end()
    assert code == 0, errors
    assert errors.count("a front end has ended (-9), another begins") <= 1
    assert "Traceback" not in errors


def sockets(pid: int) -> int:
    """How many a process has."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += str(file.readlink()).startswith("socket:")
    return found


def figure(server: Apart, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_while_the_model_is_loaded(start: Callable[..., Apart], number: signal.Signals) -> None:
    """Requests are refused; all processes end with the first, however that ends."""
    server = start("--load", "600")
    http = server.http
    health = http.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "loading")
    assert health.headers["retry-after"] == "1"
    for path in ("/v1/completions", "/v1/messages", "/api/generate"):
        assert http.post(path, json=ASKED).status_code == 503
    for path in ("/metrics", "/lora-adapters", "/v1/responses/resp_1"):
        assert http.get(path).json()["error"]["code"] == "loading"
    slot = http.post("/slots/0?action=erase", json={})
    assert slot.json()["error"]["code"] == "loading"
    http.close()
    server.process.send_signal(number)
    code, errors = server.end()  # front ends have its stderr, too
    assert code == (130 if number == signal.SIGTERM else -number)
    assert not is_open(server.port)
    assert "Traceback" not in errors  # nothing has failed


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


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


def ask_and_drop(server: Apart, body: dict[str, Any]) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)


def test_a_front_end_that_dies_is_replaced(server: Apart) -> None:
    """Its answers end with an error, those of the other go on."""
    text = server.ask(max_tokens=400).json()["choices"][0]["text"]  # 2 s
    found: list[str | None] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as http:
            try:
                reply = http.post("/v1/completions", json=ASKED | {"max_tokens": 400})
                found.append(reply.json()["choices"][0]["text"])
            except httpx.HTTPError:
                found.append(None)

    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False)
    before = server.fronts
    idle = [sockets(front) for front in before]
    threads: list[threading.Thread] = []

    def each_has_some() -> bool:
        """Front ends take connections as they can: one may get many. Some answers may have ended
        before the other front end has any."""
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        busy = [sockets(front) - usual for front, usual in zip(before, idle, strict=True)]
        return min(busy) > 2 and figure(server, "urdir_running") > 0

    wait_for(each_has_some)
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert set(found) == {None, text}
    wait_for(lambda: len(server.fronts) == 2)
    assert before[1] in server.fronts
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False)
    wait_for(lambda: figure(server, "urdir_running") == 0)
    for _ in range(4):
        assert server.ask().status_code == 200


@pytest.mark.slow
def test_a_model_that_has_gone_ends_all(start: Callable[..., Apart], tmp_path: Path) -> None:
    """The front end in place of one that dies cannot read it; there is no third."""
    file = tmp_path / "demo.gguf"
    shutil.copy(demo_model(), file)
    server = start("--model", str(file), "--workers", "1")
    file.unlink()
    os.kill(server.fronts[0], signal.SIGKILL)
    code, errors = server.end()
    assert code == 1
    assert errors.count("another begins") == 1
    assert re.search(r"^error: .*demo\.gguf", errors, re.MULTILINE)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_an_engine_that_dies_ends_all(start: Callable[..., Apart]) -> None:
    """With its cause and exit code 1."""
    server = start("--step", "0.01")
    lines: list[str] = []

    def listen() -> None:
        body = ASKED | {"max_tokens": 4000, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False
        ) as response:
            lines.extend(response.iter_lines())

    thread = threading.Thread(target=listen)
    thread.start()
    wait_for(lambda: len(lines) > 4)
    fronts = server.fronts
    refused = server.ask(seed=DEADLY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "device_lost")
    thread.join()
    assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
    code, errors = server.end()
    assert code == 1
    assert "the engine's process has ended: killed by SIGKILL" in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in fronts))


@pytest.mark.slow
def test_a_second_signal_aborts_what_is_open(start: Callable[..., Apart]) -> None:
    server = start("--step", "0.05")
    body = ASKED | {"max_tokens": 4000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.killpg(server.process.pid, signal.SIGINT)
        wait_for(lambda: not is_open(server.port))
        assert next(lines) == ""  # it goes on
        assert next(lines)
        os.killpg(server.process.pid, signal.SIGINT)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    code, errors = server.end()
    assert code == 130
    assert errors.count("finishing open requests") == 1
    assert "Traceback" not in errors


def test_a_signal_after_the_greeting_is_an_order() -> None:
    """Before it, one ends the processes at once: nothing is open."""
    control, theirs = multiprocessing.Pipe()
    signals = supervisor._Signals(control, lambda *_: signals.take(signal.SIGTERM, None))
    with pytest.raises(KeyboardInterrupt):
        signals.take(signal.SIGTERM, None)
    for said in (("toy", 512), None):
        theirs.send(said)
    signals.wait(multiprocessing.Process())
    assert theirs.recv() == "drain"


def test_an_error_of_the_greeting_is_no_end_of_the_engine() -> None:
    """Its reader may have gone: no end of the engine is awaited."""

    def greet(name: str, context: int) -> None:
        raise BrokenPipeError

    control, theirs = multiprocessing.Pipe()
    theirs.send(("toy", 512))
    with pytest.raises(BrokenPipeError):
        supervisor._Signals(control, greet).wait(multiprocessing.Process())


@pytest.mark.slow
def test_a_third_signal_ends_all_at_once(start: Callable[..., Apart]) -> None:
    """Also front ends that do nothing end with the engine, once they go on."""
    server = start("--workers", "1")
    engine, (front,) = server.engine, server.fronts
    os.kill(front, signal.SIGSTOP)
    sent = 0
    while server.process.poll() is None and sent < PATIENCE:
        server.process.send_signal(signal.SIGINT)
        sent += 1
        with suppress(subprocess.TimeoutExpired):  # two that arrive at once are one
            server.process.wait(0.5 if sent < 3 else 2)
    assert sent >= 3
    assert server.process.returncode == 130
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    os.kill(front, signal.SIGCONT)
    wait_for(lambda: not Path(f"/proc/{front}").exists())
    assert "Traceback" not in server.end()[1]


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


@pytest.mark.full
@pytest.mark.timeout(0)
def test_a_soak_with_front_ends_that_die(
    start: Callable[..., Apart], pytestconfig: pytest.Config
) -> None:
    """Streams are whole, or their front end was killed; some clients leave. Nothing stays open, and
    the engine does not grow. A minute, unless ``--soak`` is less."""
    seconds = min(60.0, pytestconfig.getoption("--soak"))
    server = start("--sequences", "32", "--step", "0.002", "--workers", "3")
    expected = {seed: server.ask(seed=seed, max_tokens=40).json() for seed in range(4)}
    texts = {seed: reply["choices"][0]["text"] for seed, reply in expected.items()}
    rng, end = random.Random(7), time.monotonic() + seconds
    ended, killed, memory = Counter[str](), 0, list[int]()

    async def client() -> None:
        while time.monotonic() < end:
            seed, leaves = rng.randrange(4), rng.random() < 0.1
            body = ASKED | {"seed": seed, "max_tokens": 40}
            target = HttpServer.parse(server.url)
            text = ""
            try:
                async with aclosing(target.events("/v1/completions", body | STREAMED)) as events:
                    async for event in events:
                        assert "error" not in event, event
                        text += event["choices"][0]["text"]
                        if leaves:
                            ended["left"] += 1
                            break
            except ServerError:
                ended["cut"] += 1
                assert texts[seed].startswith(text)
                continue
            if not leaves:
                ended["whole"] += 1
                assert text == texts[seed]

    async def kill() -> None:
        """Also those that have not begun to serve."""
        nonlocal killed
        while time.monotonic() < end:
            await asyncio.sleep(1)
            memory.append(resident(server.engine))
            os.kill(rng.choice(server.fronts), signal.SIGKILL)
            killed += 1

    async def run() -> None:
        await asyncio.gather(kill(), *(client() for _ in range(16)))

    asyncio.run(run())
    assert killed >= min(seconds / 20, 2)
    assert ended["whole"] > ended["cut"] > 0 < ended["left"]
    wait_for(lambda: len(server.fronts) == 3)
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False)
    wait_for(lambda: figure(server, "urdir_running") == 0)
    assert figure(server, "urdir_queued") == 0
    assert server.ask(seed=1, max_tokens=40).json()["choices"][0]["text"] == texts[1]
    late = len(memory) * 2 // 3
    assert max(memory[late:]) < max(memory[: late or 1]) + (16 << 20)
    server.process.terminate()
    code, errors = server.end()
    assert (code, errors.count("another begins")) == (0, killed)
    assert "Traceback" not in errors


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_file_that_is_refused(tmp_path: Path) -> None:
    """By the command, once, whichever process finds it."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-m", "urdir.model", "serve", "--port", "0", "--device", "emulator"]
    command += ["-m", str(tmp_path / "bad.gguf"), "--api-workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"urdir: error: .*bad\.gguf.*\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [(("-ot", "nothing=CPU"), "no such tensor"), (("--device", "abacus"), "abacus")],
)
def test_bad_usage_that_the_engine_finds(flags: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "urdir.model", "serve", "--port", "0", "--device", "emulator"]
    command += ["--api-workers", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_order_with_the_first_round_is_remembered() -> None:
    """Nothing hears it yet."""

    async def run() -> tuple[int, bool | None]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await EngineLink.connect(None, ours)
            rounds = [wire.Round(context=64), wire.Round(order="abort")]
            theirs.sendall(b"".join(map(wire.frame, rounds)))
            context = await link.context
        await asyncio.sleep(0.01)  # the end of the connection is no order to drain
        return context, link.ordered

    assert asyncio.run(run()) == (64, True)


def test_the_engine_hears_of_a_request_that_begins_to_arrive() -> None:
    """Once it has a model, and unless another is open: it is busy then anyway."""

    async def run() -> list[wire.Call]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await EngineLink.connect(None, ours)
            link.expect()
            link.begin_with(cast(Any, "a model"))
            link.expect()
            answer = link.generate(Request(prompt=(1,), limit=1))
            first = asyncio.ensure_future(anext(answer))
            await asyncio.sleep(0)
            link.expect()
            theirs.sendall(wire.frame(wire.Round([wire.Update(0, (5,))])))
            await first
            await answer.aclose()
            link.expect()
            theirs.setblocking(False)
            return [*map(wire.decode_call, wire.Frames().push(theirs.recv(1 << 16)))]

    kinds = [type(call) for call in asyncio.run(run())]
    assert kinds == [wire.Ready, wire.Expect, wire.Ask, wire.Cancel, wire.Expect]


def test_calls_are_whole_and_in_order_however_late_they_are_read() -> None:
    """Some are sent at once, some once there is room."""

    async def run() -> list[wire.Call]:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
        theirs.setblocking(False)
        with theirs:
            link = await EngineLink.connect(None, ours)
            link.begin_with(cast(Any, "a model"))
            frames, found, sent = wire.Frames(), list[wire.Call](), 0

            def read(most: int) -> None:
                with suppress(BlockingIOError):
                    found.extend(map(wire.decode_call, frames.push(theirs.recv(most))))

            while len(found) < 1 + 60:
                for _ in range(3 if sent < 60 else 0):
                    scope = bytes(30_000 * (sent % 3))
                    await link._begin(Request(prompt=(1, sent), limit=1, scope=scope), print)
                    sent += 1
                    read(20_000)
                await asyncio.sleep(0.001 * (sent % 2))
                read(3000)
        return found

    _, *calls = run_in_loop(run())
    assert [call.prompt for call in calls if isinstance(call, wire.Ask)] == [
        (1, number) for number in range(60)
    ]


def test_what_is_unsent_follows() -> None:
    """Whichever thread sent it; nothing is sent once all is closed."""
    engine: Any = None  # no calls
    ours, theirs = socket.socketpair()
    rounds = [wire.Round([wire.Update(number, tuple(range(100_000)))]) for number in range(20)]
    with theirs, Desks(Store(0, 0.0)) as desks:
        theirs.settimeout(PATIENCE)
        desk = desks.open(ours)
        desks.start(engine)
        for each in rounds:
            desk.send(each)
        frames, found = wire.Frames(), []
        while len(found) < len(rounds):
            found += map(wire.decode_round, frames.push(theirs.recv(1 << 18)))
    assert found == rounds
    desk.send(rounds[0])
    desks.order("drain")
    desks.close()


class Looking:
    """An idle service, whose thread looks for the request that it expects; ``read_by`` are the
    threads that read requests."""

    def __init__(self) -> None:
        self.read_by: list[str] = []
        self.looks = threading.Event()

    def expect(self, look: Callable[[], bool]) -> bool:
        def run() -> None:
            while not look():
                self.looks.set()

        threading.Thread(target=run, name="service").start()
        return True

    def answer_to(self, *_: object) -> None:
        self.read_by.append(threading.current_thread().name)

    def add(self, _: object) -> None: ...


def test_the_service_itself_reads_a_request_that_it_expects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others are read by a thread of their own, which leaves the first one to it."""
    is_read = threading.Event()
    leaves = SimpleNamespace(sleep=lambda _: is_read.wait(PATIENCE))  # however busy the machine is
    monkeypatch.setattr(apart_desks, "time", leaves)
    monkeypatch.setattr(apart_desks, "_TURN_SECONDS", PATIENCE)
    engine: Any = Looking()
    ours, theirs = socket.socketpair()
    with theirs, Desks(Store(0, 0.0)) as desks:
        desks.open(ours)
        desks.start(engine)
        theirs.sendall(wire.frame(wire.Expect()))
        assert engine.looks.wait(PATIENCE)
        for number in range(2):
            theirs.sendall(wire.frame(wire.Ask.of(number, Request(prompt=(1,)))))
            deadline = time.monotonic() + PATIENCE
            while len(engine.read_by) == number:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            is_read.set()
    assert engine.read_by[0] == "service"
    assert engine.read_by[1] != "service"


def test_requests_arrive_as_they_are() -> None:
    """All of them but what makes text, and processors, which are code of this process."""
    settings = SamplingSettings(seed=(1 << 64) - 1, logit_bias=((5, -1.5), (7, 2.0)), logprobs=3)
    constraint = Constraint.choice(["yes", "nó"])
    request = Request(
        prompt=(1, 2, 1 << 20),
        settings=settings,
        limit=7,
        stops=("a",),
        ignore_end=True,
        constraint=constraint,
        thoughts=ThoughtLimit(5, "<think>", "</think>", "Enough.</think>", is_open=True),
        shown=frozenset({"<b>"}),
        scope=b"\xff\0",
        drafts=False,
        draft_p_min=0.25,
        adapters=(("a", -0.5),),
        source=(3, 1 << 20),
    )
    unlike = [
        each.name
        for each in fields(Request)
        if each.default is not MISSING and getattr(request, each.name) == each.default
    ]
    assert unlike == ["processors"]  # a new field is to be sent, too
    (body,) = wire.Frames().push(wire.frame(wire.Ask.of(3, request)))
    call = wire.decode_call(body)
    assert isinstance(call, wire.Ask)
    assert call.request == replace(request, stops=(), shown=frozenset())


def test_frames_are_cut_anywhere() -> None:
    calls = [wire.Stop(1), wire.Cancel(2), wire.Query(1 << 40), wire.Ready()]
    data = b"".join(map(wire.frame, calls))
    for size in (1, 3, 7, len(data)):
        frames, found = wire.Frames(), []
        for at in range(0, len(data), size):
            found += map(wire.decode_call, frames.push(data[at : at + size]))
        assert found == calls


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
