"""Command-line parser with llama.cpp's rules: a flag is a whole word, its value the next word.

argparse guesses: "-pg" would be "-p g", "--temp" may be abbreviated, and a value must not begin
with a dash. The words are therefore reordered before argparse reads them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from urdir.model.commands.config_file import read_toml, rows_as_words
from urdir.model.commands.variables import Variable, VariableError, variables
from urdir.model.environment import flag_variables

#: Commands of other programs that do not exist here, and what to use instead.
ABSENT = {
    "embedding": "urdir embed writes embeddings",
    "imatrix": "urdir quantises without an importance matrix",
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
        self._variables: tuple[Variable, ...] = ()
        self._names_model: Callable[[list[str]], bool] = bool
        self._source = ""  # the variable, or the row of a file, that is read
        self._no_presets: frozenset[argparse.Action] = frozenset()

    def read_config(self) -> None:
        """Take --config FILE.toml: flags by their names, which the command line and the environment
        override. Call before `read_variables`."""
        self.add_argument(
            "--config",
            metavar="FILE",
            help="flags from a TOML file, such as ctx-size = 8192; the command line and the "
            "environment override it",
        )

    def read_presets(self, refused: Collection[argparse.Action]) -> None:
        """Take --models-preset FILE.toml: rows for all models, and a table of rows for each. A
        model has no flags that are ``refused``.

        ``presets`` of the namespace has the flags of each table, by its name, and as "" those of a
        model without a table. The command line and the environment override all of them."""
        self._no_presets = frozenset(refused)

    def read_variables(self, names_model: Callable[[list[str]], bool] = bool) -> None:
        """Read all declared flags from the environment, and mention it in the help.

        ``names_model`` reports whether the words without a flag name a model, which then takes
        precedence."""
        self._variables, self._names_model = tuple(variables(self.flags)), names_model
        for variable in self._variables:
            if variable.action.help not in (None, argparse.SUPPRESS):
                variable.action.help = f"{variable.action.help} [${variable.name}]"

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does; the environment supplies flags that ``args`` lack."""
        namespace = argparse.Namespace() if namespace is None else namespace
        parsed = self._parse_with(args, namespace, [])
        if self._no_presets and (file := namespace.models_preset) is not None:
            namespace.presets = self._presets(args, file)
        return parsed

    def _parse_with(
        self,
        args: Sequence[str],
        namespace: argparse.Namespace,
        tables: Sequence[tuple[str, Mapping[str, Any]]],
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse ``args``; below them come the environment, then the ``tables``, each with where it
        stands, then the file of --config."""
        given = self._given(args) if self._variables else set()
        try:
            given |= self._take_variables(given, namespace)
            for where, rows in tables:
                given |= self._take_rows(where, rows, given, namespace, self._no_presets)
            if self._variables and (file := self._config_of(args)) is not None:
                self._source = f"--config {file}"
                rows = read_toml(file, self.error)
                self._take_rows(self._source, rows, given, namespace)
        finally:
            self._source = ""
        return super().parse_known_args(args, namespace)

    def _presets(self, args: Sequence[str], file: str) -> dict[str, argparse.Namespace]:
        """See `read_presets`."""
        self._source = f"--models-preset {file}"
        rows = read_toml(file, self.error)
        tables = {name: row for name, row in rows.items() if isinstance(row, dict)}
        common = {name: row for name, row in rows.items() if name not in tables}
        common |= tables.pop("*", {})
        found = {}
        for name, table in {"": {}, **tables}.items():
            own = argparse.Namespace()
            self._source = f"{file}: [{name}]"
            for row in table:
                if isinstance(table[row], dict):
                    self.error(f'a name with dots is written in quotes: ["{name}.{row}"]')
            own.load_on_startup = table.pop("load-on-startup", False)
            if not isinstance(own.load_on_startup, bool):
                self.error(f"load-on-startup: true or false, not {own.load_on_startup!r}")
            places = [(f"{file}: [{name}]", table), (file, common)]
            self._parse_with(args, own, places)
            found[name] = own
        return found

    def _take_variables(
        self, given: set[argparse.Action], namespace: argparse.Namespace
    ) -> set[argparse.Action]:
        """Store the variables of flags that are not ``given`` in ``namespace``; returns these."""
        environ = flag_variables() if self._variables else {}
        sources: dict[argparse.Action, str] = {}
        for variable in self._variables:
            source = variable.source(environ)
            self._source = f"${source}" if source else ""
            action = variable.action
            if source is None or {action, *self._excluded(action), *self._same(action)} & given:
                continue
            for other in self._excluded(action) & sources.keys():
                self.error(f"it excludes ${sources[other]}")
            try:
                word = variable.word(source, environ)
            except VariableError as wrong:
                self.error(str(wrong))
            if word is not None:
                super().parse_known_args([word], namespace)
            sources[action] = source
        self._source = ""
        return {*sources}

    def _config_of(self, args: Sequence[str]) -> str | None:
        """The file of --config, the last one, or of its variable."""
        end = args.index("--") if "--" in args else len(args)
        found = [word for word in args[:end] if word.startswith("--config=")]
        variable = flag_variables().get("URDIR_ARG_CONFIG")
        return found[-1].partition("=")[2] if found else variable or None

    def _take_rows(
        self,
        where: str,
        rows: Mapping[str, Any],
        given: set[argparse.Action],
        namespace: argparse.Namespace,
        refused: Collection[argparse.Action] = (),
    ) -> set[argparse.Action]:
        """Store the rows of a table whose flags are not ``given`` in ``namespace``; returns
        these."""
        names: dict[argparse.Action, str] = {}
        self._source = where
        for name, words in rows_as_words(rows, self.flags, refused, self.error):
            self._source = f"{where}: {name}"
            action = self.flags[words[0].partition("=")[0]]
            others = {*self._excluded(action), *self._same(action)}
            if {action, *others} & given:
                self._source = where
                continue
            for other in others & names.keys():
                self.error(f"it excludes {names[other]}")
            names[action] = name
            super().parse_known_args(words, namespace)
            self._source = where
        return {*names}

    def _given(self, args: Sequence[str]) -> set[argparse.Action]:
        """Flags on a command line, including the model's if a word names it."""
        end = args.index("--") if "--" in args else len(args)
        named = [word.partition("=")[0] for word in args[:end]]
        words = [word for word in args[:end] if not _is_flag(word)] + list(args[end + 1 :])
        given = {self.flags[name] for name in named if name in self.flags}
        if words and "--model" in self.flags and self._names_model(words):
            given.add(self.flags["--model"])
        return given

    def _excluded(self, action: argparse.Action) -> set[argparse.Action]:
        """Flags that cannot be combined with a flag."""
        groups = (group._group_actions for group in self._mutually_exclusive_groups)
        return {other for group in groups if action in group for other in group} - {action}

    def _same(self, action: argparse.Action) -> set[argparse.Action]:
        """Flags that are the opposite of a switch."""
        pairs = {f"--no-{name[2:]}" for name in action.option_strings}
        pairs |= {f"--{name[5:]}" for name in action.option_strings if name.startswith("--no-")}
        found = {self.flags[name] for name in pairs & self.flags.keys()}
        return {other for other in found if other.nargs in (0, "?")}

    def error(self, message: str) -> NoReturn:
        """End the command with one line that also refers to the help."""
        source = f"{self._source}: " if self._source else ""
        self.exit(2, f"{self.prog}: {source}{message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message; argparse would hide that it cannot be written."""
        print(message, end="", file=file or sys.stderr)

    def parse(
        self, argv: Iterable[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse ``argv`` into ``namespace``. If a command is missing, print help on stderr and exit
        with 2."""
        return self.parse_args(self._ordered(deque(argv)), namespace or argparse.Namespace())

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        """Every flag by each of its names."""
        return self._option_string_actions

    @property
    def positionals(self) -> list[argparse.Action]:
        """Positional arguments, except subcommands."""
        found = self._get_positional_actions()
        return [action for action in found if not isinstance(action, argparse._SubParsersAction)]

    @property
    def subcommands(self) -> Mapping[str, Parser]:
        """Parsers of the subcommands; empty without subcommands."""
        if self._subparsers is None:
            return {}
        (action,) = self._subparsers._group_actions
        return action.choices  # type: ignore[return-value]

    def _ordered(self, words: deque[str]) -> list[str]:
        """Flags joined with their values ("-p=-5"), then positional words."""
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
        """Maximum number of positional words."""
        takes_many = any(action.nargs in ("*", "+") for action in self.positionals)
        return sys.maxsize if takes_many else len(self.positionals)

    def _tied(self, word: str, rest: deque[str]) -> str:
        """A flag joined with its value, which is removed from ``rest``."""
        action = self.flags.get(word)
        if action is None:
            name, equals, _ = word.partition("=")
            if not equals or name not in self.flags:
                self.error(self._unknown_flag(name))
            return word
        takes = action.nargs is None
        if action.nargs == "?" and action.choices:
            takes = bool(rest) and rest[0] in action.choices
            if not takes and isinstance(action.const, str):
                return f"{word}={action.const}"  # alone, argparse takes a positional word for it
        if takes and not rest:  # argparse would take a positional word for it
            self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return f"{word}={rest.popleft()}" if takes else word

    def _unknown_flag(self, name: str) -> str:
        commands = [word for word, parser in self.subcommands.items() if name in parser.flags]
        if commands:
            return f"{name} comes after a command: {self.prog} {commands[0]} {name} ..."
        shown = [word for word, of in self.flags.items() if of.help != argparse.SUPPRESS]
        near = get_close_matches(name, shown, 1, 0.7)
        return f"unknown flag {name}" + (f": did you mean {near[0]}?" if near else "")

    def _unknown_command(self, word: str) -> str:
        if word in ABSENT:
            return f"no command {word!r}: {ABSENT[word]}"
        near = get_close_matches(word, self.subcommands, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(self.subcommands)}"
        return f"no command {word!r}: {hint}"


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: not a number, and not "-", which means stdin."""
    return word.startswith("-") and word != "-" and not re.fullmatch(r"-\.?\d.*", word)
