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
    from urdir.model.text.thought_limit import ThoughtClock


class Answer:
    """The answer to ``request``. ``deliver`` gets its items.

    Its pieces have tokens and no text (`AnswerText`). A ``matcher``, at its start, says which
    tokens may come, and so do ``thoughts``, where reasoning is limited. ``number`` is the
    scheduler's; ``cached`` how much of its prompt was found. Tokens may be chosen ``on_host``.
    ``end_ids`` end it, unless the request says otherwise. While it is open its ``adapters`` are in
    a ``place``.
    """

    def __init__(
        self,
        request: Request,
        end_ids: Iterable[int],
        matcher: Matcher | None,
        deliver: Callable[[Item], None],
        *,
        thoughts: ThoughtClock | None = None,
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
        self._on_host = on_host
        self._matcher = matcher
        self._thoughts = thoughts
        self._accepted = 0

    @property
    def output(self) -> Output:
        """What the next step needs for it: logits where tokens are chosen on the host."""
        if self._on_host:
            return Output.LOGITS
        is_masked = self._matcher is not None or self._forced is not None
        return Output.of(self.request.settings, masked=is_masked)

    @property
    def free(self) -> int | None:
        """The place, in prompt and answer, from which on tokens wait for those before them; None
        where reasoning is not limited."""
        if self._thoughts is None:
            return None
        return len(self.request.prompt) + self._accepted + self._thoughts.free

    @property
    def _forced(self) -> int | None:
        return None if self._thoughts is None else self._thoughts.forced

    def accept(self, token: int) -> None:
        """Append a token. Raises ConstraintError where it may not come."""
        if self._matcher is not None:
            self._matcher.accept(token)
        if self._thoughts is not None:
            self._accepted += 1
            self._thoughts.accept(token)

    def mask(self, vocab: int) -> npt.NDArray[np.uint32] | None:
        """A bit for each token of the vocabulary that may come next, (ceil(vocab / 32),) u32; None
        where all may. Raises ConstraintError."""
        if self._matcher is None and self._forced is None:
            return None
        words = np.zeros(-(-vocab // 32), np.uint32)
        if self._matcher is not None:
            self._matcher.mask(words)
        if (forced := self._forced) is not None:
            place, bit = forced // 32, np.uint32(1 << forced % 32)
            if self._matcher is None or words[place] & bit:  # not within a character
                words[:], words[place] = 0, bit
        return words

    def drafts(
        self, vocab: int, tokens: Sequence[int], settings: DraftSettings, most: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Up to ``most`` drafts after ``tokens``, prompt and answer, that the constraint allows,
        each with the mask after it. Raises ConstraintError."""
        if self._matcher is None or self._forced is not None:
            return []
        proposed = ngram_drafts(tokens, most, settings.longest, settings.shortest)
        return self._matcher.follow(proposed, most, -(-vocab // 32))
