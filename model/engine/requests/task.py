"""A request that a scheduler has and that has not ended."""

from __future__ import annotations

import sys

from urdir.model.engine.requests.request import Finish, Request
from urdir.model.engine.speculation.drafting import Acceptance


class Task:
    """How far a request of up to ``context`` tokens is that came at time ``arrived``.

    ``tokens`` are those that are known. The first ``stored`` are in storage once all planned steps
    have run, ``complete`` of them now; where steps have drafts, these are the most that may be, and
    ``reached`` the most that ever were; there is ``room`` for more. Those past ``end`` are never
    processed. Tokens from place ``free`` on are chosen once all before them are known. Segments
    process the first ``prefill``, decode rows the others. ``in_flight`` planned
    steps with rows of it are not complete. ``slot`` is -1 while it waits. Of the ``drafted`` tokens
    ``accepted`` were accepted; ``acceptance`` is None where it takes no drafts. Tokens from
    ``missed`` on may lack keys in the draft model's cache; None: only those may that the next step
    with drafts processes. What the first ``scored`` tokens say of the prompt's next ones is
    read, where that is wanted.
    """

    __slots__ = (
        "acceptance",
        "accepted",
        "arrived",
        "cached",
        "complete",
        "drafted",
        "end",
        "free",
        "has_begun",
        "in_flight",
        "missed",
        "number",
        "prefill",
        "reached",
        "request",
        "room",
        "scored",
        "slot",
        "stored",
        "tokens",
        "waited",
        "waits",
    )

    def __init__(self, number: int, request: Request, context: int, arrived: float) -> None:
        self.number = number
        self.request = request
        self.arrived = arrived
        self.tokens = list(request.prompt)
        given = len(self.tokens)
        most = context if request.limit is None else max(given, given + request.limit - 1)
        self.end = min(context, most)
        self.waits = request.constraint is not None or bool(request.processors)
        self.free = sys.maxsize
        self.slot = -1
        self.stored = self.complete = self.reached = self.room = self.prefill = 0
        self.drafted = self.accepted = 0
        self.acceptance: Acceptance | None = None
        self.missed: int | None = None
        self.in_flight = self.cached = self.scored = 0
        self.has_begun = False
        self.waited = 0.0  # seconds, until it began

    @property
    def answered(self) -> int:
        """Tokens of the answer, an end token included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def awaits_scores(self) -> bool:
        """Whether tokens of its prompt are still to be scored: a cached prefix has no logits."""
        request = self.request
        return request.prompt_logprobs is not None and self.scored < len(request.prompt) - 1

    def scored_rows(self, start: int, end: int) -> int:
        """How many of its rows from ``start`` to ``end`` are scored, the first ones."""
        return max(0, min(end, len(self.request.prompt) - 1) - start) if self.awaits_scores else 0

    @property
    def least_room(self) -> int:
        """Positions that it needs to begin: those of its tokens, and of its source."""
        return max(len(self.tokens), len(self.request.source))

    def advance(self, drafts: int, tokens: int) -> None:
        """A step with this many drafts is complete and chose this many tokens."""
        self.in_flight -= 1
        self.complete += tokens
        self.reached = max(self.reached, self.stored)
        self.stored -= 1 + drafts - tokens

    def rest_draft(self, behind: int) -> None:
        """A step leaves the draft model out: it misses tokens from now on. Complete steps passed
        those before the last known one, the last ``behind`` left out; what steps in flight accept
        is not known."""
        if self.missed is None:
            self.missed = max(0, len(self.tokens) - 1 - behind)

    def finish(self, end_ids: frozenset[int], context: int) -> Finish | None:
        """Why the answer ends by its last token; None if it continues."""
        request, answered = self.request, self.answered
        is_end = self.tokens[-1] in end_ids and not request.ignore_end
        if is_end and answered > request.settings.min_tokens:
            return Finish.END
        if request.limit is not None and answered >= request.limit:
            return Finish.LENGTH
        return Finish.FULL if len(self.tokens) > context else None
