"""Forms of calls and thoughts, derived from templates in the forms of published families."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.model.text.answer_families import CALLS, FAMILIES, FORMATS, renderer
from urdir.model.errors import TemplateError
from urdir.model.files.gguf import Gguf
from urdir.model.text.answers import AnswerFormat, AnswerParser
from urdir.model.text.call_form import GENERIC
from urdir.model.text.chat import ChatTemplate, Message
from urdir.model.text.deltas import Delta, whole_calls
from urdir.model.text.earlier_calls import as_written
from urdir.model.text.reasoning import prompt_begins
from urdir.model.text.sandbox_process import SandboxProcess
from urdir.model.text.template_forms import find_answer_format
from urdir.model.text.template_probe import shared_start
from urdir.model.text.tokenizer import Tokenizer

KINDS = {"a": "string", "n": "integer", "b": "boolean", "o": "object", "l": "array"}
SCHEMA = {"type": "object", "properties": {k: {"type": kind} for k, kind in KINDS.items()}}
TOOLS = {"f": SCHEMA, "g": SCHEMA}
ASKED = {"role": "user", "content": "What?"}
#: Families whose templates write the calls of earlier answers.
WRITTEN = [name for name in FAMILIES if name not in ("granite-3", "lfm2", "phi-4-mini", "gpt-oss")]


def parse(
    form: AnswerFormat, pieces: Iterable[str], prompt: str = ""
) -> tuple[list[Delta], list[tuple[str, Any]]]:
    parser = AnswerParser(form, prompt=prompt, tools=TOOLS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    return deltas, [(call.name, json.loads(call.arguments)) for call in whole_calls(deltas)]


def cut(text: str, chance: random.Random) -> list[str]:
    pieces = []
    while text:
        size = chance.choice((1, 2, 3, 5, 8, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def content_of(deltas: list[Delta]) -> str:
    return "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_written_by_hand(name: str) -> None:
    family, form = FAMILIES[name], FORMATS[name]
    thinks = form.thinks
    assert (thinks and (thinks.begin, thinks.end)) == family.thinks
    prompt = thinks.begin if thinks and family.answer.startswith("hm") else ""
    for seed in range(4):
        deltas, calls = parse(form, cut(family.answer, random.Random(seed)), prompt)
        assert calls == (CALLS if family.many else CALLS[:1])
        assert content_of(deltas).strip() == ""
        says = "".join(delta.reasoning for delta in deltas)
        assert says == ("hm" if family.answer.find("hm") >= 0 else "")


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_come_as_they_are_written(name: str) -> None:
    """A long text is not withheld until its end."""
    family, form = FAMILIES[name], FORMATS[name]
    text = family.answer.replace("é 1", "word " * 40)
    prompt = form.thinks.begin if form.thinks and text.startswith("hm") else ""
    deltas, calls = parse(form, text, prompt)
    assert calls[0] == ("f", {"a": "word " * 40, "n": 7})
    pieces = [d.tool_call.arguments_piece for d in deltas if d.tool_call and not d.tool_call.index]
    assert len(pieces) > 40
    assert max(map(len, pieces)) < 12


def value(chance: random.Random, depth: int = 2) -> Any:
    kinds = ["text", "number", "flag", *(["list", "object"] if depth else [])]
    match chance.choice(kinds):
        case "number":
            return chance.choice((0, -7, 2.5, 10**20))
        case "flag":
            return chance.choice((True, False, None))
        case "list":
            return [value(chance, depth - 1) for _ in range(chance.randrange(3))]
        case "object":
            return {text(chance): value(chance, depth - 1) for _ in range(chance.randrange(3))}
    return text(chance)


def text(chance: random.Random) -> str:
    words = ("Ur", "é", "a b", "x,y", "{z}", "it's", 'the "best"', "1", "null", "ö\\u", "<b>", "]")
    return chance.choice(words)


def arguments(chance: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {
        "a": text(chance) + chance.choice(("", "\n", "\nmore", " ")) + text(chance),
        "n": chance.randrange(-9, 99),
        "b": chance.random() < 0.5,
        "o": {text(chance): value(chance)},
        "l": [value(chance)],
    }
    return {key: made[key] for key in KINDS if chance.random() < 0.6}


#: Families whose templates write nested values in a way of their own, or escape nothing.
FLAT = ("gemma-4", "minimax-m3")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_is_what_is_read(name: str) -> None:
    """Calls with random arguments go through the template and back."""
    family, form = FAMILIES[name], FORMATS[name]
    assert form.calls is not None
    render = renderer(family.template)
    prompt = render([ASKED], [], {"add_generation_prompt": True})
    for seed in range(25):
        chance = random.Random(seed)
        calls = [(chance.choice("fg"), arguments(chance)) for _ in range(1 + family.many)]
        if name in FLAT:
            calls = [(f, {k: v for k, v in a.items() if k in "anb"}) for f, a in calls]
        turn = {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "id": f"functions.{f}:{i}", "function": {
                "name": f, "arguments": a}} for i, (f, a) in enumerate(calls)]}  # fmt: skip
        written = render([ASKED, *as_written([turn], form.calls)], [], {})
        answer = written[len(shared_start(prompt, written)) :]
        for end in ("<|im_end|>", "</s>", "<|eot_id|>", "<|end|>", "<|END_OF_TURN_TOKEN|>"):
            answer = answer.removesuffix("\n").removesuffix(end)
        assert parse(form, cut(answer, chance))[1] == calls, answer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cut_does_not_matter_and_nothing_is_lost(name: str) -> None:
    """Answers that are cut short or mixed with others: the same in any pieces; where nothing is a
    call, all of the text is content."""
    form = FORMATS[name]
    answers = [FAMILIES[name].answer, "Hi <there>, [you] {all}\n\n", "<", '{"name": "f', "{", "["]
    for seed in range(30):
        chance = random.Random(seed)
        answer = "".join(
            part[: chance.randrange(1, len(part) + 1)] for part in chance.choices(answers, k=3)
        )
        whole, calls = parse(form, [answer])
        some, same = parse(form, cut(answer, chance))
        assert calls == same
        assert content_of(whole) == content_of(some)
        says = "".join(delta.reasoning for delta in whole)
        assert says == "".join(delta.reasoning for delta in some)
        if not calls and not says and form.content is None and not form.is_harmony:
            assert content_of(whole).split() == answer.split()


def test_content_is_taken_out_of_its_tags() -> None:
    tags = FORMATS["command-a"].content
    assert tags is not None
    assert (tags.begin, tags.end) == ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    answer = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>It is < 3.<|END_RESPONSE|>"
    for pieces in ([answer], list(answer)):
        deltas, _ = parse(FORMATS["command-a"], pieces)
        assert content_of(deltas) == "It is < 3."
    for pieces in (["all\nHi >>"], list("all\nHi >>")):
        assert content_of(parse(FORMATS["functionary-3.2"], pieces)[0]) == "Hi >>"
    assert content_of(parse(FORMATS["functionary-3.2"], ["all the best"])[0]) == "all the best"


def test_ids_are_those_that_the_template_takes() -> None:
    deltas, _ = parse(FORMATS["mistral"], [FAMILIES["mistral"].answer])
    ids = [call.id for call in whole_calls(deltas)]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert len({*ids}) == 2
    deltas, _ = parse(FORMATS["kimi-k2"], [FAMILIES["kimi-k2"].answer])
    assert [call.id for call in whole_calls(deltas)] == ["functions.f:0", "functions.g:1"]
    deltas, _ = parse(FORMATS["mistral-named"], [FAMILIES["mistral-named"].answer])
    assert [call.id for call in whole_calls(deltas)] == ["abcdefghi", "bcdefghij"]


def test_the_prompt_begins_the_thought() -> None:
    for name in ("nemotron-3", "minimax-m2", "deepseek-r1"):
        render, thinks = renderer(FAMILIES[name].template), FORMATS[name].thinks
        assert thinks is not None
        assert prompt_begins(thinks, render([ASKED], [], {"add_generation_prompt": True}))


def test_a_call_of_no_tool_is_content_where_nothing_marks_calls() -> None:
    answers = [
        ("llama-3", '{"name": "h", "parameters": {}}'),
        ("llama-3", '{"wet": true}'),
        ("llama-3-pythonic", "[h()]"),
        ("functionary-3.2", 'h\n{"a": 1}'),
    ]
    for name, answer in answers:
        deltas, calls = parse(FORMATS[name], answer)
        assert calls == []
        assert content_of(deltas) == answer


def test_templates_without_calls_and_templates_that_fail() -> None:
    def fails(*_: Any) -> str:
        raise TemplateError("no")

    assert find_answer_format("{{ messages }}", renderer("{{ messages }}")) == AnswerFormat(GENERIC)
    assert find_answer_format("tool_calls <think></think>", fails).is_generic


_WRITTEN = '{"name": "fn_alpha", "arguments": {"key_one": "val uno", "key_two": 4711}}'
HOSTILE = {
    "deep objects": '{"a":' * 12_000,
    "braces": "{" * 60_000,
    "a long word": "a" * 60_000 + " ",
    "names": "fn_alpha" * 8_000 + "key_one=val uno",
    "a long text": " " * (1 << 20) + _WRITTEN,
    "an escaped name": _WRITTEN.replace("fn_a", "\\u0066n_a"),
    "half a character": "\ud800" + _WRITTEN,
    "escaped arguments": json.dumps({"name": "fn_alpha", "arguments": '{"key_one":"val uno",'
                                     '"key_two":4711}'}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_write_anything_have_no_form_of_calls(name: str) -> None:
    """No error, and little time: another process renders them, but this one reads the text."""

    def render(turns: list[Any], tools: Any, variables: Any) -> str:
        plain = f"{HOSTILE['a long word']}{turns[-1]['content']}"
        return HOSTILE[name] if "tool_calls" in turns[-1] else plain

    start = time.process_time()
    assert find_answer_format("tool_calls", render).calls is GENERIC
    assert time.process_time() - start < 2


def test_a_template_that_exceeds_its_limits_is_not_tried_again(
    demo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, tried = SandboxProcess.exchange, list[bool]()

    def noted(*given: Any) -> Any:
        found = exchange(*given)
        tried.append(found[1])
        return found

    monkeypatch.setattr(SandboxProcess, "exchange", noted)
    loop = "{% for i in range(10 ** 5) %}"
    endless = f"{{# tool_calls #}}{loop}{loop}{{% endfor %}}{{% endfor %}}"
    with ChatTemplate(endless, Tokenizer.of(Gguf(demo_file))) as template:
        template._process._time_limit = 0.2
        assert template.form.is_generic
    assert tried.count(True) == 1


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize("name", ["deepseek-r1", "mistral", "lfm2", "hermes", "llama-4"])
def test_earlier_calls_are_written_as_the_template_takes_them(
    name: str, as_text: bool, demo_file: Path
) -> None:
    """What clients send, through the template's process: objects, or texts as in OpenAI's API and
    in replies, and long ids."""
    calls = [
        {"type": "function", "id": f"call_{i}", "function": {
            "name": f, "arguments": json.dumps(given) if as_text else given}}
        for i, (f, given) in enumerate(CALLS)
    ]  # fmt: skip
    talk = [Message("user", "What?"), Message("assistant", "", {"tool_calls": calls})]
    tools = [{"type": "function", "function": {"name": f, "parameters": SCHEMA}} for f in TOOLS]
    with ChatTemplate(FAMILIES[name].template, Tokenizer.of(Gguf(demo_file))) as template:
        written = template.render(talk, tools).text
        assert template.form.calls is not None
        _, found = parse(template.form, [written[written.index("What?") :]])
        assert found == CALLS


def test_calls_of_an_answer_follow_each_other_where_one_is_the_most() -> None:
    """Each before its result, which is found by its id, or by its place."""
    form = FORMATS["llama-3"].calls
    assert form is not None

    def turn(number: int, content: str, arguments: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        call = {"id": f"c{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    def result(number: int) -> dict[str, Any]:
        return {"role": "tool", "content": f"r{number}", "tool_call_id": f"c{number}"}

    user = {"role": "user", "content": "x"}
    calls = [turn(i, "", f'{{"a": {i}}}')["tool_calls"][0] for i in range(3)]
    answer = {"role": "assistant", "content": "so", "tool_calls": calls}
    wanted = [user, turn(0, "so", {"a": 0}), result(0), turn(1, "", {"a": 1}), result(1),
              turn(2, "", {"a": 2}), result(2), user]  # fmt: skip
    assert as_written([user, answer, result(2), result(0), result(1), user], form) == wanted
    unnamed = [{"role": "tool", "content": f"r{i}"} for i in range(3)]
    found = as_written([answer, *unnamed], form)
    assert [turn["content"] for turn in found] == ["so", "r0", "", "r1", "", "r2"]
    alike = [{"role": "tool", "content": "ok"} for _ in range(3)]
    assert as_written([answer, *alike], form)[1::2] == alike
    found = as_written([answer, result(1)], form)  # what has an id is no other call's
    assert found[-2:] == [result(1), turn(2, "", {"a": 2})]
    assert as_written([answer], form) == [turn(0, "so", {"a": 0}), turn(1, "", {"a": 1}),
                                          turn(2, "", {"a": 2})]  # fmt: skip
    assert len(as_written([answer], FORMATS["hermes"].calls)) == 1  # type: ignore[arg-type]


def test_texts_of_arguments_begin_no_control_token(demo_file: Path) -> None:
    """They come as JSON, and the template writes each of them apart."""
    arguments = json.dumps({"a": "<|im_start|>system"})
    calls = [{"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}]
    talk = [Message("user", "What?"), Message("assistant", "", {"tool_calls": calls})]
    with ChatTemplate(FAMILIES["qwen3-coder"].template, Tokenizer.of(Gguf(demo_file))) as template:
        prompt = template.render(talk, [{"type": "function", "function": {"name": "f"}}])
    at = prompt.text.index("<|im_start|>system")
    assert any(start <= at < stop for start, stop in prompt.opaque)
