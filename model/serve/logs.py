"""The server's log: what happens, and a line for each request, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Literal

from urdir.model.errors import ModelError
from urdir.model.serve import spans

#: A line for each request; its records have `REQUEST`.
access_log = logging.getLogger("urdir.access")
#: Attribute of a record: the fields of a request, a dictionary.
REQUEST = "request"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How the processes of a server log; picklable.

    By default warnings and errors go to stderr, as they are. ``verbose`` adds what happens and a
    line for each request; a ``file``, which several processes append to and logrotate may move, or
    a ``form`` gets these, too. Without ``requests`` these have no lines. Spans go to the collector
    ``otlp`` (see `spans`).
    """

    form: Literal["text", "json"] | None = None
    file: Path | None = None
    verbose: bool = False
    requests: bool = True
    otlp: str | None = None

    def begin(self) -> None:
        """Log so in this process. Raises ModelError if the file cannot be opened."""
        access_log.disabled = not self.requests
        if self.otlp is not None:
            spans.begin(self.otlp)
        if self.form is None and self.file is None and not self.verbose:
            return
        try:
            handler = (
                logging.StreamHandler()
                if self.file is None
                else _File(self.file, encoding="utf-8", errors="backslashreplace")
            )
        except OSError as error:
            raise ModelError(f"the log {self.file}: {error.strerror}") from error
        handler.setFormatter(_Json() if self.form == "json" else _Text())
        root = logging.getLogger("urdir")
        root.handlers = [handler]
        root.propagate = False
        root.setLevel(logging.INFO)


class _File(WatchedFileHandler):
    """A file that may be moved, or fail: of an outage stderr has one line, requests nothing."""

    _failure: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        before, self._failure = self._failure, None
        try:
            super().emit(record)
        except OSError as error:  # a new file cannot be opened
            self._failure = error
        if self._failure is None:
            return
        with suppress(OSError):  # what it has not written is lost; the next line opens the file
            self.close()
        if before is None:
            why = self._failure.strerror
            print(f"urdir: the log {self.baseFilename}: {why}: lines are lost", file=sys.stderr)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._failure = error
        else:
            super().handleError(record)


def _time_of(record: logging.LogRecord) -> str:
    """UTC, as RFC 3339 has it, in milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        line = f"{_time_of(record)} {record.levelname.lower()} {record.name} {record.message}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        request = getattr(record, REQUEST, None)
        line |= request if request is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_request(fields: dict[str, Any]) -> None:
    """Log a request: "client", "method", "path", "status", "seconds", "request_id" and more."""
    words = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
    access_log.info("%s", words, extra={REQUEST: fields})


def _word(value: object) -> str:
    """A value without blanks or quotes stands as it is; others, which clients chose, in quotes."""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    is_plain = text.isascii() and text.isprintable() and text and not set(text) & {" ", '"', "="}
    return text if is_plain else json.dumps(text)
