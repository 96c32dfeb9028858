"""/v1/responses by the official client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from urdir.model.serve.access import Access
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import GENERIC
from urdir.model.text.reasoning import THINK_TAGS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Rain?", "parameters": CITY},
    {"type": "function", "name": "time", "parameters": {"type": "object"}},
]
CALLS = (
    '<think>Where?</think>Well.<tool_call>{"name": "weather", "arguments": {"city": "Ur"}}'
    '</tool_call><tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
HERMES = AnswerFormat(replace(GENERIC), THINK_TAGS[0])
PATH = "/v1/responses"


def ask(server: Any, **body: Any) -> Any:
    return server.openai().responses.create(**{"model": "toy", "input": "Hi", **body})


def prompt_of(server: Any) -> str:
    tokenizer = server.service.model.tokenizer
    return str(tokenizer.decode(server.service.requests[-1].prompt, keep_control=True))


def test_an_answer(server: Any) -> None:
    answer = ask(
        server, instructions="Be brief.", max_output_tokens=99, temperature=0.5, metadata={"a": "b"}
    )
    assert answer.output_text == "2 plus 3 is 5."
    assert (answer.status, answer.model, answer.object) == ("completed", "toy", "response")
    assert (answer.instructions, answer.temperature) == ("Be brief.", 0.5)
    assert (answer.max_output_tokens, answer.metadata) == (99, {"a": "b"})
    [request] = server.service.requests
    assert (request.limit, request.settings.temperature) == (99, 0.5)
    assert answer.usage.input_tokens == len(request.prompt)
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.output_tokens == 8
    assert prompt_of(server).index("Be brief.") < prompt_of(server).index("Hi")


@pytest.mark.parametrize("calls", [False, True])
def test_a_stream_has_the_events_of_the_client_library(server: Any, calls: bool) -> None:
    body: dict[str, Any] = {"tools": TOOLS} if calls else {}
    if calls:
        server.service.answer, server.model.answer_format = CALLS, HERMES
    found = list(ask(server, stream=True, **body))
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in found:  # strictly, as the client itself does not check
        adapter.validate_python(event.model_dump(warnings=False, by_alias=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = [event.type for event in found]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    last, whole = found[-1].response, ask(server, **body)
    drop: Any = {"id", "created_at", "completed_at", "timings", "output"}
    assert last.model_dump(exclude=drop) == whole.model_dump(exclude=drop)
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == last.output
    assert [bare(item) for item in done] == [bare(item) for item in whole.output]
    texts = [e.delta for e in found if e.type == "response.output_text.delta"]
    assert "".join(texts) == ("Well." if calls else "2 plus 3 is 5.")
    parts = [e.text for e in found if e.type == "response.output_text.done"]
    assert parts == ["".join(texts)]
    with server.openai().responses.stream(model="toy", input="Hi", **body) as stream:
        assert stream.get_final_response().output_text == "".join(texts)


def test_a_call_that_breaks_off_is_text(server: Any) -> None:
    server.model.answer_format = HERMES
    server.service.answer = '<tool_call>{"name": "weather", "arguments": {"city": "Ur" oops'
    found = list(ask(server, stream=True, tools=TOOLS))
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert [item.type for item in found[-1].response.output] == ["message"]
    assert ask(server, tools=TOOLS).output_text == server.service.answer


def bare(item: Any) -> dict[str, Any]:
    return dict(item.model_dump(exclude={"id", "call_id"}))


def test_reasoning_and_calls_are_items(server: Any) -> None:
    server.service.answer, server.model.answer_format = CALLS, HERMES
    answer = ask(server, tools=TOOLS)
    thought, text, weather, time = answer.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content] == ["Where?"]
    assert text.content[0].text == "Well."
    assert (weather.type, weather.name, weather.arguments) == (
        *("function_call", "weather"),
        '{"city": "Ur"}',
    )
    assert time.call_id != weather.call_id
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert len(ask(server, tools=TOOLS, parallel_tool_calls=False).output) == 3
    result = {"type": "function_call_output", "call_id": weather.call_id, "output": "wet"}
    sent: list[Any] = [{"role": "user", "content": "Hi"}, *answer.output, result]
    ask(server, tools=TOOLS, input=sent)
    alone = prompt_of(server)
    ask(server, tools=TOOLS, input=[result], previous_response_id=answer.id)
    assert prompt_of(server) == alone
    places = [alone.index(text) for text in ("Hi", "Well.", '"city": "Ur"', "wet")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ("required", (None, True)),
        ({"type": "function", "name": "time"}, ("time", True)),
        ("auto", None),
        ("none", None),
    ],
)
def test_tool_choice(server: Any, choice: Any, required: Any) -> None:
    ask(server, tools=TOOLS, tool_choice=choice)
    [request] = server.service.requests
    schemas = {"weather": CITY, "time": {"type": "object"}}
    assert request.constraint == (required and (schemas, *required))


def test_a_form_beside_a_required_call(server: Any) -> None:
    """Instructor sends both; the form is that of a text."""
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}
    ask(server, tools=TOOLS, tool_choice="required", text=form)
    [request] = server.service.requests
    assert set(request.constraint[0]) == {"weather", "time"}


def test_structured_text(server: Any) -> None:
    form: Any = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    answer = ask(server, text={"format": form})
    assert server.service.requests[0].constraint == ("json_schema", CITY, True)
    assert answer.text.format.name == "city"


def test_cut_short(server: Any) -> None:
    answer = ask(server, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    *_, item, last = ask(server, max_output_tokens=3, stream=True)
    assert (item.type, item.item.status) == ("response.output_item.done", "incomplete")
    assert last.type == "response.incomplete"


def test_responses_are_kept(server: Any) -> None:
    responses = server.openai().responses
    first = ask(server, input="One", instructions="Not again.")
    *_, last = ask(server, input="Two", previous_response_id=first.id, stream=True)
    server.service.answer = "third"
    third = ask(server, input="Three", previous_response_id=last.response.id)
    assert third.previous_response_id == last.response.id
    prompt = prompt_of(server)
    assert "Not again." not in prompt
    places = [prompt.index(text) for text in ("One", "2 plus", "Two", "Three")]
    assert places == sorted(places)
    assert prompt.count("2 plus 3 is 5.") == 2
    assert responses.retrieve(third.id) == third
    with pytest.raises(openai.BadRequestError, match="in the background"):
        responses.cancel(third.id)
    responses.delete(third.id)
    unstored = ask(server, store=False)
    for gone in (third.id, unstored.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="was not stored"):
            responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError, match="was not stored"):
            ask(server, previous_response_id=gone)


def test_items_before_a_response_are_listed(server: Any) -> None:
    items = server.openai().responses.input_items
    first = ask(server, input="One")
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "wet"}
    second = ask(server, input=[call, result], previous_response_id=first.id)
    listed = [*items.list(second.id, order="asc")]
    kinds = ["message", "message", "function_call", "function_call_output"]
    assert [item.type for item in listed] == kinds
    assert (listed[0].role, listed[0].content[0].text) == ("user", "One")
    assert listed[1] == first.output[0]
    assert len({item.id for item in listed}) == 4
    assert [*items.list(second.id, limit=3)] == listed[::-1]  # in two pages
    page = items.list(second.id, limit=1, after=listed[2].id)
    assert (page.data, page.has_more) == ([listed[1]], True)
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
        reply = server.http().get(f"{PATH}/{second.id}/input_items", params=query)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, *query)
    with pytest.raises(openai.NotFoundError):
        items.list("resp_none")


def test_input_tokens_are_counted(server: Any) -> None:
    """As many as the model would read; nothing is answered."""
    first = ask(server, input="One")
    given: Any = {"input": "Two", "previous_response_id": first.id, "tools": TOOLS}
    ask(server, **given)
    messages = [{"role": "user", "content": "Hi"}]
    server.http().post("/v1/chat/completions", json={"messages": messages})
    wanted = [len(request.prompt) for request in server.service.requests[-2:]]
    counted = server.openai().responses.input_tokens.count(model="toy", **given)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", wanted[0])
    counts = "/v1/chat/completions/input_tokens"
    reply = server.http().post(counts, json={"messages": messages})
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": wanted[1]}
    assert server.http().post(counts, json={"messages": []}).status_code == 400
    assert len(server.service.requests) == 3


def test_tools_of_others_beside_functions(server: Any) -> None:
    """As Codex has them; the model is offered the functions."""
    namespace = {"type": "namespace", "name": "agents", "tools": TOOLS[1:]}
    server.http().post(PATH, json={"input": "Hi", "tools": TOOLS[:1]})
    wanted = prompt_of(server)
    tools = [{"type": "web_search"}, TOOLS[0], namespace]
    assert server.http().post(PATH, json={"input": "Hi", "tools": tools}).status_code == 200
    assert prompt_of(server) == wanted
    bad = server.http().post(PATH, json={"input": "Hi", "tools": [tools[0], {"type": "function"}]})
    assert bad.json()["error"]["param"] == "tools[1].function"
    choice = {"tools": tools, "tool_choice": {"type": "web_search"}}
    refused = server.http().post(PATH, json={"input": "Hi", **choice})
    assert refused.json()["error"]["param"] == "tool_choice.type"


def reference(item: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item.id}


def test_items_are_named_instead_of_given(server: Any) -> None:
    """As Vercel's AI SDK does from the second turn on."""
    server.service.answer = f"<think>Now?</think>Well.{CALLS[CALLS.rindex('<tool_call>') :]}"
    server.service.model.form = HERMES
    asked = [{"role": "user", "content": "One"}]
    first = ask(server, input=asked, tools=TOOLS[1:])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "dry"}
        for item in first.output
        if item.type == "function_call"
    ]
    given = [*asked, *(item.model_dump() for item in first.output), *outputs]
    named = [*asked, *map(reference, first.output), *outputs]
    server.service.answer = "Dry."
    prompts = []
    for items in (given, named):
        second = ask(server, input=items)
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1]
    # the second response has the items of the first one, which is no longer needed
    server.openai().responses.delete(first.id)
    thanks = {"role": "user", "content": "Thanks"}
    ask(server, input=[*named, reference(second.output[0]), thanks])
    assert prompt_of(server).startswith(prompts[0].rstrip())
    ask(server, input=[reference(second.output[0]), thanks], previous_response_id=second.id)


