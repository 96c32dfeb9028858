"""Streaming detokenisation: tokens to printable text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from urdir.model.errors import SettingsError
from urdir.model.text.tags import begun
from urdir.model.text.tokenizer import Tokenizer


class TextStream:
    """Turns a stream of tokens into pieces of text that can be printed at once.

    Control tokens are not printed unless their texts are in `shown` (`AnswerFormat.shown`).
    Characters are never cut, and text that may become a stop string is withheld until decided.
    `stopped_by` is the stop string that was found; neither it nor anything after it is printed. The
    concatenated pieces do not depend on how text was tokenised: the stop string that completes
    first wins.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), shown: Iterable[str] = ()
    ) -> None:
        if not all(stops):
            raise SettingsError("empty stop string: leave it out")
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._shown = {tokenizer.control_id(text) for text in shown}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Append a token; the text that it completes, often empty."""
        if self._tokenizer.is_control(token_id) and token_id not in self._shown:
            return ""
        return self._print(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """End the stream; the withheld text, and U+FFFD for an incomplete character."""
        text = self._print(self._decoder.decode(b"", final=True))
        if self.stopped_by is None:
            text += self._held
        self._held = ""
        return text

    def _print(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.stopped_by = min(found, key=lambda item: (item[0], -len(item[1])))
            self._held = ""
            return text[: end - len(self.stopped_by)]
        cut = len(text) - begun(text, self._stops)
        self._held = text[cut:]
        return text[:cut]
