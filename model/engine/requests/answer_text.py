"""The text of an answer, made from the tokens that an engine delivers, wherever that is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.requests.request import Ending, Finish, Item, Piece, Request
from urdir.model.text.text_stream import TextStream

if TYPE_CHECKING:
    from urdir.model.text.tokenizer import Tokenizer


class AnswerText:
    """Adds text to the items of the answer to ``request``, and passes them to ``deliver``.

    Where a stop string is found it calls ``stop`` and drops the tokens behind it; the ending that
    then comes says so. Where text cannot be made, that error is the last item.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        deliver: Callable[[Item], None],
        stop: Callable[[], None],
    ) -> None:
        self._stream = TextStream(tokenizer, request.stops, request.shown)
        self._deliver = deliver
        self._stop = stop
        self._generated = 0
        self._has_failed = False

    def __call__(self, item: Item) -> None:
        """Pass on the next item."""
        if self._has_failed:
            return
        try:
            self._take(item)
        except Exception as error:  # of this answer alone
            self._has_failed = True
            self._stop()
            self._deliver(error)

    def _take(self, item: Item) -> None:
        if isinstance(item, Piece):
            if self._stream.stopped_by is None:
                self._deliver(self._texted(item))
        elif isinstance(item, Ending):
            self._end(item)
        else:
            self._deliver(item)

    def _texted(self, piece: Piece) -> Piece:
        """The piece with its text, up to a stop string."""
        choices, push = [], self._stream.push
        for choice in piece.choices:
            text = push(choice.token)
            choices.append(choice._replace(text=text) if text else choice)
            if self._stream.stopped_by is not None:
                self._stop()
                break
        self._generated += len(choices)
        text = "".join([choice.text for choice in choices])
        return Piece(text, tuple(choices), piece.scores)

    def _end(self, ending: Ending) -> None:
        """Deliver the text that was held back, and the ending."""
        if (stop := self._stream.stopped_by) is not None:  # before any other end
            ending = replace(
                ending, finish=Finish.STOP, generated_tokens=self._generated, stopped_by=stop
            )
        elif text := self._stream.finish():
            self._deliver(Piece(text, ()))
        self._deliver(ending)
