"""Tables of text, as wide as the terminal at most."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: What is between two columns.
_GAP = "  "
#: Characters that are left of a column that may be cut.
_LEAST = 16


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: flush ``right`` for numbers. Where room is short, columns of the highest
    ``rank`` are left out first, those of rank 0 never, and the last one is ``cut``."""

    heading: str
    right: bool = False
    rank: int = 0
    cut: bool = False


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows below their headings; a note on stderr says which columns had no room."""
    lines, left_out = fitted(columns, rows, terminal_width())
    for line in lines:
        print(line)
    if left_out:
        print(
            f"left out in a terminal of {terminal_width()} columns: {', '.join(left_out)}",
            file=sys.stderr,
        )


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None
) -> tuple[list[str], list[str]]:
    """The lines of a table of ``width`` characters at most (None: any), its headings first, and the
    headings of the columns that were left out."""
    cells = [tuple(column.heading for column in columns), *map(tuple, rows)]
    widths = [max(map(len, texts)) for texts in zip(*cells, strict=True)]
    least = [min(w, _LEAST) if c.cut else w for c, w in zip(columns, widths, strict=True)]
    kept = list(range(len(columns)))
    for number in sorted(kept, key=lambda n: -columns[n].rank):
        needed = sum(least[n] for n in kept) + len(_GAP) * (len(kept) - 1)
        if width is None or needed <= width or not columns[number].rank:
            break
        kept.remove(number)
    chosen = [tuple(row[number] for number in kept) for row in cells]
    right = [place for place, number in enumerate(kept) if columns[number].right]
    lines = [line if width is None else _cut(line, width) for line in aligned(chosen, right)]
    return lines, [c.heading for n, c in enumerate(columns) if n not in kept]


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Rows of cells as lines with columns of one width, those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield _GAP.join(cells).rstrip()


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown whose source is aligned, too: the first column left, others right."""
    widths = [max(3, *map(len, column)) for column in zip(headings, *rows, strict=True)]
    yield from markdown_head(headings, widths)
    yield from (markdown_row(row, widths) for row in rows)


def markdown_head(headings: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The first two lines of such a table with columns of three characters or more."""
    marks = [":" + "-" * (w - 1) if not n else "-" * (w - 1) + ":" for n, w in enumerate(widths)]
    yield markdown_row(headings, widths)
    yield markdown_row(marks, widths)


def markdown_row(row: Sequence[str], widths: Sequence[int]) -> str:
    """Another line of it; a cell that is wider stands out."""
    first, *others = zip(row, widths, strict=True)
    cells = (first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others))
    return f"| {' | '.join(cells)} |"


def wrapped(text: str, indent: int) -> str:
    """Text that goes on in further lines, ``indent`` characters in, where the terminal ends."""
    width = terminal_width()
    if width is None or len(text) <= width:
        return text
    return textwrap.fill(text, max(width, 2 * indent), subsequent_indent=" " * indent)


def fitting(line: str) -> str:
    """A line, cut where the terminal ends."""
    width = terminal_width()
    return line if width is None else _cut(line, width)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."
