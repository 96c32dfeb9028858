"""Calls of tools with templates that know none, by the official client: the model as clients know
it, its templates and constraints are the real ones; tokens are random among those allowed."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request, TokenChoice
from urdir.model.errors import ModelError
from urdir.model.serve.interface import Defaults
from urdir.model.serve.served_model import EngineModel
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.named_templates import named_template
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Ur", "Uruk"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": NOTHING}},
]
ASKED: list[Any] = [{"role": "user", "content": "Is it wet in Ur?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ur"}}\n</tool_call>'
#: The demo model's; without a system role; whose turns must alternate; one with thoughts.
TEMPLATES = ["chatml", "gemma", "mistral-v7", "deepseek3"]


class Service:
    """Answers with ``answer``; with random tokens where there is a constraint."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, compiler: ConstraintCompiler
    ) -> None:
        engine = SimpleNamespace(
            name="toy",
            session=SimpleNamespace(context=4096),
            tokenizer=tokenizer,
            template=template,
        )
        self.compiler = compiler
        self.model = EngineModel(cast(Any, engine), (), 4096, Defaults())
        self.requests: list[Request] = []
        self.answer = ""
        self.lost = None
        self._tokenizer = tokenizer
        self._chance = random.Random(3)

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        self.requests.append(request)
        matcher = None
        if request.constraint is not None:
            matcher = self.compiler.matcher(request.constraint)
        answer = Answer(request, self._tokenizer.end_ids, matcher, lambda item: None)
        stream = TextStream(self._tokenizer, request.stops, request.shown)
        count = 0
        for token in self._tokens(answer):
            answer.accept(token)
            count += 1
            yield Piece(stream.push(token), (TokenChoice(token),))
        yield Piece(stream.finish(), ())
        yield Ending(Finish.END, len(request.prompt), 0, count, None)

    def _tokens(self, answer: Answer) -> Iterator[int]:
        size = self._tokenizer.vocab_size
        given = iter(self._tokenizer.encode(self.answer))
        while True:
            if (mask := answer.mask(size)) is None:
                yield from given
                return
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            ends = self._tokenizer.end_ids.intersection(allowed.tolist())
            if ends:
                return
            texts = [t for t in allowed.tolist() if self._tokenizer.token_text(t).strip()]
            yield self._chance.choice(texts or allowed.tolist())

    async def drain(self) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing is open."""

    async def check(self, constraint: Constraint) -> None:
        self.compiler.matcher(constraint)

    async def metrics(self) -> Any:
        raise ModelError("none")


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request: Any, toy_texts: Any, _running: Any) -> Iterator[Any]:
    tokenizer, _ = toy_texts
    with (
        ChatTemplate(named_template(request.param), tokenizer) as template,
        ConstraintCompiler(tokenizer) as compiler,
        _running(Service(tokenizer, template, compiler)) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def _running() -> Callable[..., Any]:
    from tests.model.serve.conftest import running

    return running


def ask(server: Any, stream: bool = False, **body: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Content, calls and the reason of the end, by the official client."""
    body = {"model": "toy", "messages": ASKED, "tools": TOOLS, **body}
    reply = server.openai().chat.completions.create(**body, stream=stream)
    if not stream:
        [choice] = reply.choices
        found = [call.function for call in choice.message.tool_calls or []]
        assert len({call.id for call in choice.message.tool_calls or []}) == len(found)
        content = choice.message.content or ""
        calls = [(call.name, json.loads(call.arguments)) for call in found]
        return content, calls, choice.finish_reason
    content, names, arguments, finish = "", {}, {}, ""
    for chunk in reply:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name:
                assert call.id
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
        finish = choice.finish_reason or finish
    return content, [(names[i], json.loads(arguments[i])) for i in sorted(names)], finish


def prompt_of(server: Any) -> str:
    tokenizer = server.service.model.tokenizer
    return str(tokenizer.decode(server.service.requests[-1].prompt, keep_control=True))


@pytest.mark.filterwarnings("ignore:the chat template has no system role")
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_or_text(served: Any, stream: bool) -> None:
    served.service.answer = CALL
    assert ask(served, stream) == ("", [("weather", {"city": "Ur"})], "tool_calls")
    prompt = prompt_of(served)
    assert json.dumps(TOOLS[0]["function"]) in prompt
    assert prompt.index("You can call tools.") < prompt.index("Is it wet in Ur?")
    served.service.answer = f"Let me look.\n{CALL}\n{CALL.replace('Ur', 'Uruk')}"
    content, calls, finish = ask(served, stream)
    assert (content, finish) == ("Let me look.", "tool_calls")
    assert calls == [("weather", {"city": "Ur"}), ("weather", {"city": "Uruk"})]
    assert ask(served, stream, parallel_tool_calls=False)[1] == calls[:1]
    served.service.answer = "It is < 3 mm wet."
    assert ask(served, stream) == ("It is < 3 mm wet.", [], "stop")
    assert ask(served, stream, tool_choice="none") == ("It is < 3 mm wet.", [], "stop")
    assert "You can call tools." not in prompt_of(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["weather", "time", None])
