"""`urdir run` with a format of the answer, without a prompt, and with a name as of ollama."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.commands import chat, prompts, run
from urdir.model.text.formats import Format

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_an_answer_has_its_format(cli: Cli, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [17]}')
    asked = ("run", "demo", "-n", "6", "--temp", "0", "-p")
    assert cli(*asked, "What is 2 plus 3?", "-jf", schema)[:2] == (0, "17\n")


def test_formats_of_flags(tmp_path: Path) -> None:
    given = dict.fromkeys(("grammar", "grammar_file", "json_schema", "json_schema_file"))

    def read(**flags: object) -> Format | None:
        return prompts.given_format(argparse.Namespace(**{**given, **flags}))

    file = tmp_path / "file"
    file.write_text('{"type": "object"}')
    assert read() is read(grammar="") is None
    assert read(grammar="root ::= x") == Format("grammar", "root ::= x")
    assert read(grammar_file=file) == Format("grammar", '{"type": "object"}')
    assert read(json_schema={}) == Format("json_schema", {})
    assert read(json_schema_file=file) == Format("json_schema", {"type": "object"})
    file.write_text("[")
    with pytest.raises(prompts.UsageError, match=r"--json-schema-file .*is not JSON"):
        read(json_schema_file=file)


def test_two_formats_are_bad_usage(cli: Cli) -> None:
    code, _, err = cli("run", "demo", "x y", "-j", "{}", "--grammar", 'root ::= "a"')
    assert code == 2
    assert "not allowed with argument" in err
    code, _, err = cli("run", "demo", "x y", "-j", "[]")
    assert code == 2
    assert "is not a JSON object" in err


def test_without_a_prompt_a_terminal_begins_a_chat(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flags of `run`, and what `chat` has besides."""
    begun: list[argparse.Namespace] = []
    monkeypatch.setattr(chat, "run", lambda args: begun.append(args) or 0)
    monkeypatch.setattr(run, "has_terminal", lambda: True)
    assert cli("run", "demo", "--temp", "0.5", "-sys", "Be brief.")[0] == 0
    (args,) = begun
    assert (args.model, args.words, args.temperature) == ("demo", [], 0.5)
    assert (args.system, args.prompt, args.color) == ("Be brief.", None, "auto")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3:8b", "hf:ORG/LLAMA3-GGUF:Q4_K_M"),
        ("qwen2.5", "as of ollama means no model here"),
        ("hf.co/org/Some-GGUF:Q8_0", "give hf:org/Some-GGUF:Q8_0 for"),
        ("folder/file.gguf", ": no such file"),
    ],
)
def test_names_as_of_ollama_are_explained(cli: Cli, name: str, words: str) -> None:
    for command in (("run", name, "hello"), ("show", name)):
        code, _, err = cli(*command)
        assert code == 1
        assert f"{name}: no such file" in err
        assert words in err
        assert ("ollama" in err) == name.startswith(("llama", "qwen"))
    if "file" not in name:
        code, _, err = cli("pull", name)
        assert (code, words in err) == (2, True)
