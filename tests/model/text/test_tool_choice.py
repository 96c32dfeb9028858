"""Calls that a model must make: what the constraint allows is what the parser reads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model.text.answer_families import FORMATS as FAMILY_FORMATS
from tests.model.text.answer_families import derived
from urdir.model.errors import ConstraintError
from urdir.model.files.gguf import Gguf
from urdir.model.text.answers import AnswerFormat, AnswerParser
from urdir.model.text.call_form import GENERIC
from urdir.model.text.constraints import Constraint
from urdir.model.text.deltas import whole_calls
from urdir.model.text.matcher import ConstraintCompiler, Matcher
from urdir.model.text.reasoning import THINK_TAGS
from urdir.model.text.tags import begun
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.tool_choice import after_thoughts, required_call

TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 5},
            "kind": {"$ref": "#/$defs/kind"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/number"}, "maxItems": 2},
        },
        "required": ["kind", "list"],
        "additionalProperties": False,
        "$defs": {
            "number": {"type": "integer", "minimum": 0, "maximum": 9},
            "kind": {"enum": ["red", "blue"]},
        },
    },
    "g-2": {"properties": {}, "additionalProperties": False},
}
FORMATS = {
    name: replace(form, thinks=None, content=None) for name, form in FAMILY_FORMATS.items()
} | {
    "generic": AnswerFormat(GENERIC),
    "deepseek-v3.2": derived("deepseek-v3.2", ["｜DSML｜"]),
}
#: One of each way to write calls.
KINDS = ("generic", "qwen3-coder", "kimi-k2", "llama-3", "llama-3-pythonic", "gemma-4", "gpt-oss")
THINKS = AnswerFormat(thinks=THINK_TAGS[0])


def _markup(name: str) -> list[str]:
    """The tags of a format, which models have as control tokens."""
    tags = (tag for tag in FORMATS[name].shown if not tag.startswith(("<tool_call", "<function")))
    return sorted(tag for tag in tags if "=" not in tag and not tag.startswith("</"))


@pytest.fixture
def make_tokenizer(make_gguf: Callable[..., Path]) -> Callable[[list[str]], Tokenizer]:
    """A byte-level vocabulary with control tokens of its own."""

    def make(controls: list[str]) -> Tokenizer:
        texts = [chr(0x100 + b) if b < 0x21 else chr(b) for b in range(0x7F)]
        texts += ["Ċ</", '"}', "},", "</think", "ĊĊ"]
        tokens = ["<end>", *controls, *texts]
        types = [3] * (1 + len(controls)) + [1] * len(texts)
        metadata = {
            "model": "gpt2", "pre": "default", "tokens": tokens, "merges": ["Ċ Ċ"],
            "token_type": np.array(types, np.int32), "eos_token_id": 0,
        }  # fmt: skip
        path = make_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
        return Tokenizer.of(Gguf(path))

    return make


def random_answer(tokenizer: Tokenizer, constraint: Constraint, form: AnswerFormat) -> str:
    """The shortest of some random walks through what a constraint allows, as text."""
    with ConstraintCompiler(tokenizer) as compiler:
        return random_walk(tokenizer, compiler.matcher(constraint), form)


def random_walk(tokenizer: Tokenizer, matcher: Matcher, form: AnswerFormat) -> str:
    chance, stream, text = random.Random(9), TextStream(tokenizer, (), form.shown), ""
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    tags = [
        tag.strip() for tag in (*(form.calls.literals() if form.calls else ()), "</think>", "</a>")
    ]
    for _ in range(3000):
        matcher.mask(mask)
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if 0 in tokens:  # <end>
            return text + stream.finish()
        token = chance.choice(tokens)
        if chance.random() < 0.8:  # go on with a tag, or end something
            most = max(begun(text, (tag,)) for tag in tags if tag)
            nexts = {tag[most] for tag in tags if begun(text, (tag,)) == most and tag}
            nexts |= set() if most else set('"}]')
            controls = [t for t in tokens if tokenizer.token_text(t) in form.shown]
            likely = controls or [t for t in tokens if tokenizer.token_text(t) in nexts]
            token = chance.choice(likely or tokens)
        matcher.accept(token)
        text += stream.push(token)
    raise AssertionError(f"no end: {text[:200]}")


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tool", ["f", "g-2"])
def test_a_required_call_is_one_that_the_parser_reads(
    make_tokenizer: Callable[[list[str]], Tokenizer], name: str, tool: str
) -> None:
    form = FORMATS[name]
    text = random_answer(make_tokenizer(_markup(name)), required_call(form, TOOLS, name=tool), form)
    parser = AnswerParser(form, tools=TOOLS)
    deltas = [d for d in parser.push(text) + parser.finish() if not d.reasoning]
    assert not any(delta.content for delta in deltas), text
    [call] = whole_calls(deltas)
    assert call.name == tool
    arguments = json.loads(call.arguments)
    if tool == "g-2":
        assert arguments == {}
    else:
        assert {"kind", "list"} <= set(arguments) <= {"a", "kind", "list"}
        assert arguments["kind"] in ("red", "blue")
        assert all(value in range(10) for value in arguments["list"])


def accepts(tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    """Whether a constraint allows a text as a whole."""
    with ConstraintCompiler(tokenizer) as compiler:
        matcher = compiler.matcher(constraint)
        try:
            for token in tokenizer.encode(text, parse_special=True):
                matcher.accept(token)
            matcher.accept(min(tokenizer.end_ids))
        except ConstraintError:
            return False
        return True


CALLS = {
    "hermes": ("<tool_call>\n{}\n</tool_call>", '{{"name": "{}", "arguments": {}}}', "\n"),
    "generic": ("<tool_call>\n{}\n</tool_call>", '{{"name": "{}", "arguments": {}}}', "\n"),
    "firefunction": ("functools[{}]", '{{"name": "{}", "arguments": {}}}', ", "),
    "apertus": ("<|tools_prefix|>[{}]<|tools_suffix|>", '{{"{}": {}}}', ", "),
    "devstral": ("{}", "[TOOL_CALLS]{}[ARGS]{}", ""),
}
F = '{"kind": "red", "list": [1]}'


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", CALLS)
def test_white_space_of_arguments(
    make_tokenizer: Callable[[list[str]], Tokenizer], name: str
) -> None:
    form, tokenizer = FORMATS[name], make_tokenizer(_markup(name))
    constraint = required_call(form, TOOLS, name="f")
    whole, call, _ = CALLS[name]

    def allows(arguments: str) -> bool:
        return accepts(tokenizer, constraint, whole.format(call.format("f", arguments)))

    assert allows(F)
    assert allows(F.replace(" ", ""))
    for arguments in (F.replace(": ", ":  "), F.replace(": ", ":\n"), F.replace("{", "{ ")):
        assert not allows(arguments), arguments


@pytest.mark.parametrize("name", CALLS)
def test_one_call_or_many(make_tokenizer: Callable[[list[str]], Tokenizer], name: str) -> None:
    form, tokenizer = FORMATS[name], make_tokenizer(_markup(name))
    whole, one, between = CALLS[name]
    first, second, other = one.format("f", F), one.format("g-2", "{}"), one.format("h", "{}")
    if name in ("hermes", "generic"):  # its tags stand around each
        first, second, other = (whole.format(call) for call in (first, second, other))
        whole = "{}"
    single = required_call(form, TOOLS)
    assert accepts(tokenizer, single, whole.format(first))
    assert accepts(tokenizer, single, whole.format(second))
    assert not accepts(tokenizer, single, whole.format(other))
    assert not accepts(tokenizer, single, whole.format(first + between + second))
    assert not accepts(tokenizer, single, "I would rather not.")
    many = required_call(form, TOOLS, many=True)
    assert accepts(tokenizer, many, whole.format(first + between + second + between + second))
    assert not accepts(tokenizer, many, whole.format(""))


@pytest.mark.parametrize("controls", [[], ["<think>", "</think>"]])
def test_thoughts_come_first_and_are_free(
    make_tokenizer: Callable[[list[str]], Tokenizer], controls: list[str]
) -> None:
    tokenizer = make_tokenizer(controls)
    yes = Constraint.lark('start: A\nA: "yes" | "no"')

    def check(prompt: str, text: str) -> bool:
        return accepts(tokenizer, after_thoughts(yes, THINKS, prompt), text)

    assert check("", "<think>anything {</think>\n\nyes")
    assert check("", "no")
    assert not check("", "<think>anything {</think>\n\nmaybe")
    assert check("<think>\n", "anything</think>no")
    assert not check("<think>\n", "no")
    assert not check("<think>\n\n</think>\n\n", "anything</think>no")
    assert check("<think>\n\n</think>\n\n", "no")


def test_harmony_answers_in_its_last_channel(
    make_tokenizer: Callable[[list[str]], Tokenizer],
) -> None:
    form, tokenizer = FORMATS["gpt-oss"], make_tokenizer(_markup("gpt-oss"))
    constraint = after_thoughts(Constraint.json_object(), form, "")
    thoughts = "<|channel|>analysis<|message|>{ hm<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": 1}'
    assert accepts(tokenizer, constraint, thoughts + final)
    assert accepts(tokenizer, constraint, final)
    assert not accepts(tokenizer, constraint, thoughts + final + "}")
    assert not accepts(tokenizer, constraint, '{"a": 1}')


def test_a_call_after_thoughts(make_tokenizer: Callable[[list[str]], Tokenizer]) -> None:
    form = AnswerFormat(FORMATS["devstral"].calls, THINK_TAGS[1])
    tokenizer = make_tokenizer(sorted(form.shown))
    constraint = required_call(form, TOOLS)
    call = "[TOOL_CALLS]g-2[ARGS]{}"
    assert accepts(tokenizer, constraint, "[THINK]hm[/THINK]" + call)
    assert accepts(tokenizer, constraint, call)
    assert not accepts(tokenizer, constraint, "[THINK]hm[/THINK]no")
    constraint = required_call(form, TOOLS, "Do it.[THINK]")
    assert accepts(tokenizer, constraint, "hm[/THINK]" + call)
    assert not accepts(tokenizer, constraint, call)


@pytest.mark.turns(2)  # a format with thoughts, the next one without
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_in_a_form_or_a_call(
    make_tokenizer: Callable[[list[str]], Tokenizer], name: str, thinks: bool
) -> None:
    """With tools and a form of the answer the model may call, too, and nothing else."""
    form = FORMATS[name]
    if thinks and not form.is_harmony:
        form = AnswerFormat(form.calls, THINK_TAGS[0])
    tokenizer = make_tokenizer(_markup(name))
    call = random_answer(tokenizer, required_call(form, TOOLS, name="g-2"), form)
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    answer = Constraint.json_schema({**schema, "additionalProperties": False})
    constraint = after_thoughts(answer, form, "", tools=TOOLS)
    final = "<|channel|>final<|message|>" if form.is_harmony else ""
    assert accepts(tokenizer, constraint, call)
    assert accepts(tokenizer, constraint, final + '{"a": 1}')
    if thinks and not form.is_harmony:
        assert accepts(tokenizer, constraint, '<think>hm</think>{"a": 1}')
    assert not accepts(tokenizer, constraint, final + "I would rather not.")
    assert not accepts(tokenizer, after_thoughts(answer, form, ""), call)
    assert after_thoughts(answer, form, "", "So: ", tools=TOOLS) == answer


def test_an_answer_that_has_begun_thinks_on_or_no_more(
    make_tokenizer: Callable[[list[str]], Tokenizer],
) -> None:
    tokenizer = make_tokenizer([])
    yes = Constraint.lark('start: "yes"')

    def check(prompt: str, begun: str, text: str) -> bool:
        return accepts(tokenizer, after_thoughts(yes, THINKS, prompt, begun), text)

    assert check("<think>\n", "Let me", " see.</think>yes")
    assert not check("<think>\n", "Let me", "yes")
    assert check("", "<think>Let me", " see.</think>yes")
    assert check("", "<think>Let me see.</think>", "yes")
    assert not check("", "<think>Let me see.</think>", "<think>hm</think>yes")
    assert check("", "So: ", "yes")
    assert not check("", "So: ", "<think>hm</think>yes")
    assert check("", " \n", "<think>hm</think>yes")


def test_gpt_oss_goes_on_with_its_thoughts_or_its_answer(
    make_tokenizer: Callable[[list[str]], Tokenizer],
) -> None:
    form, tokenizer = FORMATS["gpt-oss"], make_tokenizer(_markup("gpt-oss"))
    begin = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>{}<|message|>"
    form_of = Constraint.json_object()
    thinking = after_thoughts(form_of, form, begin.format("analysis"), "Let me")
    final = '<|channel|>final<|message|>{"a": 1}'
    assert accepts(tokenizer, thinking, f" see<|end|><|start|>assistant{final}")
    assert not accepts(tokenizer, thinking, '{"a": 1}')
    assert after_thoughts(form_of, form, begin.format("final"), "So: ") == form_of


def test_calls_that_cannot_be_required() -> None:
    with pytest.raises(ConstraintError, match="without a chat template"):
        required_call(AnswerFormat(), TOOLS)
    with pytest.raises(ConstraintError, match="'h' is required, but there is no such tool"):
        required_call(FORMATS["hermes"], TOOLS, name="h")
    with pytest.raises(ConstraintError, match="no tools are given"):
        required_call(FORMATS["hermes"], {})
