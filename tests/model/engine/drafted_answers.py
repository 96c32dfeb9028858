"""What answers with drafts of any kind have in common: requests with everything that a request may
have, a constraint in plain Python, and the rule of acceptance in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.model.engine.test_speculation import CONTEXT, VOCABULARY, prompts, random_settings
from urdir.driver import execute
from urdir.driver.stream import Stream
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ConstraintError
from urdir.model.text.constraints import Constraint
from urdir.ptxgen.kernels.sampling import SETTINGS_WORDS, unpack_settings

#: Tokens that end an answer.
END_IDS = (0, 1)
CONSTRAINT = Constraint.choice(["a pattern"])


class Patterns:
    """Gives every constraint the same `Pattern`."""

    def matcher(self, constraint: Constraint) -> Any:
        return Pattern()

    def close(self) -> None:
        """Nothing."""


class Pattern:
    """A constraint on the tokens below ``VOCABULARY``: which may come depends on the last one and
    on their number. Every third is forced; from six tokens on the answer may end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        last, count = tokens[-1] if tokens else 3, len(tokens)
        if count % 3 == 2:
            return {3 + (7 * last + count) % (VOCABULARY - 3)}
        found = {token for token in range(2, VOCABULARY) if (token + last) % 3 != 1}
        return found | {END_IDS[0]} if count >= 6 else found

    def mask(self, into: Any) -> None:
        into[:] = self._words(self.tokens, len(into))

    def accept(self, token: int) -> None:
        if token not in self.allowed(self.tokens):
            raise ConstraintError(f"token {token} after {self.tokens}")
        self.tokens.append(token)

    def follow(self, proposed: Sequence[int], most: int, n_words: int) -> list[tuple[int, Any]]:
        tokens, found = list(self.tokens), []
        for token in proposed[:most]:
            if token not in self.allowed(tokens) - {*END_IDS}:
                break
            tokens.append(token)
            found.append((token, self._words(tokens, n_words)))
        while len(found) < most and len(forced := self.allowed(tokens)) == 1:
            tokens.append(*forced)
            found.append((tokens[-1], self._words(tokens, n_words)))
        return found

    def _words(self, tokens: Sequence[int], count: int) -> Any:
        words = np.zeros(count, np.uint32)
        for token in self.allowed(tokens):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words


def any_requests(rng: np.random.Generator, count: int) -> list[Request]:
    """Requests with settings of all kinds, greedy and drawn, with texts that end them. The fourth
    has no drafts, the fifth and the sixth have a constraint, and the context ends within the
    answer to the seventh."""
    requests = []
    for at, prompt in enumerate(prompts(rng, count)):
        settings = GREEDY if at % 2 == 0 else random_settings(rng, drawn=at % 4 == 1)
        limit = max(int(rng.integers(8, 16)), settings.min_tokens)
        stops = ("7 1",) if at % 3 == 0 else ()
        request = Request(prompt=prompt, settings=settings, limit=limit, stops=stops)
        request = replace(request, drafts=at != 3)
        if at in (4, 5):
            request = replace(request, constraint=CONSTRAINT)
        if at == 6:
            whole = tuple(np.resize(prompt, CONTEXT - int(rng.integers(1, 8))).tolist())
            request = replace(request, prompt=whole, limit=None, ignore_end=True)
        requests.append(request)
    return requests


@dataclass
class Counted:
    """An observer that runs steps launch by launch, and compares what acceptance writes with a
    model of the rule: a draft stands while it is what the row before it chose, and none after a
    token that ends the answer."""

    session: Session | None = None
    drafted: int = 0
    accepted: int = 0
    steps: list[int] = field(default_factory=list)

    def run(self, bound: execute.BoundPlan, stream: Stream) -> None:
        for operation, loaded in bound.steps():
            expected = None
            if operation.label == "accept":
                expected = self._expected(operation)
            execute.queue(operation, loaded, stream)
            if expected is not None:
                self._check(expected)

    def _expected(self, operation: Any) -> dict[int, tuple[int, list[int], int]]:
        """By sequence: the position of the pending token, the tokens that count, and drafts."""
        assert self.session is not None
        state = self.session.parts.state
        self.session.stream.synchronize()
        kernel = operation.kernel
        rows = {
            name: state[name].download(np.uint32, kernel.rows)
            for name in ("sequence", "place", "position")
        }
        found, given = (state[name].download(np.uint32) for name in ("found", "given"))
        tokens = state["tokens"].download(np.uint32, (state.sequences, state.max_len))
        settings = state["settings"].download(np.uint32, (state.sequences, SETTINGS_WORDS))
        chosen = self._chosen(operation, kernel)
        expected = {}
        for row in np.flatnonzero(rows["place"] == 0):
            at, sequence = int(rows["position"][row]), int(rows["sequence"][row])
            if at >= state.max_len:
                continue
            drafts = max(int(found[sequence]), int(given[sequence]))
            of = unpack_settings(settings[sequence])
            counted: list[int] = []
            for place in range(drafts + 1):
                token = int(chosen[row + place])
                counted.append(token)
                generated = max(0, at + place + 1 - int(of["answer_at"]))
                ends = token in of["end_ids"][: of["end_count"]].tolist()
                if (ends and generated >= of["min_tokens"]) or token == 0xFFFFFFFF:
                    break
                if place < drafts and int(tokens[sequence, at + place + 1]) != token:
                    break
            expected[sequence] = at, counted, drafts
        return expected

    def _chosen(self, operation: Any, kernel: Any) -> Any:
        """What the rows of a step chose."""
        assert self.session is not None
        if not kernel.slices:
            return self.session.parts.state["sampled"].download(np.uint32, kernel.rows)
        logits = self.session.parts.work["logits"]
        vocab = self.session.parts.config.vocab_size
        return np.argmax(logits.download(np.float32, (kernel.rows, vocab)), axis=1)

    def _check(self, expected: dict[int, tuple[int, list[int], int]]) -> None:
        assert self.session is not None
        self.session.stream.synchronize()
        state = self.session.parts.state
        for sequence, (at, counted, drafts) in expected.items():
            assert state.accepted(sequence, at) == (len(counted), drafts)
            assert [state.chosen(sequence, at + i) for i in range(len(counted))] == counted
            self.drafted += drafts
            self.accepted += len(counted) - 1
            self.steps.append(drafts)