def test_items_that_cannot_be_named(server: Any) -> None:
    hi = {"role": "user", "content": "Hi"}
    first = ask(server, input="One")
    known = reference(first.output[0])
    other = {**known, "id": known["id"].removesuffix("_0") + "_7"}
    for items in ([hi, other], [known, hi, known]):
        with pytest.raises(openai.BadRequestError, match="item"):
            ask(server, input=items)
    server.openai().responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        ask(server, input=[known, hi])
    apart = [ask(server, input="Hi") for _ in range(9)]
    names = [reference(each.output[0]) for each in apart]
    ask(server, input=[*names[1:], hi])
    with pytest.raises(openai.BadRequestError, match="one more than the 8"):
        ask(server, input=[*names, hi])


def test_responses_are_kept_for_the_key_that_asked(start: Any) -> None:
    server = start(Access(api_keys=("a", "b")))
    mine, other = server.openai(api_key="a"), server.openai(api_key="b")
    answer = mine.responses.create(model="toy", input="Hi")
    assert mine.responses.retrieve(answer.id).id == answer.id
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(answer.id)


def test_what_is_kept_is_bounded(start: Any) -> None:
    server = start(kept_bytes=32_000)
    names = [ask(server).id for _ in range(32)]
    client = server.openai()
    found = []
    for name in names:
        try:
            found.append(client.responses.retrieve(name).id)
        except openai.NotFoundError:
            continue
    assert 0 < len(found) < 32
    assert found == names[-len(found) :]
    large = ask(server, metadata={"a": "b" * 2000})
    with pytest.raises(openai.NotFoundError, match="too large"):
        client.responses.retrieve(large.id)
    assert client.responses.retrieve(names[-1]).id == names[-1]  # nothing gave way


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": []}, "input"),
        ({"input": {"role": "user", "content": "Hi"}}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"background": 1}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"n": 2}, "n"),
        ({"store": "no"}, "store"),
    ],
)
def test_refusals(server: Any, body: Any, named: str) -> None:
    reply = server.http().post(PATH, json={"input": "Hi", **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, named)
    assert server.service.requests == []


def test_a_stream_that_fails(server: Any) -> None:
    server.service.error, server.service.good = RuntimeError("secret"), 3
    *_, last = ask(server, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert [item.status for item in last.response.output] == ["incomplete"]
    assert last.response.error.code == "server_error"
    assert "secret" not in last.response.error.message


def test_items_that_are_alike_are_several(server: Any) -> None:
    """A stream tells them apart."""
    server.model.answer_format = HERMES
    server.service.answer = CALLS.replace("<think>Where?</think>Well.", "A") + "A"
    done = [
        event for event in ask(server, stream=True, tools=TOOLS) if event.type.endswith("item.done")
    ]
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    kinds = ["message", "function_call", "function_call", "message"]
    assert [event.item.type for event in done] == kinds
