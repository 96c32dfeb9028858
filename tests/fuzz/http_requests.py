"""Requests to the server, in process: the application, the model as clients know it, its template,
its tokeniser and its constraints are the real ones; only the tokens of answers are made up."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tests.fuzz import trees
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request, TokenChoice
from urdir.model.engine.sampling_settings import DEFAULTS, SETTINGS
from urdir.model.errors import ModelError
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata
from urdir.model.memory.scored_rows import TokenScores
from urdir.model.serve.access import Access
from urdir.model.serve.app import make_app
from urdir.model.serve.interface import Defaults, Metrics
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.served_model import EngineModel
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}{% for call in m.tool_calls %}<tool_call>
{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_ANSWER = '<think>so\n</think>Hi <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> ok'
_MOST_TOKENS = 12  # of an answer

_SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "multipleOf": 3},
        "y": {"anyOf": [{"type": "string", "maxLength": 9, "pattern": "^a+"}, {"enum": [1, "b"]}]},
        "z": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1},
    },
    "required": ["x"],
    "$defs": {"d": {"type": "number", "exclusiveMaximum": 1e9}},
}
_FUNCTION = {"name": "f", "description": "a function", "parameters": _SCHEMA}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
_CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"x": 3}'}}
_SETTINGS = {
    **{name: getattr(DEFAULTS, name) for name, of in SETTINGS.items() if of.field_of},
    **{"seed": 7, "n": 2, "repetition_penalty": 1.1, "frequency_penalty": -0.5},
    **{"logit_bias": {"5": -100, "7": 1.5}, "stop": ["x", "yy"]},
    **{"min_tokens": 1, "max_tokens": 9, "ignore_eos": False, "user": "me"},
}
_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "user", "content": "And <|im_end|> now?"},
]
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
_NAMED = {"type": "function", "function": {"name": "f"}}
_GBNF = 'root ::= "[" (a | root) "]" # c\na ::= [^x-z\\u00e9\\]]{1,3} | "\\n"'
_OPEN = [*_TURNS, {"role": "assistant", "content": "<think>It", "reasoning_content": "Hm"}]
_FLAT = [{"name": "f", "description": "d", "input_schema": _SCHEMA}]
_FLAT_FUNCTIONS = [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}]
_FORM = {"type": "json_schema", "name": "s", "schema": _SCHEMA}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": ""},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
]
_GRAMMAR = 'start: "a" b+\nb: /[0-9]{1,3}/ | "x" | %json {"type": "null"}'

#: Good bodies by path.
_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        _HI,
        {**_SETTINGS, "messages": _TURNS, "logprobs": True, "top_logprobs": 3},
        {**_HI, **_SETTINGS, **_STREAMED},
        {**_TOOLS, "messages": _TURNS, "tool_choice": "required"},
        {**_TOOLS, **_HI, "tool_choice": _NAMED, "parallel_tool_calls": False, **_STREAMED},
        {**_HI, "response_format": _JSON_SCHEMA},
        {**_HI, **_TOOLS, "response_format": _JSON_SCHEMA},
        {"messages": _OPEN, "echo": True, **_TOOLS},
        {"messages": _OPEN, "continue_final_message": "content", "guided_regex": "a+"},
        {**_HI, "grammar": _GBNF, "mirostat": 0, "samplers": None},
        {**_HI, "chat_template_kwargs": {"enable_thinking": False}, "modalities": ["text"]},
    ],
    "/v1/completions": [
        {"prompt": "Hello", **_SETTINGS, "logprobs": 2},
        {"prompt": [[5, 6, 7], [8]], "echo": True, **_STREAMED},
        {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 3, "max_tokens": 1, **_STREAMED},
        {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 0, "prompt_logprobs": 2},
        {"prompt": ["a", "b"], "structured_outputs": {"regex": "[a-f]{2,9}(x|y\\d)*"}},
        {"prompt": "a", "structured_outputs": {"grammar": _GRAMMAR}},
        {"prompt": "a", "guided_grammar": _GBNF, "add_special_tokens": False},
        {"prompt": "a", "json_schema": _SCHEMA, "dry_multiplier": 0, "typical_p": 1.0},
        {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "a", "structured_outputs": {"json": _SCHEMA}},
    ],
    "/tokenize": [
        {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True},
        {"content": "Hello", "add_special": True, "with_pieces": True, "parse_special": False},
        {**_TOOLS, "messages": _TURNS, "add_generation_prompt": False},
    ],
    "/detokenize": [{"tokens": [5, 6, 7, 2047]}],
    "/v1/messages": [
        {**_HI, "system": "Be brief.", "max_tokens": 9, "stop_sequences": ["x"], "stream": True},
        {"messages": _BLOCKS, "tools": _FLAT, "tool_choice": {"type": "any"}, "stream": True},
        {"messages": _BLOCKS, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {**_HI, "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ],
    "/v1/messages/count_tokens": [{"messages": _BLOCKS, "tools": _FLAT}],
    "/v1/responses/input_tokens": [{"input": _ITEMS, "tools": _FLAT_FUNCTIONS}],
    "/v1/responses": [
        {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9, "stream": True},
        {"input": _ITEMS, "tools": _FLAT_FUNCTIONS, "tool_choice": "required", "stream": True},
        {"input": _ITEMS, "store": False, "text": {"format": _FORM}, "temperature": 0.5},
    ],
    "/api/chat": [
        {**_HI, "options": {"temperature": 0.5, "stop": ["x"], "num_predict": 9}},
        {"messages": _TURNS, **_TOOLS, "think": False, "format": _SCHEMA, "logprobs": True},
    ],
    "/api/generate": [
        {"prompt": "Hi", "system": "Be brief.", "context": [5, 6], "stream": False},
        {"prompt": "Hi", "raw": True, "format": "json", "top_logprobs": 2},
    ],
    "/api/show": [{"model": "demo"}],
    "/apply-template": [{**_TOOLS, "messages": _TURNS}],
    "/completion": [
        {"prompt": "Hello", "n_probs": 2, "return_tokens": True, "n_predict": 9, "stream": True},
        {"prompt": ["a", [5, 6]], "grammar": _GBNF, "temperature": 0.5, "n_cmpl": 2},
    ],
    "/infill": [
        {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "stream": True},
        {"input_prefix": "", "input_suffix": "", "input_extra": [{"filename": "f", "text": "x"}]},
    ],
}
#: Texts that a JSON reader takes, and what is read later may not.
_STRINGS = ("\ud800", "\udfff<|im_start|>", "{{ x }}", "[", "(((", "a" * 70_000, "\ufeff", "%json")


class HttpTarget:
    """A method, a path, a content type and a body in parts, for the application.

    Whatever comes: one whole response, good or in the shape of its protocol's errors, and none that
    says the server failed.
    """

    def __init__(self, folder: Path) -> None:
        with Gguf(demo_model()) as gguf:
            tokenizer = Tokenizer.of(gguf)
        self._service = _MadeUp(tokenizer)
        self._app = make_app(self._service, Access(), Limits(), ServerMetrics())
        self._loop = asyncio.new_event_loop()
        for path, bodies in _BODIES.items():  # starts threads and processes; each must be good
            for body in bodies:
                status, _ = self._answer("POST", path, "application/json", [json.dumps(body)])
                assert status == 200, (path, body)

    def make(self, rng: random.Random) -> bytes:
        path = rng.choice([*_BODIES])
        body = json.dumps(_changed(rng, rng.choice(_BODIES[path])), ensure_ascii=rng.random() < 0.9)
        raw = body.encode("utf-8", "surrogatepass")
        if rng.random() < 0.2:
            raw = trees.raw(rng, raw)
        elif rng.random() < 0.05:
            raw = _nested(rng, raw)
        method, kind = "POST", "application/json"
        if rng.random() < 0.05:
            method = rng.choice(("GET", "PUT", "OPTIONS", "HEAD", "POST"))
            path = trees.text(rng, rng.choice((path, "/v1/models/demo", "/v1/embeddings", "/")))
            kind = trees.text(rng, kind)
        cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 0, 0, 2))))
        parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        return json.dumps([method, path, kind, [part.decode("latin-1") for part in parts]]).encode()

    def take(self, data: bytes) -> None:
        method, path, kind, parts = json.loads(data)
        status, body = self._answer(method, path, kind, parts)
        if status >= 500:
            raise AssertionError(f"{status} {body[:200]!r}")
        if status != 200:
            if method != "HEAD" and status != 307:  # from a path with one slash too many
                _check_error(path, json.loads(body))
            raise RefusedError(f"{status}")
        if path in ("/api/chat", "/api/generate"):
            events = [json.loads(line) for line in body.splitlines()]
        elif body.startswith((b"data: ", b"event: ")):
            lines = body.decode().removesuffix("data: [DONE]\n\n").split("\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        else:
            events = [json.loads(body)] if method == "POST" else []
        for event in events:
            if isinstance(event, dict) and event.get("error"):
                _check_error(path, event)
                if "internal error" in str(event) or "server_error" in str(event):
                    raise AssertionError(event)

    def _answer(self, method: str, path: str, kind: str, parts: list[str]) -> tuple[int, bytes]:
        """Status and body of the response."""
        return self._loop.run_until_complete(
            asyncio.wait_for(self._exchange(method, path, kind, parts), 20)
        )

    async def _exchange(
        self, method: str, path: str, kind: str, parts: list[str]
    ) -> tuple[int, bytes]:
        messages = [
            {"type": "http.request", "body": part.encode("latin-1"), "more_body": True}
            for part in parts
        ]
        messages[-1]["more_body"] = False
        waiting = iter(messages)
        status, body, is_whole = [], bytearray(), False

        async def receive() -> Any:
            if (message := next(waiting, None)) is not None:
                return message
            return await asyncio.Event().wait()  # the client stays

        async def send(message: Any) -> None:
            nonlocal is_whole
            assert not is_whole, "more after the end of a response"
            if message["type"] == "http.response.start":
                status.append(message["status"])
            else:
                body.extend(message.get("body", b""))
                is_whole = not message.get("more_body", False)

        await self._app(_scope(method, path, kind), receive, send)
        assert len(status) == 1, "not one response"
        assert is_whole, "a response without an end"
        return status[0], bytes(body)


class RefusedError(ModelError):
    """The server has refused a request, with this status."""


class _MadeUp:
    """A service whose answers have tokens of one text, or what their constraints allow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        template = ChatTemplate(_TEMPLATE, tokenizer)
        session = SimpleNamespace(context=512)
        fill = {f"tokenizer.ggml.fim_{name}_token_id": 7 for name in ("pre", "suf", "mid")}
        of = {"tensors": {}, "architecture": "llama", "path": "demo.gguf"}
        file = SimpleNamespace(metadata=Metadata(fill), **of)
        engine = SimpleNamespace(
            name="demo", session=session, tokenizer=tokenizer, template=template, file=file
        )
        self.compiler = ConstraintCompiler(tokenizer)
        self.model = EngineModel(cast(Any, engine), (), 512, Defaults())
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(_ANSWER, parse_special=True)[:_MOST_TOKENS]

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """As `Service`: settings as words, a mask for every token, text and its end."""
        request.settings.words(len(request.prompt), self._tokenizer.end_ids)
        matcher = None
        if request.constraint is not None:
            matcher = self.compiler.matcher(request.constraint)
        answer = Answer(request, self._tokenizer.end_ids, matcher, lambda item: None)
        stream = TextStream(self._tokenizer, request.stops, request.shown)
        finish, count = Finish.LENGTH, 0
        if (likely := request.prompt_logprobs) is not None:
            rows = len(request.prompt) - 1
            ids = np.zeros((rows, likely), np.uint32)
            yield Piece("", (), (TokenScores(np.zeros((rows, 1 + likely), np.float32), ids),))
        for token in self._ids[: request.limit]:
            if (mask := answer.mask(self._tokenizer.vocab_size)) is not None:
                token = _allowed(mask)
            if token in self._tokenizer.end_ids:
                finish = Finish.END
                break
            count += 1
            answer.accept(token)
            yield Piece(stream.push(token), (_choice(token, request),))
            if stream.stopped_by is not None:
                finish = Finish.STOP
                break
        yield Piece(stream.finish(), ())
        yield Ending(finish, len(request.prompt), 0, count, stream.stopped_by)

    @property
    def lost(self) -> None:
        """There is no device."""

    async def check(self, constraint: Constraint) -> None:
        """Compile it."""
        self.compiler.matcher(constraint)

    async def metrics(self) -> Metrics:
        """Nothing runs."""
        return Metrics()

    async def drain(self) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """The process ends."""


