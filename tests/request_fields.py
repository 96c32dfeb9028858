"""The tables of fields in the README of urdir.model.serve, from `request_fields.FIELDS`.

    .venv/bin/python tests/request_fields.py

writes them anew.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from urdir.model.serve.request_fields import ALL, FIELDS, UNSET, Handling, RequestField

README = Path(__file__).parents[1] / "model" / "serve" / "README.md"
_HEADS = {
    Handling.SERVED: ("field", "where", "whose", "notes"),
    Handling.REFUSED: ("field", "where", "whose", "why", "passes"),
    Handling.NO_EFFECT: ("field", "where", "whose", "why"),
}


def readme_with_tables(text: str) -> str:
    """The README with the tables as they must be."""
    for handling in Handling:
        begin = f"<!-- {handling.value} -->\n"
        found = re.search(re.escape(begin) + ".*?(?=<!-- end -->)", text, re.DOTALL)
        assert found is not None, handling
        text = text[: found.start()] + begin + _table(handling) + text[found.end() :]
    return text


def _table(handling: Handling) -> str:
    head = _HEADS[handling]
    fields = [field for field in FIELDS if field.handling is handling]
    alike = itertools.groupby(fields, lambda f: (f.endpoints, f.origins, f.note, f.neutral))
    rows = [head, ("---",) * len(head), *(_row(list(group), len(head)) for _, group in alike)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(fields: list[RequestField], length: int) -> tuple[str, ...]:
    first = fields[0]
    names = ", ".join(f"`{field.name}`" for field in fields)
    where = "all" if first.endpoints == ALL else ", ".join(first.endpoints)
    cells = (names, where, first.origins, first.note, _passes(first.neutral))
    return tuple(cell.replace("|", "\\|") for cell in cells[:length])


def _passes(neutral: Iterable[object]) -> str:
    values = [f"`{json.dumps(value)}`" for value in neutral]
    empty = [f"`{json.dumps(value)}`" for value in UNSET]
    if values[: len(empty)] == empty:
        values[: len(empty)] = ["`false`, or empty"]
    return ", ".join(values) or "null"


if __name__ == "__main__":
    README.write_text(readme_with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
