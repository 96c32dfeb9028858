"""Steps one at a time: the caller says which sequences a step has, and it is complete on return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.engine.step_queue import NO_MASKS
from urdir.model.errors import ContextFullError, ModelError, UnsupportedError
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN
from urdir.ptxgen.spec import ceil_div

Words = npt.NDArray[np.uint32]


class EagerSteps(Owner):
    """Exclusive use of the sequences of ``session``, empty at first.

    ``tokens[s]`` are those of sequence s. The first ``lengths[s]`` are in the cache; the others are
    *pending*: the next step processes them. A prompt, and what a step chooses, is pending at first.
    All have the adapters of requests that name none.

    When this is closed, requests can resume from what the cache holds. Raises ModelError where the
    sequences are in use, UnsupportedError for an encoder-decoder.
    """

    def __init__(self, session: Session) -> None:
        if session.takes_sources:
            raise UnsupportedError(
                "steps one at a time of an encoder-decoder are not supported: make a request"
            )
        self.session = session
        self.tokens: list[list[int]] = [[] for _ in range(session.sequences)]
        self.lengths = [0] * session.sequences
        self._scope = b""
        with ExitStack() as owners:
            owners.enter_context(session.in_use())
            for sequence in range(session.sequences):
                session.storage.match(sequence, (), 0)
                owners.callback(self._release, sequence)
                session.parts.state.write_sampling(sequence, GREEDY.words())
            if session.adapters is not None:
                chosen = session.adapters.chosen(None)
                self._scope = session.adapters.scope(self._scope, chosen)
                place = session.adapters.take(chosen)
                owners.callback(session.adapters.give_back, place)
                for sequence in range(session.sequences):
                    session.parts.state.write_adapter(sequence, *place)
            self._owners = owners.pop_all()

    # ---- tokens come and go ----

    def feed(self, tokens: Sequence[int], sequence: int = 0) -> None:
        """Append ``tokens``, which are pending then.

        Raises ModelError for a token id outside the vocabulary and ContextFullError when the tokens
        do not fit; the sequence is then as it was.
        """
        if not tokens:
            return
        known = self.tokens[sequence]
        self.session.check_room(len(known) + len(tokens))
        self.session.check_tokens(tokens)
        end = len(known) + len(tokens) - 1  # a step has room for the last one
        self.session.storage.reserve(sequence, self.lengths[sequence], end)
        self.session.parts.state.write_tokens(sequence, len(known), tokens)
        known.extend(tokens)

    def kept(self, length: int, sequence: int = 0) -> int:
        """How many of the first ``length`` tokens `truncate` can leave: all, where they are pending
        or the cache still has what the next token looks back on, and, with recurrent layers, the
        state after them."""
        processed = self.lengths[sequence]
        if length >= processed:
            return min(length, len(self.tokens[sequence]))
        return self.session.storage.kept(sequence, length, processed)

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forget every token of a sequence from ``length`` on. Raises ModelError, nothing changed,
        for tokens that the sequence does not have or that are not `kept`."""
        known, processed = self.tokens[sequence], self.lengths[sequence]
        if not 0 <= length <= len(known):
            raise ModelError(f"cannot truncate {len(known)} tokens to {length}")
        left = min(length, processed)
        self.session.storage.truncate(sequence, left, processed)
        self.session.parts.state.write_known(sequence, length)
        del known[length:]
        self.lengths[sequence] = left
        self.session.queue.forget_rows()

    def fork(self, source: int, target: int) -> None:
        """Make ``target`` a copy of ``source``, whose last token is pending in both."""
        self.process(len(self.tokens[source]) - 1, source)
        self.session.storage.fork(source, target, self.lengths[source])
        self.session.parts.state.copy_tokens(source, target, len(self.tokens[source]))
        self.tokens[target] = [*self.tokens[source]]
        self.lengths[target] = self.lengths[source]
        self.session.queue.forget_rows()

    # ---- steps ----

    def logits(self, sequences: Sequence[int] = (0,)) -> npt.NDArray[np.float32]:
        """Process what is pending: the logits (len(sequences), n_vocab) f32 after it.

        The last tokens of several sequences share a step; those of a single one share it with those
        before them. Raises ContextFullError, ModelError and DriverError: the tokens are pending
        then.
        """
        self._step(sequences, Output.LOGITS)
        shape = (len(sequences), self.session.parts.config.vocab_size)
        return self.session.parts.work["logits"].download(np.float32, shape)

    def step(self, sequences: Sequence[int] = (0,), output: Output = Output.GREEDY) -> list[int]:
        """The same, and the device chooses the next token of each, which is pending then.

        ``output`` is GREEDY (the most likely, the lowest id on ties), SAMPLE or LOGPROBS. Raises
        ModelError also where a sequence has no token to choose: see `StepQueue.no_choice`.
        """
        before = [self.lengths[sequence] for sequence in sequences]
        self._step(sequences, output)
        state = self.session.parts.state
        chosen = [int(token) for token in state["sampled"].download(np.uint32, len(sequences))]
        if INVALID_TOKEN in chosen:
            for sequence, length in zip(sequences, before, strict=True):
                self._rewind(sequence, length)
            raise self.session.queue.no_choice(sequences[chosen.index(INVALID_TOKEN)])
        for sequence, token in zip(sequences, chosen, strict=True):
            self.tokens[sequence].append(token)
        return chosen

    def process(self, end: int, sequence: int = 0) -> None:
        """Process the first ``end`` tokens of a sequence, by chunks, without a result."""
        while (start := self.lengths[sequence]) < end:
            _, stop = self.session.shapes.prompt(start, end)
            self.launch(Batch((), (Segment(sequence, start, stop),)), Output.NONE)

    def launch(self, batch: Batch, output: Output, masks: Mapping[int, Words] = NO_MASKS) -> None:
        """Queue one step of these rows, whose tokens are known; its segments fit a chunk.
        ``masks`` (ceil(n_vocab / 32),) u32 have, by sequence, a bit for each token that is allowed.

        Raises ContextFullError when the cache has no room, DriverError; nothing was queued then.
        """
        session, lasts = self.session, [self.lengths[sequence] for sequence in batch.decode]
        ends = {sequence: last + 1 for sequence, last in zip(batch.decode, lasts, strict=True)}
        ends |= {segment.sequence: segment.end for segment in batch.segments}
        for sequence, end in ends.items():
            session.storage.reserve(sequence, self.lengths[sequence], end)
        shape = session.shapes.of_batch(batch, max(ends.values()), output)
        session.queue.launch(shape, batch, lasts, masks)
        for sequence, end in ends.items():
            self.lengths[sequence] = end
        for segment in batch.segments:
            session.storage.keep_prefix(segment.sequence, segment.end)

    def _step(self, sequences: Sequence[int], output: Output) -> None:
        """Process what is pending of some sequences, the last step with an output."""
        if len(set(sequences)) != len(sequences) or not sequences:
            raise ModelError(f"a step of sequences {list(sequences)}: each once, at least one")
        for sequence in sequences:
            self._check_step(sequence)
        first, *others = sequences
        if not others:
            self._process_chunks(first)
            start, end = self.lengths[first], len(self.tokens[first])
            if end - start > 1:
                self.launch(Batch((), (Segment(first, start, end, chooses=True),)), output)
                return
        for sequence in sequences:
            self.process(len(self.tokens[sequence]) - 1, sequence)
        self.launch(Batch(tuple(sequences)), output)

    def _check_step(self, sequence: int) -> None:
        """Raise where a step cannot process a token: ContextFullError, or ModelError for none."""
        context = self.session.context
        if self.lengths[sequence] >= context:
            raise ContextFullError(f"the context of {context} tokens is full: open a larger one")
        if self.lengths[sequence] >= len(self.tokens[sequence]):
            raise ModelError(f"sequence {sequence} has no pending token: feed() one before a step")

    def _process_chunks(self, sequence: int) -> None:
        """Process whole chunks, until no more than one is pending: a step takes that."""
        chunk, known = self.session.shapes.chunks[-1], len(self.tokens[sequence])
        start = self.lengths[sequence]
        self.process(start + chunk * ceil_div(known - start - chunk, chunk), sequence)

    def _rewind(self, sequence: int, length: int) -> None:
        """Make the tokens of a sequence from ``length`` on pending again, or from where the cache
        can be cut to."""
        storage, processed = self.session.storage, self.lengths[sequence]
        self.lengths[sequence] = kept = storage.kept(sequence, length, processed)
        storage.truncate(sequence, kept, processed)
        self.session.parts.state.write_known(sequence, len(self.tokens[sequence]))

    # ---- the end ----

    def _release(self, sequence: int) -> None:
        length = self.lengths[sequence]
        known = self.tokens[sequence][:length]
        self.session.storage.release(sequence, known, length, self._scope)

    def close(self) -> None:
        """Release the sequences. Idempotent."""
        self._owners.close()
