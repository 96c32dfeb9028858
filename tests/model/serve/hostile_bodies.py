"""Bodies that a stranger may send, all of which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from random import Random
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: What they are refused with.
REFUSED = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
}
_HI = [{"role": "user", "content": "x"}]


def _nested_lists(rng: Random) -> tuple[str, bytes]:
    """Megabytes of lists, in which objects weigh many times their text."""
    return CHAT, b'{"x": [' + b"[[]]," * rng.randint(10_000, 700_000) + b"1]}"


def _deep(rng: Random) -> tuple[str, bytes]:
    depth = rng.randint(200, 200_000)
    mark, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return CHAT, b'{"messages": ' + mark * depth + b"1" + end * depth + b"}"


def _deep_arguments(rng: Random) -> tuple[str, bytes]:
    """An earlier call of a tool, whose arguments are JSON in a string."""
    arguments = '{"a":' * 700 + "1" + "}" * 700
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    earlier = {"role": "assistant", "content": None, "tool_calls": [call]}
    return CHAT, json.dumps({"messages": [*_HI, earlier, *_HI], "n": 0}).encode()


def _many_ids(rng: Random) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"prompt": [5] * rng.choice((300, 9_000, 900_000))}).encode()


def _many_prompts(rng: Random) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"prompt": [[5]] * 50_000}).encode()


def _long_text(rng: Random) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": "a b " * rng.randint(2_000, 500_000)}]
    return CHAT, json.dumps({"messages": messages}).encode()


def _too_large(rng: Random) -> tuple[str, bytes]:
    return CHAT, b" " * (5 << 20)


def _no_json(rng: Random) -> tuple[str, bytes]:
    return CHAT, rng.randbytes(rng.randint(1, 2_000))


def _of_schema(schema: Any) -> tuple[str, bytes]:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": _HI, "max_tokens": 4, "response_format": shape}
    return CHAT, json.dumps(body).encode()


def _patterns(rng: Random) -> tuple[str, bytes]:
    """Their product has more states than there are atoms."""
    letters = "abcdefghijklmnopqrst"
    parts = [
        {"type": "string", "pattern": f".*{letter}.{{{20 + number}}}"}
        for number, letter in enumerate(letters)
    ]
    return _of_schema({"allOf": parts, "title": str(rng.random())})


def _repeats(rng: Random) -> tuple[str, bytes]:
    return _of_schema({"type": "string", "pattern": "((a{1,999}){1,999}){1,999}" * 3 + "("})


def _large_schema(rng: Random) -> tuple[str, bytes]:
    names = {f"{rng.random()}": {"type": "string"} for _ in range(9_000)}
    return _of_schema({"type": "object", "properties": names})


HOSTILE: tuple[Callable[[Random], tuple[str, bytes]], ...] = (
    _nested_lists,
    _deep,
    _deep_arguments,
    _many_ids,
    _many_prompts,
    _long_text,
    _too_large,
    _no_json,
    _patterns,
    _repeats,
    _large_schema,
)
