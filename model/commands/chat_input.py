"""Input of a conversation: an editor with history on a terminal, lines otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands.prompts import MOST_BYTES
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

#: Returns the next turn, None at the end of input. KeyboardInterrupt: start the line again.
ReadTurn = Callable[[], str | None]


def has_terminal() -> bool:
    """Whether stdin and stdout are a terminal that an editor can use."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.isatty(sys.stdout.fileno())


def editor(commands: Sequence[str], with_file: Sequence[str], cache: Path | None) -> ReadTurn:
    """Lines with editing, history (kept in the folder ``cache``), completed ``commands``, and names
    of files after those ``with_file``.

    Alt-Enter, or a backslash before Enter, begins another line; pasted text may have several.
    """
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        "> ",
        history=_history(cache),
        key_bindings=_keys(),
        completer=completer(commands, with_file),
        complete_while_typing=False,
        prompt_continuation="  ",
    )

    def read() -> str | None:
        try:
            return session.prompt()
        except EOFError:
            return None

    return read


def completer(commands: Sequence[str], with_file: Sequence[str]) -> Completer:
    """Completes a line that begins with a command."""
    from prompt_toolkit.completion import NestedCompleter, PathCompleter, WordCompleter
    from prompt_toolkit.completion import merge_completers as merged

    names = WordCompleter(list(commands), sentence=True)
    files = NestedCompleter(dict.fromkeys(with_file, PathCompleter(expanduser=True)))
    return merged([names, files], deduplicate=True)


def read_line() -> str | None:
    """A line of stdin, after a prompt on a terminal. Raises ModelError for invalid text."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        binary = getattr(sys.stdin, "buffer", None)
        if binary is None:  # a stand-in for a stream, which has text
            return sys.stdin.readline() or None
        line: bytes = binary.readline(MOST_BYTES)
    except OSError as exc:
        raise EOFError(f"stdin cannot be read: {exc.strerror}") from exc
    if len(line) == MOST_BYTES:
        raise EOFError(f"a line of more than {MOST_BYTES >> 20} MiB: no turn is that long")
    try:
        return line.decode(sys.stdin.encoding) or None
    except UnicodeDecodeError as exc:
        raise ModelError(
            f"a line that is not {sys.stdin.encoding.upper()} is left out (byte {exc.start})"
        ) from exc


def _history(cache: Path | None) -> History:
    """Earlier turns, in a file that only this user can read, or in memory without a folder."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        """In memory alone where the disk is full, or a turn is not valid Unicode."""

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):
                super().store_string(string)

    if cache is None:
        return InMemoryHistory()
    path = cache / "chat_history"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as exc:
        print(f"the history is not kept: {path}: {exc.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return Kept(path)


def _keys() -> KeyBindings:
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @Condition
    def goes_on() -> bool:
        return get_app().current_buffer.document.text_before_cursor.endswith("\\")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", filter=goes_on)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.delete_before_cursor()
        event.current_buffer.insert_text("\n")

    return keys
