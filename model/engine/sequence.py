"""A sequence: its tokens, what the cache holds of them, how they are chosen and when it ends."""

from __future__ import annotations

from collections import abc
from enum import Enum

from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import ContextFullError, ModelError

Ids = abc.Sequence[int]


class Finish(Enum):
    """Why a generation ended."""

    END = "end"  # the model said so
    STOP = "stop"  # a stop string was found
    LENGTH = "length"  # as many tokens as were asked for
    FULL = "full"  # no room left in the KV cache
    INTERRUPTED = "interrupted"


class Sequence:
    """Up to ``context`` tokens in place ``slot`` of the cache; bookkeeping alone, no device.

    ``tokens`` are those that the host knows; those from ``answer_at`` on are an answer. The first
    ``length`` are in the cache, counting steps that are queued. ``known`` tokens exist: those on
    the device that the host has not read yet are among them. Tokens from ``length`` to ``known``
    are *pending*: a step processes them. The last token of a full sequence has no room in the
    cache.
    """

    def __init__(self, slot: int, context: int) -> None:
        self.slot = slot
        self.context = context
        self.tokens: list[int] = []
        self.length = 0
        self.known = 0
        self.settings = GREEDY
        self.end_ids: frozenset[int] = frozenset()
        self.answer_at = 0

    @property
    def pending(self) -> int:
        """Tokens that exist and are not processed."""
        return self.known - self.length

    @property
    def unread(self) -> int:
        """Tokens that queued steps choose and the host has not read."""
        return self.known - len(self.tokens)

    @property
    def last(self) -> int:
        """Where the token is whose step chooses the next: the last one that exists, or the next."""
        return max(self.length, self.known - 1)

    @property
    def reach(self) -> int:
        """The most tokens that it can be cut to before its next step, as far as the host knows
        them: those that are pending can be processed, up to the last."""
        return min(self.last, len(self.tokens))

    @property
    def is_full(self) -> bool:
        """True when no further token can be processed."""
        return self.length >= self.context

    # ---- what is asked before anything happens ----

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError when so many tokens, from the first on, do not fit."""
        if tokens > self.context:
            raise ContextFullError(
                f"{tokens} tokens exceed the context of {self.context} by {tokens - self.context}: "
                "open with a larger one, or shorten the prompt"
            )

    def check_append(self, count: int) -> None:
        """Raise where ``count`` more tokens cannot follow: ContextFullError without room,
        ModelError while some are unread.
        """
        self.check_read()
        self.check_room(self.known + count)

    def check_read(self) -> None:
        """Raise ModelError while the device has chosen tokens that the host has not read."""
        if self.unread:
            raise ModelError(
                f"sequence {self.slot}: {self.unread} tokens are still to be read: close the stream"
            )

    def check_step(self) -> None:
        """Raise where a step cannot process a token: ContextFullError, or ModelError for none."""
        if self.is_full:
            raise ContextFullError(
                f"the context of {self.context} tokens is full: open with a larger one"
            )
        if self.pending < 1:
            raise ModelError(f"sequence {self.slot} has no pending token: feed() one before a step")

    def check_truncate(self, length: int) -> None:
        """Raise ModelError for a length that the sequence has not, as far as the host knows it."""
        if not 0 <= length <= min(self.length, len(self.tokens)):
            raise ModelError(f"cannot truncate {self.length} tokens to {length}")

    # ---- what happens to it ----

    def append(self, tokens: Ids) -> None:
        """The host adds tokens, which are pending then."""
        self.check_append(len(tokens))
        self.tokens.extend(tokens)
        self.known = len(self.tokens)

    def process(self, end: int) -> None:
        """Steps that process the tokens up to ``end`` are queued."""
        assert self.length <= end <= self.known
        self.length = end

    def step(self, count: int, chooses: bool) -> None:
        """``count`` steps from the last token on are queued; where the device ``chooses``, a token
        follows."""
        self.length = self.last + count
        if chooses:
            self.known = max(self.known, self.length + 1)

    def read(self, token: int) -> None:
        """The host knows the next token, which the device or itself has chosen."""
        self.tokens.append(token)
        self.known = max(self.known, len(self.tokens))

    def forget_unread(self) -> bool:
        """Undo the steps whose tokens the host has not read; the last one read is pending then.

        Returns whether there were any.
        """
        if self.unread <= 0:
            return False
        self.known = len(self.tokens)
        self.length = min(self.length, max(self.known - 1, 0))
        return True

    def rewind(self, length: int) -> None:
        """The tokens from ``length`` on are pending again."""
        assert length <= self.length
        self.length = length

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on."""
        self.check_truncate(length)
        del self.tokens[length:]
        self.length = self.known = length
        self.answer_at = min(self.answer_at, length)

    def copy(self, other: Sequence) -> None:
        """Take over the tokens of another, the pending one included; slot, settings and
        end ids stay. Raises ModelError while some of the other's are unread.
        """
        other.check_read()
        self.tokens[:] = other.tokens
        self.length, self.known = other.length, other.known
        self.answer_at = len(self.tokens)

    # ---- an answer ----

    def begin_answer(self, end_ids: frozenset[int]) -> None:
        """What follows the tokens so far is an answer, which one of the ``end_ids`` ends."""
        self.end_ids = end_ids
        self.answer_at = len(self.tokens)

    @property
    def has_ended(self) -> bool:
        """Whether the last token that the host knows has ended an answer."""
        return len(self.tokens) > self.answer_at and self.tokens[-1] in self.end_ids
