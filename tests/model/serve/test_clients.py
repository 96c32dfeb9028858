"""Clients as they are: plain, streamed, with tools and structured, each where it is installed.

    pip install 'urdir[clients]'

The text is the demo model's; answers are given, or made by constraints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest

from tests.model.serve.conftest import running
from tests.model.serve.test_tool_calls import ASKED, CALL, CITY, TOOLS, Service
from tests.patience import PATIENCE
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.named_templates import named_template

pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients' own
SAYS = "It is < 3 mm wet."
CITIES = ({"city": "Ur"}, {"city": "Uruk"})


class City(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """What is asked for."""

    city: Literal["Ur", "Uruk"]


@pytest.fixture(scope="module")
def server(toy_texts: Any) -> Iterator[Any]:
    tokenizer, _ = toy_texts
    with (
        ChatTemplate(named_template("chatml"), tokenizer) as template,
        ConstraintCompiler(tokenizer) as compiler,
        running(Service(tokenizer, template, compiler)) as made,
    ):
        yield made


def test_langchain(server: Any) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(model="toy", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.service.answer = SAYS
    assert model.invoke("Wet?").content == SAYS
    assert "".join(chunk.content for chunk in model.stream("Wet?")) == SAYS
    server.service.answer = CALL
    tools = model.bind_tools(TOOLS)
    [called] = tools.invoke("Wet?").tool_calls
    assert (called["name"], called["args"]) == ("weather", {"city": "Ur"})
    whole = None
    for chunk in tools.stream("Wet?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    [called] = whole.tool_calls
    assert (called["name"], called["args"]) == ("weather", {"city": "Ur"})
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(City, method=method).invoke("Where?").city


def test_litellm(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it is downloaded
    litellm = pytest.importorskip("litellm")
    given: Any = {"model": "openai/toy", "api_base": f"{server.url}/v1", "api_key": "none"}
    server.service.answer = SAYS
    assert litellm.completion(**given, messages=ASKED).choices[0].message.content == SAYS
    chunks = litellm.completion(**given, messages=ASKED, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAYS
    server.service.answer = CALL
    reply = litellm.completion(**given, messages=ASKED, tools=TOOLS)
    [called] = reply.choices[0].message.tool_calls
    assert json.loads(called.function.arguments) == {"city": "Ur"}
    chunks = [*litellm.completion(**given, messages=ASKED, tools=TOOLS, stream=True)]
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in built] == [{"city": "Ur"}]
    anthropic = {**given, "model": "anthropic/toy", "api_base": server.url}
    for asked in (given, anthropic):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**asked, messages=[{"role": "user", "content": "wet " * 5000}])
    server.service.answer = SAYS
    for name in ("ollama/toy", "ollama_chat/toy"):  # which do not say that they send JSON
        ollama = {"model": name, "api_base": server.url, "messages": ASKED}
        assert litellm.completion(**ollama).choices[0].message.content == SAYS
        chunks = litellm.completion(**ollama, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAYS


def test_instructor(server: Any) -> None:
    instructor = pytest.importorskip("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(server.openai(), mode=mode)
        asked: Any = {"model": "toy", "response_model": City, "messages": ASKED}
        assert client.chat.completions.create(**asked).model_dump() in CITIES
        *_, last = client.chat.completions.create_partial(**asked)
        assert last.model_dump() in CITIES
    client = instructor.from_openai(server.openai(), mode=instructor.Mode.RESPONSES_TOOLS)
    asked = {"model": "toy", "response_model": City, "input": ASKED}
    assert client.responses.create(**asked).model_dump() in CITIES


def test_pydantic_ai(server: Any) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    asked: list[str] = []

    def weather(city: str) -> str:
        asked.append(city)
        server.service.answer = SAYS  # to the result
        return "wet"

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as http:
            given = {"base_url": f"{server.url}/v1", "api_key": "none", "http_client": http}
            provider = providers.OpenAIProvider(**given)
            model = models.OpenAIChatModel("toy", provider=provider)
            server.service.answer = SAYS
            assert (await ai.Agent(model).run("Wet?")).output == SAYS
            async with ai.Agent(model).run_stream("Wet?") as stream:
                assert [text async for text in stream.stream_text()][-1] == SAYS
            made = await ai.Agent(model, output_type=City).run("Where?")
            assert made.output.model_dump() in CITIES
            server.service.answer = CALL
            assert (await ai.Agent(model, tools=[weather]).run("Wet?")).output == SAYS
            responses = models.OpenAIResponsesModel("toy", provider=provider)
            assert (await ai.Agent(responses).run("Wet?")).output == SAYS
            made = await ai.Agent(responses, output_type=City).run("Where?")
            assert made.output.model_dump() in CITIES

    asyncio.run(ask())
    assert asked == ["Ur"]


def test_anthropic(server: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        talk_to_anthropic(server, client)


def talk_to_anthropic(server: Any, client: Any) -> None:
    given: Any = {"model": "toy", "max_tokens": 200, "messages": ASKED}
    server.service.answer = SAYS
    assert client.messages.create(**given).content[0].text == SAYS
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == SAYS
    server.service.answer = CALL
    tools = [{"name": "weather", "input_schema": CITY}]
    with client.messages.stream(**given, tools=tools) as stream:
        last = stream.get_final_message()
    for message in (last, client.messages.create(**given, tools=tools)):
        assert message.stop_reason == "tool_use"
        assert message.content[-1].input == {"city": "Ur"}
    message = client.messages.create(**given, tools=tools, tool_choice={"type": "any"})
    assert message.content[-1].input in CITIES


def test_ollama(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    with contextlib.closing(client._client):
        talk_to_ollama(server, client)


def talk_to_ollama(server: Any, client: Any) -> None:
    server.service.answer = SAYS
    assert client.chat(model="toy", messages=ASKED).message.content == SAYS
    parts = client.chat(model="toy", messages=ASKED, stream=True)
    assert "".join(part.message.content for part in parts) == SAYS
    server.service.answer = CALL
    [called] = client.chat(model="toy", messages=ASKED, tools=TOOLS).message.tool_calls
    assert called.function.arguments == {"city": "Ur"}
    parts = [*client.chat(model="toy", messages=ASKED, tools=TOOLS, stream=True)]
    found = [call for part in parts for call in part.message.tool_calls or []]
    assert [call.function.arguments for call in found] == [{"city": "Ur"}]
    structured = client.chat(model="toy", messages=ASKED, format=CITY).message.content
    assert json.loads(structured) in CITIES
