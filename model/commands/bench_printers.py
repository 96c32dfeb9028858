"""Printers of `urdir bench` records: Markdown, CSV, JSON, JSON lines, SQL.

In csv, jsonl and sql every record is complete by itself: it repeats the conditions of the run.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from urdir.model.commands.bench_report import Conditions, LoadConditions, Section
from urdir.model.commands.table import markdown_head, markdown_row

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Under = Conditions | LoadConditions


class Printer:
    """Prints the rows of sections; rows of one section are consecutive."""

    def add(self, under: Under, section: Section, rows: Iterable[DataclassInstance]) -> None:
        """Print rows that were measured under these conditions."""
        raise NotImplementedError

    def end(self) -> None:
        """Print what requires all rows: nothing, unless a printer says otherwise."""


class MarkdownPrinter(Printer):
    """The conditions of the first row, and one table per section.

    Column widths fit the first rows that are added, and the section's ``room``."""

    def __init__(self) -> None:
        self._section: Section | None = None
        self._widths: Sequence[int] = ()
        self._has_heading = False

    def add(self, under: Under, section: Section, rows: Iterable[DataclassInstance]) -> None:
        """See `Printer`."""
        records = map(section.record, rows)
        cells = [[_cell(cell(r)) for cell in section.columns.values()] for r in records]
        if not self._has_heading:
            self._has_heading = True
            print("\n".join(under.heading))
        if section is not self._section:
            self._section = section
            columns = list(zip(section.columns, *cells, strict=True))
            widths = [max(map(len, column)) for column in columns]
            room = [section.room.get(heading, 3) for heading in section.columns]
            self._widths = list(map(max, widths, room))
            print()
            print("\n".join(markdown_head(list(section.columns), self._widths)))
        for row in cells:
            print(markdown_row(row, self._widths))
        sys.stdout.flush()


class JsonPrinter(Printer):
    """One object, printed at the end if any record exists: last conditions, lists of records."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._under: dict[str, Any] = {}
        self._found: dict[str, list[dict[str, Any]]] = {section.name: [] for section in sections}

    def add(self, under: Under, section: Section, rows: Iterable[DataclassInstance]) -> None:
        """See `Printer`."""
        self._under = asdict(under)
        self._found[section.name] += map(section.record, rows)

    def end(self) -> None:
        """See `Printer`."""
        if self._under:
            print(json.dumps(self._under | self._found, indent=2))


class JsonLinesPrinter(Printer):
    """One line per record."""

    def add(self, under: Under, section: Section, rows: Iterable[DataclassInstance]) -> None:
        """See `Printer`."""
        for row in rows:
            print(json.dumps(_complete(under, section, row)), flush=True)


class CsvPrinter(Printer):
    """One table; a column that a kind of record lacks is empty."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._names = dict.fromkeys(name for section in sections for name in section.types)
        self._writer: csv.DictWriter[str] | None = None

    def add(self, under: Under, section: Section, rows: Iterable[DataclassInstance]) -> None:
        """See `Printer`."""
        if self._writer is None:
            names = ("section", *self._names, *(field.name for field in fields(under)))
            self._writer = csv.DictWriter(sys.stdout, names, restval="", lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerows(_complete(under, section, row) for row in rows)
        sys.stdout.flush()


class SqlPrinter(Printer):
    """One table per section, for sqlite and others."""

    def __init__(self) -> None:
        self._made: set[str] = set()

    def add(self, under: Under, section: Section, rows: Iterable[DataclassInstance]) -> None:
        """See `Printer`."""
        table = f"urdir_bench_{section.name}"
        if table not in self._made:
            self._made.add(table)
            types = section.types | {field.name: field.type for field in fields(under)}
            columns = ", ".join(f"{name} {_sql_type(kind)}" for name, kind in types.items())
            print(f"CREATE TABLE IF NOT EXISTS {table} ({columns});")
        for row in rows:
            values = (section.record(row) | asdict(under)).values()
            print(f"INSERT INTO {table} VALUES ({', '.join(map(_sql, values))});", flush=True)


def printer(kind: str, sections: Sequence[Section]) -> Printer:
    """The printer for md, csv, json, jsonl or sql, for rows of these sections."""
    match kind:
        case "csv":
            return CsvPrinter(sections)
        case "json":
            return JsonPrinter(sections)
        case "jsonl":
            return JsonLinesPrinter()
        case "sql":
            return SqlPrinter()
        case _:
            return MarkdownPrinter()


def print_report(
    under: Under, found: Sequence[tuple[Section, Sequence[DataclassInstance]]], kind: str
) -> None:
    """Print the rows of sections when all rows are known."""
    printing = printer(kind, [section for section, _ in found])
    for section, rows in found:
        printing.add(under, section, rows)
    printing.end()


def _complete(under: Under, section: Section, row: DataclassInstance) -> dict[str, Any]:
    return {"section": section.name, **section.record(row), **asdict(under)}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sql_type(kind: Any) -> str:
    """SQL type of a field whose annotation is ``kind``."""
    return "TEXT" if str(kind).startswith("str") else "REAL"


def _sql(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(float(value))
