"""A queue of steps: writes rows that the device does not have, then launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.engine.batch import Batch, ShapeBuckets, StepShape
from urdir.model.engine.runner import Steps
from urdir.model.errors import ModelError
from urdir.model.memory.device_state import DecodeState
from urdir.model.memory.scored_rows import ScoredRows
from urdir.model.memory.turns import Turns

if TYPE_CHECKING:
    from urdir.driver.stream import Stream

Words = npt.NDArray[np.uint32]
#: Every sequence may take any token.
NO_MASKS: Mapping[int, Words] = {}
#: Drafts of the host for a sequence, each with the mask of the token after it.
GivenDrafts = Sequence[tuple[int, Words]]
#: All drafts are those of the device.
NO_DRAFTS: Mapping[int, GivenDrafts] = {}


class StepQueue:
    """Queues steps on ``stream``, each behind the ones before it; the host waits for none.

    The device itself advances rows that choose a token: if the next step continues the same
    sequences, or those whose turn it is, nothing is written. With drafts only the device knows the
    positions.
    """

    def __init__(
        self, steps: Steps, state: DecodeState, shapes: ShapeBuckets, stream: Stream
    ) -> None:
        self._steps = steps
        self._state = state
        self._shapes = shapes
        self._stream = stream
        #: On the device: sequence and position, or where there are drafts, their number.
        self._rows: tuple[tuple[int, int], ...] = ()
        self._turns: Turns[tuple[int, int]] | None = None

    def launch(
        self,
        shape: StepShape,
        batch: Batch,
        lasts: Sequence[int],
        masks: Mapping[int, Words] = NO_MASKS,
        on_begin: Callable[[], None] = lambda: None,
        *,
        given: Mapping[int, GivenDrafts] = NO_DRAFTS,
        revise: Callable[[], None] | None = None,
        scored: ScoredRows | None = None,
    ) -> None:
        """Queue the steps of ``shape``, which `ShapeBuckets` gave for ``batch``. ``lasts`` are the
        positions of the tokens that ``batch.decode`` processes, or what they are at most.
        ``masks`` (ceil(n_vocab / 32),) u32 have, by sequence, a bit for each token that is allowed.
        Sequences in ``given`` have these drafts, with the mask after each, and none of the device.
        ``on_begin`` is called when all is written, before the steps are queued, ``revise`` between
        the `StepShape.halves` of a step. ``scored`` are its scored rows. Raises DriverError."""
        parts = (shape,) if revise is None else shape.halves
        for part in parts:
            self._steps.make_ready(part)
        is_drafted = self._state.drafts is not None
        counts = batch.draft_counts if is_drafted else lasts
        wanted, turns = tuple(zip(batch.decode, counts, strict=True)), self._turns_of(batch, shape)
        if batch.segments:
            rows = self._shapes.rows_of(batch, shape, lasts)
            self._state.write_step(rows, self._shapes.choosing_rows(batch, shape))
            if scored is not None:
                self._state.write_scored(scored)
            ends = [(s.sequence, s.end - 1) for s in batch.segments if s.chooses]
            wanted += tuple((s, 0 if is_drafted else at) for s, at in ends)
        elif (wanted, turns) != (self._rows, self._turns):
            self._state.write_rows(
                tuple(zip(batch.decode, lasts, strict=True)), batch.drafts, given, turns
            )
        self._write_masks(batch, lasts, masks, given)
        self._rows = ()  # until the steps are queued, device and host may differ
        on_begin()
        self._steps.launch(parts[0], self._stream)
        for part in parts[1:]:
            if revise is not None:
                revise()
            self._steps.launch(part, self._stream)
        steps = 0 if is_drafted else shape.steps
        self._rows, self._turns = tuple((sequence, at + steps) for sequence, at in wanted), turns
        if turns is not None:
            following, self._turns = turns.next(self._rows)
            self._rows = tuple(following)

    def _turns_of(self, batch: Batch, shape: StepShape) -> Turns[tuple[int, int]] | None:
        """The turns that the device takes in a step by this shape."""
        is_exact = shape.rows == len(batch.decode) and shape.output.is_token
        return batch.turns if self._state.turns and is_exact else None

    def _write_masks(
        self,
        batch: Batch,
        lasts: Sequence[int],
        masks: Mapping[int, Words],
        given: Mapping[int, GivenDrafts],
    ) -> None:
        """Write the masks of rows, and the drafts that they follow."""
        by_row = {batch.row_of(sequence): words for sequence, words in masks.items()}
        for sequence, drafts in given.items():
            known = lasts[batch.decode.index(sequence)] + 1
            self._state.write_drafts(sequence, known, [token for token, _ in drafts])
            first = batch.row_of(sequence) + 1
            by_row |= {first + at: words for at, (_, words) in enumerate(drafts)}
        self._state.write_masks(by_row)

    def forget_rows(self) -> None:
        """Write all rows of the next step: device row metadata is stale."""
        self._rows = ()

    def no_choice(self, sequence: int) -> ModelError:
        """The error that names a sequence for which the device chose INVALID_TOKEN: one of its
        logits is NaN, or the highest is infinite, or no token is allowed. Its row becomes a padding
        row.
        """
        self.forget_rows()
        return ModelError(
            f"sequence {sequence}: no token can be chosen: its logits hold NaN or infinity (the "
            "forward pass went wrong), or no token is allowed"
        )
