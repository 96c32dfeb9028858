"""Flags of llama.cpp without effect here, and refused flags: the rows of unserved.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from urdir.model.commands.flags import NOTHING, PERHAPS, VALUE, Accepted, Refused

UNSERVED = Path(__file__).with_name("unserved.toml")
#: Sections that are for several groups of flags.
_GROUPS = {"answers": ("text", "server"), "all": ("text", "server", "bench")}
_Rows = Mapping[str, str | list[str]]


def read_unserved(file: Path = UNSERVED) -> Iterator[Accepted | Refused]:
    """Read one flag from each row of the file."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    for section, rows in table["accepted"].items():
        for why, names, takes in _flags(rows):
            kind, _, values = _kind_of(takes)
            yield Accepted(names, _GROUPS.get(section, (section,)), why, kind, values)
    for section, rows in table["refused"].items():
        for why, names, takes in _flags(rows):
            kind, off, _ = _kind_of(takes)
            yield Refused(names, _GROUPS.get(section, (section,)), why, kind, off)


def _flags(rows: _Rows) -> Iterator[tuple[str, str, str]]:
    """Reason, names and argument of each flag, as in the file."""
    for why, flags in rows.items():
        for flag in [flags] if isinstance(flags, str) else flags:
            names, blank, takes = flag.rpartition(" ")
            is_name = takes.startswith("-")
            yield why, *((names + blank + takes, "") if is_name else (names, takes))


def _kind_of(takes: str) -> tuple[int | str | None, float | None, tuple[str, ...] | None]:
    """The kind of value, the value that turns the flag off, and the allowed values."""
    if not takes:
        return NOTHING, None, None
    if takes.startswith("["):
        return PERHAPS, None, None
    if takes == "N":
        return VALUE, None, None
    if takes.startswith("N="):
        return VALUE, float(takes[2:]), None
    return VALUE, None, tuple(takes.split("|"))
