"""`urdir serve` as a process: flags, the line it prints, Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.model.serve.serve_process import CHAT, HI, Process
from tests.patience import PATIENCE
from tests.processes import running, start_python
from urdir.model.cli import build_parser, main
from urdir.model.commands import serve_opening as command
from urdir.model.engine.options import EngineOptions
from urdir.model.engine.requests import async_service
from urdir.model.files.metadata import Metadata
from urdir.model.serve.access import Access
from urdir.model.serve.interface import Defaults
from urdir.model.text.named_templates import named_template

#: As much of an engine as `EngineModel` looks at.
ENGINE: Any = SimpleNamespace(
    name="toy",
    tokenizer=None,
    file=SimpleNamespace(metadata=Metadata({})),
    template=SimpleNamespace(source="", form=None),
    session=SimpleNamespace(
        context=64,
        shapes=SimpleNamespace(chunks=(64,), alignment=16, walk=None),
        cache=SimpleNamespace(pools=[SimpleNamespace(pages=1000, page_len=2)]),
        parts=SimpleNamespace(
            recurrent=SimpleNamespace(shape=SimpleNamespace(nbytes=52_690_944)),
        ),
        storage=SimpleNamespace(shared_states=SimpleNamespace(places=7)),
    ),
)
ROOM = (
    "the cache has room for 2,000 tokens\n"
    "up to 7 states are kept for prompts with a common prefix, 52,690,944 bytes each\n"
)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """Put `ENGINE` in place of engines; what they are to be opened with."""
    opened: list[EngineOptions] = []

    def load(wanted: EngineOptions) -> contextlib.nullcontext[None]:
        opened.append(wanted)
        return contextlib.nullcontext()

    monkeypatch.setattr(command, "load", load)
    monkeypatch.setattr(command, "makes_embeddings", lambda args: False)
    monkeypatch.setattr(command, "begin_warm_up", lambda loading, seconds: None)
    monkeypatch.setattr("urdir.model.engine.engine.Engine", lambda loading: ENGINE)
    return opened


def ask_beside(server: Process) -> tuple[threading.Thread, list[str], threading.Event]:
    """Ask for a stream in a thread: its lines, and when the first of them has come."""
    lines: list[str] = []
    begun = threading.Event()

    def ask() -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream(
                "POST",
                server.url + CHAT,
                json={**HI, "stream": True},
                timeout=PATIENCE,
                trust_env=False,
            ) as response,
        ):
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, lines, begun


@pytest.mark.slow
def test_an_interrupt_answers_what_is_open_and_ends(process: Callable[..., Process]) -> None:
    server = process(delay=0.05)
    assert server.greeting.startswith("toy, 512 tokens of context: http://127.0.0.1:")
    thread, lines, begun = ask_beside(server)
    assert begun.wait(PATIENCE)
    server.interrupt()
    thread.join(PATIENCE)
    out, err = server.end()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert out == "0 drained closed 0\n"
    assert "finishing open requests" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_interrupt_ends_the_answers(process: Callable[..., Process]) -> None:
    server = process(delay=0.05, repeat=10_000)
    thread, lines, begun = ask_beside(server)
    assert begun.wait(PATIENCE)
    server.interrupt()
    assert server.process.stderr is not None
    assert server.process.stderr.readline() == "\n"
    assert "Ctrl-C again" in server.process.stderr.readline()
    server.interrupt()
    thread.join(PATIENCE)
    out, err = server.end()
    assert "data: [DONE]" not in lines
    assert out == "130 closed 1\n"
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_a_lost_device_is_an_exit_code(process: Callable[..., Process], at_once: bool) -> None:
    server = process(*["--exit-on-device-loss"][: int(at_once)], lost="the device is lost: why")
    if not at_once:
        assert (
            httpx.get(f"{server.url}/health", timeout=PATIENCE, trust_env=False).status_code == 503
        )
        server.interrupt()
    out, err = server.end()
    assert out == "1 drained closed 0\n"
    assert err.endswith("urdir: error: the device is lost: why\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_more_connections_than_open_files(process: Callable[..., Process]) -> None:
    """Clients that only connect: others are served, and the log stays small."""
    server = process(files=64)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        for _ in range(90):
            stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
        reply = httpx.post(server.url + CHAT, json=HI, timeout=PATIENCE, trust_env=False)
        assert reply.status_code == 200
    server.interrupt()
    out, err = server.end()
    assert out == "0 drained closed 0\n"
    assert len(err) < 300


@pytest.mark.slow
def test_flags(process: Callable[..., Process], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = process("--api-key-file", str(keys), "--cors", "https://a.example", "--host", "::1")
    assert server.url.startswith("http://[::1]:")
    with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as http:
        assert http.get("/v1/models").status_code == 401
        asked = http.get(
            "/v1/models", headers={"Authorization": "Bearer two", "Origin": "https://a.example"}
        )
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403
    server.process.terminate()
    assert server.end()[0] == "0 drained closed 0\n"


@pytest.mark.parametrize(
    ("extra", "missing", "flags"), [("serve", "starlette", []), ("ray", "ray", ["--ray"])]
)
def test_without_the_extra_one_line_says_what_to_install(
    extra: str, missing: str, flags: list[str]
) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from urdir.model.cli import main; "
    script += f"sys.exit(main(['serve', *{flags}]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"pip install 'urdir[{extra}]'" in done.stderr


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ((), {"localhost", "127.0.0.1", "[::1]"}),
        (("--host", "127.0.0.2"), {"localhost", "127.0.0.1", "127.0.0.2", "[::1]"}),
        (("--allowed-host", "Me.example"), {"localhost", "127.0.0.1", "[::1]", "me.example"}),
        (("--host", "0.0.0.0"), None),
        (
            ("--host", "fe80::1", "--allowed-host", "a"),
            {"localhost", "127.0.0.1", "[::1]", "[fe80::1]", "a"},
        ),
    ],
)
def test_names_of_the_server(
    flags: tuple[str, ...], hosts: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Access] = []

    def serve(service: object, listener: object, access: Access, *more: object) -> None:
        found.append(access)

    monkeypatch.setattr("urdir.model.serve.server.serve", serve)
    monkeypatch.setattr("urdir.model.serve.listening.listen", lambda *where: socket.socket())
    monkeypatch.setattr("urdir.model.commands.serve_opening.open_service", lambda *more: None)
    assert main(["serve", "--api-workers", "0", *flags]) == 0
    assert found == [Access((), (), None if hosts is None else frozenset(hosts))]


def test_adapters_that_are_not_applied_have_room_one_by_one() -> None:
    """They are given without a scale, which clients are told all the same."""
    flags = ["--lora", "a.gguf", "--lora-scaled", "b.gguf:0.5"]
    for more, scales in (([], [1.0, 0.5]), (["--lora-init-without-apply"], [0.0, 0.0])):
        args = build_parser("serve").parse(["serve", "demo", *flags, *more])
        given = command.engine_options(args, None).adapters
        assert [scale for _, scale in given] == scales
        assert command.adapters(args) == (("a", 1.0), ("b", 0.5))


def test_flags_of_access_and_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("urdir.model.serve.server.serve", lambda *given: found.append(given[2:4]))
    monkeypatch.setattr("urdir.model.serve.listening.listen", lambda *where: socket.socket())
    options = stand_in(monkeypatch)
    monkeypatch.setattr(
        async_service,
        "AsyncService",
        lambda engine, model, **more: found.append((model, more["limits"])),
    )
    (tmp_path / "keys").write_text("# of the team\none\n\n\t# too\n two \r\n")
    words = ["--api-key", "a, b", "--api-key-file", tmp_path / "keys"]
    words += ["--cors-origins", "tauri://x, http://y:1/"]
    words += ["--no-webui", "-to", "600", "--temp", "0.6", "-s", "7", "-n", "9", "-rea", "off"]
    words += ["--chat-template", "chatml", "-np", "-1", "-b", "64"]
    words += ["--no-prefix-sharing"]
    assert cli("serve", "--api-workers", "0", *words)[::2] == (0, ROOM)
    (opened,), (model, queue), (access, limits) = options, *found
    assert not queue.share_prefixes
    assert access.api_keys == ("a", "b", "one", "two")
    assert access.origins == ("tauri://x", "http://y:1")
    assert not access.page
    assert (limits.stalled_seconds, limits.silent_seconds) == (600, 600)
    assert (opened.sequences, opened.chunk) == (None, 64)
    assert opened.chat_template == named_template("chatml")
    usual = Defaults()
    assert model.defaults == Defaults(
        settings=replace(usual.settings, temperature=0.6, seed=7),
        limit=9,
        variables={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), ("toy", "demo")),
        (("-m", "demo"), ("toy", "demo")),
        (("models/toy-Q8_0.gguf",), ("toy", "toy-Q8_0.gguf")),
        (("-m", "/models/toy/"), ("toy",)),
        (("-hf", "org/repo:Q8_0"), ("toy", "hf:org/repo:Q8_0")),
        (("-m", "demo", "--alias", "gpt-4o, mine"), ("gpt-4o", "mine")),
    ],
)
def test_names_of_the_model(
    flags: tuple[str, ...], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("urdir.model.serve.server.serve", lambda *given: None)
    monkeypatch.setattr("urdir.model.serve.listening.listen", lambda *where: socket.socket())
    stand_in(monkeypatch)
    monkeypatch.setattr(
        async_service, "AsyncService", lambda engine, model, **more: found.append(model)
    )
    assert main(["serve", "--api-workers", "0", *flags]) == 0
    assert found[0].names == names


@pytest.mark.slow
@pytest.mark.full
def test_the_demo_model_answers_several_at_once() -> None:
    """The engine itself, on a machine without a GPU."""
    words = ("serve", "--port", "0", "-c", "64", "--device", "emulator")
    with running(start_python("-m", "urdir.model", *words, stderr=subprocess.PIPE)) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        question = {"role": "user", "content": "What is 2 plus 3?"}
        body = {"model": "demo", "messages": [question], "temperature": 0, "n": 3}
        with httpx.Client(timeout=120, trust_env=False) as client:
            choices = client.post(url + CHAT, json=body).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["2 plus 3 is 5."] * 3
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--port", "70000"), 2, "between 0 and 65535"),
        (("--ray", "--exit-on-device-loss"), 2, "Ray replaces such replicas itself"),
        (("--api-key", ""), 2, "--api-key is empty"),
        (("--alias", "a,,b"), 2, "'a,,b' has an empty name"),
        (("--api-workers", "1", "--spec-type", "draft-eagle3"), 2, "with -md"),
        (
            ("--api-workers", "1", "--logit-bias", "5+1", "--logit-bias", "5-1"),
            2,
            "(see urdir serve",
        ),
        (("--api-key-file", "/nowhere"), 1, "--api-key-file /nowhere"),
        (("--host", "192.0.2.1"), 1, "give another --host"),
        (("--host", "no.such.name.invalid"), 1, "cannot listen on no.such.name.invalid"),
    ],
)
def test_bad_flags(
    cli: Callable[..., tuple[int, str, str]], flags: tuple[str, ...], code: int, words: str
) -> None:
    result = cli("serve", *flags)
    assert (result[0], result[1]) == (code, "")
    assert words in result[2]
    assert result[2].count("\n") == 1


def test_windows_has_one_process(
    cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    code, _, errors = cli("serve", "--api-workers", "2")
    assert (code, errors.count("\n")) == (2, 1)
    assert "--api-workers on Windows" in errors
