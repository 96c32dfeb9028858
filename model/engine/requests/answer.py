"""An answer in progress: its text, the tokens allowed next, and its consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.engine.batch import Output
from urdir.model.engine.requests.request import Ending, Piece, Request, TokenChoice
from urdir.model.engine.speculation.host_drafts import ngram_drafts
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.model.text.matcher import Matcher

#: What comes out of a request: pieces, and last an ending or what went wrong.
Item = Piece | Ending | Exception


class Answer:
    """The answer to ``request``. ``deliver`` gets its items.

    Without a ``tokenizer`` it has no text. A ``matcher``, at its start, says which tokens may come.
    ``number`` is the scheduler's; ``cached`` how much of its prompt was found. ``output`` is what a
    step needs for it: logits where tokens are chosen ``on_host``. ``end_ids`` end it.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        matcher: Matcher | None,
        deliver: Callable[[Item], None],
        *,
        on_host: bool = False,
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.number = 0
        self.cached = 0
        self.end_ids = frozenset[int]()
        if tokenizer is not None and not request.ignore_end:
            self.end_ids = frozenset(tokenizer.end_ids)
        self.output = Output.of(request.settings, masked=matcher is not None)
        if on_host:
            self.output = Output.LOGITS
        self._matcher = matcher
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, request.stops, request.shown)

    def push(self, choice: TokenChoice) -> str:
        """The text that a token completes. Raises ConstraintError where it may not come."""
        if self._matcher is not None:
            self._matcher.accept(choice.token)
        return "" if self._stream is None else self._stream.push(choice.token)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return None if self._stream is None else self._stream.stopped_by

    def finish(self) -> str:
        """The text that was held back."""
        return "" if self._stream is None else self._stream.finish()

    def mask(self, vocab: int) -> npt.NDArray[np.uint32] | None:
        """A bit for each token of the vocabulary that may come next, (ceil(vocab / 32),) u32; None
        where all may. Raises ConstraintError."""
        if self._matcher is None:
            return None
        words = np.zeros(-(-vocab // 32), np.uint32)
        self._matcher.mask(words)
        return words

    def drafts(
        self, vocab: int, tokens: Sequence[int], settings: DraftSettings, most: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Up to ``most`` drafts after ``tokens``, prompt and answer, that the constraint allows,
        each with the mask after it. Raises ConstraintError."""
        assert self._matcher is not None
        proposed = ngram_drafts(tokens, most, settings.longest, settings.shortest)
        return self._matcher.follow(proposed, most, -(-vocab // 32))
