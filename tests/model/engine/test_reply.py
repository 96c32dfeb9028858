"""A conversation and a plain text in one line, from the library."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from urdir.driver.explainer import explain
from urdir.driver.plan import Plan
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Statistics
from urdir.model.engine.reply import reply_to
from urdir.model.engine.sampling import SamplingSettings
from urdir.model.errors import ModelError, TemplateError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.text.chat import Message
from urdir.ptxgen.kernels.argmax import Argmax

GREEDY = SamplingSettings(temperature=0.0)
QUESTION = {"role": "user", "content": "What is 2 plus 3?"}


@pytest.mark.slow
def test_chat_and_generate_in_one_line() -> None:
    with Engine.open("demo", device="emulator", cache_folder=None) as engine:
        reply = engine.chat([QUESTION], settings=GREEDY)
        assert str(reply) == reply.content == "2 plus 3 is 5."
        assert (reply.reasoning, reply.tool_calls) == ("", ())
        assert reply.statistics.generated_tokens == 8
        more = Message("user", "And plus 1?")
        second = engine.chat([QUESTION, reply.message, more], settings=GREEDY, limit=3)
        assert second.content == "5 plus "
        assert second.statistics.cached_tokens > 10
        assert engine.generate("Once upon a", settings=GREEDY, limit=1) == " time"
        assert engine.generate("Once upon a", settings=GREEDY, stops=["e"]) == " tim"
        with pytest.raises(ModelError, match="empty"):
            engine.generate("")
        assert repr(engine) == "<Engine 'Urdir Demo 5M' on emulator:sm_90a, context 512>"


def test_thoughts_and_calls_are_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    pieces = ["<think>So", "</think>", "Well.", call[:12], call[12:]]

    class Answer:
        statistics = Statistics(generated_tokens=5)

        def text(self) -> Iterator[str]:
            return iter(pieces)

    prompts: list[Any] = []
    template: Any = SimpleNamespace(
        source="<think></think><tool_call></tool_call>{{ tools }}",
        render=lambda *args: prompts.append(args) or SimpleNamespace(text="prompt"),
        tokens=lambda prompt: [1, 2],
    )
    begun: list[Any] = []

    def begin(*args: Any) -> Any:
        begun.append(args)
        return Answer()

    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    reply = reply_to(template, [QUESTION], tools, {"enable_thinking": True}, begin)
    assert (reply.reasoning, reply.content.strip()) == ("So", "Well.")
    (called,) = reply.tool_calls
    assert (called.name, called.arguments) == ("add", '{"a": 2}')
    assert prompts == [([Message(**QUESTION)], tools, {"enable_thinking": True})]
    assert begun[0][0] == [1, 2]
    (again,) = reply.message.more["tool_calls"]
    assert again["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert again["id"] == called.id


def test_messages_are_objects_or_dictionaries() -> None:
    message = Message("user", "x")
    assert Message.of(message) is message
    assert Message.of({"role": "user", "content": "x"}) == message
    tool = Message.of({"role": "tool", "content": "5", "tool_call_id": "a"})
    assert tool.more == {"tool_call_id": "a"}
    assert Message.of({"role": "assistant", "content": None, "tool_calls": []}).content == ""
    for bad in ({}, {"role": "user"}, {"role": "user", "content": None}, {"content": "x"}):
        with pytest.raises(TemplateError, match="a role and a content"):
            Message.of(bad)


class Printer:
    """What IPython hands to `_repr_pretty_`."""

    def __init__(self) -> None:
        self.printed = ""

    def text(self, text: str) -> None:
        self.printed += text


def test_what_notebooks_show() -> None:
    explanation = explain(Argmax.smallest_example())
    with Gguf(demo_model()) as gguf:
        config = Config.from_gguf(gguf)
    for value, short, line in (
        (explanation, "<Explanation of argmax on sm_90a>", "global memory: "),
        (config, "<Config llama, 6 layers, hidden 256, ", "layers 0-5:"),
        (Plan("step"), "<Plan 'step', 0 operations>", "plan step: empty"),
    ):
        assert repr(value).startswith(short)
        assert len(repr(value)) < 100
        assert any(found.startswith(line) for found in str(value).splitlines())
        printer = Printer()
        value._repr_pretty_(printer, False)
        assert printer.printed == str(value)
    assert len(explanation.text(top=1)) < len(explanation.text())
