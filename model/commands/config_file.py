"""Flags from a TOML file: a row a flag, by any of its names without dashes.

    model = "model.gguf"
    ctx-size = 8192
    api-key = ["one", "two"]    # a repeatable flag
    no-webui = true             # a switch

An underscore may stand for a dash.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn


def read_config(
    file: str, flags: Mapping[str, argparse.Action], fail: Callable[[str], NoReturn]
) -> Iterator[tuple[str, list[str]]]:
    """Each row's name and its flag as words of a command line; switches that are false have none.

    ``flags`` are those of the command, by their names. ``fail`` gets what is wrong.
    """
    try:
        rows = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        fail(f"--config {file}: {getattr(error, 'strerror', None) or error}")
    names: dict[argparse.Action, str] = {}
    for name, value in rows.items():
        word = name.replace("_", "-")
        flag = next((flag for flag in (f"--{word}", f"-{word}") if flag in flags), "")
        if flags.get(flag) in (None, flags["--config"], flags["--help"]):
            near = get_close_matches(f"--{word}", flags, 1, 0.7)
            hint = f": did you mean {near[0].lstrip('-')}?" if near else ""
            fail(f"--config {file}: no flag {name!r}{hint}")
        action = flags[flag]
        if action.default != argparse.SUPPRESS and names.setdefault(action, name) != name:
            fail(f"--config {file}: {name} is the same flag as {names[action]}: give one of them")
        what = _Row(f"--config {file}: {name}", flag, action, fail)
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
