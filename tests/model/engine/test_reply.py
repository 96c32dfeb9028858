"""A conversation and a plain text in one line, from the library."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from urdir.driver.explainer import explain
from urdir.driver.plan import Plan
from urdir.model.engine.answer_options import ChatOptions, check_options, make_request, token_ids
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation, Statistics
from urdir.model.engine.reply import AsyncReply, ChatPrompt, Reply, ReplyStream, _name_of
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ConstraintError, ModelError, SettingsError, TemplateError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.serve.served_model import EngineModel
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import GENERIC
from urdir.model.text.chat import ChatTemplate, Message, Prompt, conversation
from urdir.model.text.formats import Format
from urdir.model.text.reasoning import THINK_TAGS
from urdir.model.text.tokenizer import Tokenizer
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.spec import smallest_example

GREEDY = SamplingSettings(temperature=0.0)
QUESTION = {"role": "user", "content": "What is 2 plus 3?"}


@pytest.mark.slow
def test_chat_and_generate_in_one_line() -> None:
    with Engine.open("demo", device="emulator", cache_folder=None) as engine:
        reply = engine.chat([QUESTION], settings=GREEDY)
        assert str(reply) == reply.content == "2 plus 3 is 5."
        assert (reply.reasoning, reply.tool_calls) == ("", ())
        assert "".join(choice.text for choice in reply.choices[:8]) == reply.content
        assert {choice.logprob for choice in reply.choices} == {None}
        assert reply.statistics.generated_tokens == 8
        more = Message("user", "And plus 1?")
        second = engine.chat([QUESTION, reply.message, more], settings=GREEDY, limit=3)
        assert second.content == "5 plus "
        assert second.statistics.cached_tokens > 10
        assert engine.generate("Once upon a", settings=GREEDY, limit=1) == " time"
        assert engine.generate("Once upon a", settings=GREEDY, stops=["e"]) == " tim"
        assert engine.generate("Once upon a", settings=GREEDY, stops="e") == " tim"
        with pytest.raises(ModelError, match="empty"):
            engine.generate("")
        assert repr(engine) == "<Engine 'Urdir Demo 5M' on emulator:sm_90a, context 512>"


BAD: list[tuple[Any, dict[str, Any], type[ModelError], str]] = [
    ("hi", {}, TemplateError, "'hi' is not a conversation: give a list of messages, such as"),
    (QUESTION, {}, TemplateError, "is not a conversation"),
    (Message("user", "x"), {}, TemplateError, "is not a conversation"),
    (None, {}, TemplateError, "None is not a conversation"),
    (["hi"], {}, TemplateError, "'hi' is not a message: give a list of messages"),
    ([], {}, TemplateError, "the conversation is empty"),
    ([QUESTION | {"role": "usr"}], {}, TemplateError, "message 0 has the role 'usr': expected "),
    ([QUESTION, Message("usr", "x")], {}, TemplateError, "message 1 has the role 'usr'"),
    ([QUESTION], {"tools": [{}]}, TemplateError, "are no tools: give a list of descriptions"),
    ([QUESTION], {"variables": 5}, TemplateError, "variables are 5: expected names with values"),
    ([QUESTION], {"limit": -1}, SettingsError, "a limit of -1 tokens: expected 0 or more"),
    ([QUESTION], {"stops": ""}, SettingsError, "stops are .*: expected texts, none empty"),
    ([QUESTION], {"stops": ["a", ""]}, SettingsError, "stops are"),
]


@pytest.mark.full  # by a command: commands/test_run.py
@pytest.mark.slow
def test_drawn_answers_differ_and_their_seed_repeats_them() -> None:
    """Of a chat, a text, and many. Prompts are in the cache, and so processed in the same steps."""
    wild = SamplingSettings(temperature=20.0, top_k=0, top_p=1.0, min_p=0.0)
    exact: Any = {"exact": True, "kv_dtype": "f32", "sequences": 2, "cache_folder": None}
    with Engine.open("demo", device="emulator", **exact) as engine:
        ask = partial(engine.chat, [QUESTION], limit=2)
        _, *replies = [ask(settings=wild) for _ in range(3)]
        assert len({reply.content for reply in replies}) == 2
        again = ask(settings=replace(wild, seed=replies[0].statistics.seed))
        assert again.content == replies[0].content
        assert len({engine.generate("Once", settings=wild, limit=2) for _ in range(2)}) == 2
        many = partial(engine.generate_all, ["Once", "Once"], limit=2)
        _, drawn = list(many(settings=wild)), list(many(settings=wild))
        first, second = drawn
        assert first.text != second.text
        assert first.settings.seed == second.settings.seed is not None
        assert [str(each) for each in many(settings=first.settings)] == [*map(str, drawn)]


@pytest.mark.slow
def test_what_a_chat_cannot_answer_is_refused_in_one_line() -> None:
    with Engine.open("demo", device="emulator", cache_folder=None) as engine:
        for messages, fields, error, words in BAD:
            with pytest.raises(error, match=words) as caught:
                engine.chat(messages, **fields)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temperature": 0}, TypeError, r"settings=SamplingSettings\(temperature=\.\.\.\) has it"),
        ({"max_tokens": 5}, TypeError, "no option 'max_tokens': limit=N has it"),
        ({"xyz": 5}, TypeError, "no option 'xyz': expected adapters, grammar"),
        ({"settings": {"temperature": 0}}, SettingsError, "expected SamplingSettings"),
        ({"stops": 5}, SettingsError, r"stops are \(5,\): expected texts"),
        ({"processors": print}, SettingsError, "logit processors are"),
        ({"adapters": {"poet": 0.5}}, SettingsError, r"adapters are .*: expected names, or pairs"),
        ({"adapters": ("poet", 0.5)}, SettingsError, "adapters are"),
        ({"adapters": [("poet", "1")]}, SettingsError, "adapters are"),
        ({"tool_choice": 5}, TemplateError, "tool_choice 5: expected 'auto'"),
        ({"grammar": 5}, ConstraintError, "grammar is 5: expected a text"),
        ({"regex": b"a"}, ConstraintError, "regex is b'a': expected a text"),
    ],
)
def test_options_of_other_libraries_are_explained(
    options: Any, error: type[Exception], words: str
) -> None:
    def request() -> Request:
        check_options(options, ChatOptions)
        return _prompt(_name_of(options.get("tool_choice", "auto"))).request(GREEDY, options)

    with pytest.raises(error, match=words):
        request()


def test_one_or_several_and_none_are_taken() -> None:
    options: Any = {"stops": None, "adapters": "poet", "processors": None}
    request = _prompt(_name_of({"type": "function", "function": {"name": "add"}})).request(
        GREEDY, options
    )
    assert (request.stops, request.adapters, request.processors) == ((), (("poet", 1.0),), ())
    options = {"stops": "x", "adapters": [("a", 0.5), "b"]}
    request = _prompt().request(GREEDY, options)
    assert (request.stops, request.adapters) == (("x",), (("a", 0.5), ("b", 1.0)))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message.of({"role": "user", "content": parts}).content == "a\nb"


def test_a_budget_of_reasoning() -> None:
    """It is the server's limit; without any the template is asked for no reasoning."""
    options: Any = {"reasoning_budget": 7}
    limit = _prompt().request(GREEDY, options).thoughts
    assert limit == AnswerFormat(GENERIC, THINK_TAGS[0]).limit(7, "prompt")
    assert limit is not None
    assert _prompt().request(GREEDY, {}).thoughts is None
    for bad in (-1, "5"):
        with pytest.raises(SettingsError, match="a reasoning_budget of"):
            _prompt().request(GREEDY, {"reasoning_budget": bad})  # type: ignore[typeddict-item]
    source = "{{ enable_thinking | default('unset') }}"
    with ChatTemplate(source, Tokenizer.of(Gguf(demo_model()))) as template:
        for budget, given, wanted in ((0, {}, "False"), (5, {}, "unset"),
                                      (0, {"enable_thinking": True}, "True")):  # fmt: skip
            made = ChatPrompt.of(
                template, [QUESTION], {"reasoning_budget": budget, "variables": given}
            )
            assert made.rendered.text == wanted