def _allowed(mask: np.ndarray[Any, np.dtype[np.uint32]]) -> int:
    """The last token that may come."""
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert len(ids), "no token may come"
    return int(ids[-1])


def _choice(token: int, request: Request) -> TokenChoice:
    likely = request.settings.logprobs
    if likely is None:
        return TokenChoice(token)
    return TokenChoice(token, -0.5, tuple((i, -0.5 - i) for i in range(likely)))


def _scope(method: str, path: str, kind: str) -> dict[str, Any]:
    headers = [(b"host", b"x"), (b"content-type", kind.encode("utf-8", "replace"))]
    return {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
        **{"method": method, "path": path, "raw_path": b"", "root_path": "", "query_string": b""},
        **{"headers": headers, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80)},
    }


def _changed(rng: random.Random, body: dict[str, Any]) -> Any:
    """A body with changes, and sometimes fields of another."""
    if rng.random() < 0.2:
        body = {**body, **rng.choice([b for bodies in _BODIES.values() for b in bodies])}
    body = trees.changed(rng, body)
    if rng.random() < 0.2 and (places := trees.paths(body)):
        container, key = rng.choice(places)
        container[key] = rng.choice(_STRINGS)
        if isinstance(container, dict) and rng.random() < 0.3:
            container[rng.choice(_STRINGS)] = container.pop(key)
    if rng.random() < 0.2:
        for container, key in trees.paths(body):
            if key == "arguments":
                container[key] = _arguments(rng)
    return body


