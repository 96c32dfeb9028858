"""A draft that predicts one token after the other, beside a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from urdir.driver.plan import Plan
from urdir.model.engine.drafts import Draft, DraftStep
from urdir.model.engine.speculation.draft import GIVEN, PASSED_ON, HeadLaunches, append_drafts

Values = npt.NDArray[np.float32]


class ChainDraft(Draft):
    """A `Draft` whose tokens are drafted each from the one before and the hidden state that the
    draft itself passes on."""

    launches: HeadLaunches

    def logits(self, sequence: int, position: int, head: int = 0) -> Values:
        """Process the token at a position with the hidden state that is given: the logits (vocab,)
        f32 of a head. `passed` has its hidden state."""
        at = self._write([(sequence, position)], 1, prompt=False)
        self._run(DraftStep("head", 1, self.session.shapes.keys(at), head))
        return self.last_logits

    @property
    def last_logits(self) -> Values:
        """The logits (vocab,) f32 of the first row of the last step."""
        vocab = self.parts.own.config.vocab_size
        return self.parts.own.work["logits"].download(np.float32, vocab)

    @property
    def passed(self) -> Values:
        """The hidden state (hidden,) f32 that the first row of the last step passes on."""
        width = self.shape.widths[PASSED_ON]
        return self.parts.own.work[PASSED_ON].download(np.float32, width)

    # ---- tokens that are drafted ----

    def propose(self, lasts: Sequence[tuple[int, int, int]], count: int) -> list[list[int]]:
        """See `Draft.propose`."""
        self._run(self.write_lasts(lasts, count))
        return self.read_drafts(len(lasts), count)

    def write_lasts(self, lasts: Sequence[tuple[int, int, int]], count: int) -> DraftStep:
        """Write the rows of `propose`; returns the step that drafts."""
        rows = self.shape.rows.rows
        self.rows.write_last([token for *_, token in lasts])
        at = self._write([(s, p) for s, p, _ in lasts], rows, prompt=False, more=count - 1)
        return DraftStep("drafts", rows, self.session.shapes.keys(at, rows), drafts=count)

    # ---- plans ----

    def _largest_steps(self) -> Iterator[DraftStep]:
        """See `Draft`."""
        yield from super()._largest_steps()
        keys, rows = self.shape.cache.max_len, self.shape.rows.rows
        for count in dict.fromkeys((1, rows)):
            yield from (DraftStep("head", count, keys, head) for head in range(self.launches.heads))

    def append(self, plan: Plan, step: DraftStep) -> None:
        """Append the launches of a step."""
        if step.kind not in ("head", "drafts"):
            super().append(plan, step)
            return
        rows = self._rows(step)
        if step.kind == "head":
            given = self.parts.own.work[GIVEN]
            self.launches.append_head(plan, rows, step.head, self._tokens, given)
        else:
            append_drafts(plan, self.launches, self.parts, rows, self.chain, step.drafts)
