"""Steps of sequences whose books the host keeps: what is pending is processed, lengths move on."""

from __future__ import annotations

from collections import abc

import numpy as np
import numpy.typing as npt

from urdir.model.engine.batch import Batch, Output, Segment, ShapeBuckets, StepShape
from urdir.model.engine.sequence import Sequence
from urdir.model.engine.step_queue import NO_MASKS, StepQueue
from urdir.model.errors import ModelError
from urdir.model.memory.storage import SequenceStorage
from urdir.ptxgen.spec import ceil_div

Slots = abc.Sequence[int]
Words = npt.NDArray[np.uint32]


class SequenceSteps:
    """Queues steps of ``sequences``, in the buckets ``shapes``, through ``queue``; ``storage`` has
    room made for them."""

    def __init__(
        self,
        sequences: abc.Sequence[Sequence],
        shapes: ShapeBuckets,
        storage: SequenceStorage,
        queue: StepQueue,
    ) -> None:
        self._sequences = sequences
        self._shapes = shapes
        self._storage = storage
        self._queue = queue

    def longest(self, sequences: Slots) -> int:
        """The length of the longest of some sequences, once one token of each is pending."""
        return max([self._sequences[s].last for s in sequences], default=0)

    def shape_after(self, output: Output, sequences: Slots, steps: int = 1) -> StepShape:
        """The shape of the next ``steps`` steps of ``sequences``. Raises as a step of them would:
        ContextFullError for a full one, ModelError for one without a pending token.
        """
        if len(set(sequences)) != len(sequences) or not sequences:
            raise ModelError(f"a step of sequences {list(sequences)}: each once, at least one")
        for s in sequences:
            self._sequences[s].check_step()
        if (segment := self._segment(sequences)) is not None:
            return self._shapes.prompt(segment.start, segment.end, output)[0]
        return self._shapes.decode(len(sequences), self.longest(sequences) + steps, output, steps)

    def process(self, sequence: Sequence, end: int) -> None:
        """Queue prompt steps without an output until no token before ``end`` is pending. Raises
        ContextFullError when the cache has no room; nothing was queued then."""
        if sequence.length >= end:
            return
        self._storage.reserve(sequence.slot, sequence.length, end)
        while sequence.length < end:
            shape, stop = self._shapes.prompt(sequence.length, end)
            segment = Segment(sequence.slot, sequence.length, stop)
            self._launch(shape, Batch((), (segment,)))
        self._storage.keep_state(sequence.slot, end)

    def process_chunks(self, sequence: Sequence) -> None:
        """The same by whole chunks, until no more than one is pending: a step takes that."""
        chunk = self._shapes.chunks[-1]
        whole = chunk * ceil_div(sequence.pending - chunk, chunk)
        self.process(sequence, min(sequence.length + whole, sequence.last))

    def step(self, output: Output, sequences: Slots) -> None:
        """Queue one step of ``sequences``."""
        shape = self.shape_after(output, sequences)
        for s in sequences:
            self._sequences[s].check_read()
        self.launch(shape, sequences)

    def launch(self, shape: StepShape, sequences: Slots) -> None:
        """Queue steps of that shape; the host's lengths move on with the device's positions.

        Raises ContextFullError when the cache has no room, DriverError; no token was chosen then.
        """
        for s in (self._sequences[slot] for slot in sequences):
            self._storage.reserve(s.slot, s.length, s.last + shape.steps)
        if (segment := self._segment(sequences)) is not None:
            self._launch(shape, Batch((), (segment,)))
            self._storage.keep_state(segment.sequence, segment.end)
            return
        for slot in sequences:
            self.process(self._sequences[slot], self._sequences[slot].last)
        self._launch(shape, Batch(tuple(sequences)))

    def launch_batch(
        self, batch: Batch, output: Output, masks: abc.Mapping[int, Words] = NO_MASKS
    ) -> None:
        """Queue one step of a batch, whose segments are pending and fit the largest chunk.
        ``masks`` (ceil(n_vocab / 32),) u32 have, by sequence, a bit for each token that is allowed.

        Raises ContextFullError when the cache has no room, ModelError, DriverError; nothing was
        queued then.
        """
        ends = {slot: self._sequences[slot].last + 1 for slot in batch.decode}
        ends |= {segment.sequence: segment.end for segment in batch.segments}
        for slot, end in ends.items():
            self._sequences[slot].check_step()
            self._storage.reserve(slot, self._sequences[slot].length, end)
        self._launch(self._shapes.of_batch(batch, max(ends.values()), output), batch, masks)

    def _segment(self, sequences: Slots) -> Segment | None:
        """What is pending of a single sequence, where that is more than a token."""
        first = self._sequences[sequences[0]]
        if len(sequences) > 1 or first.pending <= 1:
            return None
        return Segment(first.slot, first.length, first.known, chooses=True)

    def _launch(
        self, shape: StepShape, batch: Batch, masks: abc.Mapping[int, Words] = NO_MASKS
    ) -> None:
        """Queue steps; the host's lengths move on with the device's positions."""
        self._queue.launch(shape, batch, [self._sequences[s].last for s in batch.decode], masks)
        for segment in batch.segments:
            if not segment.chooses:
                self._sequences[segment.sequence].process(segment.end)
        for slot in batch.choosing:
            self._sequences[slot].step(shape.steps, shape.output.is_token)
