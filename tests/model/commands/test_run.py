"""`urdir run`: answers, prompts and their files."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.cli import build_parser
from urdir.model.commands import prompts
from urdir.model.commands.report import print_statistics, seconds_text
from urdir.model.engine.generate import Statistics

Cli = Callable[..., tuple[int, str, str]]


def test_run_answers_with_the_demo_model(cli: Cli) -> None:
    code, out, err = cli("run", "--temp", "0", "-p", "What is 2 plus 3?")
    assert (code, out) == (0, "2 plus 3 is 5.\n")
    assert "seed" in err


@pytest.mark.slow
def test_run_prints_json_and_repeats_with_a_seed(cli: Cli) -> None:
    argv = ("run", "-p", "Hello!", "-n", "3", "--seed", "7", "--json")
    first, second = json.loads(cli(*argv)[1]), json.loads(cli(*argv)[1])
    assert first["text"] == second["text"] != ""
    assert first["statistics"]["seed"] == 7
    assert first["statistics"]["finish"] in ("length", "end")


@pytest.mark.slow
def test_run_reads_the_prompt_from_a_file_and_from_stdin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("What is 2 plus 3?", encoding="utf-8")
    assert cli("run", "--temp", "0", "-n", "1", "-f", tmp_path / "prompt.txt")[1] == "2\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 plus 3?"))
    assert cli("run", "--temp", "0", "-n", "1")[1] == "2\n"


@pytest.mark.slow
def test_stop_strings_and_raw_prompts(cli: Cli) -> None:
    assert cli("run", "--temp", "0", "-p", "What is 2 plus 3?", "--stop", " is")[1] == "2 plus 3\n"
    code, out, _ = cli("run", "--raw", "--temp", "0", "-n", "1", "-p", "Once upon a")
    assert code == 0
    assert out.startswith(" time")


@pytest.mark.slow
def test_a_full_cache_ends_the_answer_and_says_so(cli: Cli) -> None:
    argv = ("run", "--raw", "--temp", "0", "--ignore-eos", "-c", "8", "-p", "Once upon a")
    code, out, err = cli(*argv)
    assert code == 0
    assert len(out) > 5
    assert "KV cache is full (8 tokens)" in err


@pytest.mark.slow
def test_prompts_and_tokens_that_cannot_be(cli: Cli, nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.npy"
    for argv, message in (
        (("run", "-m", nano, "-p", "x"), "vocabulary"),
        (("run", "-c", "8", "-p", "a long prompt that has more than eight tokens"), "context of 8"),
        (("run", "-c", "8", "-p", "a long prompt that has more than eight tokens"), "(-c N)"),
        (("run", "--raw", "-p", ""), "empty"),
        (("run", "-f", tmp_path / "absent.txt"), "absent.txt"),
        (
            ("logits", nano, "--tokens", "1", "--output", tmp_path / "no" / "x.npy"),
            "no such folder",
        ),
        (("logits", nano, "--tokens", "1", "--output", tmp_path), "a folder; give the name of a"),
    ):
        code, out, err = cli(*argv)
        assert (code, out) == (1, ""), argv
        assert message in err
        assert len(err.splitlines()) == 1
    assert not output.exists()


def test_escapes_templates_and_files_of_system_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system.txt").write_text("Be kind.\n\n")
    parser = build_parser("run")
    args = parser.parse(["run", "-e", "-p", r"a\n\"b\" \x41 \q", "-sys", r"\t"])
    assert prompts.given_prompt(args) == 'a\n"b" A \\q'
    assert prompts.given_system(args) == "\t"
    args = parser.parse(["run", "-p", r"a\n", "-sysf", str(tmp_path / "system.txt")])
    assert (prompts.given_prompt(args), prompts.given_system(args)) == (r"a\n", "Be kind.\n")
    args = parser.parse(["run", "--chat-template", "{{ messages }}", "-p", "x"])
    assert prompts.given_template(args) == "{{ messages }}"
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert prompts.given_prompt(parser.parse(["run", "-f", "-"])) == "from stdin"
    args = parser.parse(["run", "-p", "caf\udcc3\udca9"])  # as a locale of ASCII has it
    assert prompts.given_prompt(args) == "caf\u00e9"


def test_a_prompt_of_a_million_characters_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 300_000)
    code, _, err = cli("run", "-f", tmp_path / "long.txt")
    assert code == 1
    assert re.search(r"the conversation has 1,500,0\d\d characters", err)


def test_an_answer_that_never_began_has_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    print_statistics(Statistics(seed=7, prompt_tokens=3))
    assert capsys.readouterr().err == "[3 prompt tokens (0 cached), 0 generated, seed 7]\n"
    print_statistics(Statistics(seed=7, prompt_tokens=3, generated_tokens=1, prompt_seconds=0.25))
    assert "first answer token after 250 ms, 1 generated, seed 7]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.58, "1.58 s"),
        (0.99996, "1.00 s"),
        (0.0314, "31.4 ms"),
        (213e-6, "213 us"),
        (1234, "1234 s"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    """And no exponents: 0.99996 s is not 1e+03 ms."""
    assert seconds_text(seconds) == text
