"""Flags from the environment: every flag of the commands that answer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from urdir.model.cli import build_parser
from urdir.model.commands.flags import Accepted, FlagAction, Refused
from urdir.model.commands.llama_flags import FLAGS
from urdir.model.commands.parser import Parser
from urdir.model.commands.variables import DOCUMENTED, Variable, variables

COMMANDS = ("run", "chat", "serve")
READ = ("--config", "--models-preset")  # flags whose file is read at once
#: Values that some flag takes.
VALUES = (
    "7",
    "0.5",
    "0",
    "-1",
    "15043+1",
    '{"a": 1}',
    "emulator",
    "all",
    "localhost",
    "2-3",
    "name",
    "name:0.5",
    "name=CPU",
)


@pytest.fixture(scope="module")
def parsers() -> dict[str, Parser]:
    return {name: build_parser(name).subcommands[name] for name in COMMANDS}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*DOCUMENTED.values()}:
        monkeypatch.delenv(name, raising=False)


def parsed(parser: Parser, *words: str) -> dict[str, Any]:
    return vars(parser.parse(words))


def served(parser: Parser) -> Iterator[argparse.Action]:
    for action in dict.fromkeys(parser.flags.values()):
        if not isinstance(action, FlagAction | argparse._HelpAction):
            yield action


def with_value(parser: Parser, variable: Variable) -> tuple[str, list[str]]:
    """A value for a variable, and the words of a command line that say the same."""
    action, flag = variable.action, variable.flag
    if action.nargs == 0:
        return "enabled", [flag]
    if action.choices:
        value = str([*action.choices][-1])
        return value, [f"{flag}={value}"]
    convert = action.type if callable(action.type) else str
    for value in VALUES:
        try:
            convert(value)
        except (ValueError, argparse.ArgumentTypeError):
            continue
        return value, [f"{flag}={value}"]
    raise AssertionError(f"no value for {flag}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_variable_that_means_the_same(
    command: str, parsers: dict[str, Parser], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = parsers[command]
    of_served = [v for v in variables(parser.flags) if not isinstance(v.action, FlagAction)]
    switches = {v.opposite for v in variables(parser.flags)}
    for action in served(parser):
        names = {v.name for v in of_served if v.action is action}
        assert names or switches & {*action.option_strings}, action.option_strings
    assert len({v.name for v in of_served}) == len(of_served)
    plain = parsed(parser)
    for variable in of_served:
        if variable.flag in READ:  # the file is read: tests/model/commands/test_config_file.py
            continue
        value, words = with_value(parser, variable)
        with monkeypatch.context() as patch:
            patch.setenv(variable.name, value)
            found = parsed(parser)
            assert str(found) == str(parsed(parser, *words)), variable
            patch.setenv(variable.name, "")
            assert str(parsed(parser)) == str(plain)
            if variable.opposite:
                patch.setenv(variable.name, "disabled")
                assert str(parsed(parser)) == str(parsed(parser, variable.opposite))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_wins(
    command: str, parsers: dict[str, Parser], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over its own variable, that of one which it excludes, and that of its opposite."""
    parser = parsers[command]
    for variable in variables(parser.flags):
        if isinstance(variable.action, FlagAction) or variable.flag in READ:
            continue
        _, words = with_value(parser, variable)
        alone = str(parsed(parser, *words))
        monkeypatch.setenv(variable.name, "0")
        assert str(parsed(parser, *words)) == alone, variable
        if variable.opposite:
            monkeypatch.setenv(variable.name, "on")
            other = str(parsed(parser, variable.opposite))
            monkeypatch.delenv(variable.name)
            assert other == str(parsed(parser, variable.opposite))
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", "org/repo")
    assert parsed(parser, "-m", "x.gguf")["model"] == "x.gguf"
    assert parsed(parser)["model"] == "hf:org/repo"
    monkeypatch.setenv("LLAMA_ARG_MODEL", "y.gguf")
    assert parsed(parser, "-m", "x.gguf")["model"] == "x.gguf"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_value_is_named_with_its_variable(
    command: str,
    parsers: dict[str, Parser],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = parsers[command]
    for variable in variables(parser.flags):
        action = variable.action
        takes_any = action.nargs is None and not action.choices and action.type in (None, Path)
        lambda_or_names = {"--hf-repo", "--hf-repo-draft", "--alias", "--lora"} & {
            *action.option_strings
        }
        if isinstance(action, FlagAction) or takes_any or lambda_or_names:
            continue
        with monkeypatch.context() as patch:
            patch.setenv(variable.name, "\x07 no value\udcff")
            with pytest.raises(SystemExit) as end:
                parser.parse([])
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"urdir {command}: ${variable.name}: "), line
    with pytest.raises(SystemExit):
        parser.parse(["--top-k", "x"])
    assert "$" not in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_the_table_are_accepted_or_refused_here_too(
    command: str,
    parsers: dict[str, Parser],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser, plain = parsers[command], parsed(parsers[command])
    kinds = {Accepted: 0, Refused: 0}
    for variable in variables(parser.flags):
        if not isinstance(variable.action, FlagAction):
            continue
        flag = variable.action.flag
        kinds[type(flag)] += 1
        value = "1" if variable.action.nargs in (0, "?") else "0.25"
        if isinstance(flag, Accepted) and flag.values:
            value = flag.values[0]
        with monkeypatch.context() as patch:
            patch.setenv(variable.name, value)
            if isinstance(flag, Accepted):
                assert parsed(parser) == plain
                assert f"{variable.flag} changes nothing" in capsys.readouterr().err
                continue
            with pytest.raises(SystemExit) as end:
                parser.parse([])
        assert end.value.code == 2
        start = f"urdir {command}: ${variable.name}: {variable.flag}: there is no {flag.why}"
        assert capsys.readouterr().err.startswith(start)
    assert min(kinds.values()) > 10


def test_every_documented_variable_has_a_flag(parsers: dict[str, Parser]) -> None:
    known = {name for flag in FLAGS for name in flag.names.split()}
    known |= {"--device", "--slot-save-path"}
    assert DOCUMENTED.keys() <= known
    assert len({*DOCUMENTED.values()}) == len(DOCUMENTED)


def test_help_shows_them(parsers: dict[str, Parser]) -> None:
    for parser in parsers.values():
        text = re.sub(r"\s+", " ", parser.format_help())
        for variable in variables(parser.flags):
            if not isinstance(variable.action, FlagAction):
                assert f"[${variable.name}]" in text


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        ({"LLAMA_ARG_UI": "0"}, [], {"page": False}),
        ({"LLAMA_ARG_UI": "off"}, ["--webui"], {"page": True}),
        ({"LLAMA_ARG_NO_UI": ""}, [], {"page": False}),
        ({"LLAMA_ARG_NO_UI": "0"}, [], {"page": False}),
        ({"LLAMA_ARG_UI": "1", "LLAMA_ARG_NO_UI": "1"}, [], {"page": False}),
        ({"LLAMA_ARG_REASONING": "enabled"}, [], {"reasoning": "on"}),
        ({"LLAMA_ARG_REASONING": "0"}, [], {"reasoning": "off"}),
        ({"LLAMA_ARG_REASONING": "auto"}, [], {"reasoning": "auto"}),
        ({"LLAMA_ARG_FLASH_ATTN": "1"}, [], {}),
        ({"LLAMA_API_KEY": "a,b"}, [], {"api_key": ["a,b"]}),
        ({"LLAMA_API_KEY": "a,b"}, ["--api-key", "c"], {"api_key": ["c"]}),
        ({"LLAMA_ARG_MODEL": "x"}, ["y.gguf"], {"file": "y.gguf", "model": None}),
        ({"LLAMA_ARG_MODEL": "x"}, [], {"file": None, "model": "x"}),
        ({"LLAMA_ARG_CTX_SIZE": "512"}, ["-c", "64"], {"ctx_size": 64}),
        ({"LLAMA_ARG_PORT": "9000", "URDIR_ARG_SEED": "5"}, [], {"port": 9000, "seed": 5}),
        ({"LLAMA_ARG_CACHE_REUSE": "0", "LLAMA_ARG_CONTEXT_SHIFT": "off"}, [], {}),
        ({"LLAMA_ARG_MMAP": "1", "LLAMA_ARG_MLOCK": "on"}, [], {}),
    ],
)
def test_as_llama_cpp_reads_them(
    environment: dict[str, str],
    words: list[str],
    expected: dict[str, Any],
    parsers: dict[str, Parser],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = parsed(parsers["serve"], *words)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert parsed(parsers["serve"], *words) == plain | expected


def test_words_that_name_a_model_win(
    parsers: dict[str, Parser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "x.gguf")
    for words, model in (
        (["What is it?"], "x.gguf"),
        (["y.gguf", "What is it?"], None),
        (["y.gguf"], None),
        ([], "x.gguf"),
    ):
        assert parsed(parsers["run"], *words)["model"] == model


def test_two_that_exclude_each_other(
    parsers: dict[str, Parser],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CHAT_TEMPLATE", "chatml")
    monkeypatch.setenv("LLAMA_ARG_CHAT_TEMPLATE_FILE", "x.jinja")
    with pytest.raises(SystemExit):
        parsers["serve"].parse([])
    first, second = re.findall(r"\$(\w+)", capsys.readouterr().err)
    assert {first, second} == {"LLAMA_ARG_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE_FILE"}
    assert parsed(parsers["serve"], "--chat-template", "llama3")["chat_template"] == "llama3"


def test_from_the_process(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "2")
    monkeypatch.setenv("LLAMA_ARG_TEMPERATURE", "0")
    code, out, _ = cli("run", "What is 2 plus 3?")
    assert (code, out) == (0, "2 plus\n")
    monkeypatch.setenv("LLAMA_ARG_TENSOR_SPLIT", "1,2")
    code, _, err = cli("run", "What is 2 plus 3?")
    assert code == 2
    assert "$LLAMA_ARG_TENSOR_SPLIT" in err