def test_a_call_that_is_required(served: Any, stream: bool, name: str | None) -> None:
    named = {"type": "function", "function": {"name": name}}
    seen = set()
    for _ in range(4):
        content, calls, finish = ask(served, stream, tool_choice=named if name else "required")
        assert (content, finish) == ("", "tool_calls")
        for called, arguments in calls:
            seen.add(called)
            assert arguments in ([{}] if called == "time" else [{"city": "Ur"}, {"city": "Uruk"}])
        one = ask(served, stream, tool_choice="required", parallel_tool_calls=False)[1]
        assert len(one) == 1
    assert seen <= ({name} if name else {"weather", "time"})
    assert seen


@pytest.mark.parametrize(
    "more", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": NOTHING}]
)
def test_a_function_without_parameters(served: Any, more: Any) -> None:
    tools = [{"type": "function", "function": {"name": "time", **more}}]
    for _ in range(4):
        _, calls, _ = ask(served, False, tools=tools, tool_choice="required")
        assert calls
        assert all(call == ("time", {}) for call in calls)


@pytest.mark.parametrize("stream", [False, True])
def test_other_protocols_require_calls(served: Any, stream: bool) -> None:
    """The constraint, its tokens and the parser of calls are those of chats."""
    seen = set()
    for _ in range(3):
        for name, arguments in (*anthropic_calls(served, stream), *response_calls(served, stream)):
            seen.add(name)
            assert arguments in ([{}] if name == "time" else [{"city": "Ur"}, {"city": "Uruk"}])
    assert seen <= {"weather", "time"}
    assert seen


def anthropic_calls(server: Any, stream: bool) -> list[tuple[str, Any]]:
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    body = {"messages": ASKED, "tools": tools, "tool_choice": {"type": "any"}, "stream": stream}
    reply = server.http().post("/v1/messages", json=body)
    if not stream:
        message = reply.json()
        assert message["stop_reason"] == "tool_use"
        return [(block["name"], block["input"]) for block in message["content"]]
    lines = reply.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    names = [e["content_block"]["name"] for e in events if e["type"] == "content_block_start"]
    texts = [""] * len(names)
    for event in events:
        if event["type"] == "content_block_delta":
            texts[event["index"]] += event["delta"]["partial_json"]
    return list(zip(names, map(json.loads, texts), strict=True))


def response_calls(server: Any, stream: bool) -> list[tuple[str, Any]]:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    client = server.openai().responses
    body: dict[str, Any] = {"model": "toy", "input": "Is it wet in Ur?", "tools": tools}
    reply = client.create(**body, tool_choice="required", stream=stream)
    response = [*reply][-1].response if stream else reply
    assert response.status == "completed"
    return [(item.name, json.loads(item.arguments)) for item in response.output]


def test_other_protocols_constrain_the_text(served: Any) -> None:
    form = {"type": "json_schema", "schema": CITY}
    asked: dict[str, Any] = {"messages": ASKED, "output_config": {"format": form}}
    message = served.http().post("/v1/messages", json=asked).json()
    chat = {"messages": ASKED, "format": CITY, "stream": False}
    lines = served.http().post("/api/chat", json=chat).json()
    native = served.http().post("/completion", json={"prompt": "a", "json_schema": CITY}).json()
    items = {"input": "a", "text": {"format": {**form, "name": "city"}}}
    response = served.http().post("/v1/responses", json=items).json()
    texts = [
        message["content"][-1]["text"],
        lines["message"]["content"],
        native["content"],
        response["output"][-1]["content"][0]["text"],
    ]
    for text in texts:
        assert json.loads(text) in ({"city": "Ur"}, {"city": "Uruk"})


def test_a_result_and_what_follows(served: Any) -> None:
    served.service.answer = CALL
    reply = served.openai().chat.completions.create(model="toy", messages=ASKED, tools=TOOLS)
    message = reply.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}
    served.service.answer = "It is wet."
    talk = [*ASKED, message.model_dump(exclude_none=True), result]
    assert ask(served, messages=talk) == ("It is wet.", [], "stop")
    prompt = prompt_of(served)
    assert CALL in prompt
    assert '<tool_response>\n{"name": "weather", "content": "wet"}\n</tool_response>' in prompt
    talk += [{"role": "assistant", "content": "It is wet."}, {"role": "user", "content": "And?"}]
    assert ask(served, messages=talk)[0] == "It is wet."
    talk = [*talk[:3], {"role": "user", "content": "And?"}]  # beside the result
    assert ask(served, messages=talk)[0] == "It is wet."


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_a_form_beside_tools(served: Any, stream: bool) -> None:
    """The model may do either, as with OpenAI, and nothing else."""
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    kinds = set()
    for _ in range(12):
        content, calls, finish = ask(served, stream, response_format=form)
        kinds.add(finish)
        if calls:
            assert content == ""
        else:
            assert json.loads(content)["wet"] in (True, False)
    assert kinds == {"stop", "tool_calls"}


def test_json_without_white_space(served: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"const": [1, 2]}, "b": {"const": {"c": 3}}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    structured = {"json": schema, "disable_any_whitespace": True}
    content, _, _ = ask(served, tools=[], extra_body={"structured_outputs": structured})
    assert content == '{"a":[1,2],"b":{"c":3}}'


def test_a_grammar_of_llama_cpp(served: Any) -> None:
    for name in ("grammar", "guided_grammar"):
        body = {"extra_body": {name: 'root ::= ("yes" | "no") "!"{2}'}, "tools": []}
        assert ask(served, **body)[0] in ("yes!!", "no!!")
    bad = served.http().post(
        "/v1/chat/completions", json={"messages": ASKED, "grammar": 'root ::= "a'}
    )
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_constraint")
