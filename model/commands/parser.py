"""Command lines taken apart as llama.cpp does: a flag is its whole name, its value the next word.

argparse guesses: "-pg" would be "-p g", "--temp" may be cut short, and a value must not begin with
a dash. So words are put in order before argparse sees them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

#: Commands that people look for and that are not there: what to do instead.
ABSENT = {
    "quantize": "urdir does not write model files; --quantize makes safetensors smaller while they "
    "are loaded",
    "perplexity": "perplexity is not measured; urdir logits writes the logits of a text's tokens",
    "embedding": "embeddings are not computed; urdir logits writes logits",
    "imatrix": "urdir does not quantise files, so that it has no use for an importance matrix",
    "finetune": "urdir runs models, it does not train them",
    "convert": "nothing to convert: GGUF files and safetensors folders run as they are",
    "create": "there are no model recipes: give the file, and --system-prompt, --temp ...",
    "rm": "the hub's cache is huggingface_hub's: hf cache rm",
    "ps": "models are loaded for one command; nvidia-smi shows who uses the GPU",
}


class Parser(argparse.ArgumentParser):
    """Reports bad usage in one line and exits with 2. Subcommands are parsers of this kind."""

    def __init__(self, **options: Any) -> None:
        options |= {"allow_abbrev": False}
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """End the command: one line, and the help that has more."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse would hide that a message cannot be written."""
        print(message, end="", file=file or sys.stderr)

    def parse(
        self, argv: Iterable[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """What ``argv`` asks for, in ``namespace``. Where a command is missing, help goes to stderr
        and the exit code is 2."""
        return self.parse_args(self._ordered(deque(argv)), namespace or argparse.Namespace())

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        """Every flag by each of its names."""
        return self._option_string_actions

    @property
    def positionals(self) -> list[argparse.Action]:
        """What is given without a flag, subcommands excepted."""
        found = self._get_positional_actions()
        return [action for action in found if not isinstance(action, argparse._SubParsersAction)]

    @property
    def subcommands(self) -> Mapping[str, Parser]:
        """The parsers of the commands below this one; none where it has no commands."""
        if self._subparsers is None:
            return {}
        (action,) = self._subparsers._group_actions
        return action.choices  # type: ignore[return-value]

    def _ordered(self, words: deque[str]) -> list[str]:
        """Flags with their values tied to them ("-p=-5"), then what is given without a flag."""
        tied: list[str] = []
        plain: list[str] = []
        while words:
            word = words.popleft()
            if word == "--":
                plain += words
                break
            if _is_flag(word):
                tied.append(self._tied(word, words))
            elif not self.subcommands:
                plain.append(word)
            elif word in self.subcommands:
                return [*tied, word, *self.subcommands[word]._ordered(words)]
            else:
                self.error(self._unknown_command(word))
        if self.subcommands and not tied:
            self.print_help(sys.stderr)
            self.exit(2)
        if len(plain) > self._most_plain():
            self.error(f"unexpected {plain[self._most_plain()]!r}")
        return [*tied, *(["--"] if any(map(_is_flag, plain)) else []), *plain]

    def _most_plain(self) -> int:
        """How many words without a flag there may be."""
        takes_many = any(action.nargs in ("*", "+") for action in self.positionals)
        return sys.maxsize if takes_many else len(self.positionals)

    def _tied(self, word: str, rest: deque[str]) -> str:
        """A flag with its value, which is taken from ``rest``."""
        action = self.flags.get(word)
        if action is None:
            name, equals, _ = word.partition("=")
            if not equals or name not in self.flags:
                self.error(self._unknown_flag(name))
            return word
        takes = action.nargs is None or (
            action.nargs == "?" and rest and rest[0] in _choices(action)
        )
        return f"{word}={rest.popleft()}" if takes and rest else word

    def _unknown_flag(self, name: str) -> str:
        near = get_close_matches(name, self.flags, 1, 0.7)
        return f"unknown flag {name}" + (f": did you mean {near[0]}?" if near else "")

    def _unknown_command(self, word: str) -> str:
        if word in ABSENT:
            return f"no command {word!r}: {ABSENT[word]}"
        near = get_close_matches(word, self.subcommands, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(self.subcommands)}"
        return f"no command {word!r}: {hint}"


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: no number, and not "-", which stands for stdin."""
    return word.startswith("-") and word != "-" and not re.fullmatch(r"-\.?\d.*", word)


def _choices(action: argparse.Action) -> Iterable[str]:
    return action.choices or ()
