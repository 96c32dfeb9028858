"""Sequences on a device: fed with tokens, continued by the device or by the host's sampler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from contextlib import closing, suppress

import numpy as np
import numpy.typing as npt

from urdir.model.blocks.layer import StepParts
from urdir.model.blocks.rows import Ending, StepShape
from urdir.model.engine.run_ahead import AT_ONCE, RunAhead
from urdir.model.engine.runner import Observer, Steps
from urdir.model.engine.sampling import SamplingSettings
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.memory.device_state import IDLE, DecodeState
from urdir.model.memory.kv_cache import create_cache, kv_layout
from urdir.model.memory.weights import Weights
from urdir.model.memory.workspace import workspace_sizes
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.attention.choice import length_buckets
from urdir.ptxgen.kernels.attention.kv_layout import KvDtype
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH

#: Rows of a prompt step, smallest first; what does not fill one leaves idle rows.
CHUNKS = (16, 64, 256, 512)
#: In exact mode products take f32 activations, few rows at a time.
EXACT_CHUNKS = (MAX_BATCH,)
#: Tokens before its end at which a stream begins to prepare for the next length bucket.
LOOK_AHEAD = 128


class Session(Owner):
    """Up to ``sequences`` sequences of at most ``context`` tokens each.

    ``lengths[s]`` tokens of a sequence are in the cache. At most one token, the *pending* one, is
    known but not yet processed; a step processes it. An f32 cache is the exact mode, which keeps
    activations in f32 as well. ``observer`` looks at every step, launch by launch; without
    ``fused``, launches that serve several operations are taken apart.
    """

    def __init__(
        self,
        weights: Weights,
        context: int,
        kv_dtype: KvDtype = "f16",
        *,
        sequences: int = 1,
        page_len: int = 0,
        pages: int | None = None,
        observer: Observer | None = None,
        fused: bool = True,
    ) -> None:
        config, device = weights.config, weights.device
        if not 0 < context <= config.context_length:
            raise ModelError(
                f"a context of {context} tokens: the model takes 1 to {config.context_length}"
            )
        self.context = context
        self.weights = weights
        self.lengths = [0] * sequences
        self._known = [0] * sequences
        self._chunks = chunks_of(kv_dtype)
        self._rows: tuple[tuple[int, int], ...] = ()
        self._keys = 0  # bucket of the last decode step
        self._stream = device.create_stream()
        layout = kv_layout(
            config, context, kv_dtype, sequences=sequences, page_len=page_len, pages=pages
        )
        self._buckets = length_buckets(layout.max_len)
        rows = row_bucket(sequences)
        state = DecodeState(device, sequences, layout.max_len, rows, self._chunks[-1])
        sizes = workspace_sizes(config, layout, rows, self._chunks[-1], device.properties.sm_count)
        self.parts = StepParts(
            device,
            config,
            weights,
            create_cache(device, config, layout),
            state,
            device.arena(sizes, "workspace"),
            exact=is_exact(kv_dtype),
            fused=fused,
        )
        self.ahead = RunAhead(device, self._stream)
        self.steps = Steps(self.parts, observer)

    # ---- one sequence ----

    @property
    def length(self) -> int:
        """Tokens of sequence 0 in the cache."""
        return self.lengths[0]

    @property
    def is_full(self) -> bool:
        """True when no further token fits the context of sequence 0."""
        return self.lengths[0] >= self.context

    def greedy_step(self) -> int:
        """Process the pending token of sequence 0; the most likely next one becomes pending."""
        return self.forward_gpu_resident_to_token_id()[0]

    def logits_step(self) -> npt.NDArray[np.float32]:
        """Process the pending token of sequence 0; logits (n_vocab,) of the one after it."""
        logits: npt.NDArray[np.float32] = self.forward_gpu_resident()[0]
        return logits

    def stream(
        self, ending: Ending, sequence: int = 0, *, most: int | None = None
    ) -> Generator[int, None, None]:
        """Tokens of a sequence, one a step, until it is full; steps run ahead of the reader.

        When the iterator is closed, steps that ran beyond the last token it gave are undone. It
        ends after ``most`` tokens, beyond which no step runs.
        """
        with closing(self.stream_together(ending, (sequence,), most=most)) as steps:
            for (token,) in steps:
                yield token

    # ---- any sequences ----

    def feed(self, tokens: Sequence[int], sequence: int = 0) -> None:
        """Append ``tokens``, processing all but the last, which is left pending.

        Raises ModelError for a token id outside the vocabulary and ContextFullError when they do
        not fit; the sequence is then as it was.
        """
        if not tokens:
            return
        vocab = self.parts.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab:
                raise ModelError(f"token id {token} is outside the vocabulary of {vocab} tokens")
        start, known = self.lengths[sequence], self._known[sequence]
        end = known + len(tokens)
        self.check_room(end)
        self.parts.cache.reserve(sequence, start, end - 1)
        self.parts.state.write_tokens(sequence, known, tokens)
        self._known[sequence] = end
        while self.lengths[sequence] < end - 1:
            self._prompt_step(sequence, end - 1)

    def _prompt_step(self, sequence: int, end: int) -> None:
        start = self.lengths[sequence]
        rows = next((c for c in self._chunks if c >= end - start), self._chunks[-1])
        end = min(end, start + rows)
        self.parts.state.write_chunk(sequence, start, end)
        keys = self._buckets[bisect_left(self._buckets, end)]
        self.steps.launch(StepShape(rows, keys, Ending.PROMPT), self._stream)
        self.lengths[sequence] = end

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError when a sequence of that many tokens does not fit the context."""
        if tokens > self.context:
            raise ContextFullError(
                f"{tokens} tokens exceed the context of {self.context} by {tokens - self.context}: "
                "raise -c or shorten the prompt"
            )

    def set_sampling(self, settings: SamplingSettings, sequence: int = 0) -> None:
        """How tokens of a sequence are drawn from now on, by steps that end in SAMPLE."""
        state, words = self.parts.state, settings.words
        state["settings"].upload(words, offset=sequence * words.nbytes)
        state["seed"].upload(np.array([settings.seed], np.uint64), offset=8 * sequence)

    def forward_gpu_resident(self, sequences: Sequence[int] = (0,)) -> npt.NDArray[np.float32]:
        """Process the pending token of each sequence in one step: embedding, layers, norm, LM head.

        Returns the logits (len(sequences), n_vocab) f32 of the tokens after them; the host supplies
        these (``feed``). Raises ContextFullError and ModelError, nothing done then.
        """
        shape = (len(sequences), self.parts.config.vocab_size)
        self._launch(Ending.LOGITS, sequences)
        return self.parts.work["logits"].download(np.float32, shape)

    def forward_gpu_resident_to_token_id(
        self, sequences: Sequence[int] = (0,), ending: Ending = Ending.GREEDY
    ) -> list[int]:
        """The same, and the next tokens are chosen on the device: only they come back.

        ``ending`` is GREEDY (the most likely, lowest id on ties) or SAMPLE (``set_sampling``).
        """
        self._launch(ending, sequences)
        tokens = self.parts.state["sampled"].download(np.uint32, len(sequences))
        return [int(token) for token in tokens]

    def stream_together(
        self, ending: Ending, sequences: Sequence[int], *, most: int | None = None
    ) -> Generator[list[int], None, None]:
        """The next token of each sequence, step after step, until one is full; see ``stream``.

        The graphs of several steps and of the next length bucket are recorded meanwhile, in time
        that would be waited.
        """
        longest = self._longest(sequences)
        end = self.context if most is None else min(self.context, longest + most)
        starts, done = [self.lengths[s] for s in sequences], 0
        chosen = self.parts.state.chosen
        try:
            for _ in self.ahead.run(
                lambda steps: self._queue(ending, sequences, steps, end),
                lambda: self._look_ahead(ending, sequences, end),
            ):
                tokens = [chosen(row, start + done) for row, start in enumerate(starts)]
                done += 1
                yield tokens
        finally:
            for sequence, start in zip(sequences, starts, strict=True):
                self._undo(sequence, start + done)

    def _queue(self, ending: Ending, sequences: Sequence[int], steps: int, end: int) -> int:
        """Queue up to ``steps`` steps, none beyond a length of ``end``; returns how many.

        It is one where all of them have no graph (yet), are not of one length bucket, or have no
        room in the cache.
        """
        longest = self._longest(sequences)
        if longest >= end:
            return 0
        if 1 < steps <= end - longest:
            shape = self._shape(ending, sequences, longest + steps, steps)
            one_bucket = shape.keys == self._shape(ending, sequences, longest + 1).keys
            if one_bucket and self.steps.is_recorded(shape):
                with suppress(ContextFullError):  # nothing has happened then
                    self._launch(ending, sequences, steps)
                    return steps
        self._launch(ending, sequences)
        return 1

    def _look_ahead(self, ending: Ending, sequences: Sequence[int], end: int) -> bool:
        """Do a small piece of preparing for the steps that will come; False where all is done."""
        longest = self._longest(sequences)
        later = min(longest + LOOK_AHEAD, end)
        if later > self._keys and self.steps.prepare(self._shape(ending, sequences, later)):
            return True
        several = min(longest + 2 * AT_ONCE, later)
        if several < longest + 2 * AT_ONCE:
            return False  # not worth the while
        lengths = (several, later)
        return any(
            self.steps.prepare(self._shape(ending, sequences, length, AT_ONCE))
            for length in lengths
        )

    def _undo(self, sequence: int, done: int) -> None:
        """Forget steps beyond ``done``; the token after them is known and pending."""
        if self.lengths[sequence] > done:
            self.truncate(done, sequence)
            self._known[sequence] = done + 1
            self.parts.state.write_known(sequence, done + 1)

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forget every token of a sequence from ``length`` on; nothing is pending then."""
        if not 0 <= length <= self.lengths[sequence]:
            raise ModelError(f"cannot truncate {self.lengths[sequence]} tokens to {length}")
        self.parts.cache.truncate(sequence, length)
        self.parts.state.write_known(sequence, length)
        self.lengths[sequence] = self._known[sequence] = length
        self._rows = ()

    def fork(self, source: int, target: int) -> None:
        """Make ``target`` a copy of ``source``, its pending token included."""
        length, known = self.lengths[source], self._known[source]
        self.parts.cache.fork(source, target, length)
        tokens = self.parts.state["tokens"]
        nbytes = 4 * self.parts.state.max_len
        if source != target:
            place = tokens.slice(target * nbytes, nbytes)
            place.copy_from(tokens.slice(source * nbytes, nbytes))
        self.parts.state.write_known(target, known)
        self.lengths[target], self._known[target] = length, known
        self._rows = ()

    def _launch(self, ending: Ending, sequences: Sequence[int], steps: int = 1) -> None:
        """Queue decode steps; the host's lengths move on with the device's positions."""
        self._check_pending(sequences)
        for s in sequences:
            self.parts.cache.reserve(s, self.lengths[s], self.lengths[s] + steps)
        rows = tuple((s, self.lengths[s]) for s in sequences)
        if rows != self._rows:
            self.parts.state.write_rows(rows)
        shape = self._shape(ending, sequences, steps + self._longest(sequences), steps)
        self._rows = ()  # until the steps are queued, device and host may differ
        self.steps.launch(shape, self._stream)
        self._keys = shape.keys
        for s in sequences:
            self.lengths[s] += steps
            if ending is not Ending.LOGITS:
                self._known[s] = min(max(self._known[s], self.lengths[s] + 1), self.context)
        self._rows = tuple((s, self.lengths[s]) for s in sequences)

    def _longest(self, sequences: Sequence[int]) -> int:
        return max([self.lengths[s] for s in sequences])

    def _shape(
        self, ending: Ending, sequences: Sequence[int], longest: int, steps: int = 1
    ) -> StepShape:
        """The shape of steps after which the longest sequence has ``longest`` tokens."""
        keys = self._buckets[bisect_left(self._buckets, longest)]
        return StepShape(row_bucket(len(sequences)), keys, ending, steps)

    def _check_pending(self, sequences: Sequence[int]) -> None:
        if len(set(sequences)) != len(sequences) or not sequences:
            raise ModelError(f"a step of sequences {list(sequences)}: each once, at least one")
        for s in sequences:
            if self.lengths[s] >= self.context:
                raise ContextFullError(f"the context of {self.context} tokens is full: raise -c")
            if self._known[s] <= self.lengths[s]:
                raise ModelError(f"sequence {s} has no pending token: feed() one before a step")

    def device_positions(self) -> dict[int, int]:
        """Sequence -> position as device memory has them, for comparing with ``lengths``."""
        state = self.parts.state
        pairs = zip(
            state["sequence"].download(np.uint32),
            state["position"].download(np.uint32),
            strict=True,
        )
        return {int(s): int(p) for s, p in pairs if p != IDLE}

    def close(self) -> None:
        """Free graphs, cache, state and workspace; closing twice does nothing."""
        self.steps.close()
        self._stream.close()
        self.ahead.close()
        self.parts.cache.close()
        self.parts.state.close()
        self.parts.work.close()


def is_exact(kv_dtype: KvDtype) -> bool:
    """Whether activations stay f32 throughout: with an f32 cache, where that is asked for."""
    return kv_dtype == "f32"


def chunks_of(kv_dtype: KvDtype) -> tuple[int, ...]:
    """Rows of the prompt steps, smallest first."""
    return EXACT_CHUNKS if is_exact(kv_dtype) else CHUNKS


def row_bucket(rows: int) -> int:
    """Rows of the graph that serves a step of ``rows`` sequences: the next power of two."""
    return 1 << (rows - 1).bit_length()
