"""Extracts calls of tools from a streamed answer; their form is a `CallForm`."""

from __future__ import annotations

from collections.abc import Generator

from urdir.model.text.call_form import CallForm
from urdir.model.text.call_reader import CallReader, Deltas
from urdir.model.text.deltas import CallNumbers, Delta
from urdir.model.text.source import NotACallError, Source
from urdir.model.text.tags import begun_after_space, without_space
from urdir.model.text.tool_schemas import Tools

_MOST_FAILURES = 16  # texts that begin like calls; later ones are content


class CallSplitter:
    """Splits streamed text into content and calls.

    White space around calls belongs to their tags. A call that turns out not to be one is content,
    from its beginning on.
    """

    def __init__(self, form: CallForm, tools: Tools, numbers: CallNumbers) -> None:
        self._source = Source()
        self._numbers = numbers
        self._reader = CallReader(form, tools, self._source, numbers)
        self._is_bare = form.is_bare
        self._markers = form.markers
        self._space = ""  # between the content and a possible call
        self._failures = 0
        self._run = self._split()

    @property
    def held(self) -> str:
        """Text that may still be part of something else."""
        text = self._source.whole
        return text.lstrip() if self._reader.has_calls else self._space + text

    def push(self, text: str) -> list[Delta]:
        """Process more text; what it reveals."""
        self._source.text += text
        deltas = []
        for delta in self._run:
            if delta is None:
                break
            deltas.append(delta)
        return deltas

    def finish(self) -> list[Delta]:
        """End the answer; the text that was still withheld."""
        self._source.is_whole = True
        return self.push("")

    def _split(self) -> Deltas:
        after_call = self._is_bare and (yield from self._read_calls(0))
        while (length := (yield from self._find_begin(after_call))) is not None:
            after_call = yield from self._read_calls(length)

    def _find_begin(self, after_call: bool) -> Generator[Delta | None, None, int | None]:
        """Report content up to a marker, with which the text then begins; its length, or None at
        the end of the answer."""
        source = self._source
        markers = self._markers if self._failures < _MOST_FAILURES else ()
        while True:
            if after_call:
                source.at = len(source.text) - len(source.rest.lstrip())
                after_call = source.at == len(source.text)
            found = [(at, m) for m in markers if (at := source.text.find(m, source.at)) >= 0]
            end, marker = min(found, key=lambda item: (item[0], -len(item[1])), default=(0, ""))
            if not marker:
                end = len(source.text)
                end -= 0 if source.is_whole else begun_after_space(source.rest, markers)
            content = source.text[source.at : end]
            if marker:
                kept = without_space(content)
                self._space, content = content[len(kept) :], kept
            source.at = end
            source.cut()
            if content:
                yield Delta(content=content)
            if marker:
                return len(marker)
            if source.is_whole:
                return None
            yield None

    def _read_calls(self, marker: int) -> Generator[Delta | None, None, bool]:
        """Read calls after a marker of this length; whether there is one. If not, the marker is
        content."""
        source, reader = self._source, self._reader
        try:
            yield from reader.section(strict=not marker or self._is_bare)
        except (NotACallError, RecursionError):
            self._failures += 1
            if self._numbers.is_open:
                yield self._numbers.ended(broken=True)
            source.restart()
            if not reader.has_calls and marker:
                source.at = marker
                yield Delta(content=self._space + source.text[:marker])
        is_call, reader.has_calls = reader.has_calls, False
        self._space = ""
        source.cut()
        return is_call
