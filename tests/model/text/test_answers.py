"""Answers parted into content, reasoning and calls, however their text is cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.model.text.answer_families import FAMILIES as FAMILY_TEXTS
from tests.model.text.answer_families import FORMATS as FAMILIES
from urdir.model.files.gguf import Gguf
from urdir.model.text.answers import AnswerFormat, AnswerParser
from urdir.model.text.call_form import GENERIC
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.deltas import Delta, ToolCallDelta, whole_calls
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

TYPES = {"a": "string", "n": "integer", "b": "boolean"}
TOOLS = {"f": {"properties": {name: {"type": kind} for name, kind in TYPES.items()}}, "g": {}}
FORMATS = FAMILIES | {"generic": AnswerFormat(GENERIC)}


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind put together, calls whole, without those that are none."""
    deltas = [*deltas]
    broken = {d.tool_call.index for d in deltas if d.tool_call and d.tool_call.is_broken}
    found: list[Delta] = []
    for delta in deltas:
        assert delta != Delta()
        last = found[-1] if found else Delta()
        if (call := delta.tool_call) is not None:
            if call.index in broken:
                continue
            if not call.name:
                assert last.tool_call is not None
                assert last.tool_call.index == call.index
                arguments = last.tool_call.arguments_piece + call.arguments_piece
                found[-1] = Delta(tool_call=replace(last.tool_call, arguments_piece=arguments))
                continue
        elif last.content and delta.content:
            delta = Delta(content=found.pop().content + delta.content)
        elif last.reasoning and delta.reasoning:
            delta = Delta(reasoning=found.pop().reasoning + delta.reasoning)
        found.append(delta)
    return found


def part(
    form: AnswerFormat, pieces: Iterable[str], prompt: str = "", tools: object = TOOLS
) -> list[Delta]:
    """What comes out, joined."""
    numbers = itertools.count()
    parser = AnswerParser(
        form,
        prompt=prompt,
        tools=tools,
        new_id=lambda: f"id{next(numbers)}",  # type: ignore[arg-type]
    )
    return joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())


def say(text: str) -> Delta:
    return Delta(content=text)


def think(text: str) -> Delta:
    return Delta(reasoning=text)


def call(index: int, name: str, arguments: str, call_id: str = "") -> Delta:
    return Delta(tool_call=ToolCallDelta(index, call_id or f"id{index}", name, arguments))


