"""A sequence by itself: what it holds after whatever happens to it, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from urdir.model.engine.sequence import Sequence
from urdir.model.errors import ContextFullError, ModelError

IDS = st.integers(0, 9)


def fed(*tokens: int, context: int = 8, slot: int = 0) -> Sequence:
    """A sequence as it is after a prompt: the last token is pending."""
    sequence = Sequence(slot, context)
    sequence.append(tokens)
    sequence.process(len(tokens) - 1)
    return sequence


def test_a_prompt_then_steps_of_the_device() -> None:
    sequence = fed(3, 1, 4)
    assert (sequence.length, sequence.known, sequence.pending, sequence.unread) == (2, 3, 1, 0)
    sequence.step(2, chooses=True)  # queued; the host has read none of the two tokens
    assert (sequence.length, sequence.known, sequence.pending, sequence.unread) == (4, 5, 1, 2)
    sequence.read(1)
    sequence.read(5)
    assert sequence.tokens == [3, 1, 4, 1, 5]
    assert sequence.unread == 0
    sequence.step(1, chooses=False)  # logits: the host supplies the next token
    assert (sequence.length, sequence.pending) == (5, 0)
    with pytest.raises(ModelError, match="no pending token"):
        sequence.check_step()
    sequence.append([9])
    sequence.check_step()


def test_unread_steps_are_undone() -> None:
    sequence = fed(3, 1)
    sequence.step(4, chooses=True)
    sequence.read(7)
    assert sequence.forget_unread()
    assert (sequence.tokens, sequence.length, sequence.pending) == ([3, 1, 7], 2, 1)
    assert not sequence.forget_unread()


def test_nothing_is_added_or_forked_while_tokens_are_unread() -> None:
    sequence = fed(3, 1)
    sequence.step(1, chooses=True)
    with pytest.raises(ModelError, match="sequence 0: 1 tokens are still to be read"):
        sequence.append([5])
    with pytest.raises(ModelError, match="still to be read"):
        fed(1).copy(sequence)
    assert sequence.tokens == [3, 1]


def test_the_last_token_of_a_full_sequence_has_no_room() -> None:
    sequence = fed(1, 2, 3, 4, context=4)
    sequence.step(1, chooses=True)
    sequence.read(5)
    assert sequence.is_full
    assert sequence.tokens == [1, 2, 3, 4, 5]
    with pytest.raises(ContextFullError, match="context of 4"):
        sequence.check_step()
    with pytest.raises(ContextFullError, match="by 2"):
        sequence.append([6])
    sequence.truncate(2)
    sequence.append([8])
    assert (sequence.tokens, sequence.pending) == ([1, 2, 8], 1)


def test_a_copy_goes_its_own_way_with_its_own_settings() -> None:
    original, copy = fed(1, 2, 3), Sequence(5, 8)
    copy.begin_answer(frozenset({3, 4}))
    copy.copy(original)
    assert not copy.has_ended
    copy.step(1, chooses=True)
    copy.read(4)
    assert original.tokens == [1, 2, 3]
    assert (copy.tokens, copy.answer_at, copy.slot) == ([1, 2, 3, 4], 3, 5)
    assert copy.has_ended


@pytest.mark.parametrize(
    ("end_ids", "answer", "has_ended"),
    [
        ((), [5, 6], False),
        ((6,), [6], True),
        ((6,), [5], False),
        ((2,), [], False),  # of the prompt: it ends nothing
    ],
)
def test_end_ids_end_answers(end_ids: tuple[int, ...], answer: list[int], has_ended: bool) -> None:
    sequence = fed(1, 2)
    sequence.begin_answer(frozenset(end_ids))
    for token in answer:
        sequence.step(1, chooses=True)
        sequence.read(token)
    assert sequence.tokens[sequence.answer_at :] == answer
    assert sequence.has_ended is has_ended


class Life(RuleBasedStateMachine):
    """Whatever happens to a sequence, beside lists of all tokens and of those in the cache.

    ``everything`` holds what exists on the device; the host has read all but ``unread`` of it.
    """

    @initialize(context=st.integers(1, 12))
    def begin(self, context: int) -> None:
        self.sequence = Sequence(0, context)
        self.everything: list[int] = []
        self.cached = self.unread = 0

    @rule(tokens=st.lists(IDS, min_size=1, max_size=6))
    def append(self, tokens: list[int]) -> None:
        if self.unread or len(self.everything) + len(tokens) > self.sequence.context:
            with pytest.raises(ModelError):
                self.sequence.append(tokens)
            return
        self.sequence.append(tokens)
        self.everything += tokens
        self.cached = len(self.everything) - 1
        self.sequence.process(self.cached)

    def _can_step(self) -> bool:
        return self.cached < min(len(self.everything), self.sequence.context)

    @precondition(lambda self: not self._can_step())
    @rule()
    def refuse_a_step(self) -> None:
        with pytest.raises(ModelError):
            self.sequence.check_step()

    @precondition(lambda self: self._can_step())
    @rule(token=IDS)
    def choose(self, token: int) -> None:
        self.sequence.check_step()
        self.sequence.step(1, chooses=True)
        self.everything.append(token)
        self.cached += 1
        self.unread += 1

    @precondition(lambda self: self._can_step() and not self.unread)
    @rule()
    def logits(self) -> None:
        self.sequence.step(1, chooses=False)
        self.cached += 1

    @precondition(lambda self: self.unread)
    @rule()
    def read(self) -> None:
        self.sequence.read(self.everything[-self.unread])
        self.unread -= 1

    @rule()
    def forget(self) -> None:
        assert self.sequence.forget_unread() == bool(self.unread)
        if self.unread:
            del self.everything[-self.unread :]
            self.cached, self.unread = len(self.everything) - 1, 0

    @rule(length=st.integers(-1, 13))
    def truncate(self, length: int) -> None:
        if not 0 <= length <= min(self.cached, len(self.everything) - self.unread):
            with pytest.raises(ModelError, match="cannot truncate"):
                self.sequence.truncate(length)
            return
        self.sequence.truncate(length)
        del self.everything[length:]
        self.cached, self.unread = length, 0

    @invariant()
    def it_says_what_it_holds(self) -> None:
        sequence = self.sequence
        assert sequence.tokens == self.everything[: len(self.everything) - self.unread]
        assert (sequence.length, sequence.known) == (self.cached, len(self.everything))
        assert sequence.pending == len(self.everything) - self.cached >= 0
        assert sequence.unread == self.unread
        assert sequence.is_full == (self.cached == sequence.context)


TestLife = Life.TestCase
