"""Conversations: turns, commands, full contexts, thoughts; with answers that are made up."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from urdir.model.cli import build_parser
from urdir.model.commands import chat
from urdir.model.commands.chat_input import _history, completer, read_line
from urdir.model.commands.conversation import Conversation
from urdir.model.engine.generate import Statistics
from urdir.model.engine.requests.request import Request
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.chat import Message
from urdir.model.text.formats import Format
from urdir.model.text.reasoning import THINK_TAGS

CONTEXT = 100


class Template:
    """A token for each character of the messages."""

    form = AnswerFormat(thinks=THINK_TAGS[0])

    def render(self, messages: Sequence[Message], variables: Any) -> SimpleNamespace:
        return SimpleNamespace(text="".join(message.content for message in messages))

    def tokens(self, prompt: SimpleNamespace) -> list[str]:
        return list(prompt.text)


class Answer:
    """A generation that says its prompt in capitals, and remembers it was asked."""

    asked: list[Any] = []  # noqa: RUF012 (a fixture empties it)
    interrupt_after: int | None = None

    def __init__(self, request: Request) -> None:
        self.prompt: Any = request.prompt
        seed = request.settings.seed
        self.statistics = Statistics(prompt_tokens=len(self.prompt), seed=seed)
        Answer.asked.append(self)

    def text(self) -> Iterator[str]:
        if len(self.prompt) > CONTEXT:
            raise ContextFullError(f"{len(self.prompt)} tokens exceed {CONTEXT}")
        for number, character in enumerate("".join(self.prompt)[-4:].upper()):
            if number == self.interrupt_after:
                raise KeyboardInterrupt
            yield character


@pytest.fixture
def conversation(make_conversation: Callable[[bool], Conversation]) -> Conversation:
    return make_conversation(False)


@pytest.fixture
def make_conversation(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Conversation]:
    """A conversation with colours or without."""
    monkeypatch.setattr(Answer, "asked", [])
    monkeypatch.setattr(Answer, "interrupt_after", None)
    args = build_parser("chat").parse(["chat", "--no-show-timings"])
    session = SimpleNamespace(context=CONTEXT)
    device = SimpleNamespace(synchronize=lambda: None)
    file = SimpleNamespace(metadata={})
    engine: Any = SimpleNamespace(session=session, generation=Answer, device=device, file=file)
    template: Any = Template()
    return lambda colours: Conversation(engine, template, args, "sys:", colours)


def contents(conversation: Conversation) -> list[str]:
    return [turn.content for turn in conversation.turns]


def test_turns_follow_each_other(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation.ask("one.")
    conversation.ask("two.")
    assert contents(conversation) == ["one.", "ONE.", "two.", "TWO."]
    assert "".join(Answer.asked[-1].prompt) == "sys:one.ONE.two."
    assert capsys.readouterr().out == "ONE.\nTWO.\n"


def test_an_answer_again_and_undone(conversation: Conversation) -> None:
    conversation.args.seed = 7
    conversation.ask("one.")
    conversation.ask("two.")
    conversation.retry()
    conversation.retry()
    assert [answer.statistics.seed for answer in Answer.asked] == [7, 7, 8, 9]
    assert contents(conversation) == ["one.", "ONE.", "two.", "TWO."]
    conversation.undo()
    conversation.undo()
    assert contents(conversation) == []
    for command in (conversation.undo, conversation.retry):
        with pytest.raises(ModelError, match="nothing has been asked"):
            command()


def test_a_full_context_leaves_out_the_oldest_turns(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        conversation.ask(f"turn {number:5}")
    prompts = ["".join(answer.prompt) for answer in Answer.asked]
    assert all(len(prompt) <= CONTEXT * 3 // 4 for prompt in prompts)
    assert all(prompt.startswith("sys:turn") for prompt in prompts)
    assert prompts[-1].endswith("turn     9   9turn    10  10turn    11")
    assert len(conversation.turns) == 24
    assert capsys.readouterr().err.count("oldest turns are left out") == 1
    with pytest.raises(ModelError, match=r"this turn does not fit: .*-c N"):
        conversation.ask("x" * CONTEXT)
    assert len(conversation.turns) == 24
    conversation.clear()
    conversation.ask("anew")
    assert "".join(Answer.asked[-1].prompt) == "sys:anew"


@pytest.mark.parametrize(("after", "left"), [(0, []), (2, ["one.", "ON"])])
def test_an_interrupted_answer_keeps_what_there_is(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, after: int, left: list[str]
) -> None:
    monkeypatch.setattr(Answer, "interrupt_after", after)
    conversation.ask("one.")
    assert contents(conversation) == left


def test_a_conversation_is_saved_and_loaded(conversation: Conversation, tmp_path: Path) -> None:
    path = str(tmp_path / "conversation.json")
    conversation.ask("one.")
    conversation.save(path)
    assert json.loads(Path(path).read_text()) == [
        {"role": "system", "content": "sys:"},
        {"role": "user", "content": "one."},
        {"role": "assistant", "content": "ONE."},
    ]
    conversation.clear()
    conversation.system = None
    conversation.load(path)
    assert (conversation.system, contents(conversation)) == ("sys:", ["one.", "ONE."])
    for text in ("no JSON", "[1]", "{}", '[{"role": "user", "content": "alone"}]'):
        if text == "{}":
            continue
        Path(path).write_text(text)
        with pytest.raises(ModelError, match="/load"):
            conversation.load(path)
    assert contents(conversation) == ["one.", "ONE."]
    with pytest.raises(ModelError, match="No such file"):
        conversation.load(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match="/save"):
        conversation.save(str(tmp_path))


def take(conversation: Conversation, *lines: str) -> int:
    rest = iter([*lines, None])
    return chat._talk(conversation, lambda: next(rest), None)


def test_commands(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    take(conversation, "/help", "/stats", "/system Be kind.", "/set temp 0.25", "/set seed 5")
    err = capsys.readouterr().err
    assert all(name in err for name in chat.COMMANDS)
    assert "0 of 100 tokens" in err
    assert "system: Be kind." in err
    assert conversation.system == "Be kind."
    assert (conversation.args.temperature, conversation.args.seed) == (0.25, 5)
    assert conversation.args.top_k is None  # the file's, or the usual one
    assert "temperature  0.25" in err
    assert "top-k" not in err  # what is not changed
    conversation.engine.file.metadata["general.sampling.top_p"] = 0.8  # type: ignore[index]
    take(conversation, "/set")
    shown = capsys.readouterr().err
    assert {line.index(line.split()[1]) for line in shown.splitlines()} == {21}
    values = dict(line.split() for line in shown.splitlines())
    assert values.items() >= {"temperature": "0.25", "top-k": "40", "top-p": "0.8"}.items()
    assert values.items() >= {"n-predict": "-1", "seed": "5"}.items()
    take(conversation, "one.", "/regen", "/exit", "never")
    assert contents(conversation) == ["one.", "ONE."]
    take(conversation, "/undo", "/clear")
    assert contents(conversation) == []


def test_formats_of_answers(
    conversation: Conversation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.json").write_text('{"type": "array"}')
    (tmp_path / "a.gbnf").write_text('root ::= "x"')
    (tmp_path / "bad.json").write_text("[]")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = []
    for name in ("json", "~/a.json", str(tmp_path / "a.gbnf"), "~/bad.json", "off"):
        take(conversation, f"/format {name}")
        found.append(conversation.format)
    schema, grammar = Format("json_schema", {"type": "array"}), Format("grammar", 'root ::= "x"')
    assert found == [Format("json_schema", {}), schema, grammar, grammar, None]
    err = capsys.readouterr().err
    assert "/format ~/bad.json: '[]' is not a JSON object" in err
    assert err.endswith("format: free text\n")


def test_lines_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text("")
    (tmp_path / "tales").mkdir()
    found = completer(list(chat.COMMANDS), chat.WITH_FILE)

    def of(line: str) -> list[str]:
        document = Document(line, len(line))
        return sorted(each.text for each in found.get_completions(document, CompleteEvent()))

    assert of("/") == sorted(chat.COMMANDS)
    assert of("/s") == ["/save", "/set", "/stats", "/system"]
    assert of(f"/load {tmp_path}/ta") == ["les", "lk.json"]
    assert of(f"/save {tmp_path}/tal") == ["es", "k.json"]
    assert of(f"/system {tmp_path}/ta") == []
    assert of("What about /l") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/retyr", "/retry?"),
        ("/xyzzy", "/help"),
        ("/set temp hot", "not a number"),
        ("/set tem 1", "unknown flag tem: did you mean temp?"),
        ("/set temp", "expected one argument"),
        ("/set top-p 3", "between 0 and 1"),
        ("/save", "give a file"),
        ("/format nothing.json", "/format nothing.json: cannot be read"),
        ("/undo", "nothing"),
    ],
)
def test_bad_commands_are_told_and_the_conversation_goes_on(
    conversation: Conversation, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    take(conversation, line, "one.")
    assert message in capsys.readouterr().err
    assert contents(conversation) == ["one.", "ONE."]


def test_a_full_disk_leaves_the_history_in_memory(tmp_path: Path) -> None:
    (tmp_path / "chat_history").symlink_to("/dev/full")
    history = _history(tmp_path)
    history.append_string("one.")
    history.append_string("\udcff")
    assert history.get_strings() == ["one.", "\udcff"]


def test_ctrl_c_at_the_prompt_keeps_the_conversation(conversation: Conversation) -> None:
    lines: list[Any] = ["one.", KeyboardInterrupt(), "two.", None]

    def read() -> str | None:
        line = lines.pop(0)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    chat._talk(conversation, read, "zero")
    assert contents(conversation)[::2] == ["zero", "one.", "two."]


def test_a_single_turn(conversation: Conversation) -> None:
    conversation.args.single_turn = True
    assert take(conversation, "/help", "/nothing", "one.", "two.") == 0
    assert contents(conversation) == ["one.", "ONE."]


def test_a_single_turn_that_fails_is_the_command_s_failure(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation.args.single_turn = True
    with pytest.raises(ModelError, match="does not fit"):
        take(conversation, "x" * 200)
    monkeypatch.setattr(Answer, "interrupt_after", 2)
    assert take(conversation, "one.") == 130


def test_a_line_that_is_no_text_does_not_end_the_chat(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = io.BytesIO(b"one.\ncaf\xe9\ntwo.\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, "utf-8"))
    chat._talk(conversation, read_line, None)
    assert contents(conversation) == ["one.", "ONE.", "two.", "TWO."]
    assert "not UTF-8 is left out (byte 3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("colours", "printed"),
    [(True, "\x1b[2mso\x1b[0m\nyes\n"), (False, "<think>\nso\n</think>\nyes\n")],
)
def test_thoughts_are_dimmed_or_between_tags(
    make_conversation: Callable[[bool], Conversation],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    colours: bool,
    printed: str,
) -> None:
    pieces = ["<thi", "nk>s", "o</think>", "yes"]
    monkeypatch.setattr(Answer, "text", lambda self: (yield from pieces))
    conversation = make_conversation(colours)
    conversation.ask("one.")
    assert capsys.readouterr().out == printed
    assert contents(conversation) == ["one.", "yes"]
