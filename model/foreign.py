"""What other people's code raises, as errors of this project: the one place that translates it.

The system raises OSError for names and files, Python its own errors for encodings, sizes and depth.
Libraries written in Rust raise plain Exception, and where they panic a class of their own, which no
`except Exception` catches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from urdir.model.errors import ModelError

_FOREIGN = (OSError, UnicodeError, MemoryError, RecursionError, OverflowError)
_PANIC = "PanicException"  # pyo3_runtime's, of which each library has one of its own
_MESSAGE_LIMIT = 300  # characters of a message that is not our own


@contextmanager
def foreign(what: str, error: type[ModelError]) -> Iterator[None]:
    """Raise ``error``, "what: why", for failures that are not this project's; others pass."""
    try:
        yield
    except BaseException as cause:
        if not _is_foreign(cause):
            raise
        raise error(f"{what}: {one_line(_reason(cause))}") from cause


def one_line(message: str) -> str:
    """A message of untrusted origin without line breaks and terminal control sequences, and not too
    long."""
    message = message[: 10 * _MESSAGE_LIMIT]
    text = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    return text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + "..."


def _is_foreign(cause: BaseException) -> bool:
    kind = type(cause)
    return isinstance(cause, _FOREIGN) or kind is Exception or kind.__name__ == _PANIC


def _reason(cause: BaseException) -> str:
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