def test_prompts_are_texts_or_token_ids() -> None:
    tokenizer = Tokenizer.of(Gguf(demo_model()))
    wanted = tokenizer.encode("Once upon")
    for text in ("Once upon", wanted, tuple(wanted), np.array(wanted)):
        assert token_ids(lambda: tokenizer, text) == wanted
    for bad in (None, 5, ["a"], [1.5]):
        with pytest.raises(SettingsError, match="is neither a text nor a list of token ids"):
            token_ids(lambda: tokenizer, bad)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="for several prompts there is generate_all"):
        token_ids(lambda: tokenizer, ["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"a prompt is 'hi': expected token ids"):
        Request(prompt="hi")  # type: ignore[arg-type]
    engine = object.__new__(Engine)  # nothing of it is used
    for bad in ("hi", None, 5, [1.5]):
        with pytest.raises(SettingsError, match="is not a list of token ids"):
            engine.detokenize(bad)  # type: ignore[arg-type]
    for bad in ("hi", None, 5):
        with pytest.raises(SettingsError, match="is not a list of prompts"):
            engine.generate_all(bad, settings=GREEDY)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Engine\.open\('demo'\) opens a model"):
        Engine("demo")  # type: ignore[arg-type]
    for name, words in (("n_ctx", "did you mean context"), ("contxt", "did you mean context"),
                        ("xyz", r"help\(EngineOptions\)")):  # fmt: skip
        with pytest.raises(TypeError, match=rf"^Engine.open has no option '{name}': {words}"):
            Engine.open("demo", **{name: 5})


def test_a_generation_tells_its_seed_before_it_begins() -> None:
    session: Any = None
    request = Request(prompt=(1,), settings=SamplingSettings(seed=2**64 - 1))
    assert Generation(session, None, request).statistics.seed == 2**64 - 1
    drawn = Request(prompt=(1,))
    assert Generation(session, None, drawn).statistics.seed == drawn.settings.seed


@pytest.mark.slow
def test_a_reply_has_its_tokens_with_log_probabilities() -> None:
    """Those of `Generation.pieces`, which the demo model answers in one token each."""
    settings = replace(GREEDY, logprobs=2)
    with Engine.open("demo", device="emulator", cache_folder=None) as engine:
        reply = engine.chat([QUESTION], settings=settings, limit=4)
        prompt = ChatPrompt.of(engine.template, [QUESTION], {}).tokens
        logits = engine.logits([*prompt, *(choice.token for choice in reply.choices)])
        awaited = asyncio.run(_chatted(engine, settings))
    rows = logits[len(prompt) - 1 : -1].astype(np.float64)
    wanted = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert len(reply.choices) == 4
    for choice, row in zip(reply.choices, wanted, strict=True):
        assert choice.logprob == pytest.approx(row.max(), abs=2e-3)
        assert [token for token, _ in choice.top] == np.argsort(-row)[:2].tolist()
    assert [choice.token for choice in awaited.choices] == [of.token for of in reply.choices]
    assert "choices" not in repr(reply)


async def _chatted(engine: Engine, settings: SamplingSettings) -> Reply:
    return await engine.chat_async([QUESTION], settings=settings, limit=4)


def test_thoughts_and_calls_are_fields() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    pieces = ["<think>So", "</think>", "Well.", call[:12], call[12:]]

    class Answer:
        statistics = Statistics(generated_tokens=5)

        def pieces(self) -> Iterator[Piece]:
            yield from (Piece(text, ()) for text in pieces)

    rendered: list[Any] = []
    template: Any = SimpleNamespace(
        source="{{ tools }}",
        form=AnswerFormat(GENERIC, THINK_TAGS[0]),
        render=lambda *args: rendered.append(args) or Prompt("prompt", ()),
        tokens=lambda prompt: [1, 2],
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    variables = {"enable_thinking": True}
    prompt = ChatPrompt.of(template, [QUESTION], {"tools": tools, "variables": variables})
    stream = ReplyStream(cast("Any", Answer()), prompt.parser)
    assert stream.reply.content == ""
    deltas = list(stream)
    reply = stream.reply
    assert len(deltas) > 4
    assert asyncio.run(_awaited(pieces, prompt)).message.content == reply.content
    assert (reply.reasoning, reply.content.strip()) == ("So", "Well.")
    (called,) = reply.tool_calls
    assert (called.name, called.arguments) == ("add", '{"a": 2}')
    assert rendered == [([Message(**QUESTION)], tools, variables)]
    request = prompt.request(GREEDY, {"limit": 3})
    assert (request.prompt, request.limit, request.constraint) == ((1, 2), 3, None)
    assert request.shown == template.form.shown
    (again,) = reply.message.more["tool_calls"]
    assert again["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert again["id"] == called.id


def test_a_stream_that_is_left_ends_its_answer_at_once() -> None:
    """Not when the garbage collector comes: until then no other answer can begin."""
    ended: list[bool] = []

    class Answer:
        statistics = Statistics()

        def pieces(self) -> Iterator[Piece]:
            try:
                yield from (Piece("So", ()), Piece("Well.", ()))
            finally:
                ended.append(True)

    stream = ReplyStream(cast("Any", Answer()), _prompt().parser)
    gc.disable()
    try:
        for _ in stream:
            break
        assert not ended
        del stream
        assert ended
    finally:
        gc.enable()


async def _awaited(pieces: list[str], prompt: ChatPrompt) -> Reply:
    """The reply of the same pieces for asyncio."""

    async def items() -> AsyncGenerator[Piece | Ending, None]:
        for text in pieces:
            yield Piece(text, ())
        yield Ending(Finish.STOP, 2, 1, 5)

    reply = await AsyncReply(Request(prompt=(1, 2)), items(), prompt.parser)
    assert (reply.statistics.finish, reply.statistics.cached_tokens) == (Finish.STOP, 1)
    return reply


def _prompt(tool_choice: str = "auto") -> ChatPrompt:
    tools = {"add": {"type": "object"}}
    form = AnswerFormat(GENERIC, THINK_TAGS[0])
    return ChatPrompt(Prompt("prompt", ()), (1, 2), form, tools, tool_choice)


def test_formats_and_required_calls_are_those_of_the_server() -> None:
    """The same constraint as `EngineModel` makes of a request."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    model: Any = object.__new__(EngineModel)
    prompt = _prompt()
    model._format = prompt.form
    for options, form in (
        ({"response_format": response}, Format("json_schema", schema)),
        ({"response_format": {"type": "json_object"}}, Format("json_object")),
        ({"grammar": 'root ::= "yes" | "no"'}, Format("grammar", 'root ::= "yes" | "no"')),
        ({"regex": "[a-z]+"}, Format("regex", "[a-z]+")),
    ):
        made = prompt.request(GREEDY, cast("Any", options)).constraint
        assert made == model.constraint(form, prompt.rendered, prompt.schemas, True)
        whole = make_request([1], GREEDY, cast("Any", options)).constraint
        assert whole == form.constraint()
    assert prompt.request(GREEDY, {"response_format": {"type": "text"}}).constraint is None
    for choice, name in (("required", None), ("add", "add")):
        made = _prompt(choice).request(GREEDY, {}).constraint
        assert made == model.required_call(prompt.schemas, prompt.rendered, name, True)


@pytest.mark.parametrize(
    ("choice", "options", "words"),
    [
        ("auto", {"regex": "a", "grammar": 'root ::= "a"'}, "two formats of one answer"),
        ("auto", {"response_format": {"type": "xml"}}, "has another form: give"),
        ("auto", {"response_format": {"type": "json_schema"}}, "has another form: give"),
        ("auto", {"grammar": "root ::= other"}, "no such rule"),
        ("required", {"regex": "a"}, "requires a call"),
        ("subtract", {}, "no such tool"),
    ],
)
def test_formats_that_cannot_be_are_refused(choice: str, options: Any, words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        _prompt(choice).request(GREEDY, options)


@pytest.mark.slow
def test_a_format_streams_and_an_answer_is_cancelled_from_another_thread() -> None:
    """Also before it begins; asyncio gets the same text."""
    with Engine.open("demo", device="emulator", cache_folder=None, context=64) as engine:
        stream = engine.chat([QUESTION], settings=GREEDY, regex="2{40}", stream=True)
        found: list[str] = []
        for delta in stream:
            found.append(delta.content)
            if len(found) == 2:
                thread = Thread(target=stream.cancel)
                thread.start()
                thread.join()
        reply = stream.reply
        assert "".join(found) == reply.content
        assert 0 < len(reply.content) < 40
        assert set(reply.content) == {"2"}
        assert reply.statistics.finish is Finish.INTERRUPTED
        begun = engine.generation(Request(prompt=(1,)))
        begun.cancel()
        assert (list(begun.text()), begun.statistics.generated_tokens) == ([], 0)

        async def ask() -> Reply:
            return await engine.chat_async([QUESTION], settings=GREEDY, regex="2{3}", limit=9)

        assert asyncio.run(ask()).content == "222"
        assert len(engine.session.compiler(engine.tokenizer)._compiled) == 2  # one for both calls
        with pytest.raises(TypeError, match="no option 'temperature'"):
            engine.generate("Once", temperature=0)  # type: ignore[call-arg]


def test_messages_are_objects_or_dictionaries() -> None:
    message = Message("user", "x")
    assert Message.of(message) is message
    assert Message.of({"role": "user", "content": "x"}) == message
    tool = Message.of({"role": "tool", "content": "5", "tool_call_id": "a"})
    assert tool.more == {"tool_call_id": "a"}
    assert Message.of({"role": "assistant", "content": None, "tool_calls": []}).content == ""
    others = {"name": "a", "refusal": None, "tool_calls": None, "annotations": [], "x": 5}
    assert Message.of(QUESTION | others).more == {"name": "a"}  # as the server has it
    for bad in ({}, {"role": "user"}, {"role": "user", "content": None}, {"content": "x"}):
        with pytest.raises(TemplateError, match="a role and a content"):
            Message.of(bad)


def test_a_developer_is_the_system_to_templates_that_know_none() -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    roles = [message.role for message in conversation(messages, "{{ messages }}")]
    assert roles == ["system", "user"]
    (first, _) = conversation(messages, "{% if role == 'developer' %}")
    assert first.role == "developer"


class Printer:
    """What IPython hands to `_repr_pretty_`."""

    def __init__(self) -> None:
        self.printed = ""

    def text(self, text: str) -> None:
        self.printed += text


def test_what_notebooks_show() -> None:
    explanation = explain(smallest_example(Argmax))
    with Gguf(demo_model()) as gguf:
        config = Config.of(gguf)
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
