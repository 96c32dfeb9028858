"""`urdir batch` with a toy; test_examples.py has the demo model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.serve.conftest import ToyModel, ToyService
from urdir.model.commands import serve

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
    source.write_text("\n\n".join(map(json.dumps, LINES)) + "\n{\n")
    with Gguf(demo_file) as gguf:
        tokenizer = Tokenizer.of(gguf)
        template = ChatTemplate.of(gguf, tokenizer)
    with template:
        service = ToyService(ToyModel(tokenizer, template), delay=0.001)
        monkeypatch.setattr(serve, "open_service", lambda args, template: service)
        code, out, _ = cli("batch", str(source), str(answers), "--at-once", "3")
    assert (code, out) == (1, "4 of 9 requests answered\n")
    assert service.ended == ["closed"]
    found = {line["custom_id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert len({line["id"] for line in found.values()}) == len(found) == 9
    bodies = {name: (line["response"] or {}).get("body") for name, line in found.items()}
    text = "2 plus 3 is 5."
    assert bodies["chat"]["choices"][0]["message"]["content"] == text
    assert bodies["text"]["choices"][0]["text"] == text
    assert bodies["blocks"]["content"][0]["text"] == bodies["lines"]["response"] == text
    assert found["chat"]["response"]["request_id"]
    assert found["bad"]["response"]["status_code"] == 400
    assert found["nowhere"]["response"]["status_code"] == 404
    for name in ("stream", "get", None):
        assert found[name]["error"]["code"] == "invalid_request"


def test_a_file_of_both(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    code, _, err = cli("batch", str(source), str(source))
    assert (code, "a file of their own" in err) == (2, True)
    assert source.read_text() == "{}"
