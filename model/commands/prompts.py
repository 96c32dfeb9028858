"""Sources of a prompt: words of the command line, a file, stdin."""

from __future__ import annotations

import argparse
import codecs
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from urdir.model.commands import values
from urdir.model.commands.options import UsageError
from urdir.model.errors import ModelError, SettingsError
from urdir.model.files.demo import DEMO

if TYPE_CHECKING:
    from urdir.model.text.formats import Format

#: Maximum size of a prompt: 16 MB have more tokens than any context.
MOST_BYTES = 16 << 20
#: What to do where stdin is a terminal.
NO_PROMPT = "no prompt: give it after the model, with -p TEXT or -f FILE, or pipe it in"
#: Escape sequences that llama.cpp's -e knows.
_ESCAPES = re.compile(r"""\\(?:[nrt'"\\]|x[0-9a-fA-F]{2})""")


def take_words(args: argparse.Namespace) -> None:
    """Sort the words without a flag into ``args.model`` and ``args.prompt``.

    The first one is the model, unless that is given with a flag, or the only word has a blank and
    is the name of no file; the others are the prompt.
    """
    words: list[str] = args.words
    if words and args.model is None and name_a_model(words):
        args.model, *words = words
        _check_model(args.model)
    if words and (args.prompt is not None or args.file is not None):
        raise UsageError(f"two prompts: {' '.join(words)!r} beside -p or -f")
    if words:
        args.prompt = given_text("PROMPT", " ".join(words))


def given_text(what: str, word: str) -> str:
    """A word of the command line as text. Raises UsageError, which names ``what``."""
    try:
        return values.text(word)
    except argparse.ArgumentTypeError as exc:
        raise UsageError(f"argument {what}: {exc}") from None


def name_a_model(words: list[str]) -> bool:
    """Whether the first of the words without a flag is the model."""
    return not (len(words) == 1 and _is_prose(words[0]))


def given_prompt(args: argparse.Namespace) -> str | None:
    """The prompt on the command line, as words or in a file; None without one."""
    if args.prompt is not None:
        return unescaped(args.prompt) if args.escape else str(args.prompt)
    return None if args.file is None else read_prompt("-f", args.file)


def given_system(args: argparse.Namespace) -> str | None:
    """The system message; None without one."""
    if args.system_file is not None:
        return read_text("-sysf", args.system_file).removesuffix("\n")
    return unescaped(args.system) if args.system and args.escape else args.system


def given_template(args: argparse.Namespace) -> str | None:
    """The chat template that replaces the file's; None for the file's."""
    file, given = args.chat_template_file, args.chat_template
    if file is None and given is None:
        return None
    from urdir.model.text.named_templates import is_template, template_text

    if file is not None:
        text = read_text("--chat-template-file", file)
        if not is_template(text):
            raise UsageError(f"--chat-template-file {file}: no Jinja template, without {{{{ or {{%")
        return text
    try:
        return template_text(given)
    except SettingsError as exc:
        raise UsageError(
            f"--chat-template: {exc}; --chat-template-file FILE reads one of your own"
        ) from None


def given_variables(args: argparse.Namespace) -> dict[str, Any]:
    """Variables of the template beside messages and tools; --chat-template-kwargs wins."""
    variables: dict[str, Any] = {}
    if args.reasoning != "auto":
        variables["enable_thinking"] = args.reasoning == "on"
    elif args.reasoning_budget == 0:
        variables["enable_thinking"] = False
    if args.reasoning_effort is not None:
        variables["reasoning_effort"] = args.reasoning_effort
    variables |= args.chat_template_kwargs
    return variables


def given_format(args: argparse.Namespace) -> Format | None:
    """The format of the answer; None for free text."""
    from urdir.model.text.formats import Format

    if args.grammar:  # llama.cpp's default is an empty one
        return Format("grammar", args.grammar)
    if args.grammar_file is not None:
        return Format("grammar", read_text("--grammar-file", args.grammar_file))
    if args.json_schema is not None:
        return Format("json_schema", args.json_schema)
    if args.json_schema_file is None:
        return None
    return _schema("--json-schema-file", args.json_schema_file)


