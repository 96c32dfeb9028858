"""gpt-oss's answer format (OpenAI harmony): messages with a channel and a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: the
channel `analysis` is reasoning, a recipient `functions.NAME` marks a tool call, and all else is
content.
"""

from __future__ import annotations

import re

from urdir.model.text.call_formats import dumps, loads
from urdir.model.text.deltas import CallNumbers, Delta, Splitter, ToolCall, as_content
from urdir.model.text.tags import begun

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
EVIDENCE = (CHANNEL, MESSAGE, START)
CONTROLS = (CHANNEL, MESSAGE, START, END, "<|constrain|>")

_HEADERS = (CHANNEL, START, " to=functions.")  # the possible starts of a header
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def header(prompt: str) -> str:
    """The part of an unfinished assistant message at the end of a prompt."""
    return prompt.rpartition(f"{START}assistant")[2]


class HarmonySplitter(Splitter):
    """Splits streamed text into reasoning, content and calls.

    Text without a header is content, and so are calls with invalid arguments.
    """

    def __init__(self, numbers: CallNumbers) -> None:
        super().__init__()
        self._numbers = numbers
        self._header: str | None = ""  # of the current message; None: the next text is a header
        self._is_start = True

    def finish(self) -> list[Delta]:
        """End the answer; the text that was still withheld."""
        deltas = self.push("")
        rest, self._held = self._held, ""
        return deltas + (as_content(rest) if self._header is None else self._body(rest))

    def _step(self) -> list[Delta] | None:
        if self._is_start:
            if self._held.startswith(_HEADERS):
                self._header = None
            elif any(tag.startswith(self._held) for tag in _HEADERS):
                return None
            self._is_start = False
        if self._header is None:
            return self._find_body()
        return self._find_end()

    def _find_body(self) -> list[Delta] | None:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return None
        self._header, self._held = header, rest
        return []

    def _find_end(self) -> list[Delta] | None:
        """The message up to its end: <|end|>, or the header of the next."""
        assert self._header is not None
        ends = [i for tag in (END, START, CHANNEL) if (i := self._held.find(tag)) >= 0]
        if ends:
            body, self._held = self._held[: min(ends)], self._held[min(ends) :].removeprefix(END)
            deltas = self._body(body)
            self._header, self._is_start = "", True
            return deltas
        if _RECIPIENT.search(self._header):
            return None  # a call is reported as a whole
        cut = len(self._held) - begun(self._held, (END, START, CHANNEL))
        if not cut:
            return None
        body, self._held = self._held[:cut], self._held[cut:]
        return self._body(body)

    def _body(self, body: str) -> list[Delta]:
        header = self._header or ""
        if not body:
            return []
        if recipient := _RECIPIENT.search(header):
            try:
                call = ToolCall("", recipient[1], dumps(loads(body)))
            except (ValueError, RecursionError):
                return as_content(header + MESSAGE + body)
            return [self._numbers.delta(call)]
        channel = _CHANNEL.search(header)
        if channel and channel[1] == "analysis":
            return [Delta(reasoning=body)]
        return as_content(body)