# (format, end of the prompt, answer, what it is)
ANSWERS = [
    (
        "qwen3",
        "",
        "<think>\nhm, <b>\n</think>\n\nHi <b> there. \n",
        [think("hm, <b>"), say("Hi <b> there. \n")],
    ),
    ("qwen3", "x<think>\n", "hm</think>Hi", [think("hm"), say("Hi")]),
    ("qwen3", "x<think>\n", "<think>\n hm</think>Hi", [think("hm"), say("Hi")]),
    ("qwen3", "x<think>\n", "hm </thin", [think("hm </thin")]),
    ("qwen3", "", "  <think></think> Hi</think>", [say("Hi</think>")]),
    (
        "qwen3",
        "",
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n'
            '</tool_call>\n<tool_call>{"name": "g"}</tool_call>\nDone'
        ),
        [say("Let me see."), call(0, "f", '{"a": "é"}'), call(1, "g", "{}"), say("Done")],
    ),
    (
        "qwen3",
        "",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [call(0, "f", '{"a": "</tool_call>"}')],
    ),
    (
        "qwen3",
        "",
        '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}',
        [call(0, "f", '{"n": 1}')],
    ),
    (
        "qwen3",
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
        [say(" Hi"), call(0, "f", '{"n": 1}'), call(1, "g", "{}")],
    ),
    (
        "mistral-named",
        "",
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]i2[ARGS]{}',
        [call(0, "f", '{"n": 1}', "abcdefghi"), call(1, "g", "{}", "i2")],
    ),
    (
        "deepseek-r1",
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
        "gpt-oss",
        "",
        (
            "<|channel|>analysis<|message|>hm <|e<|end|><|start|>assistant<|channel|>"
            "final<|message|>Hi <|st"
        ),
        [think("hm <|e"), say("Hi <|st")],
    ),
    (
        "gpt-oss",
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
    ("qwen3", "Hi <think>x</think>"),
    ("qwen3", "  <thin"),
    ("qwen3", '<tool_call>{"name": 3}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": "'),
    ("qwen3", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ("qwen3", "<tool_call>" + '{"function": ' * 2000 + "</tool_call>"),
    ("qwen3", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 2000 + "</tool_call>"),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": "x"}} no </tool_call>'),
    ("lfm2.5", "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>"),
    ("gemma-4", '<|tool_call>call:f{a:<|"|>x'),
    ("glm-4.5", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_val"),
    ("llama-3", ' {"nam": 1} or <|python_tag|>print(1)'),
    ("llama-3", '{"name": "f", "parameters": '),
    ("mistral", '[TOOL_CALLS] [{"name": "f"'),
    ("mistral-named", "[TOOL_CALLS]f[ARGS]{"),
    ("deepseek-r1", "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>"),
    ("gpt-oss", " to=functions.g<|channel|>commentary json<|message|>{}<|call|>"),
    ("gpt-oss", "<|channel|>analysis"),
    ("gpt-oss", "Hi <|channel|>"),
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


@pytest.mark.parametrize(("name", "prompt", "answer", "expected"), ANSWERS)
def test_what_is_put_aside_comes_back(
    name: str, prompt: str, answer: str, expected: list[Delta], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a call breaks off, and all its text is content."""
    whole = [part(FORMATS[name], [answer[:cut]], prompt) for cut in range(len(answer))]
    monkeypatch.setattr("urdir.model.text.source._LONG", 1)
    assert part(FORMATS[name], answer, prompt) == expected
    assert [part(FORMATS[name], answer[:cut], prompt) for cut in range(len(answer))] == whole


LONG = {
    "qwen3": ('<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"arguments": {"a": ["',
              '<tool_call>{"name": "f", "arguments": {', "<think>", "Hello"),
    "qwen3-coder": ("<tool_call>\n<function=f>\n<parameter=a>\n", "<tool_call>\n<function=f>\n"),
    "gpt-oss": ('<|channel|>commentary to=functions.f<|message|>{"a": "', "<|channel|>analysis"),
}  # fmt: skip


@pytest.mark.parametrize("piece", ["word", "1, ", "    ", "\n"])
@pytest.mark.parametrize("name", LONG)
def test_a_token_costs_no_more_after_a_long_text(name: str, piece: str) -> None:
    """What is searched and copied with each token stays short."""
    for start in LONG[name]:
        parser = AnswerParser(FORMATS[name], tools=TOOLS)
        parser.push(start)
        for _ in range(6000):
            parser.push(piece)
        splitters = (parser._rest, getattr(parser._rest, "_call", None))
        sources = [getattr(each, "_source", None) for each in splitters]
        assert all(len(source.text) < 4000 for source in sources if source), start
        assert len(parser._thoughts.held if parser._thoughts else "") < 4000, start


@pytest.mark.parametrize(("name", "prompt", "answer", "expected"), ANSWERS)
def test_much_white_space(name: str, prompt: str, answer: str, expected: list[Delta]) -> None:
    """Its cut does not matter either; it is text beyond what belongs to a tag."""
    for text in (" " * 1500 + answer, "So" + " " * 1500 + answer, answer + "\n" * 1500):
        assert part(FORMATS[name], text, prompt) == part(FORMATS[name], [text], prompt)


def test_a_call_in_the_channel_of_reasoning_that_breaks_off_is_content() -> None:
    text = '<|channel|>analysis to=functions.f<|message|>{"a": "1" oops, no more'
    assert part(FORMATS["gpt-oss"], [text]) == part(FORMATS["gpt-oss"], text) == [say(text)]


def test_numbers_that_json_cannot_hold_are_no_arguments() -> None:
    text = '<tool_call>{"name": "g", "arguments": {"x": -1e999}}</tool_call>'
    assert part(FORMATS["qwen3"], [text]) == [say(text)]


def test_arguments_under_two_names_are_one_call() -> None:
    text = '{"name": "g", "parameters": {"x": 1}, "arguments": {"x": 2}}'
    deltas = part(FORMATS["qwen3"], f"<tool_call>{text}</tool_call>")
    assert deltas == [call(0, "g", '{"x": 1}')]


def test_types_are_found_behind_references() -> None:
    """As pydantic writes enumerations and optional fields."""
    schema = {
        "properties": {
            "kind": {"$ref": "#/$defs/Kind"},
            "size": {"allOf": [{"$ref": "#/$defs/Size"}], "default": 1},
            "more": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
            "loop": {"$ref": "#/$defs/Loop"},
        },
        "$defs": {
            "Kind": {"enum": ["1", "2"]},
            "Size": {"type": "integer"},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]},
        },
    }
    values = {"kind": "1", "size": "2", "more": "null", "loop": '"x"'}
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"
    [found] = part(FORMATS["qwen3-coder"], [text], tools={"f": schema})
    assert found.tool_call is not None
    read = json.loads(found.tool_call.arguments_piece)
    assert read == {"kind": "1", "size": 2, "more": None, "loop": "x"}


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
    parser = AnswerParser(FORMATS["qwen3"], tools=TOOLS)
    assert [parser.push(piece) for piece in ("Hel", "lo <", "b> ", "x")] == [
        [say("Hel")], [say("lo")], [say(" <b>")], [say(" x")]
    ]  # fmt: skip
    assert parser.finish() == []


def test_calls_are_content_without_tools() -> None:
    text = '<tool_call>{"name": "g"}</tool_call>'
    for tools in (None, {}):
        assert part(FORMATS["qwen3"], [text], tools=tools) == [say(text)]


def test_ids_are_new() -> None:
    parser = AnswerParser(FORMATS["qwen3"], tools=TOOLS)
    deltas = parser.push('<tool_call>{"name": "g"}</tool_call>' * 2)
    ids = {call.id for call in whole_calls(deltas)}
    assert len(ids) == 2
    assert all(i.startswith("call_") and len(i) == 29 for i in ids)


def test_a_call_with_an_end_in_many_strings_is_given_up() -> None:
    text = '<tool_call>{"name": "' + "</tool_call>" * 1000
    assert part(FORMATS["qwen3"], [text]) == [say(text)]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), ANSWERS)
def test_of_an_answer_that_has_begun_the_rest_comes_out(
    name: str, prompt: str, text: str, expected: list[Delta]
) -> None:
    """Wherever it was cut: no character of its beginning comes again, and none of the rest is lost
    but what belongs to tags."""
    if name == "gpt-oss":
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
        deltas = joined(deltas)
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


def test_the_demo_model_has_no_form_of_its_own(demo_file: Path) -> None:
    gguf = Gguf(demo_file)
    with ChatTemplate.of(gguf, Tokenizer.of(gguf)) as template:
        assert template.form == AnswerFormat(GENERIC)
        assert template.form.is_generic


# ---- control tokens ------------------------------------------------------------------------------


def test_a_parser_sees_the_control_tokens_that_it_needs(demo_file: Path) -> None:
    tokenizer = Tokenizer.of(Gguf(demo_file))
    form = FORMATS["qwen3"]
    assert form.calls is not None
    form = replace(form, calls=replace(form.calls, controls=("<|im_start|>", "no such token")))
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>", parse_special=True)
    ids.append(tokenizer.vocab_size + 3)
    stream = TextStream(tokenizer, ("b",), form.shown)
    assert [stream.push(token) for token in ids] == ["a", "<|im_start|>", "", "", ""]
    assert stream.stopped_by == "b"


@pytest.mark.parametrize("name", FORMATS)
def test_all_tags_that_may_be_control_tokens_are_shown(name: str) -> None:
    """Those of the family's answer, which were not derived from it."""
    answers = [answer for form, _, answer, _ in ANSWERS if form == name]
    answers += [FAMILY_TEXTS[name].answer] if name in FAMILY_TEXTS else []
    written = {tag for answer in answers for tag in re.findall(r"<[|｜][^<>]*[|｜]>", answer)}
    assert written <= FORMATS[name].shown | {'<|"|>'}