def named_format(flag: str, name: str) -> Format | None:
    """A format by its name: json, off (None), or a file with a schema or, if it ends in .gbnf, a
    grammar. Raises UsageError, ModelError."""
    from urdir.model.text.formats import Format

    if name in ("json", "off"):
        return None if name == "off" else Format("json_schema", {})
    return (
        Format("grammar", read_text(flag, name)) if name.endswith(".gbnf") else _schema(flag, name)
    )


def _schema(flag: str, name: str) -> Format:
    from urdir.model.text.formats import Format

    try:
        return Format("json_schema", values.json_object(read_text(flag, name)))
    except argparse.ArgumentTypeError as exc:
        raise UsageError(f"{flag} {name}: {exc}") from None


def given_thinking(args: argparse.Namespace) -> int | None:
    """The most tokens of reasoning; None: no limit."""
    return None if args.reasoning_budget < 0 else int(args.reasoning_budget)


def read_prompt(flag: str = "", name: str = "-", missing: str = NO_PROMPT) -> str:
    """A file's text, or with "-" that of stdin, without a line break at its end, as llama.cpp reads
    prompts. Raises what `read_text` and `read_stdin` do."""
    text = read_stdin(missing) if name == "-" else read_text(flag, name)
    return text.removesuffix("\n")


def read_text(flag: str, name: str) -> str:
    """Read a text file. Raises ModelError if it is unreadable, not UTF-8, or too long."""
    try:
        with Path(name).expanduser().open("rb") as file:
            return _decoded(_read(file, f"{flag} {name}"), "utf-8", f"{flag} {name}")
    except (OSError, RuntimeError) as exc:  # RuntimeError: no home folder of a user
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ModelError(f"{flag} {name}: cannot be read: {reason}") from exc


def read_stdin(missing: str) -> str:
    """All of stdin. Raises UsageError with ``missing`` for a terminal, ModelError as `read_text`
    does."""
    if sys.stdin.isatty():
        raise UsageError(missing)
    try:
        binary = getattr(sys.stdin, "buffer", None)
        if binary is None:  # a stand-in for a stream, which has text
            return sys.stdin.read()
        return _decoded(_read(binary, "the text on stdin"), sys.stdin.encoding, "the text on stdin")
    except OSError as exc:
        raise ModelError(
            f"stdin cannot be read: {exc.strerror}; give the prompt with -p TEXT"
        ) from exc


def read_tokens(text: str, flag: str = "--tokens") -> list[int]:
    """Token ids from "1,2,3", or after an @ from a file with ids between commas or blanks. Raises
    UsageError, which names ``flag``, and ModelError for a file that cannot be read."""
    if text.startswith("@"):
        text = read_text(flag, text[1:])
    try:
        words = text.strip("[] \n").replace(",", " ").split()
        tokens = [values.whole_number(0)(word) for word in words]
    except argparse.ArgumentTypeError as exc:
        raise UsageError(f"{flag}: {exc}; give ids such as 1,2,3") from exc
    if not tokens:
        raise UsageError(f"{flag}: no token given; give ids such as 1,2,3")
    return tokens


def unescaped(text: str) -> str:
    """``text`` with the escape sequences of C that it spells; others stay."""
    return _ESCAPES.sub(lambda match: codecs.decode(match[0], "unicode_escape"), text)


def _check_model(name: str) -> None:
    """Report what a first word was taken for if it does not name a model."""
    from urdir.model.files.hub import PREFIX
    from urdir.model.files.source import ollama_hint

    if name != DEMO and not name.startswith(PREFIX) and not Path(name).exists():
        if hint := ollama_hint(name):
            raise ModelError(f"{name}: no such file: {hint}")
        raise ModelError(
            f"{name}: no such file (the first word is the model: a path, hf:org/repo or demo; "
            "give the prompt with -p, or several words in quotes)"
        )


def _is_prose(word: str) -> bool:
    return " " in word.strip() and not Path(word).exists()


def _read(file: BinaryIO, what: str) -> bytes:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ModelError(f"{what}: more than {MOST_BYTES >> 20} MiB: no prompt is that long")
    return data


def _decoded(data: bytes, encoding: str, what: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        raise ModelError(
            f"{what} is not {encoding.upper()}: byte {exc.start} is {data[exc.start]:#04x}"
        ) from exc
