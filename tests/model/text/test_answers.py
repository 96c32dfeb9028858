"""Answers parted into content, reasoning and calls, however their text is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from urdir.model.files.gguf import Gguf
from urdir.model.text.answers import AnswerFormat, AnswerParser, find_answer_format
from urdir.model.text.call_formats import CALL_FORMATS, GENERIC
from urdir.model.text.deltas import Delta, ToolCallDelta
from urdir.model.text.reasoning import THINK_TAGS
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

TYPES = {"a": "string", "n": "integer", "b": "boolean"}
TOOLS = {"f": {"properties": {name: {"type": kind} for name, kind in TYPES.items()}}, "g": {}}
THINK = THINK_TAGS[0]
FORMATS = {form.name: AnswerFormat(form, THINK) for form in (*CALL_FORMATS, GENERIC)} | {
    "harmony": AnswerFormat(is_harmony=True)
}


def part(
    form: AnswerFormat, pieces: Iterable[str], prompt: str = "", tools: object = TOOLS
) -> list[Delta]:
    """What comes out, neighbours of one kind put together."""
    numbers = itertools.count()
    parser = AnswerParser(
        form,
        prompt=prompt,
        tools=tools,
        new_id=lambda: f"id{next(numbers)}",  # type: ignore[arg-type]
    )
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    joined: list[Delta] = []
    for delta in deltas:
        assert delta != Delta()
        last = joined[-1] if joined else None
        if last and last.content and delta.content:
            joined[-1] = Delta(content=last.content + delta.content)
        elif last and last.reasoning and delta.reasoning:
            joined[-1] = Delta(reasoning=last.reasoning + delta.reasoning)
        else:
            joined.append(delta)
    return joined


def say(text: str) -> Delta:
    return Delta(content=text)


def think(text: str) -> Delta:
    return Delta(reasoning=text)


def call(index: int, name: str, arguments: str, call_id: str = "") -> Delta:
    return Delta(tool_call=ToolCallDelta(index, call_id or f"id{index}", name, arguments))


# (format, end of the prompt, answer, what it is)
ANSWERS = [
    (
        "hermes",
        "",
        "<think>\nhm, <b>\n</think>\n\nHi <b> there. \n",
        [think("hm, <b>"), say("Hi <b> there. \n")],
    ),
    ("hermes", "x<think>\n", "hm</think>Hi", [think("hm"), say("Hi")]),
    ("hermes", "x<think>\n", "<think>\n hm</think>Hi", [think("hm"), say("Hi")]),
    ("hermes", "x<think>\n", "hm </thin", [think("hm </thin")]),
    ("hermes", "", "  <think></think> Hi</think>", [say("Hi</think>")]),
    (
        "hermes",
        "",
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n'
            '</tool_call>\n<tool_call>{"name": "g"}</tool_call>\nDone'
        ),
        [say("Let me see."), call(0, "f", '{"a": "é"}'), call(1, "g", "{}"), say("Done")],
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [call(0, "f", '{"a": "</tool_call>"}')],
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}',
        [call(0, "f", '{"n": 1}')],
    ),
    (
        "hermes",
        "",
        ('a <tool_call> no </tool_call> <tool_call>{"name": "g"}</tool_call> <tool_c'),
        [say("a <tool_call> no </tool_call>"), call(0, "g", "{}"), say("<tool_c")],
    ),
    (
        "qwen3-coder",
        "",
        (
            "Go.\n<tool_call>\n<function=f>\n<parameter=a>\n5 </parameter> x\n"
            "</tool_call>\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
            "<parameter=b>\nTrue\n</parameter>\n<parameter=z>\n[1, 2]\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        [
            say("Go."),
            call(
                0,
                "f",
                ('{"a": "5 </parameter> x\\n</tool_call>\\n", "n": 7, "b": true, "z": [1, 2]}'),
            ),
        ],
    ),
    (
        "qwen3-coder",
        "",
        ("<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>x</tool_call> y"),
        [call(0, "g", "{}"), say("<tool_call>x</tool_call> y")],
    ),
    (
        "llama-3",
        "",
        (
            '{"name": "f", "parameters": {"a": "b"}};'
            ' {"type": "function", "name": "g", "parameters": {}}'
        ),
        [call(0, "f", '{"a": "b"}'), call(1, "g", "{}")],
    ),
    (
        "llama-3",
        "",
        '<|python_tag|>{"name": "f", "parameters": {"n": 1}}',
        [call(0, "f", '{"n": 1}')],
    ),
    (
        "mistral",
        "",
        (
            ' Hi[TOOL_CALLS] [{"name": "f", "argument'
            's": {"n": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]'
        ),
        [say(" Hi"), call(0, "f", '{"n": 1}', "abcdefghi"), call(1, "g", "{}", "id0")],
    ),
    (
        "mistral-named",
        "",
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}',
        [call(0, "f", '{"n": 1}', "abcdefghi"), call(1, "g", "{}", "id0")],
    ),
    (
        "deepseek-v3",
        "<think>",
        (
            "hm</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
            '<｜tool▁sep｜>f\n```json\n{"n": 1}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        [think("hm"), call(0, "f", '{"n": 1}'), call(1, "g", "{}")],
    ),
    (
        "deepseek-v3.1",
        "",
        (
            'Hi <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>\nBye"
        ),
        [say("Hi"), call(0, "f", '{"n": 1}'), call(1, "g", "{}"), say("Bye")],
    ),
    (
        "harmony",
        "",
        (
            "<|channel|>analysis<|message|>hm <|e<|end|><|start|>assistant<|channel|>"
            "final<|message|>Hi <|st"
        ),
        [think("hm <|e"), say("Hi <|st")],
    ),
    (
        "harmony",
        "",
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"n": 1}'
        ),
        [say("I look."), call(0, "f", '{"n": 1}')],
    ),
]

# what begins like thoughts or calls and is neither
PLAIN = [
    ("hermes", "Hi <think>x</think>"),
    ("hermes", "  <thin"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "'),
    ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ("llama-3", ' {"nam": 1} or <|python_tag|>print(1)'),
    ("llama-3", '{"name": "f", "parameters": '),
    ("mistral", '[TOOL_CALLS] [{"name": "f"'),
    ("mistral-named", "[TOOL_CALLS]f[ARGS]{"),
    ("deepseek-v3", "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>"),
    ("harmony", " to=functions.g<|channel|>commentary json<|message|>{}<|call|>"),
    ("harmony", "<|channel|>analysis"),
    ("harmony", "Hi <|channel|>"),
]


@pytest.mark.parametrize(("name", "prompt", "answer", "expected"), ANSWERS)
def test_answers(name: str, prompt: str, answer: str, expected: list[Delta]) -> None:
    form = FORMATS[name]
    assert part(form, [answer], prompt) == expected
    assert part(form, answer, prompt) == expected  # character by character


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_text_that_is_neither(name: str, text: str) -> None:
    assert part(FORMATS[name], [text]) == part(FORMATS[name], text) == [say(text)]


@pytest.mark.parametrize("name", FORMATS)
def test_the_cut_of_the_text_does_not_matter(name: str) -> None:
    form = FORMATS[name]
    answers = [answer for format_name, _, answer, _ in ANSWERS if format_name == name]
    answers += [text for format_name, text in PLAIN if format_name == name and len(text) < 999]
    tags = [tag for answer in answers for tag in (answer[:9], answer[-9:], answer[:40])]

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.sampled_from([*answers, *tags, " ", "\n", "<", "a"]), max_size=5).map("".join),
        st.sets(st.integers(0, 400)),
        st.sampled_from(["", "<think>"]),
    )
    def check(text: str, cuts: set[int], prompt: str) -> None:
        bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        assert part(form, pieces, prompt) == part(form, [text], prompt)

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_tags_comes_out_as_it_is(name: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.text("ab<|[ \n{}_thinktool", max_size=6)))
    @example([" ", "\n<", "tool_call", "\n"])
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        assert part(FORMATS[name], pieces) == ([say(text)] if text else [])

    check()


def test_text_comes_at_once() -> None:
    parser = AnswerParser(FORMATS["hermes"], tools=TOOLS)
    assert [parser.push(piece) for piece in ("Hel", "lo <", "b> ", "x")] == [
        [say("Hel")], [say("lo")], [say(" <b>")], [say(" x")]
    ]  # fmt: skip
    assert parser.finish() == []


def test_calls_are_content_without_tools() -> None:
    text = '<tool_call>{"name": "g"}</tool_call>'
    for tools in (None, {}):
        assert part(FORMATS["hermes"], [text], tools=tools) == [say(text)]


def test_ids_are_new() -> None:
    parser = AnswerParser(FORMATS["hermes"], tools=TOOLS)
    deltas = parser.push('<tool_call>{"name": "g"}</tool_call>' * 2)
    ids = {delta.tool_call.id for delta in deltas if delta.tool_call}
    assert len(ids) == 2
    assert all(i.startswith("call_") and len(i) == 29 for i in ids)


def test_a_call_with_an_end_in_many_strings_is_given_up() -> None:
    text = '<tool_call>{"name": "' + "</tool_call>" * 1000
    assert part(FORMATS["hermes"], [text]) == [say(text)]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), ANSWERS)
def test_of_an_answer_that_has_begun_the_rest_comes_out(
    name: str, prompt: str, text: str, expected: list[Delta]
) -> None:
    """Wherever it was cut: no character of its beginning comes again, and none of the rest is lost
    but what belongs to tags."""
    if name == "harmony":
        prompt = f"<|start|>assistant{prompt}"
    for cut in range(len(text) + 1):
        numbers = itertools.count()
        parser = AnswerParser(
            FORMATS[name],
            prompt=prompt,
            begun=text[:cut],
            tools=TOOLS,
            new_id=lambda numbers=numbers: f"id{next(numbers)}",
        )
        deltas = [delta for char in text[cut:] for delta in parser.push(char)] + parser.finish()
        assert Delta() not in deltas
        for kind in ("content", "reasoning"):
            whole = "".join(getattr(delta, kind) for delta in expected)
            rest = "".join(getattr(delta, kind) for delta in deltas)
            assert whole.endswith(rest), (cut, rest)
        assert sum(len(d.content) + len(d.reasoning) for d in deltas) <= len(text) - cut
        calls = [delta.tool_call for delta in expected if delta.tool_call]
        found = [delta.tool_call for delta in deltas if delta.tool_call]
        assert found == calls[len(calls) - len(found) :]


def test_a_begun_text_goes_on_as_it_is() -> None:
    for form in FORMATS.values():
        for begun in ("", "So", "So <", "So\n", "1 <tool_", "{", "a ["):
            parser = AnswerParser(form, begun=begun, tools=TOOLS)
            deltas = parser.push("b> c") + parser.finish()
            assert "".join(delta.content for delta in deltas) == "b> c", (form, begun)


# ---- which format --------------------------------------------------------------------------------

# parts of templates as models have them, and what they decide
TEMPLATES = [
    ("{{ message.content }}", "generic", None),
    ('<tool_call>\\n{"name": "\' + name }}</tool_call>', "hermes", None),
    ("content.split('</think>')[-1] }} <tool_call></tool_call>", "hermes", "<think>"),
    ("<tool_call>{{ name }}\\n<arg_key>k</arg_key></tool_call></think>", "generic", "<think>"),
    ("<tool_call>\\n<function={{ name }}>\\n<parameter={{ key }}>", "qwen3-coder", None),
    ("<function={{ name }}>{{ arguments }}</function>", "generic", None),
    ("<|start_header_id|>ipython<|end_header_id|> 'parameters'", "llama-3", None),
    ("[TOOL_CALLS] [{{ calls }}]", "mistral", None),
    ("[TOOL_CALLS]{{ name }}[ARGS]{{ a }} [THINK]{{ t }}[/THINK]", "mistral-named", "[THINK]"),
    ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json </think>", "deepseek-v3", "<think>"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek-v3.1", None),
]  # fmt: skip


@pytest.mark.parametrize(("template", "calls", "begin"), TEMPLATES)
def test_the_format_of_a_template(template: str, calls: str, begin: str | None) -> None:
    form = find_answer_format(template)
    assert form.calls is not None
    assert form.calls.name == calls
    assert (form.thinks and form.thinks.begin) == begin
    assert form.is_generic == (calls == "generic")


def test_gpt_oss_and_the_demo_model(demo_file: Path) -> None:
    form = find_answer_format("<|start|>assistant<|channel|>analysis<|message|>{{ t }}<|end|>")
    assert form == AnswerFormat(is_harmony=True)
    assert not form.is_generic
    demo = Gguf(demo_file).metadata.require("tokenizer.chat_template", str)
    assert find_answer_format(demo) == AnswerFormat(GENERIC)


# ---- control tokens ------------------------------------------------------------------------------


def test_a_parser_sees_the_control_tokens_that_it_needs(demo_file: Path) -> None:
    tokenizer = Tokenizer.of(Gguf(demo_file))
    form = FORMATS["hermes"]
    assert form.calls is not None
    form = replace(form, calls=replace(form.calls, controls=("<|im_start|>", "no such token")))
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>", parse_special=True)
    ids.append(tokenizer.vocab_size + 3)
    stream = TextStream(tokenizer, ("b",), form.shown)
    assert [stream.push(token) for token in ids] == ["a", "<|im_start|>", "", "", ""]
    assert stream.stopped_by == "b"


def test_all_tags_that_may_be_control_tokens_are_shown() -> None:
    for form in FORMATS.values():
        if form.calls is not None:
            assert form.calls.tags.begin in form.shown
            assert form.calls.tags.end in {*form.shown, None}
    assert "<|channel|>" in FORMATS["harmony"].shown
