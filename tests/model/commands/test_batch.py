"""`urdir batch` with a toy; test_examples.py has the demo model."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model.serve.conftest import ToyModel, ToyService
from urdir.model.commands import serve_opening
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.serve.offline import answer_lines

HI = [{"role": "user", "content": "Hi"}]
LINES = [
    {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": HI}},
    {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
    {"custom_id": "blocks", "url": "/v1/messages", "body": {"messages": HI, "max_tokens": 9}},
    {"custom_id": "lines", "url": "/api/generate", "body": {"prompt": "Hi"}},
    {"custom_id": "bad", "url": "/v1/chat/completions", "body": {"messages": []}},
    {"custom_id": "stream", "url": "/v1/completions", "body": {"prompt": "a", "stream": True}},
    {"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}},
    {"custom_id": "nowhere", "url": "/elsewhere", "body": {}},
]
#: Lines that are no requests.
BAD = [
    b"{",
    b"[" * 100_000,
    b"\xff",
    b'{"url": "/v1/completions", "body": {"prompt": "a"}}',
    json.dumps(LINES[0]).encode(),  # a second time
    b'{"custom_id": "deep", "url": "/v1/completions", "body": {"a": '
    + b"[" * 900
    + b"]" * 900
    + b"}}",
    b'{"custom_id": "path", "url": "/\\ud800", "body": {}}',
]


def test_lines(
    demo_file: Path,
    tmp_path: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from urdir.model.files.gguf import Gguf
    from urdir.model.text.chat import ChatTemplate
    from urdir.model.text.tokenizer import Tokenizer

    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [*(json.dumps(line).encode() for line in LINES), *BAD]
    source.write_bytes(b"\n\n".join(lines))
    with Gguf(demo_file) as gguf:
        tokenizer = Tokenizer.of(gguf)
        template = ChatTemplate.of(gguf, tokenizer)
    with template:
        service = ToyService(ToyModel(tokenizer, template), delay=0.001)
        monkeypatch.setattr(serve_opening, "open_service", lambda args, template: service)
        code, out, _ = cli("batch", str(source), str(answers), "--at-once", "3")
        piped = cli("batch", str(source), "-")
    assert (code, out) == (1, "4 of 15 requests answered\n")
    assert service.ended == ["closed", "closed"]
    assert (piped[0], len(piped[1].splitlines()), piped[2]) == (1, 15, out)
    written = [*map(json.loads, answers.read_text().splitlines())]
    assert len({line["id"] for line in written}) == len(written) == 15
    refused = [line["custom_id"] for line in written if line["error"]]
    assert sorted(map(str, refused)) == sorted([*["None"] * 4, "stream", "get", "chat", "path"])
    assert all(line["error"]["code"] == "invalid_request" for line in written if line["error"])
    source_lines = source.read_bytes().splitlines()
    for line in written:
        if line["error"]:
            bad = source_lines[line["error"]["line"] - 1]
            assert bad in BAD or json.loads(bad)["custom_id"] == line["custom_id"]
            assert line["error"]["message"].startswith(f"line {line['error']['line']}: ")
            assert ("not JSON: " in line["error"]["message"]) == (bad in BAD[:3])
    found = {line["custom_id"]: line for line in written if not line["error"]}
    bodies = {name: (line["response"] or {}).get("body") for name, line in found.items()}
    text = "2 plus 3 is 5."
    assert bodies["chat"]["choices"][0]["message"]["content"] == text
    assert bodies["text"]["choices"][0]["text"] == text
    assert bodies["blocks"]["content"][0]["text"] == bodies["lines"]["response"] == text
    assert found["chat"]["response"]["request_id"]
    assert found["bad"]["response"]["status_code"] == 400
    assert found["nowhere"]["response"]["status_code"] == 404
    assert found["deep"]["response"]["status_code"] == 400


def test_a_file_of_both(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    code, _, err = cli("batch", str(source), str(source))
    assert (code, "a file of their own" in err) == (2, True)
    assert source.read_text() == "{}"


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_lost_device_ends_the_batch(
    tmp_path: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    is_sound: bool,
) -> None:
    """With an error, not with that of every line."""

    class Lost:
        lost = None if is_sound else DeviceLostError("the device is lost")
        ended = False

        async def close(self) -> None:
            self.ended = True

    source, answers, service = tmp_path / "in.jsonl", tmp_path / "out.jsonl", Lost()
    source.write_text("{\n" * 9)
    monkeypatch.setattr(serve_opening, "open_service", lambda *_: service)
    code, _, err = cli("batch", str(source), str(answers))
    assert (code, service.ended) == (1, True)
    assert ("the device is lost" in err) is not is_sound
    assert answers.read_text().count("\n") == (9 if is_sound else 0)


class Idle:
    """A service whose requests are all refused before it."""

    lost = None

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("out", ["/dev/full", "-"])
def test_answers_that_cannot_be_written_end_the_batch(
    cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """A full disk is named; a reader of stdout may leave. Requests come from stdin."""
    with io.TextIOWrapper(io.BytesIO(b"{\n" * 9)) as stdin, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(serve_opening, "open_service", lambda *_: Idle())
        if out == "-":
            patch.setattr("builtins.print", _leave)
            patch.setattr("urdir.model.commands.terminal.give_up_stdout", lambda: None)
        code, _, err = cli("batch", "-", out)
    told = f"urdir: error: {out}: cannot be written: No space left on device\n"
    assert (code, err) == ((0, "") if out == "-" else (1, told))


def _leave(*_: object, **__: object) -> None:
    raise BrokenPipeError


def test_answers_are_not_replaced(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}")
    answers.write_text("an hour's work")
    code, _, err = cli("batch", str(source), str(answers))
    assert (code, "is not empty" in err) == (2, True)
    assert answers.read_text() == "an hour's work"


def test_a_busy_server_and_one_with_a_fault() -> None:
    """What is refused for a while is sent again; a fault is the answer of its line."""
    statuses = iter((429, 429, 200, 500))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status = next(statuses)
        headers = [(b"x-request-id", b"a"), (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})
        if status == 500:
            raise RuntimeError("a fault")

    lines = [json.dumps({"custom_id": i, "url": "/", "body": {}}).encode() for i in "ab"]
    written: list[Any] = []
    assert asyncio.run(answer_lines(app, lines, written.append, 1)) == (2, 1)
    assert [line["response"]["status_code"] for line in written] == [200, 500]
