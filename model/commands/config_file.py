"""Flags from a TOML file: a row a flag, by any of its names without dashes.

    model = "model.gguf"
    ctx-size = 8192
    api-key = ["one", "two"]    # a repeatable flag
    no-webui = true             # a switch

An underscore may stand for a dash. In a file of presets, tables have the rows of one model each.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn


def read_toml(file: str, fail: Callable[[str], NoReturn]) -> dict[str, Any]:
    """The rows of a file. ``fail`` gets what is wrong."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        fail(getattr(error, "strerror", None) or str(error))


def rows_as_words(
    rows: Mapping[str, Any],
    flags: Mapping[str, argparse.Action],
    refused: Collection[argparse.Action],
    fail: Callable[[str], NoReturn],
) -> Iterator[tuple[str, list[str]]]:
    """Each row's name and its flag as words of a command line; switches that are false have none.

    ``flags`` are those of the command, by their names, of which some are ``refused`` here. ``fail``
    gets what is wrong.
    """
    names: dict[argparse.Action, str] = {}
    for name, value in rows.items():
        word = name.replace("_", "-")
        flag = next((flag for flag in (f"--{word}", f"-{word}") if flag in flags), "")
        if flags.get(flag) in (None, flags["--config"], flags["--help"]):
            near = get_close_matches(f"--{word}", flags, 1, 0.7)
            hint = f": did you mean {near[0].lstrip('-')}?" if near else ""
            fail(f"no flag {name!r}{hint}")
        action = flags[flag]
        if action in refused:
            fail(f"{name} is a flag of the whole server, and no model's: give it outside")
        if action.default != argparse.SUPPRESS and names.setdefault(action, name) != name:
            fail(f"{name} is the same flag as {names[action]}: give one of them")
        what = _Row(name, flag, action, fail)
        if words := list(what.words(value)):
            yield name, words


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    flag: str
    action: argparse.Action
    fail: Callable[[str], NoReturn]

    def words(self, value: Any) -> Iterator[str]:
        if self.action.nargs == 0:
            if not isinstance(value, bool):
                self.fail(f"{self.name}: true or false, not {value!r}")
            if value:
                yield self.flag
            return
        is_list = isinstance(value, list)
        if is_list and not isinstance(self.action, argparse._AppendAction):
            self.fail(f"{self.name}: one value, not a list")
        for each in value if is_list else [value]:
            if not isinstance(each, str | int | float):
                self.fail(f"{self.name}: a text or a number, not {each!r}")
            yield f"{self.flag}={'on' if each is True else 'off' if each is False else each}"
