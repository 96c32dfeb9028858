"""Every field that OpenAI, vLLM and llama-server document is served, refused or without effect."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from urdir.model.serve.request_fields import (
    ALL,
    CHAT,
    DETOKENIZE,
    FIELDS,
    INFILL,
    MESSAGES,
    NATIVE,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_OPTIONS,
    RESPONSES,
    TEXT,
    TOKENS,
    Handling,
)
from urdir.model.text.fill import FillTokens

TESTS = Path(__file__).parents[2]
DOCUMENTED = {
    path.stem: json.loads(path.read_text()) for path in (TESTS / "data/request_fields").iterdir()
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    TEXT: ("/v1/completions", {"prompt": "Hi"}),
    TOKENS: ("/tokenize", {"prompt": "Hi"}),
    DETOKENIZE: ("/detokenize", {"tokens": [5]}),
    MESSAGES: ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    RESPONSES: ("/v1/responses", {"input": "Hi"}),
    NATIVE: ("/completion", {"prompt": "Hi"}),
    INFILL: ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    OLLAMA_CHAT: ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    OLLAMA_GENERATE: ("/api/generate", {"prompt": "Hi"}),
    OLLAMA_OPTIONS: ("/api/generate", {"prompt": "Hi"}),
}
VALUES = (True, False, 2, 0.5, "none", ["x"], {"a": 1})
WRONG = [[{}]]  # of no field's type
BY_NAME = {(endpoint, field.name): field for field in FIELDS for endpoint in field.endpoints}


def fields_of(handling: Handling) -> list[tuple[str, str]]:
    """Endpoints and fields. What all endpoints read by the same code is tried with two of them;
    those of embeddings are in `test_embeddings.py`."""
    return [
        key
        for key, field in BY_NAME.items()
        if field.handling is handling
        and key[0] in BODIES
        and not (field.endpoints == ALL and key[0] in (MESSAGES, RESPONSES, NATIVE))
    ]


def param_of(reply: Any) -> str:
    """The field that an error is about; Anthropic's errors name it in words alone."""
    error = reply.json()["error"]
    if "param" in error:
        return str(error["param"])
    words = error if isinstance(error, str) else error["message"]
    return str(words.split("'")[1].removeprefix("options."))


def post(server: Any, endpoint: str, name: str, value: Any, **more: Any) -> Any:
    """The reply to a good request with one more field."""
    path, body = BODIES[endpoint]
    parent, _, child = name.partition(".")
    changed = {name: value}
    if child and parent in ("output_config", "reasoning", "text"):
        changed = {parent: {child: value}}
    elif child and parent in ("stream_options", "structured_outputs"):
        others = {"json": {}} if "white" in child else {}
        changed = {parent: {**others, child: value}, "stream": True}
    if endpoint == TOKENS and name in ("continue_final_message", "add_generation_prompt",
                                       "chat_template_kwargs", "reasoning_effort", "documents",
                                       "tools", "tool_choice", "parallel_tool_calls"):  # fmt: skip
        body = BODIES[CHAT][1]
    server.model.fill = FillTokens(5, 6, 7)
    if endpoint == OLLAMA_OPTIONS:
        changed = {"options": {"seed": 1, **changed}}
    seed = {"options": {"seed": 1}} if path.startswith("/api/") else {"seed": 1}
    return server.http().post(path, json={**body, **seed, **changed, **more})


@pytest.mark.parametrize("whose", DOCUMENTED)
def test_every_documented_field_is_in_the_table(whose: str) -> None:
    letter = {"openai": "O", "anthropic": "A", "ollama": "M", "vllm": "V", "llama_server": "L"}[
        whose
    ]
    for endpoint, names in DOCUMENTED[whose].items():
        if endpoint != "source":
            rows = {name: BY_NAME.get((endpoint, name)) for name in names}
            assert [name for name, row in rows.items() if row is None] == []
            assert [name for name, row in rows.items() if row and letter not in row.origins] == []


def test_a_name_has_one_row_for_an_endpoint() -> None:
    assert len(BY_NAME) == sum(len(field.endpoints) for field in FIELDS)


@pytest.mark.parametrize(("endpoint", "name"), fields_of(Handling.SERVED))
def test_what_is_served_is_read(server: Any, endpoint: str, name: str) -> None:
    """A value that cannot be meant is refused by the field's name: so somebody reads the field."""
    reply = post(server, endpoint, name, WRONG)
    assert reply.status_code == 400, reply.text
    assert param_of(reply).rstrip(".").startswith(name)
    assert server.service.requests == []


@pytest.mark.parametrize(("endpoint", "name"), fields_of(Handling.REFUSED))
def test_what_is_refused_has_values_that_pass(server: Any, endpoint: str, name: str) -> None:
    field = BY_NAME[endpoint, name]
    written = [json.dumps(value) for value in field.neutral]
    for value in VALUES:
        if json.dumps(value) not in written:
            reply = post(server, endpoint, name, value)
            assert reply.status_code == 400, (value, reply.text)
            error = reply.json()["error"]
            assert param_of(reply) == name
            if "code" in error:
                assert error["code"] == "unsupported_parameter"
            assert field.note in (error if isinstance(error, str) else error["message"])
    assert server.service.requests == []
    parent = (
        {"structured_outputs": {"regex": "a"}} if name.startswith("structured_outputs.") else {}
    )
    for value in (None, *field.neutral):
        if not parent:
            assert post(server, endpoint, name, value).status_code == 200, value
        else:
            child = name.partition(".")[2]
            whole = {"structured_outputs": {"regex": "a", child: value}}
            assert post(server, endpoint, "user", "me", **whole).status_code == 200, value


@pytest.mark.parametrize(("endpoint", "name"), fields_of(Handling.NO_EFFECT))
def test_what_has_no_effect(server: Any, endpoint: str, name: str) -> None:
    plain = post(server, endpoint, "field_of_tomorrow", None)
    values = VALUES if name != "model" else ("toy",)
    for value in values:
        reply = post(server, endpoint, name, value)
        assert reply.status_code == 200, (value, reply.text)
        if endpoint in (TOKENS, DETOKENIZE):
            assert reply.json() == plain.json()
    requests = server.service.requests
    assert all(replace(r, constraint=None) == replace(requests[0]) for r in requests)


def test_a_field_that_nobody_documents_is_ignored(server: Any) -> None:
    for endpoint in BODIES:
        assert post(server, endpoint, "field_of_tomorrow", {"a": [1]}).status_code == 200


def test_the_readme_has_the_tables() -> None:
    script = runpy.run_path(str(TESTS / "request_fields.py"))
    text = script["README"].read_text(encoding="utf-8")
    assert script["readme_with_tables"](text) == text, "run tests/request_fields.py"
