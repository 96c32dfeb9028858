"""The three standard streams, whatever the shell did with them, and text that is safe to print."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata

#: Kinds of characters that a terminal obeys or hides: controls, formats (among them those that
#: change the direction of text), surrogates, line and paragraph separators.
_OBEYED = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def printable(text: object, keep: str = "") -> str:
    """Escape every character of untrusted ``text`` that a terminal would obey, as Python does
    ("\\x1b"), except those in ``keep``."""
    string = str(text)
    if string.isprintable():
        return string
    return "".join(
        char
        if char in keep or unicodedata.category(char) not in _OBEYED
        else char.encode("unicode_escape").decode()
        for char in string
    )


def shown(text: str) -> str:
    """What to write to stdout for text that a model made: as it is for a file or a pipe, without
    what a terminal would obey for a terminal."""
    return printable(text, keep="\n\t\u200d") if sys.stdout.isatty() else text


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable.

    A stream that the shell closed fails when it is used, and no file takes its number; without
    stderr, or with one that cannot be written, notes are dropped. Characters that an encoding lacks
    are escaped; where stdin should be ASCII it is UTF-8, which has that.
    """
    if sys.stdin is None:
        sys.stdin = _opened(0, "r", os.O_WRONLY)
    elif isinstance(sys.stdin, io.TextIOWrapper) and _is_ascii(sys.stdin.encoding):
        sys.stdin.reconfigure(encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = _opened(1, "w", os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = _opened(2, "w", os.O_WRONLY)
    elif sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        notes = io.BufferedWriter(_Notes(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(notes, sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_stdout() -> None:
    """Discard unwritten output when the reader of stdout is gone, so that exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Notes(io.FileIO):
    """stderr that ignores notes which cannot be written."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return len(data)  # type: ignore[arg-type]


def _is_ascii(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "ascii"


def _opened(number: int, mode: str, flags: int) -> io.TextIOWrapper:
    """The null device under the number of a closed stream; the wrong way round it always fails."""
    descriptor = os.open(os.devnull, flags)
    if descriptor != number:
        try:
            os.fstat(number)  # in use by now: leave it alone
        except OSError:
            os.dup2(descriptor, number)
            descriptor = number
    stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
    assert isinstance(stream, io.TextIOWrapper)
    return stream
