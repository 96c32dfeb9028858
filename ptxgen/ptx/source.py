"""PTX source text for the parser: without comments, with positions for messages."""

from __future__ import annotations

import bisect
import re

from urdir.ptxgen.ptx.syntax import Immediate, PtxSyntaxError, Variable, constant
from urdir.ptxgen.ptx.types import TYPE_BYTES

# Comments, and directives that no consumer needs.
_IGNORED = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*\.(?:loc|file)\b[^\n]*|\.pragma\s+\"[^\"]*\"\s*;", re.S | re.M
)
_SPACE = re.compile(r"\s*")
_VARIABLE = re.compile(
    r"(?:\.(visible|weak|extern|common)\s+)?\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$%]+)\s*(\[[^\]]*\])?\s*(?:=\s*(.*))?",
    re.S,
)
#: A brace, a label, or a statement up to its semicolon.
STATEMENT = re.compile(r"([{}])|([A-Za-z_$%][\w$]*)\s*:(?!:)|([^;{}]+(?:\{[^}]*\}[^;{}]*)*);")


class Source:
    """``text`` is the source with blanks for comments, so that positions are those of both."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.text = _IGNORED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
        self._line_starts = [0, *(m.end() for m in re.finditer("\n", source))]

    def error(self, message: str, at: int, text: str) -> PtxSyntaxError:
        """A syntax error at a position, with its line and the statement."""
        return PtxSyntaxError(_printable(message), self.line(at), _printable(text[:400])[:120])

    def line(self, at: int) -> int:
        """The line of a position, from 1."""
        return bisect.bisect_right(self._line_starts, at)

    def skip_space(self, at: int) -> int:
        """The position of the next non-blank character."""
        m = _SPACE.match(self.text, at)
        assert m is not None
        return m.end()

    def line_text(self, at: int) -> str:
        """The rest of the line from a position on, as written."""
        return self.source[at:].split("\n", 1)[0]

    def integer(self, text: str, at: int, statement: str) -> int:
        """The integer that ``text`` writes; ``statement`` is for the message."""
        value = constant(text.strip())
        if value is None or not isinstance(value.value, int):
            raise self.error(f"{text.strip()!r} is not an integer", at, statement)
        return value.value

    def variable(self, text: str, at: int) -> Variable:
        """A declaration of a variable, of a module or an entry (PTX ISA 5.4)."""
        m = _VARIABLE.match(text.strip())
        if not m or m.end() != len(text.strip()):
            raise self.error("not a variable declaration", at, text)
        linkage, space, align, type_, name, array, init = m.groups()
        if type_ not in TYPE_BYTES:
            raise self.error(f"unknown type .{type_}", at, text)
        count: int | None = None
        if array is not None:
            count = self.integer(array[1:-1], at, text) if array[1:-1].strip() else 0
        values: tuple[Immediate, ...] = ()
        if init:
            items = [s for s in init.strip().strip("{}").split(",") if s.strip()]
            parsed = [constant(item.strip()) for item in items]
            if any(v is None for v in parsed):
                raise self.error("only constants may initialise a variable", at, text)
            values = tuple(v for v in parsed if v is not None)
            if count == 0:
                count = len(values)
        elif count == 0 and linkage != "extern":
            raise self.error("an array without a size must be extern", at, text)
        return Variable(
            name,
            space,
            type_,
            align=int(align) if align else TYPE_BYTES[type_],
            count=count,
            line=self.line(at),
            extern=linkage == "extern",
            values=values,
        )


def _printable(text: str) -> str:
    """A text on one line, printable."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
