"""gpt-oss's answer format (OpenAI harmony): messages with a channel and a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: the
channel `analysis` is reasoning, a recipient `functions.NAME` marks a tool call, and all else is
content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from urdir.model.text.deltas import CallNumbers, Delta, Splitter, as_content
from urdir.model.text.literals import read_value
from urdir.model.text.source import NotACallError, Source, Steps
from urdir.model.text.tags import begun

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
EVIDENCE = (CHANNEL, MESSAGE, START)
CONTROLS = (CHANNEL, MESSAGE, START, END, "<|constrain|>")

_HEADERS = (CHANNEL, START, " to=functions.")  # the possible starts of a header
_LONGEST_HEADER = 1000  # with the tag after it; a longer one is content
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
        self._call: _Arguments | None = None

    @property
    def held(self) -> str:
        """Text that may still be part of something else."""
        call = self._call
        return self._held if call is None else f"{self._header}{MESSAGE}{call.text}{self._held}"

    def finish(self) -> list[Delta]:
        """End the answer; the text that was still withheld."""
        deltas = self.push("")
        rest, self._held = self._held, ""
        if self._header is None:
            return deltas + as_content(rest)
        return deltas + self._body(rest, ends=True)

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
        end = self._held.find(MESSAGE, 0, _LONGEST_HEADER)
        if end < 0 and len(self._held) < _LONGEST_HEADER:
            return None
        if end < 0:
            text, self._held = self._held[:_LONGEST_HEADER], self._held[_LONGEST_HEADER:]
            self._header = ""
            return as_content(text)
        header, self._held = self._held[:end], self._held[end + len(MESSAGE) :]
        self._header = header
        if recipient := _RECIPIENT.search(header):
            self._call = _Arguments(recipient[1])
        return []

    def _find_end(self) -> list[Delta] | None:
        """The message up to its end: <|end|>, or the header of the next."""
        ends = [i for tag in (END, START, CHANNEL) if (i := self._held.find(tag)) >= 0]
        if ends:
            body, self._held = self._held[: min(ends)], self._held[min(ends) :].removeprefix(END)
            deltas = self._body(body, ends=True)
            self._header, self._is_start = "", True
            return deltas
        cut = len(self._held) - begun(self._held, (END, START, CHANNEL))
        if not cut:
            return None
        body, self._held = self._held[:cut], self._held[cut:]
        return self._body(body)

    def _body(self, body: str, ends: bool = False) -> list[Delta]:
        header = self._header or ""
        if self._call is not None:
            return self._arguments(self._call, body, ends)
        if not body:
            return []
        channel = _CHANNEL.search(header)
        if channel and channel[1] == "analysis":
            return [Delta(reasoning=body)]
        return as_content(body)

    def _arguments(self, call: _Arguments, body: str, ends: bool) -> list[Delta]:
        """More of the arguments of a call; what does not become one is content."""
        deltas = []
        try:
            for piece in call.push(body, ends):
                if not self._numbers.is_open:
                    deltas.append(self._numbers.begin(call.name))
                deltas.append(self._numbers.more(piece))
        except (NotACallError, RecursionError):
            if self._numbers.is_open:
                deltas.append(self._numbers.ended(broken=True))
            text = f"{self._header}{MESSAGE}{call.text}"
            self._call, self._header = None, ""  # the rest of it is content, too
            return deltas + as_content(text)
        if ends:
            self._call = None
            deltas.append(self._numbers.ended())
        return deltas


class _Arguments:
    """The arguments of a call of ``name``, as far as their text has come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._source = Source()
        self._pieces = self._read()

    @property
    def text(self) -> str:
        """What has come."""
        return self._source.whole

    def push(self, text: str, ends: bool) -> Iterator[str]:
        """What more text adds to them. Raises NotACallError."""
        self._source.text += text
        self._source.is_whole = ends
        for piece in self._pieces:
            if not piece:
                return
            yield piece

    def _read(self) -> Steps[None]:
        source = self._source
        yield from source.space()
        if (yield from source.peek()) != "{":
            raise NotACallError("arguments must be an object")
        yield from read_value(source)
        yield from source.space()
        if (yield from source.peek()):
            raise NotACallError("text after the arguments")