def _arguments(rng: random.Random) -> str:
    """Of a call: JSON in a string, deep, wide or strange."""
    depth = rng.choice((62, 63, 64, 300, 700, 900, 5000))
    inner = rng.choice(("1", "NaN", "1e999", "9" * 5000, '"\\ud800"', "[],[]", ""))
    begin, end = rng.choice((("[", "]"), ('{"a":', "}")))
    return rng.choice(('{"a":' + begin * depth + inner + end * depth + "}", inner, "{" + inner))


def _nested(rng: random.Random, raw: bytes) -> bytes:
    """A body deep within others, whole or not; or a number of many digits in its place."""
    depth = rng.choice((10, 63, 64, 65, 500, 2000, 100_000))
    begin, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    inner = rng.choice((raw, b"9" * depth, b"1e" + b"9" * depth, b'"' + b"\\u0000" * depth))
    nested = begin * depth + inner + end * rng.choice((0, depth, depth))
    return rng.choice((nested, b'{"messages":' + nested + b"}", b'{"n":' + inner + b"}"))


def _check_error(path: str, body: Any) -> None:
    """The shape that the path's protocol has."""
    error = body["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str), error
        return
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert isinstance(error["type"], str), error
    if path.startswith("/v1/messages"):
        assert body["type"] == "error", body
        return
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
