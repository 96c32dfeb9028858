"""An answer in progress: the tokens allowed next, and its consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.engine.adapters import AdapterPlace, Choice
from urdir.model.engine.batch import Output
from urdir.model.engine.requests.request import Item, Request
from urdir.model.engine.speculation.host_drafts import ngram_drafts

if TYPE_CHECKING:
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.model.text.matcher import Matcher


class Answer:
    """The answer to ``request``. ``deliver`` gets its items.

    Its pieces have tokens and no text (`AnswerText`). A ``matcher``, at its start, says which
    tokens may come. ``number`` is the scheduler's; ``cached`` how much of its prompt was found.
    ``output`` is what a step needs for it: logits where tokens are chosen ``on_host``. ``end_ids``
    end it, unless the request says otherwise. While it is open its ``adapters`` are in a ``place``.
    """

    def __init__(
        self,
        request: Request,
        end_ids: Iterable[int],
        matcher: Matcher | None,
        deliver: Callable[[Item], None],
        *,
        on_host: bool = False,
        adapters: Choice = (),
    ) -> None:
        self.request = request
        self.adapters = adapters
        self.place = AdapterPlace()
        self.deliver = deliver
        self.number = 0
        self.cached = 0
        self.end_ids = frozenset(() if request.ignore_end else end_ids)
        self.output = Output.of(request.settings, masked=matcher is not None)
        if on_host:
            self.output = Output.LOGITS
        self._matcher = matcher

    def accept(self, token: int) -> None:
        """Append a token. Raises ConstraintError where it may not come."""
        if self._matcher is not None:
            self._matcher.accept(token)

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
